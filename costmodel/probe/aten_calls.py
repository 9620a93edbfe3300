"""Common ATen ops as a model calls them: what a CPU takes for each, few elements or many, in a cache.

The roofline knows bytes and arithmetic. How long a call takes before it begins, and which of its loops are vectorised
for which type, differs from op to op and follows from nothing but a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fuseplan.costmodel.device import CallTimes
from fuseplan.costmodel.probe.timing import Call, CallTimer, TimeBudget, time_calls

_aten = torch.ops.aten
_COLS, _HEAD = 2048, 64
_TYPES = (torch.float32, torch.bfloat16)
#: Elements that ATen gives to one thread, and the fewest that it shares out (``at::internal::GRAIN_SIZE``).
_GRAIN = 2**15
#: Threads that the largest of the calls keeps busy, with several grains each, at most.
_MOST_THREADS = 16
_UNARY = ("neg", "silu", "gelu", "sigmoid", "tanh", "relu", "exp", "cos", "sin", "rsqrt", "clone")
_BINARY = ("add", "sub", "mul", "div")


def time_aten_calls(timer: CallTimer, cores: int, budget: TimeBudget) -> dict[str, CallTimes]:
    """By name and type (``aten.mul.Tensor.float32``): few elements, one share, one for each thread, and many.

    Where the budget is short large sizes are left out.
    """
    shares = _GRAIN * min(cores, _MOST_THREADS)
    sizes = sorted({_HEAD, _GRAIN, shares, 4 * shares})
    calls = {(name, size): call for size in sizes for dtype in _TYPES for name, call in _calls(size, dtype).items()}
    timings = time_calls(calls, timer, budget=budget, least=0)
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, size), timing in timings.items():
        points.setdefault(name, []).append((float(size), timing.typical_us))
    return {name: CallTimes(tuple(own)) for name, own in points.items()}


def _calls(elements: int, dtype: torch.dtype) -> dict[str, Call]:
    cols = min(elements, _COLS)
    rows = elements // cols
    x = (torch.rand(rows, cols) + 0.5).to(dtype)
    y, indices = torch.rand_like(x), torch.arange(rows)
    mask = (torch.arange(cols) < cols // 2).expand(rows, cols).contiguous()
    heads = x.view(rows, cols // _HEAD, _HEAD).transpose(0, 1)
    cache = heads.contiguous()
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    found: dict[str, Call] = {f"{name}.default": partial(_op(name, "default"), x) for name in _UNARY}
    found |= {f"{name}.Tensor": partial(_op(name, "Tensor"), x, y) for name in _BINARY}
    found |= {
        "add.Tensor.number": partial(_aten.add.Tensor, x, 1.5),
        "mul.Tensor.number": partial(_aten.mul.Tensor, x, 1.5),
        "pow.Tensor_Scalar": partial(_aten.pow.Tensor_Scalar, x, 2),
        "le.Tensor": partial(_aten.le.Tensor, x, y),
        "where.self": partial(_aten.where.self, mask, x, y),
        "to.dtype": partial(_aten.to.dtype, x, other),
        "mean.dim": partial(_aten.mean.dim, x, [-1], True),
        "sum.dim_IntList": partial(_aten.sum.dim_IntList, x, [-1], True),
        "amax.default": partial(_aten.amax.default, x, [-1], True),
        "softmax.int": partial(_aten.softmax.int, x, -1),
        "layer_norm.default": partial(_aten.layer_norm.default, x, [cols]),
        "cat.default": partial(_aten.cat.default, [x[:, cols // 2:], x[:, :cols // 2]], -1),
        "embedding.default": partial(_aten.embedding.default, x, indices),
        "index_select.default": partial(_aten.index_select.default, x, 0, indices),
        "index_copy_.default": partial(_aten.index_copy_.default, torch.zeros_like(cache), -2, indices, cache),
        "reshape.default": partial(_aten.reshape.default, heads, [-1]),
        "contiguous.default": partial(_aten.contiguous.default, heads) if rows > 1 else partial(_aten.clone.default, x),
        "zeros.default": partial(_aten.zeros.default, [rows, cols], dtype=dtype),
    }
    typed: dict[str, Call] = {}
    for name, call in found.items():
        op, number, _ = name.partition(".number")
        typed[f"aten.{op}.{str(dtype).removeprefix('torch.')}{number}"] = call
    if dtype is torch.float32:
        typed["aten.arange.default.int64"] = partial(_aten.arange.default, elements)
        typed["aten.__and__.Tensor.bool"] = partial(_aten.__and__.Tensor, mask, mask)
        typed["aten.add.Tensor.int64.number"] = partial(_aten.add.Tensor, torch.arange(elements), 1)
        typed["aten.le.Tensor.int64"] = partial(_aten.le.Tensor, torch.arange(elements), torch.arange(elements))
    return typed


def _op(name: str, overload: str) -> Callable[..., torch.Tensor]:
    return getattr(getattr(_aten, name), overload)  # type: ignore[no-any-return]
