"""Quantisation behind a norm or a gated activation, and dequantisation of weights.

Per token: each row is divided by its own largest magnitude over the largest number of the target type, and that scale
is a second result. Per tensor: the scale is given. Spelled as the reference code of vLLM and AutoAWQ has it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.patterns import functions
from fuseplan.planner.patterns.functions import Inputs, InputSpecs, Pattern, Shape, dense, usual_inputs

_AWQ_GROUP = 128
#: int4 numbers in an int32 word.
_PACKED = 8


def _quantise(value: Tensor, target: torch.dtype, scale: Tensor | None) -> tuple[Tensor, ...]:
    """The quantised value; where no scale is given, a scale [..., 1] for each row too."""
    wide, given = value.float(), scale
    low, high = (-448.0, 448.0) if target.is_floating_point else (-128.0, 127.0)
    if scale is None:
        # The least scale keeps a row of zeros from dividing by zero.
        scale = (wide.abs().amax(-1, keepdim=True) / high).clamp(min=1.0 / (high * 512.0))
    number = wide / scale
    number = number if target.is_floating_point else number.round()
    out = number.clamp(low, high).to(target)
    return (out, scale) if given is None else (out,)


def _quantised(head: Callable[..., Any], target: torch.dtype, per_token: bool) -> Callable[..., tuple[Tensor, ...]]:
    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        operands, scale = (tensors, None) if per_token else (tensors[:-1], tensors[-1])
        found = head(*operands)
        *results, value = found if isinstance(found, tuple) else (found,)
        return *results, *_quantise(value, target, scale)

    return compute


def _with_scale(inputs: Inputs) -> Inputs:
    return lambda shape, dtype: {**inputs(shape, dtype), "scale": dense((1,), "float32")}


def _dequantise_int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [N, K] with one scale for each output channel."""
    return (weight.float() * scale).to(dtype)


def _dequantise_awq(weight: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ's int4 weights [K, N]: eight columns to an int32 word, interleaved; scales and zeros for 128 rows each."""
    # Column i of a word is its nibble (0, 4, 1, 5, 2, 6, 3, 7)[i].
    order = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device).view(2, 4)
    shifts = order.t().reshape(_PACKED)

    def unpacked(words: Tensor) -> Tensor:
        spread = torch.bitwise_right_shift(words.unsqueeze(2), shifts)
        return torch.bitwise_and(spread, 15).view(words.shape[0], words.shape[1] * _PACKED)

    spread = unpacked(zeros).repeat_interleave(_AWQ_GROUP, 0)
    return (unpacked(weight) - spread) * scales.repeat_interleave(_AWQ_GROUP, 0)


def _awq_inputs(shape: Shape, dtype: str) -> InputSpecs:
    rows, columns = shape
    if columns % _PACKED or rows % _AWQ_GROUP:
        raise ShapeError(
            f"takes rows in groups of {_AWQ_GROUP} and columns in words of {_PACKED}, "
            f"not {rows}x{columns}; try 4096x4096"
        )
    groups, words = rows // _AWQ_GROUP, columns // _PACKED
    return {
        "weight": dense((rows, words), "int32"), "zeros": dense((groups, words), "int32"),
        "scales": dense((groups, columns), dtype),
    }


def quantisation_patterns() -> dict[str, Pattern]:
    found = {}
    heads: dict[Callable[..., Any], tuple[str, ...]] = {
        functions.rms_norm: ("out",), functions.add_rms_norm: ("hidden", "out"), functions.swiglu: ("out",)}
    for (head, results), (short, target) in product(
        heads.items(), (("fp8", torch.float8_e4m3fn), ("int8", torch.int8))
    ):
        name, inputs = f"{head.__name__}_{short}", usual_inputs(head)
        found[f"{name}_token"] = Pattern(_quantised(head, target, True), inputs, (*results, "scale"))
        found[f"{name}_tensor"] = Pattern(_quantised(head, target, False), _with_scale(inputs), results)
    found["dequantise_int8"] = Pattern(
        _dequantise_int8,
        lambda shape, dtype: {"weight": dense(shape, "int8"), "scale": dense((shape[0], 1), "float32")},
        typed=True,
    )
    found["dequantise_awq"] = Pattern(_dequantise_awq, _awq_inputs)
    return found
