"""One subject's tune: who takes part, what is tried, what each trial found, and what goes into the decision."""

from __future__ import annotations

import time
from collections import Counter
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
from fuseplan.search.worker import Executor, Outcome

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

    @staticmethod
    def on(device_type: str, trials: int | None = None, seconds: float | None = None) -> Budget:
        """The usual budget on a device, where not said otherwise.

        A GPU's times vary less, and its default configurations are near the bandwidth: fewer trials and shorter runs.
        """
        usual = Budget() if device_type == "cpu" else Budget(trials=8, decide_s=0.16)
        return replace(
            usual, trials=usual.trials if trials is None else trials,
            seconds=usual.seconds if seconds is None else seconds,
        )


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


@dataclass(frozen=True)
class Workshop:
    """What every tune of a tuner works with."""

    database: Database
    backends: tuple[Backend, ...]
    bench: jobs.Bench
    executor: Executor
    budget: Budget
    versions: Versions
    progress: Callable[[ProgressEvent], None] | None = None

    @property
    def target(self) -> Target:
        return self.bench.target

    def refusal(self, backend: Backend, subject: Subject) -> str | None:
        """Why a back end cannot take part, or None."""
        if backend.device_type != self.target.device_type:
            return f"is for {backend.device_type}, not {self.target.device_type}"
        return backend.unavailable() or backend.refuse(subject.ir, self.target)

    def call(self, function: Callable[..., object], *args: object) -> Outcome:
        """Run a job in the measuring process."""
        return self.executor.call(function, *args, limit_s=self.budget.job_limit_s)


