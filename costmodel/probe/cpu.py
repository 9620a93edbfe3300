"""Measures a CPU with ATen calls and the wall clock.

The roofline knows bytes and arithmetic. How long a call takes before it begins, and which of its loops are vectorised
for which type, differs from op to op and follows from nothing but a measurement: common ops are timed one by one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fuseplan.costmodel.device import CallTimes
from fuseplan.costmodel.identity import DeviceIdentity
from fuseplan.costmodel.probe.fit import RateTiming, StreamTiming
from fuseplan.costmodel.probe.measurements import Measurements, stream_sizes, time_host_calls, time_streams
from fuseplan.costmodel.probe.timing import CallTimer, HostCallTimer, TimeBudget, TimedCall, Timing, time_calls
from fuseplan.costmodel.probe.yardstick import processor_yardstick

_aten = torch.ops.aten
_COLS, _HEAD = 2048, 64
_TYPES = (torch.float32, torch.bfloat16)
#: Elements that ATen gives to one thread, and the fewest that it shares out (``at::internal::GRAIN_SIZE``).
_GRAIN = 2**15
#: Threads that the largest of the calls keeps busy, with several grains each, at most.
_MOST_THREADS = 16
_UNARY = ("neg", "silu", "gelu", "sigmoid", "tanh", "relu", "exp", "cos", "sin", "rsqrt", "clone")
_BINARY = ("add", "sub", "mul", "div")
_MIB = 2**20
_LARGEST_BYTES = 256 * _MIB
_PATTERNS = ("neg", "add", "copy", "read")
_MATMUL_SIZES = (128, 256, 512, 1024, 2048, 4096)
_MATMUL_UNITS = {
    "fp32_matmul": torch.float32, "bf16_matmul": torch.bfloat16, "fp16_matmul": torch.float16, "fp64": torch.float64,
}
#: Special functions and the operations one element counts as (the weights of the scalar op table). The cheap ones,
#: and those that other libraries do better than their weight says, show what the unit can do.
_SPECIAL_FLOPS: dict[Callable[..., torch.Tensor], float] = {
    torch.exp: 1.0, torch.sigmoid: 3.0, torch.reciprocal: 1.0, torch.rsqrt: 1.0, torch.erf: 8.0,
}


def measure_cpu(
    identity: DeviceIdentity, quick: bool, kernel_call: TimedCall | None, budget: TimeBudget
) -> Measurements:
    """Time what a CPU spec needs, with all of PyTorch's threads and with one; bandwidth last, for it takes longest."""
    timer = _timer(sample_us=500.0 if quick else 2000.0, repeats=9 if quick else 25)
    largest_bytes = _largest_bytes(identity)
    ratio = 2.0 if quick else 2.0**0.5
    eager, kernel, view = time_host_calls("cpu", timer, kernel_call, budget.step(0.0, 0.05, 0.05, "launch latency"))
    calls_timer = _timer(sample_us=100.0 if quick else 500.0, repeats=5 if quick else 15)
    calls = time_aten_calls(calls_timer, identity.cores, budget.part(0.15, "ATen calls"))
    rates = _rates(identity, quick, budget.step(0.05, 0.25, 0.15, "arithmetic"), timer)
    thread_streams: list[StreamTiming] = []
    if identity.cores > 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            single = _rates(identity, quick, budget.step(0.25, 0.4, 0.15, "arithmetic, one thread"), timer)
            thread_streams = time_streams(
                stream_sizes(largest_bytes // 4, ratio * ratio), _PATTERNS, "cpu", timer,
                budget.step(0.4, 0.5, 0.2, "memory bandwidth, one thread"),
            )
        finally:
            torch.set_num_threads(threads)
        rates += _from_one_thread(single, identity.cores)
    streams = time_streams(
        stream_sizes(largest_bytes, ratio), _PATTERNS, "cpu", timer, budget.step(0.5, 1.0, 1.0, "memory bandwidth")
    )
    return Measurements(streams, eager, rates, thread_streams, kernel, view=view, calls=calls)


def _timer(sample_us: float, repeats: int) -> HostCallTimer:
    return HostCallTimer(sample_us, repeats, steady=lambda limit_us: processor_yardstick().steady(limit_us * 1e-6))


def _largest_bytes(identity: DeviceIdentity) -> int:
    """Well past the last-level cache, yet a small part of the memory."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(max(_LARGEST_BYTES, 4 * identity.l2_bytes), max(_MIB, available // 4))


def _from_one_thread(single: list[RateTiming], cores: int) -> list[RateTiming]:
    """All threads reach at least one thread's rates, and ideally ``cores`` times these, however busy the machine."""
    return single + [replace(rate, flops=rate.flops * cores, typical=False) for rate in single]


def _rates(identity: DeviceIdentity, quick: bool, budget: TimeBudget, timer: HostCallTimer) -> list[RateTiming]:
    return _special_rates(identity, timer, budget.part(0.3)) + _matmul_rates(quick, budget)


def _special_rates(identity: DeviceIdentity, timer: HostCallTimer, budget: TimeBudget) -> list[RateTiming]:
    """Special functions on data that stays in each core's own cache: 32 Ki elements, ATen's share of one thread."""
    x = torch.rand(2**15 * identity.cores) + 0.5
    out = torch.empty_like(x)
    calls = {function: partial(function, x, out=out) for function in _SPECIAL_FLOPS}
    timings = time_calls(calls, timer, budget)
    return [
        RateTiming("sfu", x.numel() * _SPECIAL_FLOPS[function], timing, typical=function in (torch.exp, torch.sigmoid))
        for function, timing in timings.items()
    ]


def _matmul_rates(quick: bool, budget: TimeBudget) -> list[RateTiming]:
    """Square matmuls, each type at the first size that keeps it busy (some CPUs have no fast half precision)."""
    rates: list[RateTiming] = []
    for number, (unit, dtype) in enumerate(_MATMUL_UNITS.items()):
        own = budget.part(1 / (len(_MATMUL_UNITS) - number))
        flops, timing = _matmul(dtype, 4_000.0 if quick else 40_000.0, 5 if quick else 15, own)
        if unit.endswith("_matmul"):
            rates.append(RateTiming(unit, flops, timing))
        if unit in ("fp32_matmul", "fp64"):
            # A matmul issues fused multiply-adds, two operations in a slot where elementwise maths issues one.
            elementwise = unit.removesuffix("_matmul")
            rates.append(RateTiming(elementwise, flops / 2, timing))
            rates.append(RateTiming(elementwise, flops, timing, typical=False))
        budget.report((number + 1) / len(_MATMUL_UNITS), budget.purpose)
    return rates


def _matmul(dtype: torch.dtype, enough_us: float, repeats: int, budget: TimeBudget) -> tuple[float, Timing]:
    """Operations and time of the smallest square matmul that takes ``enough_us`` (or the largest one tried)."""
    trying = budget.part(0.5)
    for size in _MATMUL_SIZES:
        a = torch.rand(size, size).to(dtype)
        b, out = a.t().contiguous(), torch.empty_like(a)
        call = partial(torch.mm, a, b, out=out)
        if _quickest_us(call, trying) >= enough_us or trying.left_us() <= 0:
            break
    timing = time_calls({size: call}, _timer(sample_us=1.0, repeats=repeats), budget=budget)[size]
    return 2.0 * size**3, timing


def _quickest_us(call: TimedCall, budget: TimeBudget) -> float:
    """The shortest of three calls, or of as many as there is time for."""
    times: list[float] = []
    while not times or (len(times) < 3 and budget.left_us() > 0):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return min(times)


def time_aten_calls(timer: CallTimer, cores: int, budget: TimeBudget) -> dict[str, CallTimes]:
    """Times by op and type (``aten.mul.Tensor.float32``), few elements first; large ones only while time is left."""
    shares = _GRAIN * min(cores, _MOST_THREADS)
    sizes = sorted({_HEAD, _GRAIN, shares, 4 * shares})
    calls = {(name, size): call for size in sizes for dtype in _TYPES for name, call in _calls(size, dtype).items()}
    timings = time_calls(calls, timer, budget=budget, least=0)
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, size), timing in timings.items():
        points.setdefault(name, []).append((float(size), timing.typical_us))
    return {name: CallTimes(tuple(own)) for name, own in points.items()}


