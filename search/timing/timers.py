"""How one call is timed: on a CPU, from the host on a GPU, inside a CUDA graph, and with a cold cache.

Each timer turns a callable into a sampler, which gives the mean time per call of one batch. Operand sets are used in
turn, so that weights come cold from memory as they do in a model.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeAlias

import torch

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.costmodel.probe.timing import record_calls, replay_us
from fuseplan.costmodel.probe.yardstick import processor_yardstick
from fuseplan.search.timing.signs import goes_on

#: A contestant: called with the inputs, allocates and returns its outputs.
Run: TypeAlias = Callable[..., object]
#: Operand sets, used in turn.
Operands: TypeAlias = Sequence[tuple[torch.Tensor, ...]]
#: Microseconds per call of one batch.
Sampler: TypeAlias = Callable[[], float]

#: What is overwritten between cold calls: at least this much, and several times the last-level cache.
MIN_FLUSH_BYTES = 256 * 2**20
_FLUSH_MULTIPLE = 4
_COLD_SAMPLE_US = 1000.0
_MIN_COLD_CALLS, _MAX_COLD_CALLS = 3, 10
#: Results of a cold sample that are held at once. Larger ones are spread over memory whatever block they get.
HELD_BYTES = 2**30
#: A replay takes half of this at least.
_GRAPH_US = 200.0
#: What a replay takes at most, unless one call takes longer. Operands that the cache still holds after so long are at
#: most 60 MB (H200), which memory would have taken 13 us to read: 1.3 % of the replay. So it need not visit every set.
_LONG_GRAPH_US = 1_000.0
_MAX_REPETITIONS = 2000
_CALIBRATION_TRIES = 3
_MAX_LAUNCHES = 512


class Timer(ABC):
    """Times callables in one regime. Picklable: it travels to the measuring process."""

    regime: ClassVar[str]
    #: Whether configurations are compared with a cold cache, too.
    has_cold: ClassVar[bool] = False

    def clock(self) -> float:
        """Seconds, for budgets."""
        return time.perf_counter()

    def of_device(self) -> Timer | None:
        """What times a kernel without the host that launches it; None if this timer does so itself, or none can."""
        return None

    def from_memory(self, l2_bytes: int) -> Timer | None:
        """What times calls with a cold last-level cache of this size; None where nothing is compared that way."""
        return cold_timer(l2_bytes) if self.has_cold else None

    def disturbances(self) -> int:
        """A count that grows when something else took the processor away, which spoils the sample under way."""
        return 0

    def steady(self) -> bool:
        """Whether the device runs at its full speed at this moment."""
        return True

    def observe(self, sampler: Sampler, tries: int = 1) -> tuple[float, bool]:
        """A sample that nothing disturbed, else the fastest of some, for disturbances only ever add; and which."""
        fastest = math.inf
        for _ in range(tries):
            before, steady = self.disturbances(), self.steady()
            value = sampler()
            goes_on()
            if steady and self.disturbances() == before and self.steady():
                return value, True
            fastest = min(fastest, value)
        return fastest, False

    @abstractmethod
    def prepare(self, run: Run, operands: Operands) -> Sampler:
        """Warm ``run`` up, calibrate its batch, and return its sampler."""


def _calls(run: Run, operands: Operands, count: int) -> list[Callable[[], object]]:
    """So many calls, with operand sets in turn."""
    return [partial(run, *operands[number % len(operands)]) for number in range(count)]


class HostTimer(Timer):
    """Wall time of a batch of calls from the host."""

    regime = "eager"
    #: A batch is long enough to be timed well and short enough to be interleaved.
    batch_us: ClassVar[float] = 1000.0
    #: Calls of a batch, if these take no longer than ``long_batch_us``.
    least_calls: ClassVar[int] = 1
    long_batch_us: ClassVar[float] = 8000.0
    turn = 0  # the next call's operand set, whoever makes it: what another contestant has just read is in the caches

    def synchronise(self) -> None:
        """Wait for the device."""

    def disturbances(self) -> int:
        # A thread pool waits for its last thread: one that loses its core costs a scheduler's time slice, 4 ms or 8.
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        for number in range(2):
            run(*operands[number % len(operands)])
        repetitions = self._calibrate(run, operands)

        def sample() -> float:
            first, self.turn = self.turn, self.turn + repetitions
            if repetitions > 1:
                # Whoever ran before has left its own code and data in the caches.
                run(*operands[(first - 1) % len(operands)])
            return self._spent_us(run, operands, range(first, first + repetitions)) / repetitions

        return sample

    def _spent_us(self, run: Run, operands: Operands, calls: range) -> float:
        count = len(operands)
        self.synchronise()
        start = self.clock()
        for call in calls:
            run(*operands[call % count])
        self.synchronise()
        return (self.clock() - start) * 1e6

    def _calibrate(self, run: Run, operands: Operands) -> int:
        """Calls that make a batch."""
        repetitions = 1
        while True:
            batch = partial(self._spent_us, run, operands, range(repetitions))
            spent_us, _ = self.observe(batch, _CALIBRATION_TRIES)
            if spent_us >= self.batch_us / 2 or repetitions >= _MAX_REPETITIONS:
                per_call = max(spent_us / repetitions, 1e-3)
                least = min(self.least_calls, int(self.long_batch_us / per_call))
                return max(1, least, min(_MAX_REPETITIONS, round(self.batch_us / per_call)))
            repetitions = min(_MAX_REPETITIONS, repetitions * 4)


class CpuTimer(HostTimer):
    """The host timer where the host does the work: the speed of its cores is watched."""

    def steady(self) -> bool:
        return processor_yardstick().steady()


class CudaEagerTimer(HostTimer):
    """Launches from the host, back to back: the larger of host time and device time."""

    has_cold = True
    least_calls = 4  # the first one of a batch finds nothing to run behind, and the host's caches without its code

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def of_device(self) -> Timer | None:
        return CudaGraphTimer()


class CudaGraphTimer(Timer):
    """Many launches over rotating operands, replayed from one CUDA graph: device time without the host."""

    regime = "graph"
    has_cold = True

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        stream = torch.cuda.Stream()
        launches = self._calibrate(run, operands, stream)
        graph = record_calls(_calls(run, operands, launches), stream)
        # The host took part in the calibration: it launches short kernels more slowly than they run.
        wanted = self._launches(replay_us(graph, launches), len(operands))
        if wanted > 1.25 * launches:
            launches = wanted
            graph = record_calls(_calls(run, operands, launches), stream)
        return lambda: replay_us(graph, launches)

    @staticmethod
    def _calibrate(run: Run, operands: Operands, stream: torch.cuda.Stream) -> int:
        """A first guess of :meth:`_launches`, from a few calls."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in (*_calls(run, operands, 3), begin.record, *_calls(run, operands, 3), end.record):
                call()
        end.synchronize()
        torch.cuda.current_stream().wait_stream(stream)
        return CudaGraphTimer._launches(max(float(begin.elapsed_time(end)) * 1e3 / 3, 0.5), len(operands))

    @staticmethod
    def _launches(call_us: float, sets: int) -> int:
        """Calls of so many us in a replay that is long enough, and that visits every operand set if it can."""
        call_us = max(call_us, 1e-3)
        visited = min(sets, math.ceil(_LONG_GRAPH_US / call_us))
        return max(visited, min(_MAX_LAUNCHES, math.ceil(_GRAPH_US / call_us)))


