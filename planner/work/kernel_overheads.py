"""What a generated kernel does besides moving bytes and arithmetic: the fields of ``Work`` that only predict.

On GPUs they count a straightforward kernel that holds its loads in registers; on CPUs the code of
:mod:`fuseplan.kernels.cpp.emitter`, in vector instructions for one fp32 element (a whole vector where not vectorised).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fuseplan.costmodel.work import Work
from fuseplan.kernels.cpp.config import BYTES_PER_THREAD, count_tasks, ir_bytes, tile_choices
from fuseplan.kernels.cpp.contraction import Contraction, Sum
from fuseplan.kernels.cpp.emitter import simplified, simplified_segments
from fuseplan.kernels.cpp.row_vectors import RowVectors
from fuseplan.kernels.ir.gathers import value_axes
from fuseplan.kernels.ir.index import Index, evaluate
from fuseplan.kernels.ir.ir import ITEMSIZE, Apply, Const, Instr, KernelIR, Load, Reduce, Scan, Segment, operands
from fuseplan.kernels.ir.ops import REDUCTIONS, op_spec
from fuseplan.kernels.ir.reduction_loops import folds_across, reduction_depths, scans_in_parts, sweeps, with_totals
from fuseplan.kernels.triton.config import DEFAULT_PERSISTENT_COLS, default_splits, full_tile, line_rows

#: Dependent instructions of folding a row: shuffles within a warp, then an exchange between warps.
_FOLD_STEPS = 4.0
#: The same where an address is data, which is loaded before what lies there: a way to memory and back.
_GATHER_STEPS = 5.0
#: The same where programs hand over what they folded: a store, a counter and a load, each a way to memory and back.
_HAND_OVER_STEPS = 3 * _GATHER_STEPS
#: Instructions that a warp issues, one a cycle, in a step of 0.026 us: a tenth of what an elementwise kernel takes.
_STEP_INSTRUCTIONS = 50.0
#: Of a scan, for each element: it is added to those before it in its thread, and to what is before those.
_SCAN = 2.0
#: Elements that one thread has to do: those of a small pointwise tile, and of a row at most that is held in registers.
_TILE_SHARE, _ROW_SHARE = 4.0, 32.0
#: Uses of the special-function unit there, where they are not what the op table counts: conversions and roundings of
#: double precision are some, of a logarithm there is none.
_SPECIAL: Mapping[str, float] = {"sin": 5, "cos": 5, "tanh": 2, "sigmoid": 2, "erf": 1, "pow": 6, "log": 0}


def kernel_overheads(ir: KernelIR) -> Work:
    """The effort of one launch of a static kernel, and nothing of what it moves."""
    segments = [_segment_effort(ir, segment) for segment in ir.segments]
    largest = {name: max(getattr(one, name) for one in segments) for name in ("row_bytes", "row_loaded_bytes", "steps")}
    return Work(**largest, special=sum(one.special for one in segments))


def reduction_levels(segment: Segment) -> int:
    """How many reductions feed one another; a scan exchanges between threads as one does."""
    return max(*reduction_depths(segment), int(segment.has_scan()), 0)


def launches(ir: KernelIR) -> int:
    """Launches of a kernel on a GPU: several where programs share what they scan."""
    shared = [segment for segment in ir.segments if scans_in_parts(segment) and default_splits(ir, segment) > 1]
    return max((sweeps(with_totals(segment), centre=True) for segment in shared), default=1)


def _segment_effort(ir: KernelIR, segment: Segment) -> Work:
    sizes = segment.extents()
    together = line_rows(ir, segment) if folds_across(segment) else 1
    # Programs that share a long fold each have a part of it.
    parts = default_splits(ir, segment)
    cols = -(-sizes[-1] // parts) * together
    levels = reduction_levels(segment)
    issued, each = _issued(ir, segment)
    gathers = any(load.gather is not None for load in segment.loads)
    # A thread waits for what it computes of a row, whether or not others compute the same.
    steps = _GATHER_STEPS * gathers + _share(cols, levels) * each / _STEP_INSTRUCTIONS
    if not levels:
        return replace(issued, row_bytes=0.0, row_loaded_bytes=0.0, steps=steps + _chain(segment))
    # A row that is too long to be held is loaded for each sweep along it.
    walks = sweeps(segment, centre=True) if cols > DEFAULT_PERSISTENT_COLS else 1
    return replace(
        issued,
        row_bytes=issued.row_bytes * together / parts,
        row_loaded_bytes=issued.row_loaded_bytes * walks * together / parts,
        steps=steps + _FOLD_STEPS * levels + (_HAND_OVER_STEPS if parts > 1 else 0.0),
    )


def _issued(ir: KernelIR, segment: Segment) -> tuple[Work, float]:
    """Special functions of a segment, and what it loads and stores for a row; and instructions for an element."""
    (*outer, cols), block_rows = segment.extents(), full_tile(ir, segment)[0]
    rows = math.prod(outer)
    each = special = loaded_bytes = stored_bytes = 0.0
    for instr, once, axes in zip(segment.body, segment.per_row, value_axes(segment), strict=True):
        # What no coordinate of a row occurs in is one row of a block's tile, and computed once for all of them.
        shared = 1 if axes - {segment.col_axis} else block_rows
        each += _instructions(instr) / (max(cols, 1) if once else 1)
        special += rows * _special(instr) * (1 if once else cols / shared)
        if isinstance(instr, Load):
            loaded_bytes += 0 if once else cols * ITEMSIZE[ir.buffers[instr.buffer].dtype]
    for store in segment.stores:
        once = segment.store_per_row(store)
        each += 1 / max(cols, 1) if once else 1
        stored_bytes += 0 if once else cols * ITEMSIZE[ir.buffers[store.buffer].dtype]
    return Work(special=special, row_bytes=loaded_bytes + stored_bytes, row_loaded_bytes=loaded_bytes), each


def _chain(segment: Segment) -> float:
    """Dependent instructions of one element, from the first load to the last result: the longest chain."""
    chain: list[float] = []
    for instr, once in zip(segment.body, segment.per_row, strict=True):
        own = 0.0 if once or isinstance(instr, Const | Reduce) else 1.0
        chain.append(own + max((chain[arg] for arg in operands(instr)), default=0.0))
    return max((chain[store.value] for store in segment.stores), default=0.0)


def _share(cols: int, levels: int) -> float:
    """Elements that one thread does, one after the other, where there are few rows."""
    return min(_ROW_SHARE, cols / 32) if levels else _TILE_SHARE


def _instructions(instr: Instr) -> float:
    """Instructions for one element besides what the op table counts, in units of one of fp32 arithmetic."""
    if isinstance(instr, Const | Reduce):
        return 0.0
    if isinstance(instr, Load):
        return 1.0 + (4.0 if instr.gather is not None else 0.0)
    if isinstance(instr, Apply):
        spec = op_spec(instr.op)
        # Its operations are counted beside this, as half an instruction each.
        return 1.0 - (spec.flops / 2 if spec.unit == "fp32" else 0.0)
    return _SCAN * REDUCTIONS[instr.kind].flops if isinstance(instr, Scan) else 1.0


def _special(instr: Instr) -> float:
    """Uses of the special-function unit for one element."""
    if not isinstance(instr, Apply):
        return 0.0
    spec = op_spec(instr.op)
    return _SPECIAL.get(instr.op, spec.flops if spec.unit == "sfu" else 0.0)


# -- on a CPU ---------------------------------------------------------------------------------------------

#: Elements of a vector: what is loaded or stored one by one (gathers, strides) takes as long as so many.
_LANES = 16.0
#: A bool is loaded by itself, compared and widened.
_BOOL_LOAD = 3 * _LANES
#: Two instructions for one: of a type that is converted, a load under a mask, and numbers of eight bytes.
_TWO = 2.0
#: A scan along a vector in double precision: two halves, each widened, shifted and added three times, and narrowed; and
#: one of vectors that are added one after the other.
_SCAN_LANES, _SCAN_ACROSS = 24.0, 6.0
#: The share of that which a scan takes that is carried in its own precision.
_SCAN_OWN = 0.5
#: The polynomial of a special function, for each operation that the op table counts.
_POLYNOMIAL = 10.0
#: An instruction outside the loop over columns, once a row: one that waits for its result, and a loop's beginning.
_ROW_LANES = 4 * _LANES


def lanes(ir: KernelIR) -> float:
    """Of a static kernel, in units of a vector instruction for one element."""
    tasks = simplified(ir).tasks
    return sum(_segment_lanes(tasks, segment) for segment in tasks.segments)


def threads(ir: KernelIR) -> int:
    """How many threads a static kernel keeps busy: no more than it has tasks."""
    segments = simplified_segments(ir)
    return max(1, min((ir_bytes(ir) or 0) // BYTES_PER_THREAD, count_tasks(segments, 1, tile_choices(segments)[0])))


def _segment_lanes(ir: KernelIR, segment: Segment) -> float:
    if isinstance(segment, RowVectors):
        return _row_vector_lanes(ir, segment)
    *outer, cols = segment.extents()
    per_row = segment.per_row
    once = 1 + sum(per_row) + sum(segment.store_per_row(store) for store in segment.stores)
    body = zip(segment.body, per_row, strict=True)
    repeated = (instr for instr, is_once in body if isinstance(instr, Reduce) or not is_once)
    each = sum(_instruction_lanes(ir, segment, instr) for instr in repeated)
    if isinstance(segment, Contraction):
        each += sum(_sum_lanes(ir, one, math.prod(outer)) for one in segment.sums)
    each += sum(
        _moved_lanes(ir.buffers[store.buffer].dtype, store.index, segment.col_axis)
        for store in segment.stores if not segment.store_per_row(store)
    )
    return math.prod(outer) * (_ROW_LANES * once + cols * each)


def _sum_lanes(ir: KernelIR, one: Sum, rows: int) -> float:
    """Of a sum of one row: what makes its weights is shared among all ``rows``."""
    body = zip(one.weights.body, one.weights.per_row, strict=True)
    made = sum(_instruction_lanes(ir, one.weights, instr) for instr, is_once in body if not is_once)
    return evaluate(one.weights.cols, {}) * (made / rows + len(one.values))


def _row_vector_lanes(ir: KernelIR, segment: RowVectors) -> float:
    """Of a segment whose vectors hold rows: what is one number for all lanes takes as long as a whole vector."""
    *outer, rows = segment.extents()
    turns, whole = evaluate(segment.folded, {}), segment.whole
    total = 0.0
    for instr, shared, once in zip(segment.body, segment.per_row, whole.per_row, strict=True):
        own = _LANES if shared else rows * _instruction_lanes(ir, segment, instr)
        total += own * (1 if once and not isinstance(instr, Reduce) else turns)
    for store in segment.stores:
        moved = _moved_lanes(ir.buffers[store.buffer].dtype, store.index, segment.col_axis)
        total += rows * moved * (1 if whole.store_per_row(store) else turns)
    return math.prod(outer) * (_ROW_LANES + total)


def _instruction_lanes(ir: KernelIR, segment: Segment, instr: Instr) -> float:
    """Of one value for one element."""
    if isinstance(instr, Const):
        return 0.0
    if isinstance(instr, Load):
        dtype = ir.buffers[instr.buffer].dtype
        if instr.gather is not None:
            return _LANES
        if dtype == "bool":
            return _BOOL_LOAD
        moved = _moved_lanes(dtype, instr.index, segment.col_axis)
        return max(moved, _TWO) if instr.mask is not None else moved
    if isinstance(instr, Scan):
        once = _SCAN_ACROSS if isinstance(segment, RowVectors) else _SCAN_LANES
        return once * REDUCTIONS[instr.kind].flops * (_SCAN_OWN if instr.kind in ("max", "min") else 1.0)
    if isinstance(instr, Apply) and op_spec(instr.op).unit == "sfu":
        return _POLYNOMIAL * op_spec(instr.op).flops
    return _TWO if ITEMSIZE[instr.dtype] == 8 or instr.dtype == "bool" else 1.0


def _moved_lanes(dtype: str, index: Index, column: int) -> float:
    """Of loading or storing one element."""
    if not index.is_affine_in(column) or index.coefficient(column) not in (0, 1):
        return _LANES
    return 1.0 if dtype == "float32" else _TWO
