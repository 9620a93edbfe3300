"""Fit an iteration space to its indices: merge axes that are walked as one, cut words out of a row, cut where masks
change.

A ``cat`` along the last dimension selects its operand by comparing the column with a constant. Between two such columns
every comparison has one outcome: the select and the load guards fold away.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from fuseplan.kernels.ir.index import Atom, Coord, FloorDiv, Index, Mod, Size, as_size
from fuseplan.kernels.ir.ir import Apply, Const, Instr, Iota, Load, Segment, renamed

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
    """The words of a column as rows, where addresses divide it by their width: eight int4 numbers then share a load."""
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
    return split if all(access.index.is_affine_in(axis + 1) for access in split.accesses) else segment


#: More pieces than this cost more than the masks.
MAX_PIECES = 8
#: A narrower piece would not fill a vector.
MIN_COLS = 16
_WIDE = 8

#: A column position ``slope * col + offset``.
_Line = tuple[int, int]
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}


def split_columns(segment: Segment) -> tuple[Segment, ...]:
    """Pieces of a segment without reductions that cover its columns; the segment alone where nothing is gained."""
    if segment.has_reduction() or not isinstance(segment.cols, int):
        return (segment,)
    compared, stepped = _breakpoints(segment)
    edges = [0, *sorted(compared | stepped), segment.cols]
    widths = [high - low for low, high in pairwise(edges)]
    # Masks cost little; elements that no vector loads as one cost more than a narrow piece, beside a wide one.
    least = 1 if stepped and segment.cols >= _WIDE * MIN_COLS else MIN_COLS
    if not 1 < len(widths) <= MAX_PIECES or min(widths) < least:
        return (segment,)
    return tuple(_piece(segment, low, high) for low, high in pairwise(edges))


def _line(instr: Instr, col_axis: int) -> _Line | None:
    if not isinstance(instr, Const | Iota) or instr.dtype not in ("int64", "int32"):
        return None
    return (0, int(instr.value)) if isinstance(instr, Const) else _index_line(instr.index, col_axis)


def _index_line(index: Index, col_axis: int) -> _Line | None:
    slope = index.coefficient(col_axis)
    plain = all(isinstance(atom, Coord) and atom.axis == col_axis for atom, _ in index.terms)
    return (slope, index.const) if plain and isinstance(slope, int) and isinstance(index.const, int) else None


def _difference(operands: Iterable[Instr], col_axis: int) -> _Line | None:
    """Left operand less right operand of a comparison, as a function of the column."""
    left, right = (_line(instr, col_axis) for instr in operands)
    return (left[0] - right[0], left[1] - right[1]) if left is not None and right is not None else None


def _breakpoints(segment: Segment) -> tuple[set[int], set[int]]:
    """Columns inside the row where a comparison changes its outcome, and where a division steps."""
    axis, cols, body = segment.col_axis, int(segment.cols), segment.body
    compared = [instr for instr in body if isinstance(instr, Apply) and instr.op in _COMPARE]
    lines = [(instr.op, _difference((body[arg] for arg in instr.args), axis)) for instr in compared]
    changes = (_changes(op, line, cols) for op, line in lines if line is not None)
    return set[int]().union(*changes), set[int]().union(*(_steps(index, axis, cols) for index in segment.indices()))


def _changes(op: str, line: _Line, cols: int) -> set[int]:
    """Columns inside the row where the comparison of a line with 0 changes its outcome."""
    slope, offset = line
    root = -offset // slope if slope != 0 else 0

    def holds(column: int) -> bool:
        return _COMPARE[op](slope * column + offset, 0)

    return {column for column in (root, root + 1) if 0 < column < cols and holds(column) != holds(column - 1)}


def _steps(index: Index, col_axis: int, cols: int) -> set[int]:
    """Columns where a floor division or remainder of a column position steps; none when there are too many."""
    found: set[int] = set()
    for atom, _ in index.terms:
        if not isinstance(atom, FloorDiv | Mod):
            continue
        line = _index_line(atom.base, col_axis)
        if line is None or line[0] == 0 or not isinstance(atom.divisor, int):
            continue
        (slope, offset), divisor = line, atom.divisor
        first, last = offset // divisor, (slope * (cols - 1) + offset) // divisor
        if abs(last - first) < MAX_PIECES:
            ends = [offset - quotient * divisor for quotient in range(min(first, last) + 1, max(first, last) + 1)]
            found |= {-(end // slope) if slope > 0 else end // -slope + 1 for end in ends}
    return found


def _piece(segment: Segment, low: int, high: int) -> Segment:
    """Columns ``[low, high)`` as a segment of their own."""
    return specialised(segment, Index.coord(segment.col_axis, high - low) + low, high - low)


def specialised(segment: Segment, column: Index, cols: int) -> Segment:
    """The segment for ``cols`` of its columns, of which ``column`` is one, with what is alike in all of them folded."""
    axis = segment.col_axis
    moved = segment.with_indices(lambda index: index.substitute({axis: column}))
    body: list[Instr] = []
    #: New ids of the old values.
    names: list[int] = []

    def truth(value: int) -> bool | None:
        """An old value that is the same bool in every column."""
        instr = body[names[value]]
        return bool(instr.value) if isinstance(instr, Const) and instr.dtype == "bool" else None

    for instr in moved.body:
        if isinstance(instr, Apply):
            known = [truth(arg) for arg in instr.args]
            if instr.op == "where" and known[0] is not None:
                names.append(names[instr.args[1 if known[0] else 2]])
                continue
            line = _difference((body[names[arg]] for arg in instr.args), axis) if instr.op in _COMPARE else None
            if line is None:
                decided = _logic(instr.op, known)
            else:  # as in the first column, where no other one differs
                decided = None if _changes(instr.op, line, cols) else _COMPARE[instr.op](line[1], 0)
            instr = instr if decided is None else Const("bool", decided)
        elif isinstance(instr, Load) and instr.mask is not None and (shown := truth(instr.mask)) is not None:
            if not shown:
                instr = Const(instr.dtype, instr.other)
            elif instr.gather is None:
                instr = replace(instr, mask=None)
        names.append(len(body))
        body.append(renamed(instr, names.__getitem__))
    stores = tuple(store.with_values(names.__getitem__) for store in moved.stores)
    return Segment(segment.rows, cols, tuple(body), stores)


def _logic(op: str, known: Sequence[bool | None]) -> bool | None:
    """The result of a logical op where the operands that are known decide it."""
    if op == "logical_not" and known[0] is not None:
        return not known[0]
    if op == "logical_and" and (False in known or None not in known):
        return False not in known
    if op == "logical_or" and (True in known or None not in known):
        return True in known
    return None
