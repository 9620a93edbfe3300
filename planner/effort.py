"""What a generated kernel does besides moving bytes and arithmetic: the fields of ``Work`` that only predict.

The counts are those of a straightforward GPU kernel that holds what it loaded in registers. CPUs ignore them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fuseplan.kernels.index import Coord, Index, evaluate
from fuseplan.kernels.ir import ITEMSIZE, Apply, Const, Instr, KernelIR, Load, Reduce, Segment, operands
from fuseplan.kernels.triton_config import full_tile

#: Dependent instructions of folding a row: shuffles within a warp, then an exchange between warps.
_FOLD_STEPS = 3.0
#: The same where an address is data, which is loaded before what lies there: a way to memory and back.
_GATHER_STEPS = 8.0
#: Instructions for each element of a fold.
_FOLD_INSTRUCTIONS = 2.0
#: Instructions of a division or remainder by a constant, in an address that changes from column to column.
_DIVISION_INSTRUCTIONS = 4.0
#: Instructions of the polynomials, range reductions and corrections around a special function.
_POLYNOMIALS: Mapping[str, float] = {
    "sin": 20, "cos": 20, "tanh": 12, "erf": 20, "pow": 20, "int_floordiv": 20, "int_remainder": 20, "exp": 1,
    "log": 20, "sigmoid": 3, "div": 6, "reciprocal": 6, "sqrt": 6, "rsqrt": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """Fields of :class:`~fuseplan.costmodel.work.Work` with the same names."""

    requested_bytes: float = 0.0
    row_bytes: float = 0.0
    instructions: float = 0.0
    steps: float = 0.0


def kernel_effort(ir: KernelIR) -> Effort:
    """The effort of one launch of a static kernel."""
    segments = [_segment_effort(ir, segment) for segment in ir.segments]
    return Effort(
        requested_bytes=sum(_requested_bytes(ir, segment) for segment in ir.segments),
        row_bytes=max((one.row_bytes for one in segments), default=0.0),
        instructions=sum(one.instructions for one in segments),
        steps=max((one.steps for one in segments), default=0.0),
    )


def reduction_levels(segment: Segment) -> int:
    """How many reductions feed one another."""
    depth: list[int] = []
    for instr in segment.body:
        level = max((depth[arg] for arg in operands(instr)), default=0)
        depth.append(level + 1 if isinstance(instr, Reduce) else level)
    return max(depth, default=0)


def _segment_effort(ir: KernelIR, segment: Segment) -> Effort:
    cols = evaluate(segment.cols, {})
    rows = math.prod(evaluate(extent, {}) for extent in segment.rows)
    column = segment.col_axis
    per_row = segment.per_row()
    row_bytes = steps = instructions = 0.0
    for instr, once in zip(segment.body, per_row, strict=True):
        count = rows if once else rows * cols
        instructions += count * _instructions(instr, column)
        if isinstance(instr, Reduce):
            instructions += rows * cols * _FOLD_INSTRUCTIONS
        if not once:
            steps += not isinstance(instr, Const)
            row_bytes += cols * ITEMSIZE[ir.buffers[instr.buffer].dtype] if isinstance(instr, Load) else 0
    for store in segment.stores:
        once = segment.store_per_row(store)
        instructions += (rows if once else rows * cols) * (1.0 + _division_instructions(store.index, column))
        row_bytes += 0 if once else cols * ITEMSIZE[ir.buffers[store.buffer].dtype]
    levels = reduction_levels(segment)
    gathers = any(isinstance(instr, Load) and instr.gather is not None for instr in segment.body)
    waiting = _FOLD_STEPS * levels + _GATHER_STEPS * gathers
    return Effort(0.0, row_bytes if levels else 0.0, instructions, steps + waiting)


def _requested_bytes(ir: KernelIR, segment: Segment) -> float:
    """Bytes that the blocks of a segment load and store, each for itself; within a block, rows share what they can."""
    sizes = tuple(evaluate(extent, {}) for extent in (*segment.rows, segment.cols))
    block_rows = full_tile(ir, segment)[0]
    loads = {(one.buffer, one.index, one.gather is not None) for one in segment.body if isinstance(one, Load)}
    total = 0.0
    for buffer, index, gathered in loads | {(store.buffer, store.index, False) for store in segment.stores}:
        if segment.col_axis in index.axes():
            shared = 1 if gathered else min(block_rows, _shared_rows(index, sizes))
            total += math.prod(sizes) / shared * ITEMSIZE[ir.buffers[buffer].dtype]
    return total


def _shared_rows(index: Index, sizes: tuple[int, ...]) -> int:
    """Neighbouring rows for which an index is the same."""
    rows, axes = 1, index.axes()
    for axis in range(len(sizes) - 2, -1, -1):
        if axis in axes and sizes[axis] > 1:
            break
        rows *= sizes[axis]
    return rows


def _instructions(instr: Instr, column: int) -> float:
    """Instructions for one element, besides what the op table counts."""
    if isinstance(instr, Const | Reduce):
        return 0.0
    if isinstance(instr, Load):
        return 1.0 + _division_instructions(instr.index, column) + (4.0 if instr.gather is not None else 0.0)
    # 64-bit integers and floats take two registers.
    words = 2.0 if instr.dtype in ("int64", "float64") else 1.0
    if isinstance(instr, Apply):
        return words + _POLYNOMIALS.get(instr.op, 0.0)
    index = getattr(instr, "index", None)
    return words * (1.0 + (_division_instructions(index, column) if index is not None else 0.0))


def _division_instructions(index: Index, column: int) -> float:
    divisions = [atom for atom, _ in index.terms if not isinstance(atom, Coord)]
    return _DIVISION_INSTRUCTIONS * sum(column in atom.base.axes() for atom in divisions)
