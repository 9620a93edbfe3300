"""Tuning one fusion group: propose, compile in parallel, check, screen, decide in one interleaved run, store.

The answer is a :class:`~fuseplan.search.record.TuningRecord`: the best kernel, or "do not fuse". Every finished trial
is stored at once, so a tune that is killed goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fuseplan.kernels.backend import Backend, Config, Target, config_key
from fuseplan.search import jobs
from fuseplan.search.database import Database
from fuseplan.search.decision import Choice, Verdicts, decide
from fuseplan.search.errors import SubjectError
from fuseplan.search.record import Evidence, Measurement, RecordKey, Trial, TuningRecord, Versions, now
from fuseplan.search.space import Space, enumerate_space
from fuseplan.search.strategy import Strategy, make_strategy
from fuseplan.search.subject import Subject
from fuseplan.search.timers import Timer, timer_for
from fuseplan.search.worker import Executor, Outcome, WorkerPool

Phase = Literal["open", "compile", "screen", "decide", "done"]


@dataclass(frozen=True)
class Budget:
    """What one subject may cost. The first batch and the decision are always run.

    Attributes:
        trials: Configurations, over all back ends.
        seconds: Wall time of proposing, compiling and screening.
        screen_s: Seconds of samples for one screening.
        decide_s: Seconds of interleaved rounds for the decision.
        finalists: Challengers in the decision, beside the default and the unfused chain.
        job_limit_s: After how long a job in a worker counts as hanging.
    """

    trials: int = 12
    seconds: float = 6.0
    screen_s: float = 0.08
    decide_s: float = 0.5
    finalists: int = 3
    job_limit_s: float = 60.0


@dataclass(frozen=True)
class ProgressEvent:
    """One step of a tune, for a progress bar. ``best_us`` is the best time so far, the unfused chain included."""

    label: str
    trial: int
    of: int
    best_us: float
    phase: Phase


@dataclass
class _Entry:
    """A back end that takes part: its space and the strategy over it."""

    order: int
    backend: Backend
    space: Space
    strategy: Strategy


class Tuner:
    """Tunes subjects on one device in one regime, with one set of worker processes.

    Args:
        database: Where trials and records go; open for writing.
        target: The device kernels are compiled for.
        backends: Kernel back ends to choose from, in order of preference.
        device: Identity of the device, part of every key.
        budget: What one subject may cost.
        seed: Seed of the search and of the inputs.
        regime: ``"eager"`` or ``"graph"``.
        numerics: ``"fp32"`` or ``"eager"``, part of every key.
        executor: Where jobs run; a :class:`WorkerPool` of its own by default.
        timer: How calls are timed; the one for the target and regime by default.
        progress: Told about every step.
    """

    def __init__(
        self,
        database: Database,
        target: Target,
        backends: Sequence[Backend],
        device: str,
        budget: Budget = Budget(),
        seed: int = 0,
        regime: str = "eager",
        numerics: str = "fp32",
        executor: Executor | None = None,
        timer: Timer | None = None,
        progress: Callable[[ProgressEvent], None] | None = None,
    ) -> None:
        self.database = database
        self.target = target
        self.backends = tuple(backends)
        self.device = device
        self.budget = budget
        self.seed = seed
        self.regime = regime
        self.numerics = numerics
        self.versions = Versions.current(target.device_type)
        timer = timer if timer is not None else timer_for(target.device_type, regime)
        self._bench = jobs.Bench(target, timer, seed, budget.screen_s, budget.decide_s)
        self._executor: Executor = executor if executor is not None else WorkerPool()
        self._owns_executor = executor is None
        self._progress = progress

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, unless the executor is the caller's."""
        if self._owns_executor:
            self._executor.close()

    def key(self, subject: Subject) -> RecordKey:
        """The record key of a subject here."""
        return RecordKey(subject.key, self.device, self.regime, self.numerics)

    def tune(self, subject: Subject, neighbours: Iterable[TuningRecord] = (), force: bool = False) -> TuningRecord:
        """The stored answer for ``subject`` if it is current, else a newly measured one, stored.

        Args:
            subject: The fusion group.
            neighbours: Records of similar groups; their configurations are tried early.
            force: Measure again even where there is a current record, from nothing.

        Raises:
            SubjectError: The unfused chain or its reference fails.
        """
        key = self.key(subject)
        found = self.database.get_record(key)
        stored = found.record
        if force:
            self.database.forget_trials(key)
        elif stored is not None and not self.versions.mismatch(stored.evidence.versions):
            return stored
        run = _Run(self, subject, key, [*neighbours, *([stored] if stored is not None else [])])
        try:
            record = run.execute()
        finally:
            self._executor.call(jobs.release, limit_s=self.budget.job_limit_s)
        self.database.put_record(record)
        return record

    def tune_all(self, subjects: Iterable[Subject]) -> list[TuningRecord]:
        """Tune one after the other."""
        return [self.tune(subject) for subject in subjects]

    def time_unfused(self, subject: Subject) -> Measurement:
        """Time of the unfused chain alone; kept as a trial without a back end, so it is measured once.

        Raises:
            SubjectError: The chain fails.
        """
        key = self.key(subject)
        stored = self.database.get_record(key).record
        if stored is not None and not self.versions.mismatch(stored.evidence.versions):
            return stored.unfused
        for trial in self.database.trials(key, self.versions):
            if not trial.backend and trial.median_us is not None:
                return Measurement(trial.median_us, 0.0, 1, 0, self.regime)
        outcome = self._executor.call(jobs.open_subject, self._bench, subject, limit_s=self.budget.job_limit_s)
        if not outcome.ok:
            raise SubjectError(f"{subject.label}: cannot be timed: {outcome.failure}")
        time_us: Measurement = outcome.value
        self.database.log_trial(Trial(key, "", {}, time_us.median_us, created=now()), self.versions)
        return time_us

    def screen(self, subject: Subject) -> Trial:
        """The default configuration alone, compiled, checked and timed shortly: what ranks groups before a tune.

        Returns:
            The trial of the first back end whose default works, else the last failed one. A stored trial is not
            repeated; a later :meth:`tune` starts from it.

        Raises:
            SubjectError: The unfused chain or its reference fails, or no back end takes part.
        """
        run = _Run(self, subject, self.key(subject), ())
        try:
            return run.screen_defaults()
        finally:
            self._executor.call(jobs.release, limit_s=self.budget.job_limit_s)

    def report(self, event: ProgressEvent) -> None:
        if self._progress is not None:
            self._progress(event)


