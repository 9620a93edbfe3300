"""Recipes of matmuls: asked for its value at an index, one makes a product of the segment and reads its sum there.

They are not among :data:`~fuseplan.planner.lowering.recipes.RECIPES`: no kernel but one built around a matmul has them.
"""

from __future__ import annotations

from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.body import BodyBuilder
from fuseplan.planner.lowering.recipe import Recipe, result_type
from fuseplan.planner.lowering.views import Position


def _linear(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """``x @ w.T + bias``: x [..., K], w [N, K]."""
    *rows, column = position
    total = p.dot(node, (0, 1), column, tuple(rows), transposed=True)
    return _with_bias(p, node, total, position, 2) if len(node.inputs) > 2 else total


def _matmul(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """``x @ y``: x [..., K], y [K, N]."""
    if len(p.specs[node.inputs[1]].shape) != 2:
        raise NotLowerable(f"{node.op} ({node.name}): its second operand is no matrix")
    *rows, column = position
    return p.dot(node, (0, 1), column, tuple(rows), transposed=False)


def _addmm(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """``bias + x @ y``."""
    if node.attrs.get("alpha", 1) != 1 or node.attrs.get("beta", 1) != 1:
        raise NotLowerable(f"{node.op} ({node.name}) scales its operands")
    row, column = position
    return _with_bias(p, node, p.dot(node, (1, 2), column, (row,), transposed=False), position, 0)


def _with_bias(p: BodyBuilder, node: OpNode, total: int, position: Position, number: int) -> int:
    return p.apply("add", total, p.operand(node, number, position, result_type(p, node)))


MATMULS: dict[str, Recipe] = {
    "aten.linear.default": Recipe(_linear),
    "aten.mm.default": Recipe(_matmul),
    "aten.matmul.default": Recipe(_matmul),
    "aten.addmm.default": Recipe(_addmm),
}
