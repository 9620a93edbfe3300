"""Matmuls of few rows with narrow weights as tasks: what their left sides have in float32, then sums and an epilogue.

The numbers of the left sides are made once a call, into memory of the kernel's own. Each task has rows of weights to
itself, reads each of them once as it is stored, and computes the epilogue of the sums that it has made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuseplan.kernels.cpp.values import shared_by_lanes, side_by_side
from fuseplan.kernels.ir.coalesce import coalesce, specialised
from fuseplan.kernels.ir.contraction import stored_bytes
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.index import Index, flatten, is_static, row_major_strides
from fuseplan.kernels.ir.ir import ITEMSIZE, Buffer, Dot, Instr, KernelIR, Load, RowValue, Segment, Store, renamed
from fuseplan.kernels.ir.rewrite import identity, needed

#: Rows above which libraries, whose tiles reuse the weights, are faster.
MAX_ROWS = 16
#: Words of a row that lie side by side (``BLOCK`` of the header).
BLOCK = 16
#: Numbers of the inner dimension that one word of weights may hold.
_WORDS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Sum:
    """Rows ``index`` of ``weights`` times the rows in buffer ``left``; word by word, ``values`` are their numbers."""

    weights: Segment
    values: tuple[int, ...]
    index: Index
    left: int
    total: int


@dataclass(frozen=True)
class Contraction(Segment):
    """An epilogue that reads ``sums`` from buffers: what a task has of both are the same columns, and all rows."""

    sums: tuple[Sum, ...] = ()


@dataclass(frozen=True)
class Contracted:
    """Contractions, the segments ``before`` them that make their left sides, and the buffers that both share."""

    before: tuple[Segment, ...]
    contractions: tuple[Contraction, ...]
    buffers: tuple[Buffer, ...]


def refusal(ir: KernelIR) -> str | None:
    """Why no kernel is made of the matmuls of ``ir``, None where one is."""
    if ir.symbols:
        return f"a matmul with dynamic sizes ({', '.join(ir.symbols)})"
    if ir.overwritten and may_fail(ir):
        return "a matmul beside a write that may fail"
    for segment in (segment for segment in ir.segments if segment.products):
        if not 1 <= segment.num_rows <= MAX_ROWS:
            return f"a matmul of more than {MAX_ROWS} rows: libraries are faster"
        for one in segment.products:
            if not one.right.cols * segment.cols:
                return "a matmul of nothing"
            if any(instr.dtype == "float64" for side in (one.left, one.right, segment) for instr in side.body):
                return "a matmul in float64: the C++ back end leaves it to libraries"
            if stored_bytes(ir, one.right) >= ITEMSIZE[one.dtype]:
                return f"a matmul whose weights are stored as wide as {one.dtype}: libraries read them as fast"
            if any(load.gather is not None for load in one.right.loads):
                return "a matmul whose weights are looked up"
            if _apart(_in_words(one.right, one.right_value)[0]):
                return "a matmul whose weights do not lie row by row"
    return None


def parts_of(segments: Sequence[Segment], first: int) -> Contracted:
    """Segments with products as tasks; ``first`` is the number of the first buffer of their own."""
    buffers: list[Buffer] = []
    #: The left sides, by what each is; and of each what is stored, by value and words.
    lefts: dict[Segment, dict[tuple[int, int], int]] = {}

    def buffer(size: int) -> int:
        buffers.append(Buffer("part", "float32", (1, size), (size, 1), is_output=True))
        return first + len(buffers) - 1

    def left(side: Segment, value: int, words: int) -> int:
        """The buffer of a value of a left side; 0 words: of one number a row."""
        stored = lefts.setdefault(side, {})
        if (value, words) not in stored:
            blocks = -(-side.cols // (words * BLOCK)) if words else 0
            stored[value, words] = buffer(side.num_rows * max(1, words * blocks * BLOCK))
        return stored[value, words]

    made = []
    for segment in segments:
        row = _row(segment)
        body, sums = list[Instr](), dict[Dot, Sum]()
        for instr in segment.body:
            if isinstance(instr, RowValue):
                side = segment.products[instr.product].left
                instr = Load(instr.dtype, left(side, instr.value, 0), row)
            elif isinstance(instr, Dot):
                if instr not in sums:
                    one = segment.products[instr.product]
                    weights, values = _in_words(one.right, one.right_value)
                    given = left(one.left, one.left_value, len(values))
                    sums[instr] = Sum(weights, values, instr.index, given, buffer(segment.num_rows * segment.cols))
                column = Index.coord(segment.col_axis, segment.cols)
                instr = Load(instr.dtype, sums[instr].total, row * segment.cols + column)
            body.append(instr)
        made.append(Contraction(segment.rows, segment.cols, tuple(body), segment.stores, sums=tuple(sums.values())))
    before = [_left_stored(side, stored) for side, stored in lefts.items()]
    return Contracted(tuple(before), tuple(made), tuple(buffers))


def _row(segment: Segment) -> Index:
    return flatten((Index.coord(*axis) for axis in enumerate(segment.rows)), row_major_strides(segment.rows))


def _left_stored(side: Segment, stored: dict[tuple[int, int], int]) -> Segment:
    """A left side that stores its values: of ``BLOCK`` words of all rows, each row's numbers of one place in a word."""
    row, column, stores = _row(side), Index.coord(side.col_axis, side.cols), []
    for (value, words), number in stored.items():
        place = row
        if words:
            word, lines = column // words, column % words * side.num_rows + row
            place = word // BLOCK * (BLOCK * words * side.num_rows) + lines * BLOCK + word % BLOCK
        stores.append(Store(number, place, value))
    body, places = needed(side.body, (store.value for store in stores))
    segment = Segment(side.rows, side.cols, body, tuple(store.with_values(places.__getitem__) for store in stores))
    return coalesce(segment, within_divisions=True)


def _in_words(side: Segment, value: int) -> tuple[Segment, tuple[int, ...]]:
    """A right side whose columns are words of several numbers each, and these: as many as lie side by side."""
    found = [_split(side, value, words) for words in _WORDS if is_static(side.cols) and side.cols % words == 0]
    return min(found, key=lambda one: _apart(one[0]))


def _split(side: Segment, value: int, words: int) -> tuple[Segment, tuple[int, ...]]:
    cols, body, known, values = side.cols // words, list[Instr](), dict[object, int](), []
    whole = replace(side, stores=(Store(0, Index(0), value),))
    for number in range(words):
        piece = specialised(whole, Index.coord(side.col_axis, cols) * words + number, cols)
        made, places = needed(piece.body, (store.value for store in piece.stores))
        names: list[int] = []
        for instr in made:
            instr = renamed(instr, names.__getitem__)
            names.append(known.setdefault(identity(instr), len(body)))
            if names[-1] == len(body):
                body.append(instr)
        values.append(names[places[piece.stores[0].value]])
    return Segment(side.rows, cols, tuple(body), ()), tuple(values)


def _apart(side: Segment) -> int:
    """How many loads take their elements one by one."""
    loads = {(one.buffer, one.index) for one in side.loads if side.col_axis in one.index.axes()}
    return sum(not shared_by_lanes(index, side) and not side_by_side(index, side) for _, index in loads)
