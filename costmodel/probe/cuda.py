"""Measures the current CUDA device: CUDA graphs for device time, the wall clock for what the host pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fuseplan.costmodel.devices import local_architecture
from fuseplan.costmodel.identity import DeviceIdentity
from fuseplan.costmodel.probe.fit import RateTiming
from fuseplan.costmodel.probe.measurements import Measurements, stream_sizes, time_host_calls, time_streams
from fuseplan.costmodel.probe.timing import GraphTimer, HostCallTimer, TimeBudget, TimedCall, time_calls

_GIB = 2**30
_DEVICE = "cuda"
_PATTERNS = ("neg", "add", "read")
_MATMUL_UNITS = {"fp32_matmul": torch.float32, "bf16_matmul": torch.bfloat16, "fp16_matmul": torch.float16}
#: Of a full probe, and of a quick one.
_MATMUL_SIZES = (8192, 4096)
#: Elements of one thread block and dependent steps of the arithmetic kernels: enough independent elements in each
#: thread to hide latency, enough steps that loading and storing vanish.
_BLOCK, _STEPS = 1024, 2048
#: Blocks for each multiprocessor: several waves, so that the last, partial one hardly counts.
_BLOCKS_PER_CORE = 32


def measure_cuda(
    identity: DeviceIdentity, quick: bool, kernel_call: TimedCall | None, budget: TimeBudget
) -> Measurements:
    """Time everything a CUDA spec needs. Allocates up to 1 GiB (or an eighth of the memory)."""
    graph_timer = GraphTimer(sample_us=1000.0 if quick else 4000.0, repeats=7 if quick else 25)
    largest_bytes = min(_GIB, identity.memory_bytes // 8)
    sizes = stream_sizes(largest_bytes, 2.0 if quick else 2.0**0.5, identity.l2_bytes)
    streams = time_streams(sizes, _PATTERNS, _DEVICE, graph_timer, budget.step(0.0, 0.5, 0.5, "memory bandwidth"))
    # A few hundred calls stay inside the launch queue, so the host never waits for the device.
    host_timer = HostCallTimer(2000.0, 7 if quick else 25, finish=torch.cuda.synchronize, max_calls=500)
    launches = budget.step(0.5, 0.6, 0.5, "launch latency")
    eager, kernel, view = time_host_calls(_DEVICE, host_timer, kernel_call, launches)
    nodes = time_calls(_node_calls(), graph_timer, launches.part(1.0))
    calls = {**_arithmetic_calls(identity), **_matmul_calls(_MATMUL_SIZES[quick])}
    alone = {unit: call for unit, (_, call) in calls.items()}
    timings = time_calls(alone, graph_timer, budget.step(0.6, 1.0, 1.0, "arithmetic"))
    rates = [RateTiming(unit, flops, timings[unit]) for unit, (flops, _) in calls.items()]
    return Measurements(
        streams, eager, rates, kernel=kernel, graph_node=nodes["empty"], overlapped_node=nodes.get("waiting"),
        overlapped_kernel=nodes.get("negating"), view=view,
    )


def _node_calls() -> dict[str, TimedCall]:
    """Kernels that do next to nothing; some whose launch overlaps the one before, where the device can."""
    from fuseplan.costmodel.probe.kernels import nothing, only_wait, wait_and_negate  # imports Triton

    x = torch.rand(_BLOCK, device=_DEVICE)
    y = torch.empty_like(x)
    calls: dict[str, TimedCall] = {"empty": lambda: nothing[(1,)](x)}
    if local_architecture().overlaps:
        calls["waiting"] = lambda: only_wait[(1,)](x, launch_pdl=True)
        calls["negating"] = lambda: wait_and_negate[(1,)](x, y, block=_BLOCK, launch_pdl=True)
    return calls


def _arithmetic_calls(identity: DeviceIdentity) -> dict[str, tuple[float, TimedCall]]:
    """Elementwise units: operations of one call, and the call."""
    from fuseplan.costmodel.probe.kernels import exp2_chain, fma_chain  # imports Triton

    blocks = _BLOCKS_PER_CORE * identity.cores
    steps = float(blocks * _BLOCK * _STEPS)
    return {
        "fp32": (2.0 * steps, _chain(fma_chain, blocks, torch.float32)),
        "fp64": (2.0 * steps, _chain(fma_chain, blocks, torch.float64)),
        "sfu": (steps, _chain(exp2_chain, blocks, torch.float32)),
    }


def _chain(kernel: Any, blocks: int, dtype: torch.dtype) -> TimedCall:
    x = torch.rand(blocks * _BLOCK, device=_DEVICE, dtype=dtype)
    return partial(kernel[(blocks,)], x, torch.empty_like(x), _STEPS, block=_BLOCK, num_warps=4)


def _matmul_calls(size: int) -> dict[str, tuple[float, TimedCall]]:
    """Square matmuls under the caller's precision settings: operations of one call, and the call."""
    flops = 2.0 * size**3
    calls: dict[str, tuple[float, TimedCall]] = {}
    for unit, dtype in _MATMUL_UNITS.items():
        a = torch.randn(size, size, device=_DEVICE, dtype=dtype)
        b, out = torch.randn_like(a), torch.empty_like(a)
        calls[unit] = (flops, partial(torch.mm, a, b, out=out))
    if (fp8 := _fp8_matmul(size)) is not None:
        calls["fp8_matmul"] = (flops, fp8)
    return calls


def _fp8_matmul(size: int) -> Callable[[], torch.Tensor] | None:
    """An fp8 matmul, or None where this device or this PyTorch has none."""
    if not local_architecture().fp8:
        return None
    a = torch.randn(size, size, device=_DEVICE).to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device=_DEVICE).to(torch.float8_e4m3fn).t()  # cuBLASLt wants it column-major
    scale = torch.ones((), device=_DEVICE)
    call = partial(torch._scaled_mm, a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    try:
        call()
    except RuntimeError:
        return None
    return call
