"""Long folds of few rows: tasks share the columns, each folds a range, and what they fold is combined after all tasks.

That is done in the order of the ranges, which sizes alone decide on: threads do not change a bit of a result. What
needs a fold becomes a segment of its own, whose tasks begin then, and whose folds may have ranges as well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fuseplan.kernels.cpp.row_vectors import as_row_vectors
from fuseplan.kernels.ir.coalesce import coalesce
from fuseplan.kernels.ir.index import FloorDiv, Index, Mod, flatten, is_static, row_major_strides
from fuseplan.kernels.ir.ir import Buffer, Instr, Load, Reduce, Segment, Store
from fuseplan.kernels.ir.reduction_loops import folds_across, lies_apart, schedule
from fuseplan.kernels.ir.rewrite import needed

#: Tasks that are enough for the threads of any machine, and the elements of a range that are worth waking one of them.
_ENOUGH_TASKS, _LEAST_ELEMENTS = 256, 48 * 1024
#: Rows side by side that are one task at least; and columns of which each range has a multiple, if it can.
_SIDE_BY_SIDE, _ALIGNED = 64, 64


@dataclass(frozen=True)
class InRanges:
    """A segment with shared columns: ``segments`` fold its ranges into ``parts`` (ranges x rows), folds of ``kinds``
    combine those in the first range's place, and ``rest`` is what then follows, of one column if only once a row.
    """

    segments: tuple[Segment, ...]
    rest: Segment
    parts: tuple[Buffer, ...]
    kinds: tuple[str, ...]


def in_ranges(segment: Segment, first: int) -> InRanges | None:
    """The segment with its columns shared, where its rows are few and long: one, where later passes read it again, for
    of several each may stay in a cache; or where a row is several runs of memory. ``first`` is the number of the first
    of its parts among the buffers.
    """
    runs, (now, *later), body = _runs(segment), schedule(segment), segment.body
    most = runs if runs > 1 else _most_ranges(segment)
    again = len(later) > 1 or any(phase.elements or phase.stores for phase in later)
    if most < 2 or not later or (again and segment.num_rows > 1 and runs < 2):
        return None
    stores = [segment.stores[number] for number in now.stores]
    at_end = [store for number, store in enumerate(segment.stores) if number not in now.stores]
    row = flatten((Index.coord(*axis) for axis in enumerate(segment.rows)), row_major_strides(segment.rows))
    numbers = {value: first + number for number, value in enumerate(now.reductions)}
    stores += [Store(number, row, value) for value, number in numbers.items()]
    checks = {value: one.gather.check for value, one in enumerate(body) if isinstance(one, Load) and one.gather}
    early = {value for value, check in checks.items() if {value, check} & {*now.elements}}
    folding = _part(segment, body, stores, early)
    held = [Load(one.dtype, numbers[value], row) if value in numbers else one for value, one in enumerate(body)]
    choices = _choices(segment.cols, most) if runs == 1 else [(runs, segment.cols // runs)]  # only then divisions go
    ranges = min((_ranges(folding, first, (0, *choice)) for choice in choices), key=_cost)
    count, size = ranges.rows[0], ranges.cols
    left = segment.cols - count * size
    pieces = (ranges, _ranges(folding, first, (count, 1, left), count * size)) if left else (ranges,)
    shape = (count + bool(left), segment.num_rows)
    folds = [one for value in numbers if isinstance(one := body[value], Reduce)]
    parts = tuple(Buffer("part", one.dtype, shape, row_major_strides(shape), is_output=True) for one in folds)
    rest = _part(segment, held, at_end, {*checks} - early)
    rest = coalesce(rest, within_divisions=True) if again else replace(rest, cols=1)
    shared = tuple(as_row_vectors(coalesce(piece, within_divisions=True)) for piece in pieces)
    return InRanges(shared, rest, parts, tuple(one.kind for one in folds))


def _most_ranges(segment: Segment) -> int:
    """Ranges of each row, at most; where there are tasks enough without them, less than two."""
    if not is_static(*segment.rows, segment.cols) or segment.products or segment.has_scan() or not segment.num_rows:
        return 0
    together = min(segment.rows[-1], _SIDE_BY_SIDE) if folds_across(segment) else 1
    return int(min(_ENOUGH_TASKS * together // segment.num_rows, segment.cols * together // _LEAST_ELEMENTS))


def _runs(segment: Segment) -> int:
    """The runs of memory that a row is, where divisions of the column tell them apart; else 1. An operand that has one
    number for many columns, or the same numbers again and again, is read along the row as it is.
    """
    if not is_static(*segment.rows, segment.cols) or segment.products or segment.has_scan():
        return 1
    column = Index.coord(segment.col_axis, segment.cols)
    length = 0
    for load in segment.loads:
        apart = [atom for atom, _ in load.index.terms if isinstance(atom, FloorDiv | Mod) and atom.base == column]
        if {type(atom) for atom in apart} == {FloorDiv, Mod}:
            length = math.gcd(length, *(atom.divisor for atom in apart if is_static(atom.divisor)))
    return segment.cols // length if length >= _ALIGNED and segment.cols % length == 0 else 1


def _choices(cols: int, most: int) -> list[tuple[int, int]]:
    """Counts and sizes of ranges that leave no column over; one of each where there are none such."""
    even = [(count, cols // count) for count in range(most, max(1, most // 4), -1) if cols % count == 0]
    size = cols // most // _ALIGNED * _ALIGNED
    return even or [(cols // size, size)]


def _cost(ranges: Segment) -> tuple[int, bool, int]:
    """What is loaded one by one, for a division takes the columns apart; ranges that begin anywhere; few ranges."""
    return lies_apart(ranges, ranges.col_axis), ranges.cols % _ALIGNED > 0, -ranges.rows[0]


def in_runs(segment: Segment) -> Segment:
    """A segment without folds with the runs of memory that its rows are as rows."""
    runs = 1 if segment.has_reduction() else _runs(segment)
    return segment if runs == 1 else coalesce(_cut(segment, runs, segment.cols // runs), within_divisions=True)


def _cut(segment: Segment, count: int, size: int, low: int = 0) -> Segment:
    """So many ranges of a size, from column ``low`` on, as rows."""
    axes = {axis: Index.coord(axis + 1, extent) for axis, extent in enumerate(segment.rows)}
    axes[segment.col_axis] = Index.coord(0, count) * size + Index.coord(segment.col_axis + 1, size) + low
    moved = segment.with_indices(lambda index: index.substitute(axes))
    return replace(moved, rows=(count, *segment.rows), cols=size)


def _ranges(segment: Segment, first: int, place: tuple[int, int, int], low: int = 0) -> Segment:
    """Ranges that store their folds in parts; ``place`` begins with how many ranges are before them."""
    before, count, size = place
    moved = _cut(segment, count, size, low)
    part = (Index.coord(0, count) + before) * segment.num_rows
    stores = (replace(one, index=one.index + part) if one.buffer >= first else one for one in moved.stores)
    return replace(moved, stores=tuple(stores))


def _part(segment: Segment, body: Sequence[Instr], stores: Sequence[Store], lookups: Collection[int]) -> Segment:
    """Some stores and lookups with all that they need."""
    made, places = needed(body, [*lookups, *(value for store in stores for value in store.values)])
    return replace(segment, body=made, stores=tuple(store.with_values(places.__getitem__) for store in stores))
