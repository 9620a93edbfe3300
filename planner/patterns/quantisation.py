"""Quantisation behind a norm or a gated activation, and dequantisation of weights.

Per token: each row is divided by its own largest magnitude over the largest number of the target type, and that scale
is a second result. Per tensor: the scale is given. Spelled as the reference code of vLLM and AutoAWQ has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.patterns.norm import norm_inputs, rms_norm
from fuseplan.planner.patterns.pattern import OVER_ROWS, Built, Ops, Pattern, Shape, dense
from fuseplan.planner.patterns.pointwise import gate_and_up, gated

Granularity: TypeAlias = Literal["token", "tensor"]
#: Adds a pattern's ops up to the value to quantise: ``(specs, that value, other results)``.
Head: TypeAlias = Callable[[Ops, Shape, str], tuple[dict[str, TensorSpec], str, tuple[str, ...]]]

_AWQ_GROUP = 128
#: int4 numbers in an int32 word.
_PACKED = 8


@dataclass(frozen=True)
class Quantised:
    """A target type: its name in ATen, its range, and whether numbers are rounded before the conversion."""

    dtype: str
    low: float
    high: float
    rounds: bool


TARGETS: Mapping[str, Quantised] = MappingProxyType({
    "fp8": Quantised("float8_e4m3fn", -448.0, 448.0, False),
    "int8": Quantised("int8", -128.0, 127.0, True),
})


def _quantise(ops: Ops, value: str, target: Quantised, granularity: Granularity) -> tuple[str, ...]:
    """The quantised value, and per token its scales [..., 1]."""
    wide = ops.cast(value, "float32")
    if granularity == "token":
        top = ops("amax.default", ops("abs.default", wide), dim=(-1,), keepdim=True)
        scale = ops("div.Tensor", top, other=target.high)
        # The least scale keeps a row of zeros from dividing by zero.
        scale = ops("clamp.default", scale, to="scale", min=1.0 / (target.high * 512.0))
    else:
        scale = "scale"
    number = ops("div.Tensor", wide, scale)
    if target.rounds:
        number = ops("round.default", number)
    number = ops("clamp.default", number, min=target.low, max=target.high)
    out = ops.cast(number, target.dtype, to="out")
    return (out, scale) if granularity == "token" else (out,)


def _rms_norm_head(ops: Ops, shape: Shape, dtype: str) -> tuple[dict[str, TensorSpec], str, tuple[str, ...]]:
    return norm_inputs(shape, dtype), rms_norm(ops, "x", "weight", dtype), ()


def _add_rms_norm_head(ops: Ops, shape: Shape, dtype: str) -> tuple[dict[str, TensorSpec], str, tuple[str, ...]]:
    hidden = ops("add.Tensor", "residual", "x", to="hidden")
    return norm_inputs(shape, dtype, ("residual", "x")), rms_norm(ops, hidden, "weight", dtype), (hidden,)


def _swiglu_head(ops: Ops, shape: Shape, dtype: str) -> tuple[dict[str, TensorSpec], str, tuple[str, ...]]:
    return gate_and_up(shape, dtype), gated(ops), ()


def _quantised(head: Head, target: Quantised, granularity: Granularity) -> Callable[[Shape, str], Built]:
    def build(shape: Shape, dtype: str) -> Built:
        ops = Ops()
        specs, value, results = head(ops, shape, dtype)
        if granularity == "tensor":
            specs["scale"] = dense((1,), "float32")
        return ops.built(specs, *results, *_quantise(ops, value, target, granularity))

    return build


def _dequantise_int8(shape: Shape, dtype: str) -> Built:
    """Weights [N, K] with one scale for each output channel."""
    ops = Ops()
    wide = ops("mul.Tensor", ops.cast("weight", "float32"), "scale")
    specs = {"weight": dense(shape, "int8"), "scale": dense((shape[0], 1), "float32")}
    return ops.built(specs, ops.cast(wide, dtype, to="out"))


def _dequantise_awq(shape: Shape, dtype: str) -> Built:
    """AWQ's int4 weights [K, N]: eight columns to an int32 word, interleaved; scales and zeros for 128 rows each."""
    rows, columns = shape
    if columns % _PACKED or rows % _AWQ_GROUP:
        raise ShapeError(
            f"pattern dequantise_awq takes rows in groups of {_AWQ_GROUP} and columns in words of {_PACKED}, "
            f"not {rows}x{columns}; try 4096x4096"
        )
    ops = Ops()
    # Column i of a word is its nibble (0, 4, 1, 5, 2, 6, 3, 7)[i].
    order = ops("view.default", ops("arange.start_step", start=0, end=32, step=4, dtype="int32"), size=(2, 4))
    shifts = ops("reshape.default", ops("t.default", order), shape=(_PACKED,))

    def unpacked(words: str, number: int) -> str:
        spread = ops("bitwise_right_shift.Tensor", ops("unsqueeze.default", words, dim=2), shifts)
        return ops("view.default", ops("bitwise_and.Scalar", spread, other=15), size=(number, columns))

    groups = rows // _AWQ_GROUP
    zeros = ops("repeat_interleave.self_int", unpacked("zeros", groups), repeats=_AWQ_GROUP, dim=0)
    scales = ops("repeat_interleave.self_int", "scales", repeats=_AWQ_GROUP, dim=0)
    out = ops("mul.Tensor", ops("sub.Tensor", unpacked("weight", rows), zeros), scales, to="out")
    specs = {
        "weight": dense((rows, columns // _PACKED), "int32"), "zeros": dense((groups, columns // _PACKED), "int32"),
        "scales": dense((groups, columns), dtype),
    }
    return ops.built(specs, out)


def quantisation_patterns() -> dict[str, Pattern]:
    """Rows of the pattern table."""
    heads: tuple[tuple[str, Head], ...] = (
        ("rms_norm", _rms_norm_head), ("add_rms_norm", _add_rms_norm_head), ("swiglu", _swiglu_head)
    )
    sides: tuple[tuple[Granularity, str], ...] = (
        ("token", "with a scale for each row"), ("tensor", "with one given scale")
    )
    rows = {
        f"{name}_{short}_{granularity}": Pattern(
            _quantised(head, target, granularity), *OVER_ROWS, f"{name} quantised to {short} {how}"
        )
        for name, head in heads
        for short, target in TARGETS.items()
        for granularity, how in sides
    }
    rows["dequantise_int8"] = Pattern(
        _dequantise_int8, "output x input channels", "4096x4096", (2,), "int8 weight * scale of its channel"
    )
    rows["dequantise_awq"] = Pattern(
        _dequantise_awq, "input x output channels", "4096x4096", (2,), "(int4 weight - zero) * scale, groups of 128"
    )
    return rows
