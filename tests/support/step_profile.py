"""What the device and the host do in a decode step of ``generate()``, as PyTorch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from generation import Generation

from fuseplan.planner.bench.model import synchronise

#: Decode steps that the profiler looks at, at most: more have no other kernels.
_PROFILED_STEPS = 32
#: What the profiler calls Dynamo's search for compiled code, and each call of it.
_GUARDS, _COMPILED = "TorchDynamo Cache Lookup", "Torch-Compiled Region"


def device_step_us(run: Generation) -> float | None:
    """Microseconds of a decode step in which a GPU was at work; None where the profiler saw no kernel.

    Kernels that overlap count once. Whatever the profiler costs the host is not in it.
    """
    steps = min(run.sizes.new - 1, _PROFILED_STEPS)
    whole, first = _busy_us(lambda: run(steps + 1)), _busy_us(lambda: run(1))
    return (whole - first) / steps if whole > first else None


def host_step_us(run: Generation) -> tuple[float, float] | None:
    """Microseconds of a decode step that the host takes to find the compiled code (Dynamo's guards), and to call it.

    Both as the profiler sees them, which it makes longer; None where nothing is compiled.
    """
    steps = min(run.sizes.new - 1, _PROFILED_STEPS)
    names = [(one.name, one.time_range.elapsed_us()) for one in _profiled(lambda: run(steps + 1), "CPU")]
    found = [sum(us for name, us in names if name.startswith(part)) / steps for part in (_GUARDS, _COMPILED)]
    return (found[0], found[1]) if all(found) else None


def _busy_us(call: Callable[[], object]) -> float:
    from torch._C._autograd import DeviceType

    torch.cuda.synchronize()
    return covered_us(
        (one.time_range.start, one.time_range.end) for one in _profiled(call, "CUDA")
        if one.device_type == DeviceType.CUDA and not getattr(one, "is_user_annotation", False)
    )


def _profiled(call: Callable[[], object], activity: str) -> Iterable[Any]:
    """What the profiler saw of one kind in a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[getattr(ProfilerActivity, activity)]) as seen:
        call()
        synchronise(activity.lower())
    return seen.events() or ()


def covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what the spans (start, end) cover together.

    >>> covered_us([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
    4.0
    """
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
