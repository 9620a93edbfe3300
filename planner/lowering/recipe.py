"""What a recipe is, and what recipes share. The recipes are rows of :mod:`fuseplan.planner.lowering.recipes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from fuseplan.kernels.ir.index import Size, product
from fuseplan.kernels.ir.ir import RegisterType, register_type
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.body import BodyBuilder
from fuseplan.planner.lowering.views import Position, Specs

Build: TypeAlias = Callable[[BodyBuilder, OpNode, Position], int]
#: The reason when an op cannot be lowered as it is (an unsupported attribute), else None.
Refuse: TypeAlias = Callable[[OpNode, Specs], str | None]

FLOATS = ("float64", "float32", "bfloat16", "float16")
HALVES = frozenset({"bfloat16", "float16"})
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
#: What an operand or a result may be.
DTYPES = (*FLOATS, "float8_e4m3fn", *INTEGERS, "bool")


@dataclass(frozen=True)
class Recipe:
    """How an op is lowered."""

    #: Emits the value at a position of the op's (first) result.
    build: Build
    #: The dimensions of operand 0 that the op folds (none where it writes a short fold out); None for pointwise ops.
    reduced_dim: Callable[[OpNode, Specs], tuple[int, ...]] | None = None
    refuse: Refuse | None = None
    #: ``row_shape`` where it is not that the folded dimensions are one (the groups of a group_norm).
    rows: Callable[[OpNode, Specs], tuple[Size, ...]] | None = None
    #: The same as ``build`` for each further result.
    others: tuple[Build, ...] = ()
    #: For an op that writes to operand 0, the dimension along which operand 1 says where to; None where all of the
    #: operand is written. ``build`` then emits what is written, at a position of that.
    writes: Callable[[OpNode, Specs], int | None] | None = None

    def reduced_size(self, node: OpNode, specs: Specs) -> Size | None:
        """Number of elements folded into each result; None when the op folds no row here."""
        if self.reduced_dim is None or not self.reduced_dim(node, specs):
            return None
        return self.row_shape(node, specs)[-1]

    def row_shape(self, node: OpNode, specs: Specs) -> tuple[Size, ...]:
        """Operand 0's shape as the op walks it: what counts its rows, then the number of elements of a row."""
        assert self.reduced_dim is not None
        shape = specs[node.inputs[0]].shape
        if self.rows is not None:
            return self.rows(node, specs)
        kept = len(shape) - len(self.reduced_dim(node, specs))
        return (*shape[:kept], product(shape[kept:]))


def result_type(p: BodyBuilder, node: OpNode) -> RegisterType:
    """Register type of the op's result."""
    return register_type(p.specs[node.outputs[0]].dtype)


def is_float(value: Any) -> bool:
    """True for an attribute that is a float, or stands for one that changes between calls."""
    return isinstance(value, float) or (isinstance(value, sympy.Expr) and not value.is_integer)


def argument(p: BodyBuilder, node: OpNode, name: str, number: int, position: Position, dtype: RegisterType) -> int:
    """Operand ``number``, or the scalar attribute ``name`` where a number stands in its place."""
    return p.const(node.attrs[name], dtype) if name in node.attrs else p.operand(node, number, position, dtype)


def of_one(compute: Callable[[BodyBuilder, OpNode, int], int], refuse: Refuse | None = None) -> Recipe:
    """A recipe of one operand, in the type of the result."""

    def build(p: BodyBuilder, node: OpNode, position: Position) -> int:
        return compute(p, node, p.operand(node, 0, position, result_type(p, node)))

    return Recipe(build, refuse=refuse)


def of_two(
    compute: Callable[[BodyBuilder, OpNode, int, int], int],
    meet: Callable[[BodyBuilder, OpNode], RegisterType] = result_type,
) -> Recipe:
    """A recipe of two operands, either of which may be a number, in the type in which they ``meet``."""

    def build(p: BodyBuilder, node: OpNode, position: Position) -> int:
        dtype = meet(p, node)
        a = argument(p, node, "self", 0, position, dtype)
        return compute(p, node, a, argument(p, node, "other", len(node.inputs) - 1, position, dtype))

    return Recipe(build)


def float_result(node: OpNode, specs: Specs) -> str | None:
    """Refuses integer results."""
    return None if specs[node.outputs[0]].dtype in FLOATS else "integer result"


def no_booleans(node: OpNode, specs: Specs) -> str | None:
    return "of booleans" if specs[node.inputs[0]].dtype == "bool" else None
