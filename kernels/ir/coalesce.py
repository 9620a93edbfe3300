"""Fit an iteration space to its indices: merge dimensions that are walked as one, cut words out of a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fuseplan.kernels.ir.index import Coord, FloorDiv, Index, Mod, Size, as_size
from fuseplan.kernels.ir.ir import Iota, Load, Segment

#: Narrower words (the pairs of a rotary embedding) would make rows too short for the vectors of a processor.
MIN_WORD = 8


def coalesce(segment: Segment) -> Segment:
    """The same computation over the fewest dimensions.

    Dimensions of size one are dropped. Neighbouring rows merge wherever every index is affine in both with
    ``outer coefficient == inner coefficient * inner extent``; without a reduction the columns merge too (TensorIterator
    calls this coalescing).
    """
    extents: list[Size] = [*segment.rows, segment.cols]
    while len(extents) > 1 and extents[-1] == 1 and not segment.has_reduction():
        segment = _drop(segment, extents, len(extents) - 1)
        extents.pop()
        segment = replace(segment, rows=tuple(extents[:-1]), cols=extents[-1])
    axis = 0
    while axis < len(extents) - 1:
        if isinstance(extents[axis], int) and extents[axis] == 1:
            segment = _drop(segment, extents, axis)
            del extents[axis]
            continue
        is_col = axis + 1 == len(extents) - 1
        if not (is_col and segment.has_reduction()) and _mergeable(segment, extents, axis):
            segment = _merge(segment, extents, axis)
            extents[axis : axis + 2] = [as_size(extents[axis] * extents[axis + 1])]
            axis = max(axis - 1, 0)
            continue
        axis += 1
    return replace(segment, rows=tuple(extents[:-1]), cols=extents[-1])


def split_words(segment: Segment) -> Segment:
    """The same computation with words of the columns as rows, where addresses divide the column by their width.

    Eight int4 numbers that lie in one int32 then read it once for all, and no address divides the column.
    """
    if segment.has_reduction() or not isinstance(segment.cols, int):
        return segment
    axis, cols = segment.col_axis, segment.cols
    divisors = [
        atom.divisor
        for index in _indices(segment)
        for atom, _ in index.terms
        if isinstance(atom, FloorDiv | Mod) and atom.base.coefficient(axis) != 0
    ]
    if not divisors or not all(isinstance(divisor, int) for divisor in divisors):
        return segment
    width = math.gcd(cols, *divisors)
    if not MIN_WORD <= width < cols:
        return segment
    column = Index.coord(axis, cols // width) * width + Index.coord(axis + 1, width)
    split = replace(_rewrite(segment, {axis: column}), rows=(*segment.rows, cols // width), cols=width)
    loads = [instr.index for instr in split.body if isinstance(instr, Load)]
    addresses = [*loads, *(store.index for store in split.stores)]
    return split if all(index.is_affine_in(axis + 1) for index in addresses) else segment


def _indices(segment: Segment) -> Iterator[Index]:
    for instr in segment.body:
        if isinstance(instr, Load | Iota):
            yield instr.index
    for store in segment.stores:
        yield store.index


def _mergeable(segment: Segment, extents: list[Size], axis: int) -> bool:
    inner = extents[axis + 1]
    for index in _indices(segment):
        if not (index.is_affine_in(axis) and index.is_affine_in(axis + 1)):
            return False
        if as_size(index.coefficient(axis) - index.coefficient(axis + 1) * inner) != 0:
            return False
    return True


def _rewrite(segment: Segment, values: dict[int, Index]) -> Segment:
    body = tuple(
        replace(instr, index=instr.index.substitute(values)) if isinstance(instr, Load | Iota) else instr
        for instr in segment.body
    )
    return replace(segment, body=body, stores=tuple(
        replace(store, index=store.index.substitute(values)) for store in segment.stores
    ))


def _shifted(extents: list[Size], first: int, by: int) -> dict[int, Index]:
    """Coordinates from ``first`` on move ``by`` axes down."""
    return {axis: Index.coord(axis - by, extents[axis]) for axis in range(first, len(extents))}


def _drop(segment: Segment, extents: list[Size], axis: int) -> Segment:
    return _rewrite(segment, {axis: Index(0), **_shifted(extents, axis + 1, 1)})


def _merge(segment: Segment, extents: list[Size], axis: int) -> Segment:
    merged = as_size(extents[axis] * extents[axis + 1])
    # The merged coordinate takes the inner coefficient; the outer term is absorbed.
    inner = Index(0, ((Coord(axis, merged), 1),))
    return _rewrite(segment, {axis: Index(0), axis + 1: inner, **_shifted(extents, axis + 2, 1)})
