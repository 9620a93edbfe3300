"""View ops as address maps: where element ``position`` of a view lies in the tensor it views."""

from __future__ import annotations

from functools import partial

from fuseplan.kernels.ir.index import Index, as_size
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.op import rows
from fuseplan.planner.ops.positions import (
    Position,
    Specs,
    along,
    broadcast,
    normalise_dim,
    reshape_position,
    same_size,
    without,
)


def _reshape(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    return reshape_position(position, specs[value].shape, specs[node.inputs[0]].shape)


def _permute(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    dims = [normalise_dim(dim, len(position)) for dim in node.attrs["dims"]]
    return tuple(position[dims.index(dim)] for dim in range(len(dims)))


def _transpose(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    rank = len(position)
    a, b = normalise_dim(node.attrs["dim0"], rank), normalise_dim(node.attrs["dim1"], rank)
    moved = list(position)
    moved[a], moved[b] = moved[b], moved[a]
    return tuple(moved)


def _squeeze(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    shape, dims = specs[node.inputs[0]].shape, node.attrs.get("dim")
    named = range(len(shape)) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
    one = {normalise_dim(dim, len(shape)) for dim in named}
    kept = iter(position)
    return tuple(Index(0) if dim in one and same_size(size, 1) else next(kept) for dim, size in enumerate(shape))


def _slice(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    start = node.attrs.get("start") or 0
    if isinstance(start, int) and start < 0:
        start = as_size(specs[node.inputs[0]].shape[dim] + start)
        if isinstance(start, int):
            start = max(start, 0)
    return along(position, dim, position[dim] * (node.attrs.get("step") or 1) + start)


def _narrow(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    dim = normalise_dim(node.attrs["dim"], len(position))
    return along(position, dim, position[dim] + node.attrs["start"])


def _select(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    """select, and unbind, which selects each in turn."""
    shape = specs[node.inputs[0]].shape
    dim = normalise_dim(node.attrs.get("dim", 0), len(shape))
    number = node.attrs.get("index", node.outputs.index(value))
    if isinstance(number, int) and number < 0:
        number = as_size(shape[dim] + number)
    return (*position[:dim], Index(number), *position[dim:])


def _split(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    """split, split_with_sizes, chunk, unsafe_split: output number k starts where the earlier outputs end."""
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    earlier = node.outputs[: node.outputs.index(value)]
    return along(position, dim, position[dim] + as_size(sum(specs[output].shape[dim] for output in earlier)))


_row = partial(rows, "view")
_broadcast_row = partial(
    _row, view=lambda node, value, position, specs: broadcast(position, specs[node.inputs[0]].shape))

VIEWS = {
    **_row("view view_as", view=_reshape, spelled="view"),
    **_row("reshape reshape_as _unsafe_view flatten.using_ints",
           lambda p, node, position: p.pull(node.inputs[0], _reshape(node, node.outputs[0], position, p.specs)),
           view=_reshape, may_copy=True, rearranges=True, spelled="reshape"),
    **_row("unflatten.int", view=_reshape, spelled="reshape"),
    **_broadcast_row("expand expand_as", spelled="expand"),
    **_broadcast_row("broadcast_to"),
    **_row("permute", view=_permute),
    **_row("transpose.int", view=_transpose),
    **_row("t numpy_T", view=lambda node, value, position, specs: position[::-1]),
    **_row("mT", view=lambda node, value, position, specs: (*position[:-2], position[-1], position[-2])),
    **_row("unsqueeze", view=lambda node, value, position, specs: without(
        position, normalise_dim(node.attrs["dim"], len(position)))),
    **_row("squeeze squeeze.dim squeeze.dims", view=_squeeze),
    **_row("slice.Tensor", view=_slice, spelled="slice"),
    **_row("narrow", view=_narrow),
    **_row("select.int unbind.int", view=_select),
    **_row("split.Tensor split.sizes split_with_sizes unsafe_split.Tensor chunk", view=_split),
    **_row("alias detach", view=lambda node, value, position, specs: position),
}
