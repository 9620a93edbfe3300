"""Recipes of pointwise ops, conversions included: an element of the result from the operands at the same position."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial, reduce
from operator import mul
from typing import Any

import torch

from fuseplan.kernels.ir.ir import RegisterType, register_type
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import (
    FLOATS,
    INTEGERS,
    Build,
    Rows,
    argument,
    float_result,
    is_float,
    no_booleans,
    of_one,
    of_operands,
    of_two,
    result_type,
    rows,
)
from fuseplan.planner.ops.positions import Position, Specs

_FLOAT8_LARGEST = 448.0
#: Halfway to the number that would follow the largest one of float8_e4m3fn: up to here rounding gives the largest.
_FLOAT8_TIE = 464.0


def _convert(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """The value itself, converted: to, type_as, clone, contiguous, dropout at inference.

    A float outside the range of an integer type, whose conversion C and ATen leave undefined, wraps.
    """
    value = p.operand(node, 0, position)
    target = p.specs[node.outputs[0]].dtype
    if target == "bool" and value.dtype != "bool":
        return value.ne(0)
    value = value.to(register_type(target))
    if target == "float8_e4m3fn" and p.specs[node.inputs[0]].dtype != target and not float8_saturates():
        return _overflowing(p, node, value)
    return value


@cache
def float8_saturates() -> bool:
    """What a number beyond float8_e4m3fn becomes: its largest (PyTorch 2.13, and GPUs), or NaN (older PyTorch)."""
    return not bool(torch.tensor(1e4).to(torch.float8_e4m3fn).isnan())


def _overflowing(p: BodyBuilder, node: OpNode, value: Value) -> Value:
    """``value`` with NaN where it overflows float8_e4m3fn; a clamp before the conversion rules that out."""
    clamp = p.computed_by(node.inputs[0])
    if clamp is not None and clamp.op == "aten.clamp.default":
        bounds = clamp.attrs.get("min"), clamp.attrs.get("max")
        if all(isinstance(bound, int | float) and abs(bound) <= _FLOAT8_LARGEST for bound in bounds):
            return value
    return (value.abs() > _FLOAT8_TIE).where(math.nan, value)


def _shift(op: str) -> Build:
    """ATen defines shifts by too much (and by less than zero): all sign bits to the right, zero to the left."""

    def compute(p: BodyBuilder, node: OpNode, a: Value, by: Value) -> Value:
        limits = torch.iinfo(torch_dtype(p.specs[node.outputs[0]].dtype))
        # All bits of an unsigned number are shifted out of it, in a register that has more; a sign stays.
        last = limits.bits - (limits.min < 0)
        least, most = p.known_range(by)
        if least >= 0 and most <= last:
            return p.apply(op, a, by)
        low, high = p.const(0, by.dtype), p.const(last, by.dtype)
        defined = (by >= low) & (by <= high)
        if op == "shift_right":
            return p.apply(op, a, defined.where(by, high))
        return defined.where(p.apply(op, a, defined.where(by, low)), low)

    return of_two(compute)


def _power_factor(node: OpNode, specs: Specs) -> float:
    """ATen, too, knows small exponents. So does it -2, as a quotient of floats."""
    exponent = node.attrs["exponent"]
    if exponent in _ROOTS or exponent in (0, 1, 2, 3, -2) or specs[node.outputs[0]].dtype == "float64":
        return 1.0
    return 1.5


def _promoted(p: BodyBuilder, node: OpNode) -> RegisterType:
    """Register type in which a comparison's operands meet."""
    types = [register_type(p.specs[value].dtype) for value in node.inputs]
    types += ["float32" for key in ("other", "self") if is_float(node.attrs.get(key))]
    order: tuple[RegisterType, ...] = ("float64", "float32", "int64", "int32", "bool")
    best = min(order.index(t) for t in types)
    if "other" in node.attrs and order[best] == "bool":
        return "int64"
    return order[best]


def _unary(op: str) -> Build:
    return of_one(lambda x: x.space.apply(op, x))


def _rounding(op: str) -> Build:
    """Integers are rounded already."""
    return of_one(lambda x: x.space.apply(op, x) if x.dtype.startswith("float") else x)


