"""What a probe times on any device, before anything is fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from fuseplan.costmodel.device import CallTimes
from fuseplan.costmodel.probe.fit import RateTiming, StreamTiming
from fuseplan.costmodel.probe.time_budget import TimeBudget
from fuseplan.costmodel.probe.timing import Call, CallTimer, Timing, time_calls

#: Bytes that the eager calls touch.
_EAGER_BYTES = (256, 1024, 4096, 8192, 16_384)
#: Receives the fraction done (0 to 1) and what is being measured.
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Measurements:
    """Everything a probe times, before any fit.

    Attributes:
        streams: Streaming kernels over sizes, whole device.
        thread_streams: The same with one CPU thread; empty where that is the whole device.
        eager: ATen calls that allocate their result, by bytes touched, as unfused models run them.
        kernel: Direct call of a kernel that does next to nothing, by our own launcher; None when none was given.
        graph_node: A kernel that does nothing, as a node of a CUDA graph, where ``streams`` ran in graphs too; None
            on CPUs.
        overlapped_node: A kernel that only waits for the one before it, whose end its launch overlaps; None where the
            device has no such launches.
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
    device: str, timer: CallTimer, kernel_call: Call | None, progress: Callable[[float], None], budget: TimeBudget
) -> tuple[dict[int, Timing], Timing | None, Timing]:
    """What :class:`Measurements` calls ``eager``, ``kernel`` and ``view``."""
    eager = {size: _eager_call(size, device) for size in _EAGER_BYTES}
    timings = time_calls(eager, timer, progress, budget.part(0.6))
    others: dict[str, Call] = {"view": partial(torch.ops.aten.transpose.int, torch.zeros(4, 4, device=device), 0, 1)}
    if kernel_call is not None:
        others["kernel"] = kernel_call
    found = time_calls(others, timer, budget=budget)
    return timings, found.get("kernel"), found["view"]


def _eager_call(footprint_bytes: int, device: str) -> Call:
    x = torch.rand(footprint_bytes // 12, device=device)
    return partial(torch.ops.aten.add.Tensor, x, torch.rand_like(x))
