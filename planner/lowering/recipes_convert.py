"""Recipes of conversions between storage types, the narrow ones of quantised tensors included, and of bits."""

from __future__ import annotations

from functools import cache

import torch

from fuseplan.kernels.ir.ir import ITEMSIZE, register_type
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.body import BodyBuilder
from fuseplan.planner.lowering.recipe import Recipe, of_one, of_two, result_type
from fuseplan.planner.lowering.views import Position

_FLOAT8_LARGEST = 448.0
#: Halfway to the number that would follow the largest one of float8_e4m3fn: up to here rounding gives the largest.
_FLOAT8_LIMIT = 464.0


def convert(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """to, _to_copy, type_as, clone, contiguous, dropout at inference: the value itself, converted.

    A float outside the range of an integer type has no defined conversion in C or ATen; here it wraps.
    """
    value = p.operand(node, 0, position)
    target = p.specs[node.outputs[0]].dtype
    if target == "bool" and p.dtype_of(value) != "bool":
        return p.apply("ne", value, p.const(0, p.dtype_of(value)))
    value = p.cast(value, register_type(target))
    if target == "float8_e4m3fn" and p.specs[node.inputs[0]].dtype != target and not float8_saturates():
        return _overflowing(p, node, value)
    return value


@cache
def float8_saturates() -> bool:
    """What a number beyond float8_e4m3fn becomes: its largest (PyTorch 2.13, and GPUs), or NaN (older PyTorch)."""
    return not bool(torch.tensor(1e4).to(torch.float8_e4m3fn).isnan())


def _overflowing(p: BodyBuilder, node: OpNode, value: int) -> int:
    """``value`` with NaN where it overflows float8_e4m3fn; a clamp before the conversion rules that out."""
    clamp = p.computed_by(node.inputs[0])
    if clamp is not None and clamp.op == "aten.clamp.default":
        bounds = clamp.attrs.get("min"), clamp.attrs.get("max")
        if all(isinstance(bound, int | float) and abs(bound) <= _FLOAT8_LARGEST for bound in bounds):
            return value
    over = p.apply("gt", p.apply("abs", value), p.const(_FLOAT8_LIMIT, p.dtype_of(value)))
    return p.apply("where", over, p.const(float("nan"), p.dtype_of(value)), value)


def _bitwise(on_bools: str, on_integers: str) -> Recipe:
    return of_two(lambda p, node, a, b: p.apply(on_bools if p.dtype_of(a) == "bool" else on_integers, a, b))


def _bitwise_not(p: BodyBuilder, node: OpNode, value: int) -> int:
    dtype = p.dtype_of(value)
    return p.apply("logical_not", value) if dtype == "bool" else p.apply("bit_xor", value, p.const(-1, dtype))


def _shift(op: str) -> Recipe:
    """ATen defines shifts by too much (and by less than zero): all sign bits to the right, zero to the left."""

    def compute(p: BodyBuilder, node: OpNode, a: int, by: int) -> int:
        dtype, last = result_type(p, node), ITEMSIZE[p.specs[node.outputs[0]].dtype] * 8 - 1
        least, most = p.known_range(by)
        if least >= 0 and most <= last:
            return p.apply(op, a, by)
        low, high = p.const(0, dtype), p.const(last, dtype)
        defined = p.apply("logical_and", p.apply("ge", by, low), p.apply("le", by, high))
        if op == "shift_right":
            return p.apply(op, a, p.apply("where", defined, by, high))
        return p.apply("where", defined, p.apply(op, a, p.apply("where", defined, by, low)), low)

    return of_two(compute)


def bitwise_recipes() -> dict[str, Recipe]:
    rows: dict[str, Recipe] = {"aten.bitwise_not.default": of_one(_bitwise_not)}
    for name, on_bools in (("and", "logical_and"), ("or", "logical_or"), ("xor", "ne")):
        for packet in (f"bitwise_{name}", f"__{name}__"):
            rows[f"aten.{packet}.Tensor"] = rows[f"aten.{packet}.Scalar"] = _bitwise(on_bools, f"bit_{name}")
    for side, short in (("left", "lshift"), ("right", "rshift")):
        for spelling in (f"bitwise_{side}_shift.Tensor", f"bitwise_{side}_shift.Tensor_Scalar", f"__{short}__.Tensor",
                         f"__{short}__.Scalar"):
            rows[f"aten.{spelling}"] = _shift(f"shift_{side}")
    return rows
