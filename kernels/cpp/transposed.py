"""Loads whose rows, and not columns, lie side by side in memory: read in blocks that are transposed in registers.

A block is the columns of a tile for as many rows as share lines of memory. It waits in an array, as rows.
"""

from __future__ import annotations

from fuseplan.kernels.cpp.types import STORAGE_TYPE, indent
from fuseplan.kernels.cpp.values import ValueWriter
from fuseplan.kernels.ir.ir import ITEMSIZE, Load, Segment

#: Columns of a block, and how many more its rows have room for: the last vector of a row may begin before the block.
_COLS, _ROOM = 128, 16
_LINE_BYTES = 64


def transposed_loads(segment: Segment) -> tuple[int, ...]:
    """The values of a segment without folds that are loaded so."""
    inner = _inner_axis(segment)
    if segment.has_reduction() or inner is None:
        return ()
    return tuple(
        value for value, instr in enumerate(segment.body)
        if isinstance(instr, Load) and instr.gather is None and instr.mask is None
        and instr.index.is_affine_in(segment.col_axis) and instr.index.is_affine_in(inner)
        and instr.index.coefficient(inner) == 1 and instr.index.coefficient(segment.col_axis) not in (0, 1, -1))


def _inner_axis(segment: Segment) -> int | None:
    """The row axis that changes from row to row."""
    return next((axis for axis in reversed(range(segment.col_axis)) if segment.rows[axis] != 1), None)


def block_pointer(value: int) -> str:
    """Address of column 0 of a row of a block."""
    return f"x{value} + (row - top) * {_COLS + _ROOM} - from"


def in_blocks(writer: ValueWriter, first: list[str], rows: list[str]) -> list[str]:
    """The loops over blocks: ``first`` are the coordinates of the first row, ``rows`` the statements of a row."""
    inner, column, size = _inner_axis(writer.segment), writer.segment.col_axis, writer.size
    assert inner is not None
    arrays, fills = [], []
    loads = {value: instr for value in writer.blocks if isinstance(instr := writer.segment.body[value], Load)}
    height = _LINE_BYTES // min(ITEMSIZE[writer.buffers[load.buffer].dtype] for load in loads.values())
    for value, load in loads.items():
        kind = STORAGE_TYPE[writer.buffers[load.buffer].dtype]
        arrays.append(f"alignas(64) {kind} x{value}[{height * (_COLS + _ROOM)}];")
        place = f"b{load.buffer} + ({load.index.render(lambda a: 'from' if a == column else f'c{a}', size)})"
        fills.append(f"transpose<{_COLS + _ROOM}>({place}, {size(load.index.coefficient(column))}, bottom - top, "
                     f"high - from, x{value});")
    extent = size(writer.segment.rows[inner])
    return [
        *arrays,
        "const i64 stop = high;",
        f"for (i64 left = low; left < stop; left += {_COLS}) {{",
        f"  const i64 low = left, high = least(stop, left + {_COLS}), from = high >= L ? least(low, high - L) : low;",
        "  i64 top = begin, bottom = begin;",
        *indent([*first, "for (i64 row = begin; row < end; ++row) {", "  if (row == bottom) {",
                 f"    top = row, bottom = row + least({height}, least(end - row, {extent} - c{inner}));",
                 *indent(indent(fills)), "  }", *rows, "}"]),
        "}",
    ]
