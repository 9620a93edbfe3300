"""Tuning one fusion group: propose, compile in parallel, check, screen, decide in one interleaved run, store.

The answer is a :class:`~fuseplan.search.store.record.TuningRecord`: the best kernel, or "do not fuse". Every finished
trial is stored at once, so a tune that is killed goes on where it was.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.kernels.ir.backend import Backend, Config, Target
from fuseplan.search import policy
from fuseplan.search.errors import SubjectError
from fuseplan.search.store.database import Database, reservations
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import ATEN, Measurement, RecordKey, Trial, TuningRecord, Versions, now
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Parts, Sides
from fuseplan.search.timing.subject import Subject
from fuseplan.search.timing.timers import Timer, timer_for
from fuseplan.search.tune.group_search import GroupSearch, screened
from fuseplan.search.tune.resources import Alike, Budget, ProgressEvent, TuningResources
from fuseplan.search.tune.study import Studies
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.workers import jobs
from fuseplan.search.workers.compilers import GPU_COMPILERS
from fuseplan.search.workers.worker import Outcome, WorkerPool

__all__ = ["Budget", "ProgressEvent", "Tuner"]

logger = logging.getLogger(__name__)
_Kind = TypeVar("_Kind", bound=Subject)


def make_pool(device_type: str) -> WorkerPool:
    """Worker processes for tuning on a device, not started yet; of a user's pools on it one measures at a time."""
    import torch

    on_cpu, which = is_cpu(device_type), "cpu"
    if is_gpu(device_type):
        which = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    turn = Path(tempfile.gettempdir()) / f"fuseplan-{os.getuid()}-{which}.turn"
    return WorkerPool(bind=on_cpu, preload=() if on_cpu else GPU_COMPILERS, turn=str(turn))


