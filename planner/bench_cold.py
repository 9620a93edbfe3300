"""Times of calls that find nothing in the cache, as Triton's ``do_bench`` takes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fuseplan.search.timers import Operands, Run, Sampler, Timer

#: What is overwritten between calls: at least this much, and several times the last-level cache.
_MIN_FLUSH_BYTES = 256 * 2**20
_FLUSH_MULTIPLE = 4
_SAMPLE_US = 1000.0
_MIN_CALLS, _MAX_CALLS = 3, 10


class ColdTimer(Timer):
    """Device time of single calls, each after a buffer larger than the last-level cache was written.

    The time between two events around the call, with nothing subtracted: what the events themselves add is the same
    for every contestant. Writing the buffer takes the device longer than the host needs to launch what is timed, so
    the host is not in the time.

    Args:
        l2_bytes: Last-level cache.
        device: Where the buffer lies.
        event: Makes an event with ``record``, ``synchronize`` and ``elapsed_time`` in milliseconds.
    """

    regime = "cold"

    def __init__(self, l2_bytes: int, device: str = "cuda", event: Callable[[], Any] | None = None) -> None:
        self._event = event if event is not None else lambda: torch.cuda.Event(enable_timing=True)
        count = max(_MIN_FLUSH_BYTES, _FLUSH_MULTIPLE * l2_bytes) // 4
        self._buffer = torch.empty(count, dtype=torch.int32, device=device)

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        for number in range(2):
            run(*operands[number % len(operands)])
        calls = self._calls(self._times_us(run, operands, 2))

        def sample(number: int) -> float:
            return statistics.median(self._times_us(run, operands, calls))

        return sample

    @staticmethod
    def _calls(times_us: list[float]) -> int:
        """Calls of one sample."""
        return max(_MIN_CALLS, min(_MAX_CALLS, math.ceil(_SAMPLE_US / max(min(times_us), 1.0))))

    def _times_us(self, run: Run, operands: Operands, calls: int) -> list[float]:
        pairs = [(self._event(), self._event()) for _ in range(calls)]
        for call, (begin, end) in enumerate(pairs):
            self._buffer.zero_()
            begin.record()
            run(*operands[call % len(operands)])
            end.record()
        pairs[-1][1].synchronize()
        return [float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs]
