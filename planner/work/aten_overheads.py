"""What ATen's own CUDA kernels do besides moving bytes: the fields of ``Work`` that only predict, for one op alone.

An elementwise op over contiguous tensors of one type loads vectors; over anything else each element's address is
divided out of its position; a reduction gives each warp some rows; gathers have their own kernel. The counts are of
that code's structure (PyTorch 2.11), not of any device, and a calibration scales them. CPUs ignore them.
"""

from __future__ import annotations

import math

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.index import evaluate_all
from fuseplan.kernels.ir.ir import ITEMSIZE
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.ops.table import op_of, written_value

#: Dependent instructions of the other kinds, beyond those of a contiguous elementwise kernel.
_GATHER_STEPS, _FOLD_STEPS, _WHOLE_ROW_STEPS = 8.0, 20.0, 60.0
#: Those of one element in a strided kernel's thread, which divides its address first.
_ELEMENT_STEPS = 5.0
#: Elements of such a thread: half as many where a result has four bytes or more. Threads of its block.
_THREAD_ELEMENTS, _STRIDED_BLOCK = 4, 128
#: Those of a function that takes a division, a range reduction or a polynomial.
_FUNCTION_STEPS = 8.0
#: Dependent instructions of one turn of a reduction's loop, and of one row of a small gather, which takes them in turn.
_TURN_STEPS, _ROW_STEPS = 4.0, 10.0
#: A gather of no more rows than this takes them one after the other.
_SMALL_GATHER = 16
#: Threads of a block, of a warp, and elements that a thread of a reduction loads at once.
_BLOCK, _WARP, _VECTOR = 512, 32, 4
#: Threads of a block of a softmax across memory; rows side by side up to which several of them share one.
_SPATIAL_BLOCK, _SPATIAL_ROWS = 1024, 64
#: Elements of a row that a block scans in a turn, and the steps of that; and of a thread that scans one across memory.
_SCANNED_TURN, _SCAN_TURN_STEPS, _SCAN_ACROSS_STEPS = 1024, 20.0, 2.5
#: Rows that are scanned at once: its blocks keep a multiprocessor as busy as one, of the 132 that an H200 has.
_SCANNED_AT_ONCE = 132


def aten_overheads(graph: DataflowGraph, node: OpNode) -> Work:
    """The effort of ATen's kernel for one compute op of a static graph, and nothing of its bytes."""
    effort = op_of(node.op).effort
    written = node.inputs[-1] if written_value(node) is not None else node.outputs[0]
    elements = math.prod(_shape(graph, written))
    if effort in ("fold", "position"):
        read = math.prod(_shape(graph, node.inputs[0]))
        turns = _fold_turns(elements, max(read // max(elements, 1), 1))
        return Work(steps=_FOLD_STEPS, serial_steps=_TURN_STEPS * turns)
    if effort == "whole row":
        return Work(steps=_WHOLE_ROW_STEPS, serial_steps=_TURN_STEPS * _turns_across(graph, node))
    if effort == "scan":
        return Work(steps=_WHOLE_ROW_STEPS, serial_steps=_scan_steps(graph, node))
    if effort == "scatter":
        return Work(steps=_GATHER_STEPS)
    if effort == "gather":
        rows = math.prod(_shape(graph, node.inputs[1]))
        serial = _ROW_STEPS * rows if rows <= _SMALL_GATHER else 0.0
        return Work(steps=_GATHER_STEPS, serial_steps=serial)
    return _elementwise(graph, node, elements)


def _elementwise(graph: DataflowGraph, node: OpNode, elements: int) -> Work:
    """As ``gpu_kernel_impl`` in ATen's ``CUDALoops.cuh`` has it."""
    converting, dtype = _converts(graph, node), graph.specs[node.outputs[0]].dtype
    steps = _FUNCTION_STEPS if op_of(node.op).effort == "function" else 0.0
    if not converting and _same_layout(graph, node):
        return Work(steps=steps)
    most = _THREAD_ELEMENTS if converting or ITEMSIZE[dtype] < 4 else _THREAD_ELEMENTS // 2
    turns = min(most, math.ceil(elements / _STRIDED_BLOCK))
    return Work(steps=_ELEMENT_STEPS * turns + steps)


def _converts(graph: DataflowGraph, node: OpNode) -> bool:
    """Whether each element's type is looked up as it is loaded: not when narrowing a float, nor when comparing."""
    result = graph.specs[node.outputs[0]].dtype
    given = {graph.specs[value].dtype for value in node.inputs}
    narrowing = given == {"float32"} and result in ("bfloat16", "float16")
    return not narrowing and result != "bool" and any(dtype != result for dtype in given)


def _same_layout(graph: DataflowGraph, node: OpNode) -> bool:
    """Whether every operand has the result's shape and strides, sizes of one aside."""
    shape = _shape(graph, node.outputs[0])
    strides = [_strides(graph, value, len(shape)) for value in (*node.inputs, *node.outputs)]
    return all(len({own[dim] for own in strides}) == 1 for dim, extent in enumerate(shape) if extent > 1)


def _strides(graph: DataflowGraph, value: str, rank: int) -> list[int]:
    """Strides as broadcast to ``rank`` dimensions."""
    given = zip(_shape(graph, value), evaluate_all(graph.specs[value].strides, graph.symbols), strict=True)
    own = [0 if extent == 1 else stride for extent, stride in given]
    return ([0] * (rank - len(own)) + own)[-rank:] if rank else []


def _shape(graph: DataflowGraph, value: str) -> tuple[int, ...]:
    return evaluate_all(graph.specs[value].shape, graph.symbols)


def _fold_turns(outputs: int, reduced: int) -> float:
    """Turns in which a thread folds its share of a row, as ``setReduceConfig`` of ATen's ``Reduce.cuh`` shapes blocks.
    """
    height = min(_floor_power_of_2(outputs), _BLOCK // min(_floor_power_of_2(reduced), _WARP))
    width = min(_floor_power_of_2(reduced), _BLOCK // height)
    each = reduced / width
    lanes = width * height if each >= min(_BLOCK // 2, 16 * height) else width
    return reduced / (lanes * _VECTOR)


def _turns_across(graph: DataflowGraph, node: OpNode) -> float:
    """Turns in which one thread of a softmax walks a row that lies across memory, as ``SpatialSoftMax_getBlockSize`` of
    ATen's ``SoftMax.cu`` shapes its blocks: three times, one element in a turn.
    """
    shape, dim = _shape(graph, node.inputs[0]), node.attrs.get("dim")
    if not isinstance(dim, int) or not shape:
        return 0.0
    row, *beside = shape[dim % len(shape):]
    columns = min(math.prod(beside), _SPATIAL_BLOCK)
    if columns <= 1 or not row:
        return 0.0
    shares = columns <= _SPATIAL_ROWS <= row
    threads = _floor_power_of_2(min(row, _SPATIAL_BLOCK // columns)) if shares else 1
    return 3.0 * math.ceil(row / threads)


def _scan_steps(graph: DataflowGraph, node: OpNode) -> float:
    """A block goes along a row, and a thread along one that lies across memory, as in ATen's ``ScanUtils.cuh``."""
    shape = _shape(graph, node.inputs[0]) or (1,)
    dim = node.attrs["dim"] % len(shape)
    row, *beside = shape[dim:]
    if math.prod(beside) > 1:
        return _SCAN_ACROSS_STEPS * row
    return _SCAN_TURN_STEPS * math.ceil(row / _SCANNED_TURN) * max(1.0, math.prod(shape[:dim]) / _SCANNED_AT_ONCE)


def _floor_power_of_2(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)
