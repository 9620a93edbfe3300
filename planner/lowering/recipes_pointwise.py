"""Recipes of pointwise ops: an element of the result from the operands at the same (broadcast) position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from fuseplan.kernels.ir.ir import RegisterType, register_type
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.body import BodyBuilder
from fuseplan.planner.lowering.recipe import (
    INTEGERS,
    Recipe,
    argument,
    float_result,
    is_float,
    of_one,
    of_two,
    result_type,
)
from fuseplan.planner.lowering.recipes_convert import bitwise_recipes, convert
from fuseplan.planner.lowering.views import Position, Specs


def _promoted(p: BodyBuilder, node: OpNode) -> RegisterType:
    """Register type in which a comparison's operands meet."""
    types = [register_type(p.specs[value].dtype) for value in node.inputs]
    types += ["float32" for key in ("other", "self") if is_float(node.attrs.get(key))]
    order: tuple[RegisterType, ...] = ("float64", "float32", "int64", "int32", "bool")
    best = min(order.index(t) for t in types)
    if "other" in node.attrs and order[best] == "bool":
        return "int64"
    return order[best]


def _unary(op: str) -> Recipe:
    return of_one(lambda p, node, x: p.apply(op, x))


def _rounding(op: str) -> Recipe:
    """Of an integer, which is rounded already, itself."""
    return of_one(lambda p, node, x: p.apply(op, x) if p.dtype_of(x).startswith("float") else x)


def _binary(op: str) -> Recipe:
    def compute(p: BodyBuilder, node: OpNode, a: int, b: int) -> int:
        alpha = node.attrs.get("alpha", 1)
        return p.apply(op, a, b if alpha == 1 else p.apply("mul", b, p.const(alpha, p.dtype_of(b))))

    return of_two(compute)


def _applied(op: str, meet: Callable[[BodyBuilder, OpNode], RegisterType] = result_type) -> Recipe:
    return of_two(lambda p, node, a, b: p.apply(op, a, b), meet)


def _div(p: BodyBuilder, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    a = argument(p, node, "self", 0, position, dtype)
    other = node.attrs.get("other")
    if isinstance(other, int | float) and other != 0 and math.frexp(other)[0] in (0.5, -0.5):
        return p.apply("mul", a, p.const(1.0 / other, dtype))  # exact: a power of two
    return p.apply("div", a, argument(p, node, "other", 1, position, dtype))


def _floor_divide_refuse(node: OpNode, specs: Specs) -> str | None:
    """Integers by a number that is known: ATen raises where a divisor is zero, and rounds floats in another way."""
    if node.attrs.get("rounding_mode", "floor") != "floor":
        return f"{node.op}: rounding mode {node.attrs['rounding_mode']}"
    if specs[node.outputs[0]].dtype not in INTEGERS:
        return f"{node.op}: result of dtype {specs[node.outputs[0]].dtype}, only integers are supported"
    divisor = node.attrs.get("other")
    return None if isinstance(divisor, int) and divisor else f"{node.op}: the divisor is no number other than zero"


def _rsub(p: BodyBuilder, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    a = p.operand(node, 0, position, dtype)
    alpha = node.attrs.get("alpha", 1)
    if alpha != 1:
        a = p.apply("mul", a, p.const(alpha, dtype))
    return p.apply("sub", argument(p, node, "other", 1, position, dtype), a)


#: Exponents that are another op.
_ROOTS = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def power(p: BodyBuilder, base: int, exponent: float) -> int:
    """``base ** exponent`` with the cheap exponents spelled out, as ATen's own pow kernel does."""
    dtype = p.dtype_of(base)
    if exponent in (1, 2, 3):
        return reduce(lambda product, factor: p.apply("mul", product, factor), [base] * int(exponent))
    if dtype.startswith("float") and exponent in _ROOTS:
        return p.apply(_ROOTS[exponent], base)
    return p.apply("pow", base, p.const(exponent, dtype))


def _where(p: BodyBuilder, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    condition = p.operand(node, 0, position, "bool")
    first = argument(p, node, "self", 1, position, dtype)
    second = argument(p, node, "other", len(node.inputs) - 1, position, dtype)
    return p.apply("where", condition, first, second)


def _masked_fill(p: BodyBuilder, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    mask = p.operand(node, 1, position, "bool")
    filled = argument(p, node, "value", 2, position, dtype)
    return p.apply("where", mask, filled, p.operand(node, 0, position, dtype))


def _dropout_refuse(node: OpNode, specs: Specs) -> str | None:
    return f"{node.op}: training mode" if node.attrs.get("train") and node.attrs.get("p") else None


def pointwise_recipes() -> dict[str, Recipe]:
    rows: dict[str, Recipe] = {}
    for name in ("exp", "exp2", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "reciprocal",
                 "neg", "abs"):
        rows[f"aten.{name}.default"] = _unary(name)
    for name in ("floor", "ceil", "round"):
        rows[f"aten.{name}.default"] = _rounding(name)
    for name in ("add", "sub", "mul"):
        rows[f"aten.{name}.Tensor"] = rows[f"aten.{name}.Scalar"] = _binary(name)
    for name in ("div", "true_divide"):
        rows[f"aten.{name}.Tensor"] = rows[f"aten.{name}.Scalar"] = Recipe(_div, refuse=float_result)
    rows["aten.maximum.default"] = rows["aten.max.other"] = _binary("maximum")
    rows["aten.minimum.default"] = rows["aten.min.other"] = _binary("minimum")
    for name in ("floor_divide.default", "floor_divide.Scalar", "div.Scalar_mode", "div.Tensor_mode"):
        rows[f"aten.{name}"] = replace(_applied("int_floordiv"), refuse=_floor_divide_refuse)
    rows["aten.rsub.Scalar"] = rows["aten.rsub.Tensor"] = Recipe(_rsub)
    rows["aten.pow.Tensor_Scalar"] = of_one(lambda p, node, x: power(p, x, node.attrs["exponent"]), float_result)
    rows["aten.pow.Tensor_Tensor"] = rows["aten.pow.Scalar"] = replace(_applied("pow"), refuse=float_result)
    rows["aten.square.default"] = of_one(lambda p, node, x: p.apply("mul", x, x))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        rows[f"aten.{name}.Tensor"] = rows[f"aten.{name}.Scalar"] = _applied(name, _promoted)
    for name, op in (("and", "logical_and"), ("or", "logical_or"), ("xor", "ne")):
        rows[f"aten.logical_{name}.default"] = _applied(op, lambda p, node: "bool")
    rows["aten.logical_not.default"] = Recipe(
        lambda p, node, position: p.apply("logical_not", p.operand(node, 0, position, "bool")))
    rows.update(bitwise_recipes())
    for name in ("self", "ScalarSelf", "ScalarOther", "Scalar"):
        rows[f"aten.where.{name}"] = Recipe(_where)
    rows["aten.masked_fill.Scalar"] = rows["aten.masked_fill.Tensor"] = Recipe(_masked_fill)
    for name in ("to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default",
                 "clone.default", "contiguous.default", "lift_fresh_copy.default"):
        rows[f"aten.{name}"] = Recipe(convert)
    rows["aten.dropout.default"] = Recipe(convert, refuse=_dropout_refuse)
    return rows