class SubjectRun:
    """One subject's tune.

    Args:
        shop: What to work with.
        subject: The fusion group.
        key: Its record key.
        neighbours: Records of similar groups.
    """

    def __init__(self, shop: Workshop, subject: Subject, key: RecordKey, neighbours: Sequence[TuningRecord]) -> None:
        self._shop = shop
        self._subject = subject
        self._key = key
        self._refusals: dict[str, str] = {}
        self._trials: dict[tuple[str, str], Trial] = {}
        self._runs: dict[tuple[str, str], Trial] = {}
        self._default_spills: dict[str, int] = {}
        self._entries = self._take_part(neighbours)
        self._best_us = float("inf")
        #: Configurations are compared by what they take on the device, where that is not the regime's time.
        self._has_device_timer = shop.bench.timer.of_device() is not None
        self._on_device = False

    def execute(self) -> TuningRecord:
        """Try configurations within the budget, decide, and return the answer."""
        self._open()
        start = time.monotonic()
        self._on_device = self._has_device_timer
        self._resume()
        while batch := self._next_batch(time.monotonic() - start):
            self._try(batch)
        verdicts = Verdicts(
            tuple(self._trials.values()), self._refusals, sum(len(entry.space) for entry in self._entries)
        )
        self._event("decide")
        evidence = Evidence(now(), self._shop.versions, self._shop.bench.seed, 0.0)
        record = decide(
            self._shop.executor, self._shop.bench, self._subject, self._key, self._choices(), verdicts, evidence,
            self._shop.budget.job_limit_s,
        )
        self._best_us = record.best_us
        self._event("done")
        elapsed_s = round(time.monotonic() - start, 3)
        return replace(record, evidence=replace(record.evidence, elapsed_s=elapsed_s))

    def first_batch(self) -> list[tuple[Backend, Config]]:
        """What :meth:`execute` would compile first."""
        return [(entry.backend, entry.space.configs[position]) for entry, position in self._next_batch(0.0)]

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
        shop, ir = self._shop, self._subject.ir
        willing: list[tuple[int, Backend, Space]] = []
        for order, backend in enumerate(shop.backends):
            reason = shop.refusal(backend, self._subject)
            if reason is None:
                willing.append((order, backend, enumerate_space(backend, ir, shop.target)))
            else:
                self._refusals[backend.name] = reason
        shares = _shares(shop.budget.trials, len(willing))
        entries = []
        for (order, backend, space), share in zip(willing, shares, strict=True):
            suggested = [space.nearest(config) for config in backend.suggestions(ir, shop.target)]
            winners = [space.nearest(record.config) for record in neighbours if record.backend == backend.name]
            first = _early(suggested, winners, max(1, share // 3))
            entries.append(_Entry(order, backend, space, make_strategy(space, share, shop.bench.seed, first)))
        return entries

    def _open(self) -> None:
        self._event("open")
        outcome = self._shop.call(jobs.open_subject, self._shop.bench, self._subject)
        if not outcome.ok:
            raise SubjectError(f"{self._subject.label}: cannot be tuned: {outcome.failure}")
        unfused: Measurement = outcome.value
        self._best_us = unfused.median_us

    def _resume(self, only_open: bool = True) -> None:
        """Take over the trials of a tune that was cut short (or of any tune)."""
        by_name = {entry.backend.name: entry for entry in self._entries}
        for trial in self._shop.database.trials(self._key, self._shop.versions, only_open=only_open):
            if self._on_device and trial.median_us is not None and trial.device_us is None:
                continue  # only ranked against other groups so far
            entry = by_name.get(trial.backend)
            position = entry.space.find(trial.config) if entry is not None else None
            if entry is not None and position is not None:
                self._note(entry, position, trial)

    # -- trials -------------------------------------------------------------------------------------------

    def _next_batch(self, elapsed_s: float) -> list[tuple[_Entry, int]]:
        """Positions to try next; all back ends in turn, so that a compile batch fills the cores."""
        if elapsed_s >= self._shop.budget.seconds and self._trials:
            return []
        width = max(1, getattr(self._shop.executor, "compilers", 1) // max(1, len(self._entries)))
        return [(entry, position) for entry in self._entries for position in entry.strategy.ask(width)]

    def _try(self, batch: Sequence[tuple[_Entry, int]]) -> None:
        self._event("compile")
        arguments = [
            (entry.backend, self._subject.ir, entry.space.configs[position], self._shop.target)
            for entry, position in batch
        ]
        compiled = self._shop.executor.map(jobs.prepare, arguments, limit_s=self._shop.budget.job_limit_s)
        for (entry, position), outcome in zip(batch, compiled, strict=True):
            trial = self._screen(entry, position, outcome)
            self._shop.database.log_trial(trial, self._shop.versions)
            self._note(entry, position, trial)
            self._event("screen")

    def _screen(self, entry: _Entry, position: int, compiled: Outcome) -> Trial:
        config = entry.space.configs[position]
        blank = Trial(self._key, entry.backend.name, dict(config), created=now())
        if not compiled.ok:
            return replace(blank, reason=f"does not compile: {compiled.failure}")
        prepared: jobs.Prepared = compiled.value
        spilled = prepared.resources.get("spill_bytes", 0)
        if position == 0:
            self._default_spills[entry.backend.name] = spilled
        # Some maths spills whatever the configuration; only what spills more than the default is not worth measuring.
        if spilled > self._default_spills.get(entry.backend.name, spilled):
            return replace(blank, reason=f"spills {spilled} bytes of registers")
        twin = self._runs.get((entry.backend.name, prepared.run_key)) if prepared.run_key else None
        if twin is not None:
            return replace(
                blank, median_us=twin.median_us, reason=twin.reason, error=twin.error,
                duplicate_of=config_key(twin.config), device_us=twin.device_us,
            )
        trial = self._measure(entry, config, blank)
        if prepared.run_key:
            self._runs[entry.backend.name, prepared.run_key] = trial
        return trial

    def _measure(self, entry: _Entry, config: Config, blank: Trial) -> Trial:
        outcome = self._shop.call(
            jobs.screen_config, self._shop.bench, self._subject, entry.backend, config, self._on_device
        )
        if not outcome.ok:
            return replace(blank, reason=outcome.failure)
        screened: jobs.Screened = outcome.value
        error = min(screened.verdict.error, 1e300)
        if screened.time is None:
            return replace(blank, reason=f"wrong result: {screened.verdict.reason}", error=error)
        device_us = screened.device.median_us if screened.device is not None else None
        return replace(blank, median_us=screened.time.median_us, error=error, device_us=device_us)

    def _note(self, entry: _Entry, position: int, trial: Trial) -> None:
        self._trials[trial.backend, config_key(trial.config)] = trial
        entry.strategy.tell(position, trial.device_us if self._on_device else trial.median_us)
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
        others = [(e, p) for e, p, _ in ranked if (e, p) != default][: self._shop.budget.finalists]
        others.sort(key=lambda item: (item[0].order, item[1]))
        listed = [("default", *default)] if default is not None else []
        listed += [(f"challenger {number}", e, p) for number, (e, p) in enumerate(others, 1)]
        return [Choice(name, entry.backend, entry.space.configs[position]) for name, entry, position in listed]

    def _is_copy(self, entry: _Entry, position: int) -> bool:
        return bool(self._trials[entry.backend.name, config_key(entry.space.configs[position])].duplicate_of)

    # -- small things -------------------------------------------------------------------------------------

    def _event(self, phase: Phase) -> None:
        of = sum(entry.strategy.limit for entry in self._entries)
        if self._shop.progress is not None:
            self._shop.progress(ProgressEvent(self._subject.label, len(self._trials), of, self._best_us, phase))


def _shares(trials: int, backends: int) -> list[int]:
    """Trials of each back end: the preferred one searches, the others get a quarter each to show what they can do."""
    others = [max(1, trials // 4)] * max(0, backends - 1)
    return [max(1, trials - sum(others)), *others][:backends]


def _early(suggested: Iterable[int], winners: Sequence[int], most: int) -> list[int]:
    """Positions to try first: suggestions, then where neighbours won most often (the earlier neighbour among equals).

    Only so many: with many neighbours there would be no trials left to search with.
    """
    often = [position for position, _ in Counter(winners).most_common()]
    return list(dict.fromkeys([*suggested, *often]))[:most]
