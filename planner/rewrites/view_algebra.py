"""Which element of a tensor each element of another one is, through ops that only move elements: views and copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuseplan.kernels.ir.index import Index, Size
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.ops.positions import Position, along, normalise_dim
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites.trace_edit import arguments_of, is_pure, sizes_of, value_of

_aten = torch.ops.aten


def coordinates(shape: Sequence[Size]) -> Position:
    """The position of an element of a tensor, as it is."""
    return tuple(Index.coord(axis, extent) for axis, extent in enumerate(shape))


def source_position(node: fx.Node, position: Position) -> Position | None:
    """The position in a call's first operand of an element of its result; None where it may not merely move elements.
    """
    tensors = [one for one in node.all_input_nodes if value_of(one) is not None]
    if node.op != "call_function" or not is_pure(node.target) or tensors != list(node.args[:1]):
        return None
    op, (source, result) = op_of(str(node.target)), (sizes_of(one) for one in (node.args[0], node))
    if source is None or result is None:
        return None
    call = fx.map_arg(arguments_of(node), _number)
    if op.copies or (op.spelled == "to" and _looks_alike(node.args[0], node)):
        return position
    if node.target is _aten.repeat_interleave.self_int:
        dim, times = call["dim"], call["repeats"]
        fixed = isinstance(dim, int) and isinstance(times, int)
        return along(position, at := normalise_dim(dim, len(result)), position[at] // times) if fixed else None
    if op.view is None:
        return None
    specs = {"source": TensorSpec.contiguous(source, ""), "result": TensorSpec.contiguous(result, "")}
    return op.view(OpNode(str(node.target), ("source",), ("result",), call), "result", position, specs)


def _number(node: fx.Node) -> Any:
    """A size that a trace computes, as an expression; a tensor's node as it is."""
    value = node.meta.get("val")
    return value.node.expr if isinstance(value, torch.SymInt) else node


def _looks_alike(one: object, other: object) -> bool:
    """Whether two nodes' tensors have one type, on one device."""
    before, after = value_of(one), value_of(other)
    return before is not None and after is not None and (before.dtype, before.device) == (after.dtype, after.device)


def origins(node: fx.Node) -> Iterator[tuple[fx.Node, Position]]:
    """A node, and each that it is made of by calls that move elements: where an element of ``node`` is in it."""
    position: Position | None = coordinates(sizes_of(node) or ())
    while position is not None:
        yield node, position
        position = source_position(node, position)
        node = next(iter(node.all_input_nodes), node)
