"""View ops as address maps: where element ``position`` of a view lies in the tensor it views.

A ``reshape`` that copies is the same map with a store behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from fuseplan.kernels.ir.index import Index, Size, as_size, flatten, product, row_major_strides
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec

Position: TypeAlias = tuple[Index, ...]
Specs: TypeAlias = Mapping[str, TensorSpec]
#: ``map(node, output value, position, specs)``: the position in the node's first operand.
ViewMap: TypeAlias = Callable[[OpNode, str, Position, Specs], Position]


def normalise_dim(dim: Any, rank: int) -> int:
    """A dimension number in ``0 .. rank-1``."""
    number = int(dim)
    return number + rank if number < 0 else number


def same_size(a: Size, b: Size) -> bool:
    return bool(as_size(a - b) == 0)


def reshape_position(position: Position, out_shape: Sequence[Size], in_shape: Sequence[Size]) -> Position:
    """The position in ``in_shape`` of the element at ``position`` of ``out_shape`` (same elements, row-major).

    The shapes are cut into the shortest runs of dimensions with equal products: most need no division.
    """
    result: list[Index] = []
    out_at = in_at = 0
    while in_at < len(in_shape) or out_at < len(out_shape):
        out_run, in_run = _matching_run(out_shape[out_at:], in_shape[in_at:])
        out_dims, in_dims = out_shape[out_at : out_at + out_run], in_shape[in_at : in_at + in_run]
        linear = flatten(position[out_at : out_at + out_run], row_major_strides(out_dims))
        result.extend(_unflatten(linear, in_dims))
        out_at += out_run
        in_at += in_run
    return tuple(result)


def _matching_run(out_shape: Sequence[Size], in_shape: Sequence[Size]) -> tuple[int, int]:
    for total in range(1, len(out_shape) + len(in_shape) + 1):
        for out_run in range(max(0, total - len(in_shape)), min(total, len(out_shape)) + 1):
            in_run = total - out_run
            if same_size(product(out_shape[:out_run]), product(in_shape[:in_run])):
                return out_run, in_run
    return len(out_shape), len(in_shape)


def _unflatten(linear: Index, dims: Sequence[Size]) -> list[Index]:
    position = [Index(0)] * len(dims)
    for number, (extent, stride) in enumerate(zip(dims, row_major_strides(dims), strict=True)):
        if not same_size(extent, 1):
            position[number] = linear // stride if number == 0 else (linear // stride) % extent
    return position


def _reshape(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    return reshape_position(position, specs[value].shape, specs[node.inputs[0]].shape)


def broadcast(position: Position, shape: Sequence[Size]) -> Position:
    """The position in an operand of ``shape`` that is broadcast to the result's."""
    aligned = zip(position[len(position) - len(shape) :], shape, strict=True)
    return tuple(Index(0) if extent == 1 else index for index, extent in aligned)


def _permute(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    rank = len(position)
    moved: list[Index] = [Index(0)] * rank
    for out_dim, in_dim in enumerate(node.attrs["dims"]):
        moved[normalise_dim(in_dim, rank)] = position[out_dim]
    return tuple(moved)


def _transpose(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    rank = len(position)
    a, b = normalise_dim(node.attrs["dim0"], rank), normalise_dim(node.attrs["dim1"], rank)
    moved = list(position)
    moved[a], moved[b] = moved[b], moved[a]
    return tuple(moved)


def without(position: Position, dim: int) -> Position:
    """``position`` without its coordinate along ``dim``."""
    return position[:dim] + position[dim + 1 :]


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


def along(position: Position, dim: int, index: Index) -> Position:
    """``position`` with ``index`` along ``dim``."""
    return (*position[:dim], index, *position[dim + 1 :])


def _narrow(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    dim = normalise_dim(node.attrs["dim"], len(position))
    return along(position, dim, position[dim] + node.attrs["start"])


def _select(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    shape = specs[node.inputs[0]].shape
    dim = normalise_dim(node.attrs["dim"], len(shape))
    number = node.attrs["index"]
    if isinstance(number, int) and number < 0:
        number = as_size(shape[dim] + number)
    return (*position[:dim], Index(number), *position[dim:])


def _split(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    """split, split_with_sizes, chunk, unsafe_split: output number k starts where the earlier outputs end."""
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    earlier = node.outputs[: node.outputs.index(value)]
    return along(position, dim, position[dim] + as_size(sum(specs[output].shape[dim] for output in earlier)))


def _unbind(node: OpNode, value: str, position: Position, specs: Specs) -> Position:
    dim = normalise_dim(node.attrs.get("dim", 0), len(specs[node.inputs[0]].shape))
    return (*position[:dim], Index(node.outputs.index(value)), *position[dim:])


#: Ops whose result is a rearrangement of their first operand.
VIEW_MAPS: dict[str, ViewMap] = {
    f"aten.{name}": view_map
    for view_map, names in (
        (_reshape, ("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
                    "view_as.default", "reshape_as.default")),
        (lambda node, value, position, specs: broadcast(position, specs[node.inputs[0]].shape),
         ("expand.default", "expand_as.default", "broadcast_to.default")),
        (_permute, ("permute.default",)),
        (_transpose, ("transpose.int",)),
        (lambda node, value, position, specs: position[::-1], ("t.default", "numpy_T.default")),
        (lambda node, value, position, specs: (*position[:-2], position[-1], position[-2]), ("mT.default",)),
        (lambda node, value, position, specs: without(position, normalise_dim(node.attrs["dim"], len(position))),
         ("unsqueeze.default",)),
        (_squeeze, ("squeeze.default", "squeeze.dim", "squeeze.dims")),
        (_slice, ("slice.Tensor",)),
        (_narrow, ("narrow.default",)),
        (_select, ("select.int",)),
        (_split, ("split.Tensor", "split.sizes", "split_with_sizes.default", "unsafe_split.Tensor", "chunk.default")),
        (_unbind, ("unbind.int",)),
        (lambda node, value, position, specs: position, ("alias.default", "detach.default")),
    )
    for name in names
}
#: Of those, ops that copy when strides cannot express the result.
MAY_COPY = frozenset({
    "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints", "aten.reshape_as.default",
})


def is_address_map(node: OpNode, specs: Specs) -> bool:
    """True when the op moves no data: a view, or a ``reshape`` whose result strides can express."""
    if node.op not in MAY_COPY:
        return node.op in VIEW_MAPS
    return reshape_is_view(specs[node.inputs[0]], specs[node.outputs[0]])


@lru_cache(maxsize=4096)
def reshape_is_view(source: TensorSpec, result: TensorSpec) -> bool:
    """True when reading ``result`` through its own strides or through the reshape map gives the same addresses."""
    coords = tuple(Index.coord(axis, extent) for axis, extent in enumerate(result.shape))
    mapped = reshape_position(coords, result.shape, source.shape)
    return flatten(mapped, source.strides) == flatten(coords, result.strides)
