"""Ops that libraries run: matmuls, convolutions, attention, orders; and how a kernel is built around a matmul."""

from __future__ import annotations

import math
from functools import partial

from fuseplan.kernels.ir.index import evaluate_all
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import result_type, rows
from fuseplan.planner.ops.positions import Position, Specs
from fuseplan.planner.ops.windows import depthwise, refuse_depthwise


def _linear(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """``x @ w.T + bias``: x [..., K], w [N, K]."""
    *outer, column = position
    total = p.dot(node, (0, 1), column, tuple(outer), transposed=True)
    return _with_bias(p, node, total, position, 2) if len(node.inputs) > 2 else total


def _matmul(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """``x @ y``: x [..., K], y [K, N]."""
    if len(p.specs[node.inputs[1]].shape) != 2:
        raise NotLowerable(f"{node.op} ({node.name}): its second operand is no matrix")
    *outer, column = position
    return p.dot(node, (0, 1), column, tuple(outer), transposed=False)


def _addmm(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """``bias + x @ y``."""
    if node.attrs.get("alpha", 1) != 1 or node.attrs.get("beta", 1) != 1:
        raise NotLowerable(f"{node.op} ({node.name}) scales its operands")
    row, column = position
    return _with_bias(p, node, p.dot(node, (1, 2), column, (row,), transposed=False), position, 0)


def _with_bias(p: BodyBuilder, node: OpNode, total: Value, position: Position, number: int) -> Value:
    return total + p.operand(node, number, position, result_type(p, node))


def _pairs(node: OpNode, specs: Specs) -> float:
    """Of scaled dot product attention; causal: keys up to the query's own position."""
    (*outer, positions, _), keys = _shape(node, 0, specs), _shape(node, 1, specs)[-2]
    seen = positions * keys
    if node.attrs.get("is_causal"):
        within = min(positions, keys)
        seen = within * (within + 1) // 2 + (positions - within) * keys
    return float(math.prod(outer) * seen)


def _share(node: OpNode, specs: Specs) -> tuple[int, int]:
    """Keys after the last position that sees them are not read."""
    if not node.attrs.get("is_causal"):
        return 1, 1
    keys, positions = _shape(node, 1, specs)[-2], _shape(node, 0, specs)[-2]
    return min(keys, positions), max(keys, 1)


def _decode_pairs(node: OpNode, specs: Specs) -> float:
    """Of attention of one query position, whose keys may lie in pages that a block table lists."""
    keys = _shape(node, 1, specs)[2] * (_shape(node, 3, specs)[1] if _has_table(node) else 1)
    return float(math.prod(_shape(node, 0, specs)[:-1]) * keys)


def _decode_share(node: OpNode, specs: Specs) -> tuple[int, int]:
    """Pages in use."""
    pages = _shape(node, 1, specs)[0]
    return (min(pages, math.prod(_shape(node, 3, specs))), max(pages, 1)) if _has_table(node) else (1, 1)


def _has_table(node: OpNode) -> bool:
    return "block_table" not in node.attrs


def _shape(node: OpNode, number: int, specs: Specs) -> tuple[int, ...]:
    return evaluate_all(specs[node.inputs[number]].shape, {})


_matmul_row = partial(rows, "matmul", factors=(0, 1), new_memory=True, row_major=True)
_product_row = partial(rows, "product", factors=(0, 1), new_memory=True, row_major=True)

ANCHORS = {
    **_matmul_row("linear", _linear),
    **_matmul_row("mm", _matmul),
    **_matmul_row("matmul", _matmul, row_major=False),
    **_matmul_row("addmm", _addmm, factors=(1, 2)),
    **_matmul_row("bmm"),
    **_product_row("baddbmm", factors=(1, 2)),
    **_product_row("fuseplan.merged_linear.default"),
    **rows("convolution", "convolution conv1d conv3d", new_memory=True),
    **rows("convolution", "conv2d", depthwise, refuse=refuse_depthwise, new_memory=True),
    **rows("attention", "scaled_dot_product_attention", new_memory=True, pairs=_pairs, share=_share),
    **rows("attention", "fuseplan.decode_attention.default", new_memory=True, row_major=True,
           pairs=_decode_pairs, share=_decode_share),
    **rows("order", "topk sort sort.stable", launches=3, new_memory=True),
    # Overloads of which nothing more is known.
    **rows("product", "linear.* matmul.* mm.* bmm.* addmm.* baddbmm.*"),
    **rows("convolution", "convolution.* conv1d.* conv2d.* conv3d.*"),
}
