"""What a probe times on any device, before anything is fitted: calls, and kernels that stream through memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from fuseplan.costmodel.device import CallTimes
from fuseplan.costmodel.probe.fit import RateTiming, StreamTiming
from fuseplan.costmodel.probe.timing import UNLIMITED, CallTimer, TimeBudget, TimedCall, Timing, time_calls

#: Bytes that the eager calls touch.
_EAGER_BYTES = (256, 1024, 4096, 8192, 16_384)
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
#: Patterns like a fused kernel's: a library's copy may bypass the cache, and a sum writes nothing.
_TYPICAL = ("neg", "add")


@dataclass(frozen=True)
class Measurements:
    """Everything a probe times, before any fit; None and empty where the device has no such thing.

    Attributes:
        streams: Streaming kernels over sizes, whole device; ``thread_streams``: with one of several CPU threads.
        eager: ATen calls that allocate their result, by bytes touched, as unfused models run them.
        kernel: Direct call of a kernel that does next to nothing, by our own launcher.
        graph_node: A kernel that does nothing, as a node of a CUDA graph, where ``streams`` ran in graphs too.
        overlapped_node: A kernel that only waits for the one before it, whose end its launch overlaps.
        overlapped_kernel: The shortest elementwise kernel, launched so.
        calls: ATen calls that compute, by name and type; none on CUDA.
    """

    streams: Sequence[StreamTiming]
    eager: Mapping[int, Timing]
    rates: Sequence[RateTiming]
    thread_streams: Sequence[StreamTiming] = ()
    kernel: Timing | None = None
    graph_node: Timing | None = None
    overlapped_node: Timing | None = None
    overlapped_kernel: Timing | None = None
    view: Timing | None = None
    calls: Mapping[str, CallTimes] = field(default_factory=dict)


def time_host_calls(
    device: str, timer: CallTimer, kernel_call: TimedCall | None, budget: TimeBudget
) -> tuple[dict[int, Timing], Timing | None, Timing]:
    """What :class:`Measurements` calls ``eager``, ``kernel`` and ``view``."""
    arrays = {size: torch.rand(size // 12, device=device) for size in _EAGER_BYTES}
    eager = {size: partial(torch.ops.aten.add.Tensor, x, torch.rand_like(x)) for size, x in arrays.items()}
    timings = time_calls(eager, timer, replace(budget.part(0.6), report=budget.report))
    view = partial(torch.ops.aten.transpose.int, torch.zeros(4, 4, device=device), 0, 1)
    others: dict[str, TimedCall] = {"view": view}
    if kernel_call is not None:
        others["kernel"] = kernel_call
    found = time_calls(others, timer, budget.part(1.0))
    return timings, found.get("kernel"), found["view"]


def stream_sizes(largest_bytes: int, step: float, cache_bytes: int = 0) -> list[int]:
    """Footprints from 4 KiB up, ``step`` times the last, in whole KiB; more of them about a cache's edge."""
    count = math.floor(math.log(largest_bytes / 4096, step) + 1e-9)
    sizes = {round(4 * step**number) * 1024 for number in range(count + 1)}
    sizes |= {round(share * cache_bytes / 1024) * 1024 for share in _CACHE_SHARES if cache_bytes}
    return sorted(size for size in sizes if 4096 <= size <= largest_bytes)


def time_streams(
    sizes: Iterable[int], patterns: Iterable[str], device: str, timer: CallTimer, budget: TimeBudget = UNLIMITED
) -> list[StreamTiming]:
    """Time every pattern at every size in one buffer; the largest sizes are left out where the budget is short."""
    sizes = list(sizes)
    length = max(sizes) // _ITEM_BYTES + 3 * _ALIGN
    buffer = torch.rand(_TILE, device=device).repeat(-(-length // _TILE))  # all of it random would take seconds
    total = torch.empty((), device=device)
    streams = [(pattern, size) for size in sizes for pattern in patterns]
    least = sum(size <= _LEAST_BYTES for _, size in streams)
    calls = {(pattern, size): _stream_call(pattern, size, buffer, total) for pattern, size in streams}
    timings = time_calls(calls, timer, budget, least)
    return [StreamTiming(pattern, size, timing, pattern in _TYPICAL) for (pattern, size), timing in timings.items()]


def _stream_call(pattern: str, footprint_bytes: int, buffer: torch.Tensor, total: torch.Tensor) -> TimedCall:
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
