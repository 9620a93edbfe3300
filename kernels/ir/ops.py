"""THE op table: every scalar operation a kernel body may apply, with its meaning, cost, and each back end's spelling.

Templates take operands as ``{0}``, ``{1}``, ``{2}``. C++ spellings that are calls (``fp_exp``) are defined in the C++
prelude, for scalars and SIMD vectors alike; Triton spellings use ``tl`` (``ntl`` in ninetoothed has the same functions)
and must run under the Triton interpreter too; an op whose Triton spelling is empty is in no kernel for GPUs. Minimum,
maximum and their reductions propagate NaN, as in ATen.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

#: Unit that executes an op: ordinary fp32/int pipes, or the special-function unit.
Unit = Literal["fp32", "sfu"]


@dataclass(frozen=True)
class OpSpec:
    """One scalar op; ``name`` is the key used by ``Apply.op``."""

    name: str
    arity: int
    #: torch function with the op's exact meaning on tensors of one common dtype.
    reference: Callable[..., torch.Tensor]
    cpp: str
    triton: str
    #: Operations counted per application.
    flops: float = 1.0
    unit: Unit = "fp32"
    #: ``"same"`` as the operands' register type, or a register type.
    result: Literal["same", "bool", "float32"] = "same"


@dataclass(frozen=True)
class ReductionSpec:
    """A fold over the columns of a row, and the scan that is the fold of all columns so far."""

    name: str
    identity: float
    cpp_combine: str
    triton_combine: str
    triton_reduce: str
    triton_scan: str
    #: The fold of the last dimension, which stays; and the scan along a dimension.
    reference: Callable[[torch.Tensor], torch.Tensor]
    reference_scan: Callable[[torch.Tensor, int], torch.Tensor]
    #: Operations counted for each element.
    flops: float = 1.0
    #: The function of ``cpp_loops.h`` that scans a vector.
    cpp_scan: str = "scanned"


_NAN_MAX = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_NAN_MIN = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"

_ROWS: tuple[OpSpec, ...] = (
    # -- arithmetic ---------------------------------------------------------------------------------------
    OpSpec("add", 2, torch.add, "({0} + {1})", "({0} + {1})"),
    OpSpec("sub", 2, torch.sub, "({0} - {1})", "({0} - {1})"),
    OpSpec("mul", 2, torch.mul, "({0} * {1})", "({0} * {1})"),
    OpSpec("div", 2, torch.true_divide, "({0} / {1})", "({0} / {1})", unit="sfu"),
    OpSpec("neg", 1, torch.neg, "(-{0})", "(-{0})"),
    OpSpec("abs", 1, torch.abs, "fp_abs({0})", "tl.abs({0})"),
    OpSpec("maximum", 2, torch.maximum, "fp_maximum({0}, {1})", _NAN_MAX),
    OpSpec("minimum", 2, torch.minimum, "fp_minimum({0}, {1})", _NAN_MIN),
    OpSpec("reciprocal", 1, torch.reciprocal, "(1.0f / {0})", "(1.0 / {0})", unit="sfu"),
    OpSpec("floor", 1, torch.floor, "fp_floor({0})", "tl.floor({0})"),
    OpSpec("ceil", 1, torch.ceil, "fp_ceil({0})", "tl.ceil({0})"),
    OpSpec("round", 1, torch.round, "fp_round({0})", "_round({0})"),
    OpSpec("fmod", 2, torch.fmod, "fp_fmod({0}, {1})", "", flops=8.0),
    OpSpec("floordiv", 2, lambda a, b: torch.div(a, b, rounding_mode="floor"), "fp_floordiv({0}, {1})", "", flops=8.0),
    # Not the floor of Triton's quotient: that is not exactly rounded.
    OpSpec("truncdiv", 2, lambda a, b: torch.div(a, b, rounding_mode="trunc"), "fp_truncdiv({0}, {1})", "", flops=4.0),
    # -- integers (operands int64 or int32) ---------------------------------------------------------------
    OpSpec("int_floordiv", 2, lambda a, b: torch.div(a, b, rounding_mode="floor"), "fp_floordiv({0}, {1})",
           "_floordiv({0}, {1})"),
    OpSpec("int_remainder", 2, torch.remainder, "fp_remainder({0}, {1})", "_remainder({0}, {1})"),
    OpSpec("bit_and", 2, torch.bitwise_and, "({0} & {1})", "({0} & {1})"),
    OpSpec("bit_or", 2, torch.bitwise_or, "({0} | {1})", "({0} | {1})"),
    OpSpec("bit_xor", 2, torch.bitwise_xor, "({0} ^ {1})", "({0} ^ {1})"),
    # A shift by the number of bits or more is undefined here: the lowering bounds it.
    OpSpec("shift_left", 2, torch.bitwise_left_shift, "({0} << {1})", "({0} << {1})"),
    OpSpec("shift_right", 2, torch.bitwise_right_shift, "({0} >> {1})", "({0} >> {1})"),
    # The float whose bits an int32 holds: see float32_bits.
    OpSpec("as_float", 1, lambda a: a.to(torch.int32).view(torch.float32), "bit_cast<float>((int)({0}))",
           "({0}).to(tl.int32).to(tl.float32, bitcast=True)", flops=0.0, result="float32"),
    # -- special functions --------------------------------------------------------------------------------
    OpSpec("exp", 1, torch.exp, "fp_exp({0})", "_exp({0})", unit="sfu"),
    OpSpec("exp2", 1, torch.exp2, "fp_exp2({0})", "tl.exp2({0})", unit="sfu"),
    OpSpec("log", 1, torch.log, "fp_log({0})", "tl.log({0})", unit="sfu"),
    OpSpec("log1p", 1, torch.log1p, "fp_log1p({0})", "_log1p({0})", flops=4.0, unit="sfu"),
    OpSpec("sqrt", 1, torch.sqrt, "fp_sqrt({0})", "tl.sqrt({0})", unit="sfu"),
    OpSpec("rsqrt", 1, torch.rsqrt, "fp_rsqrt({0})", "tl.rsqrt({0})", unit="sfu"),
    OpSpec("sin", 1, torch.sin, "fp_sin({0})", "_sin({0})", flops=2.0, unit="sfu"),
    OpSpec("cos", 1, torch.cos, "fp_cos({0})", "_cos({0})", flops=2.0, unit="sfu"),
    OpSpec("tanh", 1, torch.tanh, "fp_tanh({0})", "_tanh({0})", flops=3.0, unit="sfu"),
    OpSpec("sigmoid", 1, torch.sigmoid, "fp_sigmoid({0})", "_sigmoid({0})", flops=3.0, unit="sfu"),
    OpSpec("erf", 1, torch.erf, "fp_erf({0})", "_erf({0})", flops=8.0, unit="sfu"),
    OpSpec("pow", 2, torch.pow, "fp_pow({0}, {1})", "_pow({0}, {1})", flops=3.0, unit="sfu"),
    # -- comparisons and logic ----------------------------------------------------------------------------
    OpSpec("eq", 2, torch.eq, "({0} == {1})", "({0} == {1})", result="bool"),
    OpSpec("ne", 2, torch.ne, "({0} != {1})", "({0} != {1})", result="bool"),
    OpSpec("lt", 2, torch.lt, "({0} < {1})", "({0} < {1})", result="bool"),
    OpSpec("le", 2, torch.le, "({0} <= {1})", "({0} <= {1})", result="bool"),
    OpSpec("gt", 2, torch.gt, "({0} > {1})", "({0} > {1})", result="bool"),
    OpSpec("ge", 2, torch.ge, "({0} >= {1})", "({0} >= {1})", result="bool"),
    OpSpec("logical_and", 2, torch.logical_and, "({0} & {1})", "({0} & {1})", result="bool"),
    OpSpec("logical_or", 2, torch.logical_or, "({0} | {1})", "({0} | {1})", result="bool"),
    OpSpec("logical_not", 1, torch.logical_not, "(!{0})", "(~{0})", result="bool"),
    OpSpec("where", 3, torch.where, "fp_where({0}, {1}, {2})", "tl.where({0}, {1}, {2})"),
)

OPS: dict[str, OpSpec] = {row.name: row for row in _ROWS}

REDUCTIONS: dict[str, ReductionSpec] = {
    row.name: row
    for row in (
        ReductionSpec("sum", 0.0, "({0} + {1})", "({0} + {1})", "tl.sum", "tl.cumsum",
                      lambda x: torch.sum(x, dim=-1, keepdim=True), torch.cumsum),
        ReductionSpec("max", -math.inf, "fp_maximum({0}, {1})", _NAN_MAX, "_row_max", "_scan_max",
                      lambda x: torch.amax(x, dim=-1, keepdim=True), lambda x, dim: torch.cummax(x, dim).values),
        ReductionSpec("min", math.inf, "fp_minimum({0}, {1})", _NAN_MIN, "_row_min", "_scan_min",
                      lambda x: torch.amin(x, dim=-1, keepdim=True), lambda x, dim: torch.cummin(x, dim).values),
        ReductionSpec("prod", 1.0, "({0} * {1})", "({0} * {1})", "_row_prod", "tl.cumprod",
                      lambda x: torch.prod(x, dim=-1, keepdim=True), torch.cumprod),
        ReductionSpec("logaddexp", -math.inf, "fp_logaddexp({0}, {1})", "_logaddexp({0}, {1})", "_row_logaddexp",
                      "_scan_logaddexp", lambda x: torch.logsumexp(x, dim=-1, keepdim=True), torch.logcumsumexp,
                      flops=25.0, cpp_scan="scanned_in_turn"),
    )
}

_SMALLEST = {"int32": -(2**31), "int64": -(2**63)}


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def fold_identity(kind: str, dtype: str) -> float | int:
    """The neutral element of a fold over values of register type ``dtype``."""
    identity = REDUCTIONS[kind].identity
    if dtype == "bool":
        return identity > 0
    if dtype in _SMALLEST and not math.isfinite(identity):
        return _SMALLEST[dtype] if identity < 0 else -(_SMALLEST[dtype] + 1)
    return identity


def float32_bits(value: float) -> int:
    """The bits of the nearest float32 as a signed 32-bit integer; infinite where it is too large.

    Kernels take integers only: so travels a float that changes from call to call, until the op ``as_float``.

    >>> hex(float32_bits(1.0)), float32_bits(-0.0) == -(2**31)
    ('0x3f800000', True)
    """
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return int(struct.unpack("<i", packed)[0])


def float_of_bits(bits: int) -> float:
    """The float that :func:`float32_bits` packed."""
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def op_spec(name: str) -> OpSpec:
    """The row of the op table; ``KeyError`` names the op and where to add it."""
    try:
        return OPS[name]
    except KeyError:
        raise KeyError(f"no scalar op '{name}' in the op table (kernels/ir/ops.py); known: {', '.join(OPS)}") from None
