"""View ops as address maps: where element ``position`` of a view lies in the tensor it views.

The same maps serve every op that only rearranges elements, whether or not strides can express the result (a ``reshape``
that copies is the same map with a store behind it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from fuseplan.kernels.ir.index import Index, Size, as_size, flatten, product, row_major_strides
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec

Position: TypeAlias = tuple[Index, ...]
Specs: TypeAlias = Mapping[str, TensorSpec]
#: ``map(node, output value, position, specs) -> (source value, position in it)``.
ViewMap: TypeAlias = Callable[[OpNode, str, Position, Specs], tuple[str, Position]]


def normalise_dim(dim: Any, rank: int) -> int:
    """A dimension number in ``0 .. rank-1``."""
    number = int(dim)
    return number + rank if number < 0 else number


def same_size(a: Size, b: Size) -> bool:
    return bool(as_size(a - b) == 0)


def reshape_position(position: Position, out_shape: Sequence[Size], in_shape: Sequence[Size]) -> Position:
    """The position in ``in_shape`` of the element at ``position`` of ``out_shape`` (same elements, row-major).

    The shapes are cut into the shortest runs of dimensions with equal products, so that most runs are one dimension on
    a side and need no division.
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
        for out_run in range(min(total, len(out_shape)) + 1):
            in_run = total - out_run
            if in_run > len(in_shape):
                continue
            if same_size(product(out_shape[:out_run]), product(in_shape[:in_run])):
                return out_run, in_run
    return len(out_shape), len(in_shape)


def _unflatten(linear: Index, dims: Sequence[Size]) -> list[Index]:
    strides = row_major_strides(dims)
    position: list[Index] = []
    for number, (extent, stride) in enumerate(zip(dims, strides, strict=True)):
        if same_size(extent, 1):
            position.append(Index(0))
            continue
        index = linear // stride
        position.append(index if number == 0 else index % extent)
    return position


def _identity(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    return node.inputs[0], position


def _reshape(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    source = node.inputs[0]
    return source, reshape_position(position, specs[value].shape, specs[source].shape)


def _expand(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    source = node.inputs[0]
    shape = specs[source].shape
    aligned = position[len(position) - len(shape) :] if shape else ()
    return source, tuple(
        Index(0) if same_size(extent, 1) else index for index, extent in zip(aligned, shape, strict=True)
    )


def _permute(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    rank = len(position)
    moved: list[Index] = [Index(0)] * rank
    for out_dim, in_dim in enumerate(node.attrs["dims"]):
        moved[normalise_dim(in_dim, rank)] = position[out_dim]
    return node.inputs[0], tuple(moved)


def _transpose(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    rank = len(position)
    a, b = normalise_dim(node.attrs["dim0"], rank), normalise_dim(node.attrs["dim1"], rank)
    moved = list(position)
    moved[a], moved[b] = moved[b], moved[a]
    return node.inputs[0], tuple(moved)


def _t(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    return node.inputs[0], tuple(reversed(position))


def _unsqueeze(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    dim = normalise_dim(node.attrs["dim"], len(position))
    return node.inputs[0], position[:dim] + position[dim + 1 :]


def _squeeze(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    source = node.inputs[0]
    shape = specs[source].shape
    rank = len(shape)
    dims = node.attrs.get("dim")
    if dims is None:
        named = set(range(rank))
    else:
        named = {normalise_dim(dim, rank) for dim in (dims if isinstance(dims, tuple | list) else (dims,))}
    kept = iter(position)
    return source, tuple(
        Index(0) if dim in named and same_size(shape[dim], 1) else next(kept) for dim in range(rank)
    )


def _slice(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    source = node.inputs[0]
    rank = len(position)
    dim = normalise_dim(node.attrs.get("dim", 0), rank)
    extent = specs[source].shape[dim]
    start = node.attrs.get("start") or 0
    if isinstance(start, int) and start < 0:
        start = as_size(extent + start)
        if isinstance(start, int):
            start = max(start, 0)
    moved = list(position)
    moved[dim] = position[dim] * (node.attrs.get("step") or 1) + start
    return source, tuple(moved)


def _narrow(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    dim = normalise_dim(node.attrs["dim"], len(position))
    moved = list(position)
    moved[dim] = position[dim] + node.attrs["start"]
    return node.inputs[0], tuple(moved)


def _select(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    source = node.inputs[0]
    shape = specs[source].shape
    dim = normalise_dim(node.attrs["dim"], len(shape))
    number = node.attrs["index"]
    if isinstance(number, int) and number < 0:
        number = as_size(shape[dim] + number)
    return source, (*position[:dim], Index(number), *position[dim:])


def _split(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    """split, split_with_sizes, chunk, unsafe_split: output number k starts where the earlier outputs end."""
    source = node.inputs[0]
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    number = node.outputs.index(value)
    start: Size = 0
    for earlier in node.outputs[:number]:
        start = as_size(start + specs[earlier].shape[dim])
    moved = list(position)
    moved[dim] = position[dim] + start
    return source, tuple(moved)


def _unbind(node: OpNode, value: str, position: Position, specs: Specs) -> tuple[str, Position]:
    source = node.inputs[0]
    dim = normalise_dim(node.attrs.get("dim", 0), len(specs[source].shape))
    return source, (*position[:dim], Index(node.outputs.index(value)), *position[dim:])


#: Ops whose result is a rearrangement of their first operand.
VIEW_MAPS: dict[str, ViewMap] = {
    "aten.view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.flatten.using_ints": _reshape,
    "aten.unflatten.int": _reshape,
    "aten.view_as.default": _reshape,
    "aten.reshape_as.default": _reshape,
    "aten.expand.default": _expand,
    "aten.expand_as.default": _expand,
    "aten.broadcast_to.default": _expand,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _t,
    "aten.numpy_T.default": _t,
    "aten.mT.default": lambda n, v, p, s: (n.inputs[0], (*p[:-2], p[-1], p[-2])),
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": _narrow,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split.sizes": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.chunk.default": _split,
    "aten.unbind.int": _unbind,
    "aten.alias.default": _identity,
    "aten.detach.default": _identity,
    "aten.view.dtype": _identity,
}
#: Of those, ops that copy when strides cannot express the result.
MAY_COPY = frozenset({
    "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints", "aten.reshape_as.default",
})
#: Reinterprets bits: an address map only when the dtype stays the same.
del VIEW_MAPS["aten.view.dtype"]


def is_address_map(node: OpNode, specs: Specs) -> bool:
    """True when the op moves no data: a view, or a ``reshape`` whose result strides can express.

    A reshape that must copy is told by its strides: a view keeps its source's elements in place, so its result spans
    exactly the addresses that the map gives.
    """
    if node.op not in VIEW_MAPS:
        return False
    if node.op not in MAY_COPY:
        return True
    return reshape_is_view(specs[node.inputs[0]], specs[node.outputs[0]])


@lru_cache(maxsize=4096)
def reshape_is_view(source: TensorSpec, result: TensorSpec) -> bool:
    """True when reading ``result`` through its own strides or through the reshape map gives the same addresses."""
    coords = tuple(Index.coord(axis, extent) for axis, extent in enumerate(result.shape))
    mapped = reshape_position(coords, result.shape, source.shape)
    return flatten(mapped, source.strides) == flatten(coords, result.strides)
