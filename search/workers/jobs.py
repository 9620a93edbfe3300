"""What the worker processes do: compile, check and screen one configuration, decide between finalists.

Module-level functions of picklable arguments. What a subject needs (inputs, oracle, operand sets) is made once per
process and kept until the next subject comes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.kernels.ir.backend import Backend, Config, Resources, Target, fused_call
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.native.overlap import span_bytes
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.store.limits import WORST_ERROR
from fuseplan.search.store.record import ATEN, Measurement, Trial
from fuseplan.search.timing.contest import Contest, Rounds, contest, decisive, mean_contest, middle_of_three, screen
from fuseplan.search.timing.operands import MEMORY, cache_bytes, copy_with_layout, memory_read, rotating_operands
from fuseplan.search.timing.sequence import Parts, SharedOperands, Sides, sequence
from fuseplan.search.timing.subject import Subject
from fuseplan.search.timing.timers import Operands, Run, Timer
from fuseplan.search.timing.verify import Oracle, check_call, check_result, make_oracle

#: Name of the unfused chain among the contestants.
UNFUSED = "unfused"
#: Share of the decisive run's time that cold calls get on top.
_COLD_SHARE = 0.3


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Leave memory that is free at the end to other processes: on a GPU PyTorch would keep it."""
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Bench:
    """How subjects are checked and timed: ``screen_s`` for one screening, ``decide_s`` for the decision."""

    target: Target
    timer: Timer
    seed: int = 0
    screen_s: float = 0.1
    decide_s: float = 0.6


@dataclass(frozen=True)
class Entrant:
    """A kernel in the decisive run; those of one run are listed in the order that breaks ties."""

    name: str
    backend: Backend
    config: Config


@dataclass(frozen=True)
class Decision:
    """The decisive run: everyone's samples, compiled facts by name, and entrants that failed on fresh inputs.

    ``device``, where there is one, decides between kernels: their samples on the device alone, hot and cold.
    """

    contest: Contest
    failed: Mapping[str, str]
    resources: Mapping[str, Mapping[str, int]]
    eager_error: float
    clocks_mhz: Mapping[str, float]
    device: Contest | None = None


class _Desk:
    """One subject's inputs, oracle and operand sets."""

    def __init__(self, bench: Bench, subject: Subject) -> None:
        self.bench, self.subject, self.device = bench, subject, bench.target.device_type

    @cached_property
    def inputs(self) -> Sequence[torch.Tensor]:
        return self.subject.make_inputs(self.bench.seed, self.device)

    @cached_property
    def oracle(self) -> Oracle:
        return make_oracle(self.subject, self.inputs)

    @cached_property
    def operands(self) -> Operands:
        # What timed calls write to is no memory that a result is checked against.
        written = self.subject.ir.overwritten.values()
        given = [copy_with_layout(one) if at in written else one for at, one in enumerate(self.inputs)]
        return _rotating(self.bench, given, self.subject.hot_inputs)