def _binary(op: str, meet: Callable[[BodyBuilder, OpNode], RegisterType] = result_type, swapped: bool = False) -> Build:
    """Of the second operand times ``alpha``; of the first, which is then the second, where they are ``swapped``."""

    def compute(p: BodyBuilder, node: OpNode, a: Value, b: Value) -> Value:
        a, b = (b, a) if swapped else (a, b)
        alpha = node.attrs.get("alpha", 1)
        return p.apply(op, a, b if alpha == 1 else b * alpha)

    return of_two(compute, meet=meet)


def _div(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    dtype = result_type(p, node)
    a = argument(p, node, "self", 0, position, dtype)
    other = node.attrs.get("other")
    if isinstance(other, int | float) and other != 0 and math.frexp(other)[0] in (0.5, -0.5):
        return a * (1.0 / other)  # exact: a power of two
    return a / argument(p, node, "other", 1, position, dtype)


def _divided(mode: str) -> Build:
    """The quotient rounded as the ``mode`` says; an argument of the same name takes its place."""

    def compute(p: BodyBuilder, node: OpNode, a: Value, b: Value) -> Value:
        if not a.dtype.startswith("float"):
            return a.int_floordiv(b)
        if node.attrs.get("rounding_mode", mode) == "trunc":
            return a.truncdiv(b)
        return a.floordiv(b)

    return of_two(compute)


def _division_factor(node: OpNode, specs: Specs) -> float:
    """Of floats in single precision or less, what a division leaves is computed one by one in ATen."""
    rest = specs[node.outputs[0]].dtype in FLOATS[1:] and node.attrs.get("rounding_mode") != "trunc"
    return 2.5 if rest else 1.0


def _remainder(p: BodyBuilder, node: OpNode, a: Value, b: Value) -> Value:
    """What is left, with the sign of the divisor."""
    if not a.dtype.startswith("float"):
        return a.int_remainder(b)
    left = a.fmod(b)
    against = left.ne(0.0) & (left < 0.0).ne(b < 0.0)
    return against.where(left + b, left)


def _division_refuse(node: OpNode, specs: Specs) -> str | None:
    """Integers by a number that is known, rounded down: ATen raises where a divisor is zero."""
    dtype = specs[node.outputs[0]].dtype
    if dtype in FLOATS:
        return None if node.attrs.get("rounding_mode", "floor") in ("floor", "trunc") else "rounds nothing"
    if node.attrs.get("rounding_mode", "floor") != "floor" or dtype not in INTEGERS:
        return f"rounding mode {node.attrs.get('rounding_mode')} of dtype {dtype}"
    divisor = node.attrs.get("other")
    return None if isinstance(divisor, int) and divisor else "the divisor is no number other than zero"


#: Exponents that are another op.
_ROOTS = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def _power(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """A power with the cheap exponents spelled out, as ATen's own pow kernel does."""
    base, exponent = p.operand(node, 0, position, result_type(p, node)), node.attrs["exponent"]
    if exponent in (1, 2, 3):
        return reduce(mul, [base] * int(exponent))
    if exponent == -2 and p.specs[node.outputs[0]].dtype in ("float32", "float64"):
        return (base * base).reciprocal()
    # Roots of float16 are powers to ATen on CPUs: of -inf and -0.0 they differ. Back ends know the constant.
    power = p.specs[node.outputs[0]].dtype == "float16" and exponent != -1
    if base.dtype.startswith("float") and exponent in _ROOTS and not power:
        return base.space.apply(_ROOTS[exponent], base)
    return base.pow(exponent)


def _masked_fill(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    dtype = result_type(p, node)
    mask = p.operand(node, 1, position, "bool")
    filled = argument(p, node, "value", 2, position, dtype)
    return mask.where(filled, p.operand(node, 0, position, dtype))


def _filled_refuse(node: OpNode, specs: Specs) -> str | None:
    """ATen raises for a number that an integer type cannot hold; of a tensor, that is known when it is run."""
    dtype, value = specs[node.outputs[0]].dtype, node.inputs[2:]
    known = dtype not in INTEGERS or not value or specs[value[0]].dtype == dtype
    return None if known else f"fills {dtype} with a number of dtype {specs[value[0]].dtype}"


def _floats_alone(node: OpNode, specs: Specs) -> str | None:
    return None if specs[node.inputs[0]].dtype in FLOATS else f"of dtype {specs[node.inputs[0]].dtype}"


def _is_number(number: float, magnitude: bool = False) -> Build:
    """Whether an element, or its ``magnitude``, is this number."""

    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        x = p.operand(node, 0, position)
        return (x.abs() if magnitude else x).eq(number)

    return build


def _is_nan(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    x = p.operand(node, 0, position)
    return x.ne(x)


def _sign(x: Value) -> Value:
    """-1, 0 or 1; 0 of NaN, as in ATen."""
    above, below = (x > 0).to(x.dtype), (x < 0).to(x.dtype)
    return above - below


def _trunc(x: Value) -> Value:
    return (x < 0.0).where(x.ceil(), x.floor()) if x.dtype.startswith("float") else x


def _finite(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """nan_to_num: NaN and infinities as numbers, by default 0 and the outermost of the dtype."""
    x = p.operand(node, 0, position, result_type(p, node))
    limits = torch.finfo(torch_dtype(p.specs[node.outputs[0]].dtype))
    cases = (
        ("posinf", x.eq(math.inf), limits.max), ("neginf", x.eq(-math.inf), limits.min), ("nan", x.ne(x), 0.0),
    )
    result = x
    for name, there, usual in cases:  # what takes a number's place is not replaced in its turn
        given = node.attrs.get(name)
        result = there.where(p.const(usual if given is None else given, x.dtype), result)
    return result


def _lerp(p: BodyBuilder, node: OpNode, a: Value, b: Value, weight: Value) -> Value:
    """a + w (b - a), from the nearer end: exact at both."""
    difference = b - a
    near = a + weight * difference
    far = b - difference * (1.0 - weight)
    return (weight.abs() < 0.5).where(near, far)


def _added(op: str) -> Build:
    """addcmul, addcdiv: a + value (b op c)."""

    def compute(p: BodyBuilder, node: OpNode, a: Value, b: Value, c: Value) -> Value:
        value = node.attrs.get("value", 1)
        return a + p.apply(op, b if value == 1 else p.apply("mul", value, b), c)

    return of_operands(compute, ("self", "tensor1", "tensor2"))


def _clamp_by_tensors(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """min(max(x, low), high) with what is given of both."""
    dtype = result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    folds = [fold for name, fold in (("min", "maximum"), ("max", "minimum")) if name in _bounds(node)]
    for number, fold in enumerate(folds, 1):
        x = p.apply(fold, x, p.operand(node, number, position, dtype))  # of equal numbers, the bound: zeros have signs
    return x


def _bounds(node: OpNode) -> tuple[str, ...]:
    kind = node.op.split(".")[1].removeprefix("clamp").strip("_")
    return (kind,) if kind else tuple(name for name in ("min", "max") if name not in node.attrs)


def _each(make: Callable[[str], Build], names: str, **also: Any) -> Rows:
    """A row for each of several ops; ``make`` is given what the name and its scalar op have in common."""
    return {name: op for full in names.split() for name, op in _row(full, make(full.split(".")[0]), **also).items()}


def _bitwise(on_bools: str, on_integers: str) -> Build:
    return of_two(lambda p, node, a, b: p.apply(on_bools if a.dtype == "bool" else on_integers, a, b))


def _logical(op: str) -> Build:
    return _binary(op, lambda p, node: "bool")


_WHERE = of_operands(lambda p, node, condition, a, b: condition.where(a, b), ("condition", "self", "other"))
_row, _conversion = partial(rows, "pointwise"), partial(rows, "conversion", build=_convert)

POINTWISE = {
    **_each(_unary, "exp", slow_on_cpu=1.7),
    **_each(_unary, "exp2 sqrt rsqrt log1p reciprocal"),
    **_each(_unary, "log sigmoid", effort="function"),
    **_each(_unary, "sin cos erf", effort="function", slow_on_cpu=1.6),
    **_each(_unary, "tanh", effort="function", slow_on_cpu=3.0),
    **_each(_unary, "neg abs", rearranges=True),
    **_each(_rounding, "floor ceil round", refuse=no_booleans),
    **_row("square", of_one(lambda x: x * x)),
    **_row("add.Tensor", _binary("add"), adds=1),
    **_row("add.Scalar", _binary("add")),
    **_row("sub.Tensor", _binary("sub"), refuse=no_booleans, adds=-1),
    **_row("sub.Scalar", _binary("sub"), refuse=no_booleans),
    **_row("rsub.Tensor", _binary("sub", swapped=True), refuse=no_booleans, adds=-1),
    **_row("rsub.Scalar", _binary("sub", swapped=True), refuse=no_booleans),
    **_row("mul.Tensor mul.Scalar", _binary("mul")),
    **_row("div.Tensor div.Scalar true_divide.Tensor true_divide.Scalar", _div, refuse=float_result),
    **_row("floor_divide floor_divide.Scalar div.Scalar_mode div.Tensor_mode", _divided("floor"),
           refuse=_division_refuse, slow_on_cpu=_division_factor),
    **_row("maximum max.other", _binary("maximum")),
    **_row("minimum min.other", _binary("minimum")),
    **_row("pow.Tensor_Scalar", _power, refuse=float_result, by_constant=True, slow_on_cpu=_power_factor),
    **_row("pow.Tensor_Tensor pow.Scalar", _binary("pow"), refuse=float_result, slow_on_cpu=1.5),
    **_each(lambda op: _binary(op, _promoted), "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor "
                                               "le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar", slow_on_cpu=3.0),
    **_row("logical_and", _logical("logical_and")),
    **_row("logical_or", _logical("logical_or")),
    **_row("logical_xor", _logical("ne")),
    **_row("logical_not", lambda p, node, position: p.operand(node, 0, position, "bool").logical_not()),
    **_row("bitwise_not", of_one(lambda x: x.logical_not() if x.dtype == "bool" else x.bit_xor(-1))),
    **_row("bitwise_and.Tensor bitwise_and.Scalar __and__.Tensor __and__.Scalar", _bitwise("logical_and", "bit_and")),
    **_row("bitwise_or.Tensor bitwise_or.Scalar __or__.Tensor __or__.Scalar", _bitwise("logical_or", "bit_or")),
    **_row("bitwise_xor.Tensor bitwise_xor.Scalar __xor__.Tensor __xor__.Scalar", _bitwise("ne", "bit_xor")),
    **_row("bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar __lshift__.Tensor __lshift__.Scalar",
           _shift("shift_left")),
    **_row("bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __rshift__.Tensor __rshift__.Scalar",
           _shift("shift_right")),
    **_row("isnan", _is_nan, refuse=_floats_alone),
    **_row("isinf", _is_number(math.inf, magnitude=True), refuse=_floats_alone),
    **_row("isposinf", _is_number(math.inf), refuse=_floats_alone),
    **_row("isneginf", _is_number(-math.inf), refuse=_floats_alone),
    **_row("sign sgn", of_one(_sign), refuse=no_booleans),
    # In single precision ATen's has no vectors.
    **_row("trunc fix", of_one(_trunc), refuse=no_booleans, slow_on_cpu=lambda node, specs: (
        3.0 if specs[node.outputs[0]].dtype == "float32" else 1.0)),
    **_row("frac", of_one(lambda x: x - _trunc(x)), refuse=float_result),
    **_row("nan_to_num", _finite, refuse=_floats_alone),
    **_row("deg2rad", of_one(lambda x: x * (math.pi / 180)), refuse=_floats_alone),
    **_row("rad2deg", of_one(lambda x: x * (180 / math.pi)), refuse=_floats_alone),
    **_row("lerp.Scalar lerp.Tensor", of_operands(_lerp, ("self", "end", "weight")), refuse=_floats_alone),
    **_row("addcmul", _added("mul"), refuse=_floats_alone),
    **_row("addcdiv", _added("div"), refuse=_floats_alone),
    **_row("clamp.Tensor clamp_min.Tensor clamp_max.Tensor", _clamp_by_tensors, refuse=no_booleans),
    **_row("remainder.Scalar remainder.Tensor remainder.Scalar_Tensor", of_two(_remainder), refuse=_division_refuse,
           slow_on_cpu=_division_factor),
    **_row("fmod.Scalar fmod.Tensor", _binary("fmod"), refuse=float_result, slow_on_cpu=_division_factor),
    **_row("where.self where.ScalarSelf where.ScalarOther", _WHERE, rearranges=True, slow_on_cpu=3.0),
    **_row("where.Scalar", _WHERE, slow_on_cpu=3.0),
    **_row("masked_fill.Scalar masked_fill.Tensor", _masked_fill, refuse=_filled_refuse, rearranges=True,
           slow_on_cpu=3.0),
    **_conversion("to.dtype to.dtype_layout to.device to.other _to_copy type_as", spelled="to"),
    **_conversion("lift_fresh_copy", spelled="clone"),
    **_conversion("clone contiguous", copies=True),
    **_conversion("dropout", drops=True, refuse=lambda node, specs: (
        "training mode" if node.attrs.get("train") and node.attrs.get("p") else None)),
}
