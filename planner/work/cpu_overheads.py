"""What a generated C++ kernel issues: the fields of ``Work`` that only CPUs' predictions use.

The counts are of the code that :mod:`fuseplan.kernels.cpp.emitter` writes, in units of a vector instruction for one
fp32 element, whose rate is measured. What the compiler cannot vectorise takes as long as a whole vector of these.
"""

from __future__ import annotations

import math

from fuseplan.kernels.cpp.config import BYTES_PER_THREAD, ir_bytes
from fuseplan.kernels.cpp.emitter import simplified_segments
from fuseplan.kernels.ir.index import Index, evaluate_all
from fuseplan.kernels.ir.ir import ITEMSIZE, Apply, Const, Instr, KernelIR, Load, Reduce, Segment
from fuseplan.kernels.ir.ops import op_spec

#: Elements of a vector: what is loaded or stored one by one (gathers, strides) takes as long as so many.
_VECTOR = 16.0
#: A bool is loaded by itself, compared and widened.
_BOOL_LOAD = 3 * _VECTOR
#: Loading or storing a type that is converted, loading under a mask, and integers and floats of eight bytes: two
#: instructions for one.
_TWO = 2.0
#: The polynomial of a special function, for each operation that the op table counts.
_SPECIAL = 10.0
#: An instruction outside the loop over columns, once a row: one that waits for its result, and a loop's beginning.
_ROW = 4 * _VECTOR


def lanes(ir: KernelIR) -> float:
    """Of a static kernel, in units of a vector instruction for one element."""
    return sum(_segment_lanes(ir, segment) for segment in simplified_segments(ir))


def threads(ir: KernelIR) -> int:
    """How many threads a static kernel has enough to do for."""
    return max(1, (ir_bytes(ir) or 0) // BYTES_PER_THREAD)


def _segment_lanes(ir: KernelIR, segment: Segment) -> float:
    *outer, cols = evaluate_all((*segment.rows, segment.cols), {})
    per_row = segment.per_row()
    once = 1 + sum(per_row) + sum(segment.store_per_row(store) for store in segment.stores)
    body = zip(segment.body, per_row, strict=True)
    each = sum(_instruction(ir, segment, instr) for instr, is_once in body if isinstance(instr, Reduce) or not is_once)
    each += sum(
        _moved(ir.buffers[store.buffer].dtype, store.index, segment.col_axis)
        for store in segment.stores if not segment.store_per_row(store)
    )
    return math.prod(outer) * (_ROW * once + cols * each)


def _instruction(ir: KernelIR, segment: Segment, instr: Instr) -> float:
    """Of one value for one element."""
    if isinstance(instr, Const):
        return 0.0
    if isinstance(instr, Load):
        dtype = ir.buffers[instr.buffer].dtype
        if instr.gather is not None:
            return _VECTOR
        if dtype == "bool":
            return _BOOL_LOAD
        moved = _moved(dtype, instr.index, segment.col_axis)
        return max(moved, _TWO) if instr.mask is not None else moved
    if isinstance(instr, Apply) and op_spec(instr.op).unit == "sfu":
        return _SPECIAL * op_spec(instr.op).flops
    return _TWO if ITEMSIZE[instr.dtype] == 8 or instr.dtype == "bool" else 1.0


def _moved(dtype: str, index: Index, column: int) -> float:
    """Of loading or storing one element."""
    if not index.is_affine_in(column) or index.coefficient(column) not in (0, 1):
        return _VECTOR
    return 1.0 if dtype == "float32" else _TWO
