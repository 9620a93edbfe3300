"""Clocks for the probe: repeated, interleaved samples of small calls, on the host and inside CUDA graphs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias, TypeVar

import torch

#: Something to time: launches work and returns nothing of interest.
TimedCall = Callable[[], object]
#: Gives one batch of samples, in microseconds per call: at least one, and no more once so many microseconds are over.
BatchSampler = Callable[[float], list[float]]
#: Receives the fraction done (0 to 1) and what is being measured.
ProbeListener = Callable[[float, str], None]
_Key = TypeVar("_Key")
#: How many times its even share of what is left one of several jobs may take: what short ones leave, long ones use.
_GENEROUS = 3.0
#: Relative disagreement up to which a machine counts as quiet.
_QUIET = 0.1
_EXTRA_PASSES = 3
#: A batch may take this many times its planned time before it is cut short.
_PATIENCE = 4.0
#: The share of its time that a set of calls may spend on warming up.
_WARM_UP = 0.4


@dataclass(frozen=True)
class TimeBudget:
    """Time until a moment by ``clock``; ``report`` is told what is done, ``short`` what time was too short for."""

    end_s: float
    clock: Callable[[], float] = time.monotonic
    purpose: str = ""
    short: list[str] = field(default_factory=list)
    report: ProbeListener = lambda fraction, label: None

    @staticmethod
    def of(seconds: float, clock: Callable[[], float] = time.monotonic) -> TimeBudget:
        return TimeBudget(clock() + seconds, clock)

    def left_us(self) -> float:
        return max(0.0, (self.end_s - self.clock()) * 1e6)

    def share_us(self, jobs: int) -> float:
        """Microseconds that the next of so many jobs may take."""
        return self.left_us() * min(1.0, _GENEROUS / jobs)

    def part(self, share: float, purpose: str = "") -> TimeBudget:
        """That share of what is left, from now on, for what is too small to be reported."""
        end_s = self.clock() + share * self.left_us() * 1e-6
        return TimeBudget(end_s, self.clock, purpose or self.purpose, self.short)

    def step(self, begin: float, end: float, share: float, purpose: str) -> TimeBudget:
        """That share for a step, whose own fractions are reported from ``begin`` to ``end``."""
        return replace(
            self.part(share, purpose),
            report=lambda fraction, label: self.report(begin + fraction * (end - begin), label))

    def note(self) -> None:
        """Remember that the time was too short for :attr:`purpose`."""
        if self.purpose not in self.short:
            self.short.append(self.purpose)


UNLIMITED = TimeBudget(math.inf)


@dataclass(frozen=True)
class Timing:
    """What repeated samples of one call say.

    ``typical_us`` is the median of the faster half, for other processes only add time. ``noise`` is how far those of
    two interleaved halves of the batches disagree, relative; 1 for one sample, which nothing confirms.
    """

    typical_us: float
    best_us: float
    noise: float

    @staticmethod
    def of(batches: Sequence[Sequence[float]]) -> Timing:
        """From batches of samples of the same call, taken at different moments; a single batch is halved itself."""
        if len(batches) == 1:
            batches = [[sample] for sample in batches[0]]
        typical_us, best_us = _typical(batches), min(map(min, batches))
        if len(batches) == 1:
            return Timing(typical_us, best_us, 1.0)
        return Timing(typical_us, best_us, abs(_typical(batches[::2]) - _typical(batches[1::2])) / typical_us)

    @property
    def disturbed(self) -> bool:
        """True when the samples disagree more than a quiet machine's do."""
        return self.noise > _QUIET or self.typical_us > (1 + _QUIET) * self.best_us


@dataclass(frozen=True)
class HostCallTimer:
    """Wall-clock time per call, averaged over enough calls that the clock's own cost vanishes.

    Attributes:
        repeats: Samples in a batch, each of about ``sample_us`` and at most ``max_calls`` (a launch queue is finite).
        finish: Waits for the device (CUDA): a sample only queues its calls, and costs what the host pays to launch.
        steady: Whether the processor runs at full speed, found out in so many microseconds; other samples are left out.
    """

    sample_us: float
    repeats: int
    finish: Callable[[], None] = lambda: None
    max_calls: int = 10_000
    steady: Callable[[float], bool] = lambda limit_us: True

    def prepare(self, call: TimedCall, limit_us: float = math.inf) -> BatchSampler:
        """Warm ``call`` up, decide how often to repeat it, and return its sampler. Brief once ``limit_us`` are over."""
        began_ns = time.perf_counter_ns()
        call_us = self._run(call, 2)
        if _since_us(began_ns) < limit_us:
            call_us = self._run(call, 3)
        calls = _count(self.sample_us, call_us, self.max_calls)
        return lambda limit_us: self._batch(call, calls, limit_us)

    def _batch(self, call: TimedCall, calls: int, limit_us: float) -> list[float]:
        """``repeats`` steady samples; fewer, but at least three, where they take much longer than planned. Once
        ``limit_us`` are over, one is enough: on a busy machine asking whether it is steady takes most of the time.
        """
        samples: list[float] = []
        steady_samples: list[float] = []
        began_ns = time.perf_counter_ns()
        before = self._steady(limit_us)
        started_ns = time.perf_counter_ns()
        patience_us = _PATIENCE * self.sample_us * self.repeats
        while len(steady_samples) < self.repeats and (_since_us(started_ns) < patience_us or len(samples) < 3):
            if samples and _since_us(began_ns) >= limit_us:
                break
            samples.append(self._run(call, calls))
            after = self._steady(limit_us - _since_us(began_ns))
            if before and after:
                steady_samples.append(samples[-1])
            before = after
        return steady_samples if len(steady_samples) >= 3 else samples

    def _steady(self, limit_us: float) -> bool:
        return limit_us > 0 and self.steady(limit_us)

    def _run(self, call: TimedCall, calls: int) -> float:
        self.finish()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        self.finish()
        return (time.perf_counter_ns() - start) * 1e-3 / calls