def _result_bytes(result: object) -> int:
    if isinstance(result, torch.Tensor):
        return result.nbytes
    return sum(map(_result_bytes, result)) if isinstance(result, tuple | list) else 0


class ColdTimer(Timer):
    """Device time of single calls, each after a buffer larger than the last-level cache was written.

    Where a result lies in memory is worth several percent, and contestants that allocate differently are given
    different blocks. So the results of a sample are held until it ends: everybody's calls then write to much the same
    blocks. Once there is no memory for that, none are held any more.

    The time lies between two events around the call, made by ``event``; what they add is the same for every contestant.
    Writing the buffer takes the device longer than launching takes the host, so no host time is in it.
    """

    regime = "cold"

    def __init__(self, l2_bytes: int, device: str = "cuda", event: Callable[[], Any] | None = None) -> None:
        self._event = event if event is not None else lambda: torch.cuda.Event(enable_timing=True)
        count = max(MIN_FLUSH_BYTES, _FLUSH_MULTIPLE * l2_bytes) // 4
        self._buffer = torch.empty(count, dtype=torch.int32, device=device)
        self._held_bytes = HELD_BYTES

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        for number in range(2):
            run(*operands[number % len(operands)])
        quickest_us = max(min(self._times_us(run, operands, 2)), 1.0)
        calls = max(_MIN_COLD_CALLS, min(_MAX_COLD_CALLS, math.ceil(_COLD_SAMPLE_US / quickest_us)))
        self._times_us(run, operands, calls)  # so that the blocks of a sample's results are there
        # Cold calls often fall into two clusters. A median of few jumps between them; a mean without extremes does not.
        return lambda: statistics.fmean(sorted(self._times_us(run, operands, calls))[1:-1])

    def _times_us(self, run: Run, operands: Operands, calls: int) -> list[float]:
        pairs = [(self._event(), self._event()) for _ in range(calls)]
        held: list[object] = []
        made_bytes = 0
        for call, (begin, end) in enumerate(pairs):
            result = self._cold_call(run, operands[call % len(operands)], begin, held)
            end.record()
            made_bytes += _result_bytes(result)
            if made_bytes <= self._held_bytes:
                held.append(result)
            del result
        pairs[-1][1].synchronize()
        return [float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs]

    def _cold_call(self, run: Run, inputs: tuple[torch.Tensor, ...], begin: Any, held: list[object]) -> object:
        """What a call returns that begins with a cold cache; it is tried again should what is held leave it no room."""
        if held:
            with suppress(torch.OutOfMemoryError):
                return self._cold_call(run, inputs, begin, [])
            held.clear()
            self._held_bytes = 0
        self._buffer.zero_()
        begin.record()
        return run(*inputs)


@lru_cache(maxsize=1)
def cold_timer(l2_bytes: int) -> ColdTimer:
    """The process's cold timer: it has a large buffer."""
    return ColdTimer(l2_bytes)


def timer_for(device_type: str, regime: str) -> Timer:
    """The timer of a device type and regime; ValueError where the device has no such regime."""
    if is_gpu(device_type) and regime in ("eager", "graph"):
        return CudaGraphTimer() if regime == "graph" else CudaEagerTimer()
    if is_cpu(device_type) and regime == "eager":
        return CpuTimer()
    raise ValueError(f"no timer for regime {regime!r} on {device_type}; CPUs have 'eager', CUDA 'eager' and 'graph'")
