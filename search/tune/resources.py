"""What every tune of a tuner works with: budget, database, back ends, executor, and the spaces of configurations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.roofline import nominal_us
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Backend, Config, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.native.build import COMPILE_LIMIT_S
from fuseplan.search import policy
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import RecordKey, Trial, Versions
from fuseplan.search.timing.subject import Subject
from fuseplan.search.tune.space import Space, enumerate_space
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.workers import jobs
from fuseplan.search.workers.compilers import Compilation
from fuseplan.search.workers.worker import Outcome, WorkerPool

_T = TypeVar("_T")
TunePhase = Literal["open", "compile", "screen", "decide", "done", "play off", "step", "step done", "capture"]
#: Name of a back end, and what its kernels that are alike have in common.
Alike: TypeAlias = tuple[str, Hashable]


@dataclass(frozen=True)
class ProgressEvent:
    """What a tune does next, for a progress bar. ``best_us`` is the best time so far, at the end of unfused chains too.

    In phase ``"play off"`` sequences of so many kernels, one of them ``label``, are run against each other. In phase
    ``"step"`` the whole step of the workload ``label`` is timed, which takes about ``best_us`` unfused; in phase
    ``"step done"`` it was, and took ``best_us``, and ``unfused_us`` unfused; ``gains`` is the range of the gain over
    its rounds. In phase ``"capture"`` it is captured.
    """

    label: str
    trial: int
    of: int
    best_us: float
    phase: TunePhase
    unfused_us: float = 0.0
    gains: tuple[float, float] | None = None


@dataclass(frozen=True)
class Budget:
    """What one subject may cost. The first batch and the decision are always run.

    Attributes:
        trials: Configurations, over all back ends; ``steep_trials`` where times depend much on them.
        backends: How many of the back ends take part at most, the preferred ones; None for all that can.
        seconds: Of proposing, compiling and screening.
        screen_s: Of samples for one screening; ``decide_s``: of interleaved rounds for the decision.
        finalists: Challengers in the decision, beside the default and the unfused chain.
        job_limit_s: After how long without a sign a job in a worker counts as hanging, beside what its calls take.
    """

    trials: int = 12
    steep_trials: int = 96
    backends: int | None = None
    seconds: float = 6.0
    screen_s: float = 0.08
    decide_s: float = 0.5
    finalists: int = 3
    job_limit_s: float = policy.JOB_LIMIT_S

    @staticmethod
    def on(
        device_type: str, trials: int | None = None, seconds: float | None = None, job_limit_s: float | None = None
    ) -> Budget:
        """The usual budget on a device, where not said otherwise."""
        # A GPU's times vary less, and its default configurations are near the bandwidth.
        usual = Budget() if is_cpu(device_type) else Budget(trials=8, decide_s=0.1)
        said: dict[str, Any] = {
            "trials": trials, "steep_trials": trials, "seconds": seconds, "job_limit_s": job_limit_s}
        return replace(usual, **{name: value for name, value in said.items() if value is not None})

    def minor(self) -> Budget:
        """For a subject that hardly counts: the preferred back end's default configuration and one more."""
        few = min(2, self.trials)
        return replace(self, trials=few, steep_trials=few, backends=1, finalists=1, decide_s=self.decide_s / 4)