def _rotating(bench: Bench, inputs: Sequence[torch.Tensor], hot: Sequence[bool]) -> Operands:
    """Operand sets in at most a quarter of the memory that is free."""
    return rotating_operands(inputs, hot, cache_bytes(bench.target.l2_bytes), free_bytes(bench.target.device_type) // 4)


_desks: dict[tuple[str, int], _Desk] = {}


def _desk(bench: Bench, subject: Subject) -> _Desk:
    key = (subject.key, bench.seed)
    if key not in _desks:
        _desks.clear()
        _desks[key] = _Desk(bench, subject)
    return _desks[key]


def prepare(backend: Backend, ir: KernelIR, config: Config, target: Target) -> dict[str, int]:
    """Compile into the cache, and say what is known of the kernel; runs in a compile lane."""
    return resource_facts(backend.prepare(ir, config, target))


def resource_facts(resources: Resources) -> dict[str, int]:
    """The numbers that are known."""
    facts = {name: getattr(resources, name) for name in ("registers", "spill_bytes", "shared_bytes")}
    return {name: value for name, value in facts.items() if value is not None}


def open_subject(bench: Bench, subject: Subject) -> None:
    """Make a subject's inputs and oracle."""
    with torch.no_grad():
        _ = _desk(bench, subject).oracle


def time_unfused(bench: Bench, subject: Subject) -> Measurement:
    """Screen a subject's unfused chain; nothing is checked, so there is no oracle to make."""
    with torch.no_grad():
        desk = _desk(bench, subject)
        return screen(bench.timer, desk.subject.eager, desk.operands, bench.screen_s)


@dataclass(frozen=True)
class Calls:
    """ATen's op (:data:`ATEN`) and right calls of libraries in one run; and what is wrong with the others."""

    contest: Contest
    failed: Mapping[str, str]


@_tidy()
def contest_calls(bench: Bench, plain: Subject, calls: Mapping[str, Subject], ops: int = 1) -> Calls:
    """Check libraries' calls against the ``ops`` that they stand for, and time the right ones beside these."""
    with torch.no_grad():
        desk = _Desk(bench, plain)  # perhaps run in the middle of another subject's tune, whose desk stays
        runs: dict[str, Run] = {ATEN: plain.eager}
        failed: dict[str, str] = {}
        for name, subject in calls.items():
            try:
                verdict = check_call(subject.eager, desk.oracle, ops)
            except Exception as error:  # a library may refuse a call for any reason
                OWN_FAULTS.tolerate(error)
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            if verdict.ok:
                runs[name] = subject.eager
            else:
                failed[name] = f"wrong result: {verdict.reason}"
        return Calls(_launched_and_alone(bench, runs, desk.operands, ATEN), failed)


def screen_config(
    bench: Bench, subject: Subject, backend: Backend, blank: Trial, on_device: bool = False
) -> Trial:
    """The ``blank`` trial once its configuration was loaded, checked, and timed shortly when it is right; ``on_device``
    also without the host.
    """
    with torch.no_grad():
        desk = _desk(bench, subject)
        kernel = backend.load(subject.ir, blank.config, bench.target)
        verdict = check_result(kernel, subject, desk.oracle, desk.device)
        checked = replace(blank, error=min(verdict.error, WORST_ERROR))
        if not verdict.ok:
            return replace(checked, reason=f"wrong result: {verdict.reason}")
        run = fused_call(kernel, subject.ir)
        alone = bench.timer.of_device() if on_device else None
        # Where times depend much on the configuration, many are screened, and less tells them apart.
        seconds = bench.screen_s if backend.likeness(subject.ir) is None else bench.screen_s / 2
        device_us = None if alone is None else screen(alone, run, desk.operands, seconds).median_us
        median_us = screen(bench.timer, run, desk.operands, seconds).median_us
        return replace(checked, median_us=median_us, device_us=device_us)


def decide_finalists(bench: Bench, subject: Subject, entrants: Sequence[Entrant]) -> Decision:
    """Check every entrant on fresh inputs, then time them, the first one twice, and the unfused chain in one run."""
    with torch.no_grad():
        desk = _desk(bench, subject)
        fresh = make_oracle(subject, subject.make_inputs(bench.seed + 1, desk.device)) if entrants else desk.oracle
        runs: dict[str, Run] = {UNFUSED: desk.subject.eager}
        failed: dict[str, str] = {}
        resources: dict[str, dict[str, int]] = {}
        for entrant in entrants:
            kernel = entrant.backend.load(subject.ir, entrant.config, bench.target)
            resources[entrant.name] = resource_facts(kernel.resources)
            verdict = check_result(kernel, subject, fresh, desk.device)
            if verdict.ok:
                runs[entrant.name] = fused_call(kernel, subject.ir)
            else:
                failed[entrant.name] = verdict.reason
        twice = next((one.name for one in entrants[:1] if one.name in runs), None)
        kernels = {name: run for name, run in runs.items() if name != UNFUSED}
        ordered = not _has_other_conditions(bench)  # else these show which kernel is the fastest
        result = decisive(bench.timer, runs, desk.operands, bench.decide_s, UNFUSED, twice, ordered)
        clocks = clocks_mhz(desk.device)
        device = _between_kernels(bench, result, kernels, desk.operands, twice)
        return Decision(result, failed, resources, min(desk.oracle.eager_error, WORST_ERROR), clocks, device)


def _between_kernels(
    bench: Bench, regime: Contest, runs: Mapping[str, Run], operands: Operands, twice: str | None
) -> Contest | None:
    """Kernels against each other on the device alone, hot and cold; None where the regime's times are all there is.

    A model leaves in the cache what was just made if it is small, and nothing that is large: both conditions count.
    """
    if len(runs) < 2 or not _has_other_conditions(bench):
        return None
    alone, cold = bench.timer.of_device(), bench.timer.from_memory(bench.target.l2_bytes)
    rounds = Rounds.until_settled(next(iter(runs)))
    hot = regime if alone is None else contest(alone, runs, operands, bench.decide_s / 2, twice, rounds)
    if cold is None:
        return hot
    return mean_contest(hot, contest(cold, runs, operands, bench.decide_s * _COLD_SHARE, twice, rounds))


def _has_other_conditions(bench: Bench) -> bool:
    """True where kernels are compared otherwise than in the regime, too."""
    return bench.timer.has_cold or bench.timer.of_device() is not None


@_tidy()
def decide_sides(bench: Bench, parts: Parts, sides: Sides, kept: Collection[str]) -> Contest:
    """Time whole sequences of kernels against each other; as :meth:`~fuseplan.search.tune.tuner.Tuner.play_off`."""
    incumbent = next(iter(sides))

    def timed() -> Contest:
        runs, shared = _runs(bench, parts, sides, kept)
        operands = _rotating(bench, shared.tensors, shared.hot)
        return _launched_and_alone(bench, runs, operands, incumbent)

    with torch.no_grad():
        return middle_of_three(timed, incumbent)


def _launched_and_alone(bench: Bench, runs: Mapping[str, Run], operands: Operands, incumbent: str) -> Contest:
    """A run in the regime and, where the host launches, one on the device alone; who wins is best in both together.

    A host that is slower than the device hides what kernels take. What no graph can record is judged as launched.
    """
    launched, alone = decisive(bench.timer, runs, operands, bench.decide_s, incumbent), bench.timer.of_device()
    if alone is None:
        return launched
    try:
        rounds = Rounds.until_settled(incumbent)
        device = contest(alone, runs, operands, bench.decide_s / 2, incumbent, rounds)
    except Exception as error:  # a library may wait for the device, which no graph records
        OWN_FAULTS.tolerate(error)
        return launched
    return mean_contest(launched, device, policy.MAX_LAUNCH_LOSS)


@_tidy()
def time_sides(bench: Bench, parts: Parts, sides: Sides, kept: Collection[str]) -> Contest:
    """The same in one run, that decides nothing; as :meth:`~fuseplan.search.tune.tuner.Tuner.time_sides`.

    It goes on until what the last side gains on the first varies little. What a cache does not hold is not copied, and
    a sample that something else disturbed stands: it is long. On a CPU another side, ``MEMORY``, only reads then.
    """
    with torch.no_grad():
        runs, shared = _runs(bench, parts, sides, kept)
        held = cache_bytes(bench.target.l2_bytes) >= sum(map(span_bytes, shared.tensors))
        operands = _rotating(bench, shared.tensors, shared.hot) if held else [tuple(shared.tensors)]
        first, last = next(iter(runs)), next(reversed(runs))
        if is_cpu(bench.target.device_type) and not held:
            runs[MEMORY] = memory_read(bench.target.l2_bytes)

        def is_steady(found: Contest) -> bool:
            low, high = found.gain_range(last, first)
            return high <= (1 + policy.STEADY_SPREAD) * low

        rounds = Rounds(policy.STEP_ROUNDS, tries=1, enough=is_steady)
        return contest(bench.timer, runs, operands, policy.STEP_LIMIT_S, rounds=rounds)


def _runs(
    bench: Bench, parts: Parts, sides: Sides, kept: Collection[str]
) -> tuple[dict[str, Run], SharedOperands]:
    """The sides as functions, and what they read."""
    shared = SharedOperands(lambda subject: subject.make_inputs(bench.seed, bench.target.device_type))
    runs = {
        side: sequence([parts[name] for name in names], shared, kept, bench.target) for side, names in sides.items()
    }
    return runs, shared


@_tidy()
def release() -> None:
    """Let go of the current subject's memory."""
    _desks.clear()


def free_bytes(device: str) -> int:
    """Memory that is free on the device; on a GPU with what PyTorch has cached."""
    if is_gpu(device):
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def clocks_mhz(device: str) -> dict[str, float]:
    """Clocks right now; {} where they cannot be read. Nothing is ever set."""
    with contextlib.suppress(Exception):
        if is_gpu(device):
            return {"sm": float(torch.cuda.clock_rate())}
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return {"core": round(fmean(float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")), 1)}
    return {}
