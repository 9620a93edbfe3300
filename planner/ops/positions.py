"""Positions: where an element of a tensor is, one index a dimension, and the same element in another shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from fuseplan.kernels.ir.index import Index, Size, as_size, flatten, product, row_major_strides
from fuseplan.planner.graph.dataflow import TensorSpec

Position: TypeAlias = tuple[Index, ...]
Specs: TypeAlias = Mapping[str, TensorSpec]


def normalise_dim(dim: Any, rank: int) -> int:
    """A dimension number in ``0 .. rank-1``."""
    number = int(dim)
    return number + rank if number < 0 else number


def same_size(a: Size, b: Size) -> bool:
    return bool(as_size(a - b) == 0)


def reshape_position(position: Position, out_shape: Sequence[Size], in_shape: Sequence[Size]) -> Position:
    """The position in ``in_shape`` of the element at ``position`` of ``out_shape`` (same elements, row-major)."""
    return _reshaped(tuple(position), tuple(out_shape), tuple(in_shape))


@lru_cache(maxsize=2**14)  # asked again for each group that holds the view
def _reshaped(position: Position, out_shape: tuple[Size, ...], in_shape: tuple[Size, ...]) -> Position:
    result: list[Index] = []
    out_at = in_at = 0
    while in_at < len(in_shape) or out_at < len(out_shape):
        out_run, in_run = _matching_run(out_shape[out_at:], in_shape[in_at:])
        out_dims, in_dims = out_shape[out_at : out_at + out_run], in_shape[in_at : in_at + in_run]
        linear = flatten(position[out_at : out_at + out_run], row_major_strides(out_dims))
        for number, (extent, stride) in enumerate(zip(in_dims, row_major_strides(in_dims), strict=True)):
            if same_size(extent, 1):
                result.append(Index(0))
            else:
                result.append(linear // stride if number == 0 else (linear // stride) % extent)
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


def broadcast(position: Position, shape: Sequence[Size]) -> Position:
    """The position in an operand of ``shape`` that is broadcast to the result's."""
    aligned = zip(position[len(position) - len(shape) :], shape, strict=True)
    return tuple(Index(0) if extent == 1 else index for index, extent in aligned)


def without(position: Position, dim: int) -> Position:
    """``position`` without its coordinate along ``dim``."""
    return position[:dim] + position[dim + 1 :]


def along(position: Position, dim: int, index: Index) -> Position:
    """``position`` with ``index`` along ``dim``."""
    return (*position[:dim], index, *position[dim + 1 :])


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether a picture's several channels, its second dimension, follow one another in memory, place after place."""
    if not spec.is_static or len(spec.shape) < 3 or spec.shape[1] == 1:
        return False
    count, channels, *rest = spec.shape
    expected = row_major_strides((count, *rest, channels))
    own = (spec.strides[0], *spec.strides[2:], spec.strides[1])
    pairs = zip((count, *rest, channels), own, expected, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


@lru_cache(maxsize=4096)
def reshape_is_view(source: TensorSpec, result: TensorSpec) -> bool:
    """True when reading ``result`` through its own strides or through the reshape map gives the same addresses."""
    coords = tuple(Index.coord(axis, extent) for axis, extent in enumerate(result.shape))
    mapped = reshape_position(coords, result.shape, source.shape)
    return flatten(mapped, source.strides) == flatten(coords, result.strides)