@contextmanager
def cuda_graph(stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """A CUDA graph of what is launched within. Other threads go on using the device, and may allocate there.

    Unlike ``torch.cuda.graph`` it leaves PyTorch's cached memory alone, unless little else is free (what is recorded
    cannot use it): returning it to the driver, and asking for it again, takes longer than a short graph's replays.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    if free < total / 4:
        torch.cuda.empty_cache()
    with torch.cuda.stream(stream if stream is not None else torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()


def record_calls(calls: Iterable[TimedCall], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some calls, replayed once."""
    with cuda_graph(stream) as graph:
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of each of the ``calls`` that a graph makes, on the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # The first replay keeps the device busy while the host starts the second, so that the events enclose device time
    # alone: starting a replay takes the host longer than ten short kernels run.
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / calls


@dataclass(frozen=True)
class GraphTimer:
    """Device time per call in a CUDA graph of many; a batch has ``repeats`` replays of about ``sample_us`` each."""

    sample_us: float
    repeats: int

    def prepare(self, call: TimedCall, limit_us: float = math.inf) -> BatchSampler:
        """As :meth:`HostCallTimer.prepare`."""
        # Capture forbids lazy initialisation, so the first calls happen outside it, on a stream of their own.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        calls = _count(self.sample_us, replay_us(record_calls([call] * 10), 10), 1000)
        graph = record_calls([call] * calls)
        replay_us(graph, calls)
        return lambda limit_us: self._batch(graph, calls, limit_us)

    def _batch(self, graph: torch.cuda.CUDAGraph, calls: int, limit_us: float) -> list[float]:
        began_ns = time.perf_counter_ns()
        samples: list[float] = []
        while not samples or (len(samples) < self.repeats and _since_us(began_ns) < limit_us):
            samples.append(replay_us(graph, calls))
        return samples


CallTimer: TypeAlias = HostCallTimer | GraphTimer


def time_calls(
    calls: Mapping[_Key, TimedCall], timer: CallTimer, budget: TimeBudget = UNLIMITED, least: int | None = None,
) -> dict[_Key, Timing]:
    """Time every call in two passes over all of them, and the disturbed ones in up to three passes more.

    A disturbance that lasts less than a pass spoils only some of a call's batches. Where the budget runs short, batches
    get smaller, passes after the first are left out, and so are the calls after the first ``least`` ones (None: all
    are timed, with one sample each); it is noted then. What is done of the first two passes is reported.
    """
    warm_up = budget.part(_WARM_UP)
    samplers: dict[_Key, BatchSampler] = {}
    for number, (key, call) in enumerate(calls.items()):
        if least is not None and number >= least and warm_up.left_us() <= 0:
            break
        samplers[key] = timer.prepare(call, warm_up.share_us(len(calls) - number))
    batches: dict[_Key, list[list[float]]] = {key: [] for key in samplers}
    for number in range(2):
        for position, (key, sampler) in enumerate(samplers.items(), start=1):
            if number == 0 or budget.left_us() > 0:
                batches[key].append(sampler(budget.share_us((2 - number) * len(samplers) - position + 1)))
            budget.report((number + position / len(samplers)) / 2, budget.purpose)
    for _ in range(_EXTRA_PASSES):
        for key, sampler in samplers.items():
            if budget.left_us() > 0 and Timing.of(batches[key]).disturbed:
                batches[key].append(sampler(budget.share_us(len(samplers))))
    if len(samplers) < len(calls) or budget.left_us() <= 0:
        budget.note()
    return {key: Timing.of(batches[key]) for key in samplers}


def _typical(batches: Sequence[Sequence[float]]) -> float:
    samples = sorted(chain.from_iterable(batches))
    return statistics.median(samples[: (len(samples) + 1) // 2])


def _count(sample_us: float, call_us: float, max_calls: int) -> int:
    return min(max_calls, max(1, math.ceil(sample_us / max(call_us, 1e-3))))


def _since_us(began_ns: int) -> float:
    return (time.perf_counter_ns() - began_ns) * 1e-3
