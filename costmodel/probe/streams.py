"""The streaming kernels a probe times: every byte is read or written once, and hardly anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch

from fuseplan.costmodel.probe.fit import StreamTiming
from fuseplan.costmodel.probe.time_budget import UNLIMITED, TimeBudget
from fuseplan.costmodel.probe.timing import Call, CallTimer, time_calls

_ITEM_BYTES = 4
#: Parts of the buffer start on multiples of this many elements, so every kernel sees aligned vectors.
_ALIGN = 256
#: Sizes up to this are timed whatever it takes: on a busy machine too, moving so much takes longer than launching does.
_LEAST_BYTES = 16 * 2**20
#: Shares of the last-level cache that are probed whatever the step.
_CACHE_SHARES = (0.4, 2 / 3, 0.8)
#: Random numbers that a buffer repeats.
_TILE = 2**20
#: Equal parts of a buffer that a pattern touches: ``copy`` and ``neg`` read one and write one, ``add`` reads two and
#: writes one, ``read`` sums everything.
_PATTERN_PARTS = {"copy": 2, "neg": 2, "add": 3, "read": 1}
#: Patterns like a fused kernel's: a library's copy may bypass the cache, which no compiled loop does; a sum writes
#: nothing.
_TYPICAL = ("neg", "add")


def stream_sizes(largest_bytes: int, step: float, cache_bytes: int = 0) -> list[int]:
    """Footprints from 4 KiB up to ``largest_bytes``, each ``step`` times the one before, in whole KiB.

    Between half of a cache of ``cache_bytes`` and all of it bandwidth falls several-fold: there are more sizes there.
    """
    count = math.floor(math.log(largest_bytes / 4096, step) + 1e-9)
    sizes = {round(4 * step**number) * 1024 for number in range(count + 1)}
    sizes |= {round(share * cache_bytes / 1024) * 1024 for share in _CACHE_SHARES if cache_bytes}
    return sorted(size for size in sizes if 4096 <= size <= largest_bytes)


def time_streams(
    sizes: Iterable[int], patterns: Iterable[str], device: str, timer: CallTimer, progress: Callable[[float], None],
    budget: TimeBudget = UNLIMITED,
) -> list[StreamTiming]:
    """Time every pattern at every size, in one buffer as large as the largest.

    Where the budget is short the largest sizes are left out.
    """
    sizes = list(sizes)
    length = max(sizes) // _ITEM_BYTES + 3 * _ALIGN
    buffer = torch.rand(_TILE, device=device).repeat(-(-length // _TILE))  # all of it random would take seconds
    total = torch.empty((), device=device)
    streams = [(pattern, size) for size in sizes for pattern in patterns]
    least = sum(size <= _LEAST_BYTES for _, size in streams)
    calls = {(pattern, size): _call(pattern, size, buffer, total) for pattern, size in streams}
    timings = time_calls(calls, timer, progress, budget, least)
    return [StreamTiming(pattern, size, timing, pattern in _TYPICAL) for (pattern, size), timing in timings.items()]


def _call(pattern: str, footprint_bytes: int, buffer: torch.Tensor, total: torch.Tensor) -> Call:
    parts = _PATTERN_PARTS[pattern]
    length = footprint_bytes // _ITEM_BYTES // parts
    pitch = -(-length // _ALIGN) * _ALIGN
    first, *others = (buffer[part * pitch : part * pitch + length] for part in range(parts))
    if pattern == "copy":
        return partial(others[0].copy_, first)
    if pattern == "neg":
        return partial(torch.neg, first, out=others[0])
    if pattern == "add":
        return partial(torch.add, first, others[0], out=others[1])
    return partial(torch.sum, first, 0, out=total)