@dataclass(frozen=True)
class TuningResources:
    """What every tune of a tuner works with.

    Trials of another tune than ``run`` do not count ("": all do). ``compiles`` is set once a kernel has compiled: what
    does not is then at fault itself.
    """

    database: Database
    backends: tuple[Backend, ...]
    bench: jobs.Bench
    executor: WorkerPool
    budget: Budget
    versions: Versions
    account: TimeAccount
    progress: Callable[[ProgressEvent], None] | None = None
    run: str = ""
    compiles: threading.Event = field(default_factory=threading.Event)
    spaces: dict[tuple[str, KernelIR], Space] = field(default_factory=dict)
    #: By back end and likeness of the kernels: configurations of one that was searched, fastest first.
    rankings: dict[Alike, list[Config]] = field(default_factory=dict)
    #: By the same, the key of the first subject that was sent to the compilers.
    first_alike: dict[Alike, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def target(self) -> Target:
        return self.bench.target

    def refusal(self, backend: Backend, subject: Subject) -> str | None:
        """Why a back end cannot take part, or None."""
        if backend.device_type != self.target.device_type:
            return f"is for {backend.device_type}, not {self.target.device_type}"
        reason = backend.unavailable()
        return backend.refuse(subject.ir, self.target) if reason is None else reason

    def space(self, backend: Backend, ir: KernelIR) -> Space:
        """The feasible configurations, enumerated once: on a GPU that takes longer than to measure one of them."""
        key = (backend.name, ir)
        if key not in self.spaces:
            with self.lock:  # two threads that enumerate at once would only take turns
                if key not in self.spaces:
                    self.spaces[key] = enumerate_space(backend, ir, self.target)
        return self.spaces[key]

    def default_of(self, subject: Subject) -> list[Compilation]:
        """The default configuration of the first back end that takes part, if there is one."""
        backend = next((one for one in self.backends if self.refusal(one, subject) is None), None)
        if backend is None:
            return []
        return [(backend, subject.ir, backend.default_config(subject.ir, self.target), self.target)]

    def searches(self, subject: Subject) -> bool:
        """False while a similar kernel is being searched, because this one will start from that result."""
        for backend in self.backends:
            if (likeness := backend.likeness(subject.ir)) is not None:
                alike = (backend.name, likeness)
                if alike not in self.rankings and self.first_alike.setdefault(alike, subject.key) != subject.key:
                    return False
        return True

    def call(
        self, what: str, function: Callable[..., object], *args: object, of: Sequence[Subject]
    ) -> Outcome:
        """Run a job that calls subjects in the measuring process, booked as ``what``; may raise MachineFailureError."""
        run = partial(self.executor.call, function, self.bench, *args, limit_s=self._limit_s(of))
        return self._booked(what, of, run)

    def _limit_s(self, of: Sequence[Subject]) -> float:
        return call_limit_s(self.budget.job_limit_s, [one.work for one in of], self.target.device_type)

    def _booked(self, what: str, of: Sequence[Subject], wait: Callable[[], Outcome]) -> Outcome:
        """An outcome that is not the machine's; of a job that timed out, with its size and what allows more."""
        with self.account.spend(what):
            outcome = wait()
        if not outcome.checked().timed_out:
            return outcome
        nbytes, flops = sum(one.work.dram_bytes for one in of), sum(one.work.total_flops for one in of)
        size = f"{nbytes / 1e6:.3g} MB and {flops / 1e9:.3g} Gflop a call"
        more = f" ({size}); `plan tune --job-limit {2 * self.budget.job_limit_s:.0f}` waits longer"
        return replace(outcome, failure=outcome.failure + more)

    def released(self, run: Callable[[], _T]) -> _T:
        """Run, then let the measuring process forget the subject."""
        try:
            result = run()
        except Exception:  # an interrupt has ended the workers already
            self._release()
            raise
        self._release()
        return result

    def _release(self) -> None:
        with self.account.spend("making references"):
            self.executor.call(jobs.release, limit_s=self.budget.job_limit_s).checked()

    def later(
        self, what: str, function: Callable[..., object], *args: object, of: Sequence[Subject]
    ) -> Callable[[], Outcome]:
        """As :meth:`call`, when the measuring process has nothing else to do; returns what waits for it.

        What is timed by the host's clock is run when it is waited for: all else that this process does disturbs it.
        """
        if not self.target.is_gpu or self.bench.timer.regime == "eager":
            return partial(self.call, what, function, *args, of=of)
        wait = self.executor.submit(function, self.bench, *args, limit_s=self._limit_s(of))
        return partial(self._booked, what, of, wait)

    def compile(self, arguments: Sequence[Compilation]) -> Iterator[Outcome]:
        """Compile beside each other, from when the first outcome is asked for; outcomes in order. May raise
        :class:`MachineFailureError`.

        On a GPU each is given as soon as it is there, so that one is timed while others compile; on a CPU compilers
        would take the cores away from what is measured.
        """
        left, outcomes = len(arguments), None
        while left:
            # Until something has compiled, all of them tell whether one that has not is at fault itself.
            several = 1 if self.target.is_gpu and self.compiles.is_set() else left
            with self.account.spend("waiting for compilers"):
                if outcomes is None:
                    limit_s = self.budget.job_limit_s + COMPILE_LIMIT_S
                    outcomes = self.executor.map(jobs.prepare, arguments, limit_s=limit_s)
                found = [outcome.checked() for outcome in islice(outcomes, several)]
            if any(outcome.ok for outcome in found):
                self.compiles.set()
            left -= several
            yield from found

    def compile_ahead(self, arguments: Sequence[Compilation], spare: bool = False) -> None:
        """Compile for a GPU into the cache, some time; ``spare``: once nothing else is to be compiled ahead."""
        if self.target.is_gpu:
            limit_s = self.budget.job_limit_s + COMPILE_LIMIT_S
            self.executor.prefetch(jobs.prepare, arguments, limit_s=limit_s, spare=spare)

    def trials(self, key: RecordKey, only_open: bool = False) -> list[Trial]:
        """Stored trials that count; one that did not compile only where others do."""
        found = self.database.trials(key, self.versions, only_open)
        sound = (trial for trial in found if self.compiles.is_set() or not trial.uncompiled)
        return [trial for trial in sound if self.run in ("", trial.run)]

    def log(self, trial: Trial) -> None:
        """Store a finished trial at once, unless it did not compile and nothing else has."""
        if trial.uncompiled and not self.compiles.is_set():
            return
        with self.account.spend("storing"):
            self.database.log_trial(replace(trial, run=self.run), self.versions)


def call_limit_s(least_s: float, works: Iterable[Work], device_type: str) -> float:
    """After how long without a sign a job counts as hanging: ``least_s``, and one call of all these ``works``.

    A job gives a sign after each call that it has timed or checked (:mod:`fuseplan.search.timing.signs`).
    """
    return least_s + policy.SLOWEST_CALL * 1e-6 * sum(nominal_us(work, device_type, fused=False) for work in works)
