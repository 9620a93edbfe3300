"""How one call is timed: on a CPU, from the host on a GPU, and inside a CUDA graph.

Each timer turns a callable into a sampler, which gives the mean time per call of one batch. Operand sets are used in
turn, so that weights come cold from memory as they do in a model.
"""

from __future__ import annotations

import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import torch

from fuseplan.costmodel.yardstick import processor_yardstick

#: A contestant: called with the inputs, allocates and returns its outputs.
Run: TypeAlias = Callable[..., object]
#: Operand sets, used in turn.
Operands: TypeAlias = Sequence[tuple[torch.Tensor, ...]]
#: Microseconds per call of one batch; the argument is the number of the round.
Sampler: TypeAlias = Callable[[int], float]

_GRAPH_US = 300.0
_MAX_REPETITIONS = 2000
_CALIBRATION_TRIES = 3
_MAX_LAUNCHES = 512


class Timer(ABC):
    """Times callables in one regime. Picklable: it travels to the measuring process."""

    regime: ClassVar[str]

    def clock(self) -> float:
        """Seconds, for budgets."""
        return time.perf_counter()

    def of_device(self) -> Timer | None:
        """What times a kernel without the host that launches it; None where this timer does, or cannot be told apart.

        Where launching takes the host longer than a kernel takes the device, all configurations of the kernel tie.
        """
        return None

    def disturbances(self) -> int:
        """A count that grows when something else took the processor away, which spoils the sample under way."""
        return 0

    def steady(self) -> bool:
        """Whether the device runs at its full speed at this moment."""
        return True

    def observe(self, sampler: Sampler, number: int) -> tuple[float, bool]:
        """A sample, and whether nothing disturbed it."""
        before = self.disturbances()
        steady = self.steady()
        value = sampler(number)
        return value, steady and self.disturbances() == before and self.steady()

    @abstractmethod
    def prepare(self, run: Run, operands: Operands) -> Sampler:
        """Warm ``run`` up, calibrate its batch, and return its sampler."""


class HostTimer(Timer):
    """Wall time of a batch of calls from the host."""

    regime = "eager"
    #: A batch is long enough to be timed well and short enough to be interleaved.
    batch_us: ClassVar[float] = 1000.0

    def synchronise(self) -> None:
        """Wait for the device."""

    def disturbances(self) -> int:
        # A thread pool waits for its last thread: one that loses its core costs a scheduler's time slice, 4 ms or 8.
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        count = len(operands)
        for number in range(2):
            run(*operands[number % count])
        repetitions = self._calibrate(run, operands)

        def sample(number: int) -> float:
            first = number * repetitions
            if repetitions > 1:
                # Whoever ran before has left its own code and data in the caches.
                run(*operands[(first - 1) % count])
            self.synchronise()
            start = self.clock()
            for call in range(first, first + repetitions):
                run(*operands[call % count])
            self.synchronise()
            return (self.clock() - start) * 1e6 / repetitions

        return sample

    def _calibrate(self, run: Run, operands: Operands) -> int:
        """Calls that make a batch."""
        repetitions = 1
        while True:
            spent_us = self._undisturbed(run, operands, repetitions)
            if spent_us >= self.batch_us / 2 or repetitions >= _MAX_REPETITIONS:
                per_call = max(spent_us / repetitions, 1e-3)
                return max(1, min(_MAX_REPETITIONS, round(self.batch_us / per_call)))
            repetitions = min(_MAX_REPETITIONS, repetitions * 4)

    def _undisturbed(self, run: Run, operands: Operands, repetitions: int) -> float:
        """Microseconds of ``repetitions`` calls: the first undisturbed try, else the fastest of a few."""
        fastest = math.inf
        for _ in range(_CALIBRATION_TRIES):
            before = self.disturbances()
            self.synchronise()
            start = self.clock()
            for call in range(repetitions):
                run(*operands[call % len(operands)])
            self.synchronise()
            fastest = min(fastest, (self.clock() - start) * 1e6)
            if self.disturbances() == before:
                break
        return fastest


class CpuTimer(HostTimer):
    """The host timer where the host does the work: the speed of its cores is watched."""

    def steady(self) -> bool:
        return processor_yardstick().steady()


class CudaEagerTimer(HostTimer):
    """Launches from the host, back to back: the larger of host time and device time."""

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def of_device(self) -> Timer | None:
        return CudaGraphTimer()


class CudaGraphTimer(Timer):
    """Many launches over rotating operands, replayed from one CUDA graph: device time without the host."""

    regime = "graph"

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        stream = torch.cuda.Stream()
        launches = self._calibrate(run, operands, stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in range(launches):
                run(*operands[call % len(operands)])
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        torch.cuda.synchronize()

        def sample(number: int) -> float:
            torch.cuda.synchronize()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / launches

        return sample

    @staticmethod
    def _calibrate(run: Run, operands: Operands, stream: torch.cuda.Stream) -> int:
        """Launches for a replay that is long enough, and that visits every operand set."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number in range(3):
                run(*operands[number % len(operands)])
            begin.record()
            for number in range(3):
                run(*operands[number % len(operands)])
            end.record()
        end.synchronize()
        torch.cuda.current_stream().wait_stream(stream)
        per_call_us = max(float(begin.elapsed_time(end)) * 1e3 / 3, 0.5)
        return max(len(operands), min(_MAX_LAUNCHES, math.ceil(_GRAPH_US / per_call_us)))


def timer_for(device_type: str, regime: str) -> Timer:
    """The timer of a device type and regime.

    Raises:
        ValueError: The device has no such regime.
    """
    if device_type == "cuda" and regime in ("eager", "graph"):
        return CudaGraphTimer() if regime == "graph" else CudaEagerTimer()
    if device_type == "cpu" and regime == "eager":
        return CpuTimer()
    raise ValueError(f"no timer for regime {regime!r} on {device_type}; CPUs have 'eager', CUDA 'eager' and 'graph'")
