"""The search of one group: which back ends take part, what is tried, what is decided, and the record of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fuseplan.kernels.ir.backend import Backend, config_key
from fuseplan.search import policy
from fuseplan.search.errors import NothingCompilesError, SubjectError
from fuseplan.search.store.record import Evidence, Finalist, RecordKey, Rejection, Trial, TuningRecord, now
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.subject import Subject
from fuseplan.search.tune.resources import ProgressEvent, TunePhase, TuningResources
from fuseplan.search.tune.space import Space
from fuseplan.search.tune.strategy import Strategy
from fuseplan.search.workers import jobs
from fuseplan.search.workers.compilers import Compilation
from fuseplan.search.workers.worker import Outcome


@dataclass
class _Entry:
    """A back end that takes part: its space and the strategy over it."""

    backend: Backend
    space: Space
    strategy: Strategy


class GroupSearch:
    """The search of one group's configurations.

    ``neighbours`` are records of similar groups. A search that is not ``whole`` knows the default configurations alone,
    which need no enumeration.
    """

    def __init__(
        self, resources: TuningResources, subject: Subject, key: RecordKey, neighbours: Sequence[TuningRecord],
        whole: bool = True,
    ) -> None:
        self._resources = resources
        self._subject = subject
        self._key = key
        self._trials: dict[tuple[str, str], Trial] = {}
        self._default_spills: dict[str, int] = {}
        self._entries = self._take_part(neighbours, whole)
        self._best_us = math.inf
        #: Configurations are compared by what they take on the device, where that is not the regime's time.
        self.on_device = whole and resources.bench.timer.of_device() is not None

    def execute(self) -> TuningRecord:
        """Try configurations within the budget, decide, and return the answer."""
        self._open()
        start = time.monotonic()
        self._resume()
        batch = self._next_batch(0.0)
        self._resources.compile_ahead(self._prospects())  # while the first ones are timed
        while batch:
            self._try(batch)
            batch = self._next_batch(time.monotonic() - start)
        self._require_a_compiler()
        self._rank()
        self._event("decide")
        record = self._decide(start)
        self._best_us = record.best_us
        self._event("done")
        return record

    def _decide(self, start_s: float) -> TuningRecord:
        """Run the finalists, the incumbent first, against the unfused chain and write down the answer.

        A run that crashes or hangs is repeated with the first choice alone, then with the unfused chain alone.
        """
        choices, failed = self._choices(), dict[str, str]()
        for size in sorted({len(choices), min(1, len(choices)), 0}, reverse=True):
            attempt = tuple(choices[:size])
            outcome = self._resources.call(
                "deciding", jobs.decide_finalists, self._subject, attempt, of=[self._subject])
            if outcome.ok:
                return self._record(choices, outcome.value, failed, start_s)
            failed |= {choice.name: f"the decisive run failed: {outcome.failure}" for choice in attempt}
        raise SubjectError(f"{self._subject.label}: the unfused chain cannot be timed: {outcome.failure}")

    def _record(
        self, choices: Sequence[jobs.Entrant], decision: jobs.Decision, failed: Mapping[str, str], start_s: float
    ) -> TuningRecord:
        contest, resources = decision.contest, self._resources
        standing = [choice for choice in choices if choice.name in contest.samples]
        between = decision.device or contest
        best = _winner(standing, between) if standing else None
        fuse = best is not None and contest.accepts(best.name, jobs.UNFUSED)
        gain = contest.gain(best.name, jobs.UNFUSED) if best is not None else 0.0
        undecided = best is not None and contest.undecided(best.name, jobs.UNFUSED)
        reason = _reason(fuse, gain, contest, undecided) if best is not None else self._no_kernel_works()
        why = {**failed, **decision.failed}
        rejected = [
            *(Rejection(choice.backend.name, dict(choice.config), why[choice.name])
              for choice in choices if choice.name not in contest.samples),
            *(Rejection(trial.backend, trial.config, trial.reason) for trial in self.trials if trial.reason),
        ]
        kernels = [
            Finalist(one.name, one.backend.name, dict(one.config), contest.time(one.name),
                     contest.gain(one.name, jobs.UNFUSED)) for one in standing
        ]
        tried = self._trials.get((best.backend.name, config_key(best.config))) if best is not None else None
        return TuningRecord(
            key=self._key,
            label=self._subject.label,
            fuse=fuse,
            backend=best.backend.name if best is not None else "",
            config=dict(best.config) if best is not None else {},
            fused=contest.time(best.name) if best is not None else None,
            unfused=contest.time(jobs.UNFUSED),
            gain=gain,
            default_gain=between.gain(best.name, "default") if best and standing[0].name == "default" else 0.0,
            threshold=contest.threshold,
            error=tried.error or 0.0 if tried is not None else 0.0,
            eager_error=decision.eager_error,
            finalists=(Finalist(jobs.UNFUSED, "", {}, contest.time(jobs.UNFUSED), 0.0), *kernels),
            rejected=tuple(rejected[:policy.REJECTIONS_LIMIT]),
            refusals=dict(self._refusals),
            enumerated=sum(len(entry.space) for entry in self._entries),
            compiled=sum(not trial.uncompiled for trial in self.trials),
            measured=sum(trial.median_us is not None for trial in self.trials),
            work=self._subject.work,
            resources=dict(decision.resources[best.name]) if best is not None else {},
            evidence=Evidence(
                now(), resources.versions, resources.bench.seed, round(time.monotonic() - start_s, 3),
                decision.clocks_mhz, reason, resources.run),
            undecided=undecided,
        )

    def _no_kernel_works(self) -> str:
        reasons = [f"{name}: {reason}" for name, reason in self._refusals.items()]
        reasons += [trial.reason for trial in self.trials if trial.reason]
        return "no kernel works: " + ("; ".join(dict.fromkeys(reasons))[:500] or "no back end was given")

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What was tried, in order."""
        return tuple(self._trials.values())

    def ahead(self) -> list[Compilation]:
        """What :meth:`execute` will compile whatever it finds, in order."""
        first = self._compilations(self._next_batch(0.0))
        return [*first, *self._prospects()] if self._steep else first

    def _prospects(self) -> list[Compilation]:
        later = [(entry, position) for entry in self._entries for position in entry.strategy.prospects()]
        return self._compilations(later)

    def _rank(self) -> None:
        """Remember what a search of most of a space has shown, for kernels alike."""
        for entry in self._entries:
            likeness = entry.backend.likeness(self._subject.ir)
            times = entry.strategy.times
            if likeness is not None and len(times) > len(entry.space) / 2:
                ranking = [entry.space.configs[position] for position in sorted(times, key=lambda one: times[one])]
                self._resources.rankings.setdefault((entry.backend.name, likeness), ranking)

    def screen_defaults(self) -> Trial:
        """The trial of the first default configuration that works, else of the last. The run is not ``whole``."""
        self._resume(only_open=False)
        if not self._entries:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._refusals.items())
            raise SubjectError(f"{self._subject.label}: no back end takes part ({reasons})")
        for entry in self._entries:
            key = (entry.backend.name, config_key(entry.space.configs[0]))
            if key not in self._trials:
                if not self._trials:
                    self._open()
                self._try([(entry, 0)])
            if self._trials[key].median_us is not None:
                return self._trials[key]
        self._require_a_compiler()
        return self._trials[key]

    def _require_a_compiler(self) -> None:
        """Where nothing has compiled yet, the compiler may be at fault, and not these kernels."""
        failed = [trial.reason for trial in self._trials.values() if trial.uncompiled]
        if failed and not self._resources.compiles.is_set():
            raise NothingCompilesError(f"{self._subject.label}: nothing has compiled in this tune ({failed[0]})")

    def _take_part(self, neighbours: Sequence[TuningRecord], whole: bool) -> list[_Entry]:
        """The back ends that take part, in order of preference; the others' reasons are kept."""
        resources, ir = self._resources, self._subject.ir
        refusals = {backend.name: resources.refusal(backend, self._subject) for backend in resources.backends}
        self._refusals = {name: reason for name, reason in refusals.items() if reason is not None}
        willing = [backend for backend in resources.backends if backend.name not in self._refusals]
        self._steep = False
        seed = resources.bench.seed
        if not whole:
            alone = [Space((), (dict(backend.default_config(ir, resources.target)),)) for backend in willing]
            pairs = zip(willing, alone, strict=True)
            return [_Entry(backend, space, Strategy(space, 1, seed)) for backend, space in pairs]
        willing = willing[: resources.budget.backends]
        entries = []
        self._steep = any(backend.likeness(ir) is not None for backend in willing)
        # A quarter for each but the preferred one, to show what it can do.
        trials = resources.budget.steep_trials if self._steep else resources.budget.trials
        others = [max(1, trials // 4)] * (len(willing) - 1)
        for backend, share in zip(willing, [max(1, trials - sum(others)), *others], strict=False):
            space = resources.space(backend, ir)
            if (ranking := resources.rankings.get((backend.name, backend.likeness(ir)))) is not None:
                known = [position for config in ranking if (position := space.find(config)) is not None]
                first = known[:policy.ALIKE_LIMIT]
                share = min(share, 1 + len(first))
            else:
                suggested = [space.nearest(config) for config in backend.suggestions(ir, resources.target)]
                winners = [space.nearest(record.config) for record in neighbours if record.backend == backend.name]
                # Where neighbours won most often; with all of them there would be no trials left to search with.
                often = [position for position, _ in Counter(winners).most_common()]
                first = list(dict.fromkeys([*suggested, *often]))[: max(1, share // 3)]
            entries.append(_Entry(backend, space, Strategy(space, share, seed, first)))
        return entries

    def _open(self) -> None:
        self._event("open")
        outcome = self._resources.call("making references", jobs.open_subject, self._subject, of=[self._subject])
        if not outcome.ok:
            raise SubjectError(f"{self._subject.label}: cannot be tuned: {outcome.failure}")

    def _resume(self, only_open: bool = True) -> None:
        """Take over the trials of a tune that was cut short (or of any tune)."""
        by_name = {entry.backend.name: entry for entry in self._entries}
        for trial in self._resources.trials(self._key, only_open):
            if self.on_device and trial.median_us is not None and trial.device_us is None:
                continue  # only ranked against other groups so far
            entry = by_name.get(trial.backend)
            position = entry.space.find(trial.config) if entry is not None else None
            if entry is not None and position is not None:
                self._note(entry, position, trial)

    def _next_batch(self, elapsed_s: float) -> list[tuple[_Entry, int]]:
        """Positions to try next; all back ends in turn, so that a compile batch fills the cores."""
        if elapsed_s >= self._resources.budget.seconds and self._trials:
            return []
        width = max(1, getattr(self._resources.executor, "compilers", 1) // max(1, len(self._entries)))
        return [(entry, position) for entry in self._entries for position in entry.strategy.ask(width)]

    def _try(self, batch: Sequence[tuple[_Entry, int]]) -> None:
        self._event("compile")
        compiled = self._resources.compile(self._compilations(batch))
        for (entry, position), outcome in zip(batch, compiled, strict=True):
            trial = self._screen(entry, position, outcome)
            self._resources.log(trial)
            self._note(entry, position, trial)
            self._event("screen")

    def _compilations(self, batch: Iterable[tuple[_Entry, int]]) -> list[Compilation]:
        ir, target = self._subject.ir, self._resources.target
        return [(entry.backend, ir, entry.space.configs[position], target) for entry, position in batch]

    def _screen(self, entry: _Entry, position: int, compiled: Outcome) -> Trial:
        blank = Trial(self._key, entry.backend.name, dict(entry.space.configs[position]), created=now())
        if not compiled.ok:
            return replace(blank, reason=f"{Trial.UNCOMPILED}: {compiled.failure}")
        spilled = compiled.value.get("spill_bytes", 0)
        if position == 0:
            self._default_spills[entry.backend.name] = spilled
        # Some maths spills whatever the configuration; only what spills more than the default is not worth measuring.
        if spilled > self._default_spills.get(entry.backend.name, spilled):
            return replace(blank, reason=f"spills {spilled} bytes of registers")
        return screened(blank, self._resources.call(
            "screening", jobs.screen_config, self._subject, entry.backend, blank, self.on_device, of=[self._subject]
        ))

    def _note(self, entry: _Entry, position: int, trial: Trial) -> None:
        self._trials[trial.backend, config_key(trial.config)] = trial
        entry.strategy.tell(position, trial.device_us if self.on_device else trial.median_us)
        if trial.median_us is not None:
            self._best_us = min(self._best_us, trial.median_us)

    def _choices(self) -> list[jobs.Entrant]:
        """The default of the first back end that has one which works, then the fastest others, in space order."""
        timed = [
            (number, position, time_us) for number, entry in enumerate(self._entries)
            for position, time_us in sorted(entry.strategy.times.items()) if time_us < math.inf
        ]
        default = next((one for one in timed if one[1] == 0), None)
        fastest = sorted((one for one in timed if one != default), key=lambda one: one[2])
        listed = {"default": default} if default is not None else {}
        for count, one in enumerate(sorted(fastest[: self._resources.budget.finalists]), 1):
            listed[f"challenger {count}"] = one
        return [jobs.Entrant(name, self._entries[number].backend, self._entries[number].space.configs[position])
                for name, (number, position, _) in listed.items()]

    def _event(self, phase: TunePhase) -> None:
        of = sum(entry.strategy.limit for entry in self._entries)
        if self._resources.progress is not None:
            self._resources.progress(ProgressEvent(self._subject.label, len(self._trials), of, self._best_us, phase))


def screened(blank: Trial, outcome: Outcome) -> Trial:
    """The trial that a screening (:func:`fuseplan.search.workers.jobs.screen_config`) makes of an untimed one."""
    found: Trial = outcome.value if outcome.ok else replace(blank, reason=outcome.failure)
    return found


def _winner(standing: Sequence[jobs.Entrant], contest: Contest) -> jobs.Entrant:
    """The best kernel. One of another back end than the preferred has to be better by more than tunes differ in."""
    first = standing[0]
    by_name = {one.name: one for one in standing}
    best = contest.winner(first.name, list(by_name)[1:])
    if by_name[best].backend.name != first.backend.name:
        own = contest.winner(
            first.name, [one.name for one in standing[1:] if one.backend.name == first.backend.name])
        runs = contest.conditions or (contest,)
        best = best if all(one.gain(best, own) > policy.OTHER_BACKEND_GAIN for one in runs) else own
    return by_name[best]


def _reason(fuse: bool, gain: float, contest: Contest, undecided: bool) -> str:
    if undecided:
        return f"no verdict: a gain of {gain:.1%} over the unfused chain, measured with a noise of {contest.noise:.0%}"
    if fuse:
        return f"the kernel takes {gain:.1%} less time than the unfused chain (threshold {contest.threshold:.1%})"
    if gain > 0:
        return f"the gain of {gain:.1%} over the unfused chain is within the threshold of {contest.threshold:.1%}"
    return f"the best kernel is {-gain:.1%} slower than the unfused chain"