class Tuner(AbstractContextManager["Tuner"]):
    """Tunes subjects on one device in one regime, with one set of worker processes.

    ``database`` is open for writing; ``backends`` are in order of preference. ``device``, ``regime`` (``"eager"`` or
    ``"graph"``) and ``numerics`` (``"fp32"`` or ``"eager"``) are part of every key; ``seed`` is that of the search and
    of the inputs. What another tune than ``run`` wrote is measured anew; "" for nothing. Each search is copied to
    ``studies``. What another tuner on this database is measuring is waited for (``leases``).
    """

    def __init__(
        self, database: Database, target: Target, backends: Sequence[Backend], device: str,
        budget: Budget | None = None, seed: int = 0, regime: str = "eager", numerics: str = "fp32",
        executor: WorkerPool | None = None, timer: Timer | None = None,
        progress: Callable[[ProgressEvent], None] | None = None, account: TimeAccount | None = None, run: str = "",
        studies: Studies | None = None
    ) -> None:
        self.database = database
        self.target = target
        self.backends = tuple(backends)
        self.device = device
        self.budget = budget = budget or Budget()
        self.seed = seed
        self.run = run
        self.regime = regime
        self.numerics = numerics
        self.studies = studies
        self.versions = Versions.current(target.device_type)
        self.leases = Leases(database)
        self.account = account if account is not None else TimeAccount()
        self._executor = executor if executor is not None else make_pool(target.device_type)
        self._owns_executor = executor is None
        #: Subjects that were not minor: whatever came of it, they are searched once.
        self._searched: set[RecordKey] = set()
        #: By the op's key: runs of it beside libraries' calls.
        self._contests: dict[str, list[jobs.Calls]] = {}
        timer = timer or timer_for(target.device_type, regime)
        self._resources = TuningResources(
            database, self.backends, jobs.Bench(target, timer, seed, budget.screen_s, budget.decide_s),
            self._executor, budget, self.versions, self.account, progress, run,
        )

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what is leased; end the worker processes, unless the executor is the caller's."""
        self.leases.close()
        if self._owns_executor:
            self._executor.close()

    def key(self, subject: Subject) -> RecordKey:
        return RecordKey(subject.key, self.device, self.regime, self.numerics)

    def tune(self, subject: Subject, neighbours: Iterable[TuningRecord] = (), minor: bool = False) -> TuningRecord:
        """The stored answer for ``subject`` if it is current, else a newly measured one, stored.

        Configurations of ``neighbours``, records of similar groups, are tried early. A ``minor`` one takes so little of
        a model's time that the preferred back end's default and best guess are all that is tried. :class:`SubjectError`
        where the unfused chain or its reference fails.
        """
        key = self.key(subject)

        def known() -> TuningRecord | None:
            if (current := self._current(key)) is None:
                return None
            # One that rests on fewer trials than its group gets if it counts is searched once more.
            was_minor = current.measured <= self.budget.minor().trials < min(self.budget.trials, current.enumerated)
            if (reason := self._refuse_record(subject, current)) is not None:
                logger.warning("the stored record of %s is not used: %s", subject.label, reason)
            elif minor or key in self._searched or not was_minor:
                return current
            return None

        def search() -> TuningRecord:
            stored = self.database.get_record(key).record
            hints = [*([stored] if stored is not None else []), *neighbours]
            if not minor:
                self._searched.add(key)
            run = GroupSearch(self._resources_for(minor), subject, key, hints)
            record = self._resources.released(run.execute)
            with self.account.spend("storing"):
                self.database.put_record(record)
                if self.studies is not None:
                    self.studies.add(record, run.trials, run.on_device)
            return record

        return self.leases.once(key, known, search)

    def _refuse_record(self, subject: Subject, record: TuningRecord) -> str | None:
        """Why a stored answer can be none for ``subject`` here, or None; its numbers are taken as they are."""
        if not record.backend:
            return "it fuses without a kernel" if record.fuse else None
        backend = next((one for one in self.backends if one.name == record.backend), None)
        if backend is None:
            return "its back end cannot be used here"
        reason = backend.refuse_config(subject.ir, record.config, self.target)
        return f"{backend.name} could not have chosen its configuration: {reason}" if reason else None

    def _current(self, key: RecordKey) -> TuningRecord | None:
        """The stored answer that need not be measured again."""
        stored = self.database.get_record(key).record
        return None if stored is None or reservations(stored, self.versions, self.run) else stored

    def time_unfused(self, subject: Subject) -> Measurement:
        """Time of the unfused chain alone, kept as a trial without a back end; :class:`SubjectError` where it fails."""
        key = self.key(subject)

        def known() -> Measurement | None:
            if (stored := self._current(key)) is not None:
                return stored.unfused
            for trial in self._resources.trials(key):
                if not trial.backend and trial.median_us is not None:
                    return Measurement(trial.median_us, 0.0, 1, 0, self.regime)
            return next((one.contest.time(ATEN) for one in self._contests.get(subject.key, ())), None)

        def find() -> Measurement:
            outcome = self._resources.call("timing unfused ops", jobs.time_unfused, subject, of=[subject])
            if not outcome.ok:
                raise SubjectError(f"{subject.label}: cannot be timed: {outcome.failure}")
            found: Measurement = outcome.value
            self._resources.log(Trial(key, "", {}, found.median_us, created=now()))
            return found

        return self.leases.once(key, known, find)

    def contest_calls(
        self, plain: Subject, calls: Mapping[str, Subject], ops: int = 1
    ) -> Callable[[], jobs.Calls | None]:
        """Check libraries' calls, by name, and run them beside the ``ops`` that they stand for; None when that fails.

        It is run when the measuring process is idle. Nothing is stored; the same calls are not timed again.
        """
        known = self._contests.setdefault(plain.key, [])
        for one in known:
            if calls.keys() <= one.contest.samples.keys() | one.failed.keys():
                return lambda: one
        run = self._resources.later("playing off", jobs.contest_calls, plain, dict(calls), ops, of=[plain])

        def result() -> jobs.Calls | None:
            found: jobs.Calls | None = run().value
            if found is not None:
                known.append(found)
            return found

        return result

    def screen(self, subject: Subject) -> Trial:
        """The default configuration alone, compiled, checked and timed shortly: what ranks groups before a tune.

        The trial is that of the first back end whose default works, else the last failed one. A stored trial is not
        repeated; a later :meth:`tune` starts from it. :class:`SubjectError` where the unfused chain or its reference
        fails, or no back end takes part.
        """
        key = self.key(subject)
        with self.leases.alone(key):
            run = GroupSearch(self._resources, subject, key, (), whole=False)
            return self._resources.released(run.screen_defaults)

    def time_again(self, kernels: Sequence[tuple[Subject, TuningRecord]]) -> list[Trial]:
        """Compile, check and time kernels of records: a trial each, with a failure's reason. Nothing is stored."""
        backends = {backend.name: backend for backend in self.backends}
        refusals = [self._refuse_record(subject, record) for subject, record in kernels]
        sound = [(subject, record) for (subject, record), why in zip(kernels, refusals, strict=True) if why is None]
        compiled = self._resources.compile([
            (backends[record.backend], subject.ir, record.config, self.target) for subject, record in sound
        ])
        found = []
        for (subject, record), refusal in zip(kernels, refusals, strict=True):
            outcome = next(compiled) if refusal is None else Outcome(failure=refusal)
            blank = Trial(record.key, record.backend, record.config, created=now())
            if outcome.ok:
                screen = partial(self._resources.call, "screening", jobs.screen_config, of=[subject])
                outcome = self._resources.released(partial(screen, subject, backends[record.backend], blank))
            found.append(screened(blank, outcome))
        return found

    def play_off(self, parts: Parts, sides: Sides, kept: Collection[str] = ()) -> Contest | None:
        """Whole sequences of tuned kernels against each other in one interleaved run; None when that run fails.

        ``sides`` name the parts that each runs, the incumbent first; ``kept`` are the values needed afterwards.
        """
        return self.play_off_later(parts, sides, kept, spare=False)()

    def play_off_later(
        self, parts: Parts, sides: Sides, kept: Collection[str] = (), spare: bool = True
    ) -> Callable[[], Contest | None]:
        """As :meth:`play_off`; ``spare``: when the measuring process has nothing else to do."""
        if self._resources.progress is not None and parts:
            label = next(iter(parts.values())).subject.label
            self._resources.progress(ProgressEvent(label, 0, len(parts), math.inf, "play off"))
        job = "playing off", jobs.decide_sides, dict(parts), dict(sides), frozenset(kept)
        called = [parts[name].subject for names in sides.values() for name in names]  # by one call of every side
        run = self._resources.later(*job, of=called) if spare else partial(self._resources.call, *job, of=called)
        return lambda: run().value

    def time_sides(self, parts: Parts, sides: Sides, kept: Collection[str]) -> Outcome:
        """As :meth:`play_off`, once, to know the times alone: a :class:`Contest`, or why there is none."""
        return self._resources.call(
            "timing whole steps", jobs.time_sides, dict(parts), dict(sides), frozenset(kept),
            of=[parts[name].subject for names in sides.values() for name in names])

    @property
    def rankings(self) -> dict[Alike, list[Config]]:
        """By likeness of kernels: configurations of one that was searched, fastest first."""
        return dict(self._resources.rankings)

    def take_rankings(self, rankings: Mapping[Alike, Sequence[Config]]) -> None:
        """Do not search kernels that another tuner has searched one alike of; :attr:`rankings` of that."""
        for alike, ranking in rankings.items():
            self._resources.rankings.setdefault(alike, list(ranking))

    def run_aside(self, function: Callable[[], object]) -> None:
        """Call a function in the measuring process when that has nothing else to do; nobody waits for it."""
        self._resources.executor.submit(function, limit_s=self.budget.job_limit_s)

    def compile_aside(self, function: Callable[[_Kind], None], subject: _Kind) -> None:
        """Call a function, for what it leaves in a cache, in an idle compiler; nobody waits for it."""
        self._resources.executor.prefetch(function, [(subject,)], limit_s=policy.PEER_LIMIT_S)

    def precompile(self, subjects: Iterable[Subject]) -> None:
        """Compile default configurations for :meth:`screen`, except where a trial or a record is stored."""
        keys = ((subject, self.key(subject)) for subject in subjects)
        new = [subject for subject, key in keys if self._current(key) is None and not self._resources.trials(key)]
        compilations = [one for subject in new for one in self._resources.default_of(subject)]
        if self.target.is_gpu:
            self._resources.compile_ahead(compilations)  # the screening waits for its own
        else:
            list(self._resources.compile(compilations))  # before anything is measured

    def _resources_for(self, minor: bool) -> TuningResources:
        budget = self.budget.minor() if minor else self.budget
        return replace(self._resources, budget=budget, bench=replace(self._resources.bench, decide_s=budget.decide_s))

    def prefetch(self, subjects: Iterable[Subject], minor: bool = False, spare: bool = False) -> None:
        """Compile for a GPU what tunes of these subjects will try in any case, beside whatever else goes on.

        Safe from any thread; ``spare`` ones wait until there is nothing else to compile. Of kernels alike the first is
        the one that will be searched; of the others only the default is compiled.
        """
        if not self.target.is_gpu:
            return
        for subject in subjects:
            default = self._resources.default_of(subject)
            self._resources.compile_ahead(default, spare)  # at once: to enumerate the others takes a while
            if self._resources.searches(subject):
                run = GroupSearch(self._resources_for(minor), subject, self.key(subject), ())
                self._resources.compile_ahead([one for one in run.ahead() if one not in default], spare)

    def prefetch_default(self, subjects: Iterable[Subject]) -> None:
        """Compile what :meth:`screen` will want of these subjects, as a spare :meth:`prefetch` does."""
        for subject in subjects:
            self._resources.compile_ahead(self._resources.default_of(subject), spare=True)