def _calls(elements: int, dtype: torch.dtype) -> dict[str, TimedCall]:
    cols = min(elements, _COLS)
    rows = elements // cols
    x = (torch.rand(rows, cols) + 0.5).to(dtype)
    y, indices, numbers = torch.rand_like(x), torch.arange(rows), torch.arange(elements)
    mask = (torch.arange(cols) < cols // 2).expand(rows, cols).contiguous()
    heads = x.view(rows, cols // _HEAD, _HEAD).transpose(0, 1)
    cache = heads.contiguous()
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    own = [partial(getattr(_aten, name).default, x) for name in _UNARY]
    own += [partial(getattr(_aten, name).Tensor, x, y) for name in _BINARY]
    own += [
        partial(_aten.add.Tensor, x, 1.5),
        partial(_aten.mul.Tensor, x, 1.5),
        partial(_aten.pow.Tensor_Scalar, x, 2),
        partial(_aten.le.Tensor, x, y),
        partial(_aten.where.self, mask, x, y),
        partial(_aten.to.dtype, x, other),
        partial(_aten.mean.dim, x, [-1], True),
        partial(_aten.sum.dim_IntList, x, [-1], True),
        partial(_aten.amax.default, x, [-1], True),
        partial(_aten.softmax.int, x, -1),
        partial(_aten.layer_norm.default, x, [cols]),
        partial(_aten.cat.default, [x[:, cols // 2:], x[:, :cols // 2]], -1),
        partial(_aten.embedding.default, x, indices),
        partial(_aten.index_select.default, x, 0, indices),
        partial(_aten.index_copy_.default, torch.zeros_like(cache), -2, indices, cache),
        partial(_aten.reshape.default, heads, [-1]),
        partial(_aten.zeros.default, [rows, cols], dtype=dtype),
    ]
    type_name = str(dtype).removeprefix("torch.")
    typed: dict[str, TimedCall] = {
        f"{call.func}.{type_name}{'.number' if isinstance(call.args[-1], float) else ''}": call for call in own
    }
    typed[f"aten.contiguous.default.{type_name}"] = partial(_aten.clone.default, x)
    if rows > 1:
        typed[f"aten.contiguous.default.{type_name}"] = partial(_aten.contiguous.default, heads)
    if dtype is torch.float32:
        typed["aten.arange.default.int64"] = partial(_aten.arange.default, elements)
        typed["aten.__and__.Tensor.bool"] = partial(_aten.__and__.Tensor, mask, mask)
        typed["aten.__and__.Tensor.bool.one"] = partial(_aten.__and__.Tensor, mask, mask[:1, :1])
        typed["aten.add.Tensor.int64.number"] = partial(_aten.add.Tensor, numbers, 1)
        typed["aten.le.Tensor.int64"] = partial(_aten.le.Tensor, numbers, numbers)
    return typed
