"""Rewrites of a segment that keep its meaning: fewer axes, longer rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuseplan.kernels.index import Atom, Coord, FloorDiv, Index, Mod, Size, as_size
from fuseplan.kernels.ir import Instr, Iota, Load, Segment


def collapse_axes(segment: Segment) -> Segment:
    """Merge neighbouring axes that every index walks as one; without reductions rows merge into the columns, too.

    A contiguous ``[B, S, H]`` pointwise kernel becomes a single row of ``B * S * H`` columns.
    """
    axis = segment.col_axis - 1
    while axis >= 0:
        merged = _merge(segment, axis)
        segment = merged or segment
        axis -= 1
    return segment


def _merge(segment: Segment, axis: int) -> Segment | None:
    """The segment with axes ``axis`` and ``axis + 1`` made one, or None where an index tells them apart."""
    extents: list[Size] = [*segment.rows, segment.cols]
    if axis + 1 == segment.col_axis and segment.has_reduction():
        return None
    body: list[Instr] = []
    for instr in segment.body:
        if isinstance(instr, Load | Iota):
            index = _merge_index(instr.index, axis, extents)
            if index is None:
                return None
            instr = replace(instr, index=index)
        body.append(instr)
    stores = []
    for store in segment.stores:
        index = _merge_index(store.index, axis, extents)
        if index is None:
            return None
        stores.append(replace(store, index=index))
    extents[axis : axis + 2] = [as_size(extents[axis] * extents[axis + 1])]
    return Segment(tuple(extents[:-1]), extents[-1], tuple(body), tuple(stores))


def _merge_index(index: Index, axis: int, extents: Sequence[Size]) -> Index | None:
    outer, inner = extents[axis], extents[axis + 1]
    slow, fast = index.coefficient(axis), index.coefficient(axis + 1)
    if inner == 1:
        fast = slow
    elif outer != 1 and as_size(slow - fast * inner) != 0:
        return None
    terms: list[tuple[Atom, Size]] = []
    for atom, coef in index.terms:
        if isinstance(atom, Coord):
            if atom.axis not in (axis, axis + 1):
                terms.append((Coord(atom.axis - (atom.axis > axis), atom.extent), coef))
            continue
        base = _merge_index(atom.base, axis, extents)
        if base is None:
            return None
        terms.append((FloorDiv(base, atom.divisor) if isinstance(atom, FloorDiv) else Mod(base, atom.divisor), coef))
    total = as_size(outer * inner)
    if total != 1 and not (isinstance(fast, int) and fast == 0):
        terms.append((Coord(axis, total), fast))
    return Index.build(index.const, terms)
