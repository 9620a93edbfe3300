"""Fit an iteration space to its indices: merge axes that are walked as one, cut words out of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fuseplan.kernels.ir.index import Atom, Coord, FloorDiv, Index, Mod, Size, as_size
from fuseplan.kernels.ir.ir import Segment

#: Narrower words (the pairs of a rotary embedding) would make rows too short for the vectors of a processor.
MIN_WORD = 8


def coalesce(segment: Segment, within_divisions: bool = False) -> Segment:
    """The same computation over the fewest axes (TensorIterator calls this coalescing).

    Neighbouring axes merge wherever every index has ``outer coefficient == inner coefficient * inner extent``; rows
    merge into columns that are not reduced. With ``within_divisions`` so do axes that a division takes apart as one.
    """
    for axis in reversed(range(segment.col_axis)):
        segment = _merged(segment, axis, within_divisions) or segment
    return segment


def _merged(segment: Segment, axis: int, within_divisions: bool) -> Segment | None:
    """The segment with axes ``axis`` and ``axis + 1`` made one, or None where an index tells them apart."""
    extents: list[Size] = [*segment.rows, segment.cols]
    if axis + 1 == segment.col_axis and extents[axis] != 1 and segment.has_reduction():
        return None
    indices = {index: _merged_index(index, axis, extents, within_divisions) for index in segment.indices()}
    if None in indices.values():
        return None
    extents[axis : axis + 2] = [as_size(extents[axis] * extents[axis + 1])]
    merged = segment.with_indices(lambda index: indices[index] or index)
    return replace(merged, rows=tuple(extents[:-1]), cols=extents[-1])


def _merged_index(index: Index, axis: int, extents: Sequence[Size], within_divisions: bool) -> Index | None:
    outer, inner = extents[axis], extents[axis + 1]
    slow, fast = index.coefficient(axis), index.coefficient(axis + 1)
    if inner == 1:
        fast = slow
    elif outer != 1:
        affine = within_divisions or (index.is_affine_in(axis) and index.is_affine_in(axis + 1))
        if not affine or as_size(slow - fast * inner) != 0:
            return None
    terms: list[tuple[Atom, Size]] = []
    for atom, coef in index.terms:
        if isinstance(atom, Coord):
            if atom.axis not in (axis, axis + 1):
                terms.append((Coord(atom.axis - (atom.axis > axis), atom.extent), coef))
            continue
        base = _merged_index(atom.base, axis, extents, within_divisions)
        if base is None:
            return None
        terms.append((FloorDiv(base, atom.divisor) if isinstance(atom, FloorDiv) else Mod(base, atom.divisor), coef))
    total = as_size(outer * inner)
    if total != 1 and not (isinstance(fast, int) and fast == 0):
        terms.append((Coord(axis, total), fast))
    return Index.build(index.const, terms)


def split_words(segment: Segment) -> Segment:
    """The same computation with words of the columns as rows, where addresses divide the column by their width.

    Eight int4 numbers that lie in one int32 then read it once for all, and no address divides the column.
    """
    if segment.has_reduction() or not isinstance(segment.cols, int):
        return segment
    axis, cols = segment.col_axis, segment.cols
    divisors = [
        atom.divisor
        for index in segment.indices()
        for atom, _ in index.terms
        if isinstance(atom, FloorDiv | Mod) and atom.base.coefficient(axis) != 0
    ]
    if not divisors or not all(isinstance(divisor, int) for divisor in divisors):
        return segment
    width = math.gcd(cols, *divisors)
    if not MIN_WORD <= width < cols:
        return segment
    column = Index.coord(axis, cols // width) * width + Index.coord(axis + 1, width)
    split = segment.with_indices(lambda index: index.substitute({axis: column}))
    split = replace(split, rows=(*segment.rows, cols // width), cols=width)
    accesses = (*split.loads, *split.stores)
    return split if all(access.index.is_affine_in(axis + 1) for access in accesses) else segment