class _Run:
    """One subject's tune."""

    def __init__(self, tuner: Tuner, subject: Subject, key: RecordKey, neighbours: Sequence[TuningRecord]) -> None:
        self._tuner = tuner
        self._subject = subject
        self._key = key
        self._budget = tuner.budget
        self._executor = tuner._executor
        self._refusals: dict[str, str] = {}
        self._trials: dict[tuple[str, str], Trial] = {}
        self._runs: dict[tuple[str, str], Trial] = {}
        self._resources: dict[tuple[str, str], dict[str, int]] = {}
        self._entries = self._take_part(neighbours)
        self._best_us = float("inf")

    def execute(self) -> TuningRecord:
        self._open()
        start = time.monotonic()
        self._resume()
        while batch := self._next_batch(time.monotonic() - start):
            self._try(batch)
        verdicts = Verdicts(
            tuple(self._trials.values()), self._refusals, sum(len(entry.space) for entry in self._entries),
            {key: dict(facts) for key, facts in self._resources.items()},
        )
        self._event("decide")
        evidence = Evidence(now(), self._tuner.versions, self._tuner.seed, 0.0)
        record = decide(
            self._executor, self._tuner._bench, self._subject, self._key, self._choices(), verdicts, evidence,
            self._budget.job_limit_s,
        )
        self._best_us = record.best_us
        self._event("done")
        elapsed_s = round(time.monotonic() - start, 3)
        return replace(record, evidence=replace(record.evidence, elapsed_s=elapsed_s))

    def screen_defaults(self) -> Trial:
        """The trials of the default configurations, one back end after the other until one works."""
        self._resume(only_open=False)
        found: Trial | None = None
        for entry in self._entries:
            key = (entry.backend.name, config_key(entry.space.configs[0]))
            if key not in self._trials:
                if found is None:
                    self._open()
                self._try([(entry, 0)])
            found = self._trials[key]
            if found.median_us is not None:
                return found
        if found is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._refusals.items())
            raise SubjectError(f"{self._subject.label}: no back end takes part ({reasons})")
        return found

    # -- who takes part -----------------------------------------------------------------------------------

    def _take_part(self, neighbours: Sequence[TuningRecord]) -> list[_Entry]:
        tuner, ir = self._tuner, self._subject.ir
        willing: list[tuple[int, Backend, Space]] = []
        for order, backend in enumerate(tuner.backends):
            reason = self._refusal(backend)
            if reason is None:
                willing.append((order, backend, enumerate_space(backend, ir, tuner.target)))
            else:
                self._refusals[backend.name] = reason
        share = max(1, self._budget.trials // max(1, len(willing)))
        entries = []
        for order, backend, space in willing:
            hints = [record.config for record in neighbours if record.backend == backend.name]
            hints += backend.suggestions(ir, tuner.target)
            first = [space.nearest(config) for config in hints]
            entries.append(_Entry(order, backend, space, make_strategy(space, share, tuner.seed, first)))
        return entries

    def _refusal(self, backend: Backend) -> str | None:
        target = self._tuner.target
        if backend.device_type != target.device_type:
            return f"is for {backend.device_type}, not {target.device_type}"
        return backend.unavailable() or backend.refuse(self._subject.ir, target)

    def _open(self) -> None:
        self._event("open")
        outcome = self._call(jobs.open_subject, self._tuner._bench, self._subject)
        if not outcome.ok:
            raise SubjectError(f"{self._subject.label}: cannot be tuned: {outcome.failure}")
        unfused: Measurement = outcome.value
        self._best_us = unfused.median_us

    def _resume(self, only_open: bool = True) -> None:
        """Take over the trials of a tune that was cut short (or of any tune)."""
        by_name = {entry.backend.name: entry for entry in self._entries}
        for trial in self._tuner.database.trials(self._key, self._tuner.versions, only_open=only_open):
            entry = by_name.get(trial.backend)
            position = entry.space.find(trial.config) if entry is not None else None
            if entry is not None and position is not None:
                self._note(entry, position, trial)

    # -- trials -------------------------------------------------------------------------------------------

    def _next_batch(self, elapsed_s: float) -> list[tuple[_Entry, int]]:
        """Positions to try next; all back ends in turn, so that a compile batch fills the cores."""
        if elapsed_s >= self._budget.seconds and self._trials:
            return []
        width = max(1, getattr(self._executor, "compilers", 1) // max(1, len(self._entries)))
        return [(entry, position) for entry in self._entries for position in entry.strategy.ask(width)]

    def _try(self, batch: Sequence[tuple[_Entry, int]]) -> None:
        self._event("compile")
        arguments = [
            (entry.backend, self._subject.ir, entry.space.configs[position], self._tuner.target)
            for entry, position in batch
        ]
        compiled = self._executor.map(jobs.prepare, arguments, limit_s=self._budget.job_limit_s)
        for (entry, position), outcome in zip(batch, compiled, strict=True):
            trial = self._screen(entry, position, outcome)
            self._tuner.database.log_trial(trial, self._tuner.versions)
            self._note(entry, position, trial)
            self._event("screen")

    def _screen(self, entry: _Entry, position: int, compiled: Outcome) -> Trial:
        config = entry.space.configs[position]
        blank = Trial(self._key, entry.backend.name, dict(config), created=now())
        if not compiled.ok:
            return replace(blank, reason=f"does not compile: {compiled.failure}")
        prepared: jobs.Prepared = compiled.value
        spilled = prepared.resources.get("spill_bytes", 0)
        if spilled and position != 0:
            return replace(blank, reason=f"spills {spilled} bytes of registers")
        twin = self._runs.get((entry.backend.name, prepared.run_key)) if prepared.run_key else None
        if twin is not None:
            return replace(
                blank, median_us=twin.median_us, reason=twin.reason, error=twin.error,
                duplicate_of=config_key(twin.config),
            )
        trial = self._measure(entry, config, blank)
        if prepared.run_key:
            self._runs[entry.backend.name, prepared.run_key] = trial
        return trial

    def _measure(self, entry: _Entry, config: Config, blank: Trial) -> Trial:
        outcome = self._call(jobs.screen_config, self._tuner._bench, self._subject, entry.backend, config)
        if not outcome.ok:
            return replace(blank, reason=outcome.failure)
        screened: jobs.Screened = outcome.value
        self._resources[entry.backend.name, config_key(config)] = dict(screened.resources)
        error = min(screened.verdict.error, 1e300)
        if screened.time is None:
            return replace(blank, reason=f"wrong result: {screened.verdict.reason}", error=error)
        return replace(blank, median_us=screened.time.median_us, error=error)

    def _note(self, entry: _Entry, position: int, trial: Trial) -> None:
        self._trials[trial.backend, config_key(trial.config)] = trial
        entry.strategy.tell(position, trial.median_us)
        if trial.median_us is not None:
            self._best_us = min(self._best_us, trial.median_us)

    def _choices(self) -> list[Choice]:
        """The default of the first back end that has one which works, then the fastest others, in space order."""
        timed = [
            (entry, position, entry.strategy.times[position])
            for entry in self._entries
            for position in entry.strategy.times
            if entry.strategy.times[position] < float("inf") and not self._is_copy(entry, position)
        ]
        default = next(((e, p) for e, p, _ in sorted(timed, key=lambda item: item[0].order) if p == 0), None)
        ranked = sorted(timed, key=lambda item: (item[2], item[0].order, item[1]))
        others = [(e, p) for e, p, _ in ranked if (e, p) != default][: self._budget.finalists]
        others.sort(key=lambda item: (item[0].order, item[1]))
        listed = [("default", *default)] if default is not None else []
        listed += [(f"challenger {number}", e, p) for number, (e, p) in enumerate(others, 1)]
        return [Choice(name, entry.backend, entry.space.configs[position]) for name, entry, position in listed]

    def _is_copy(self, entry: _Entry, position: int) -> bool:
        return bool(self._trials[entry.backend.name, config_key(entry.space.configs[position])].duplicate_of)

    # -- small things -------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., object], *args: object) -> Outcome:
        return self._executor.call(function, *args, limit_s=self._budget.job_limit_s)

    def _event(self, phase: Phase) -> None:
        of = sum(entry.strategy.limit for entry in self._entries)
        event = ProgressEvent(self._subject.label, len(self._trials), of, self._best_us, phase)
        self._tuner.report(event)
