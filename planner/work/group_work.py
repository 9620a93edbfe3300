"""The work of a fused kernel, and of the ATen ops it would replace: exact byte and flop counts from the IR."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.work import Work
from fuseplan.kernels.gpu.overlap import overlap_of
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.gathers import footprint, gathered_elements, value_axes
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import ITEMSIZE, Apply, Buffer, Dot, KernelIR, Reduce, Scan, Segment, Store
from fuseplan.kernels.ir.ops import REDUCTIONS, op_spec
from fuseplan.kernels.ir.reduction_loops import sweeps
from fuseplan.kernels.ir.rewrite import ancestors
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.lowering.lower import Lowered, NotLowerable, group_nodes, lower
from fuseplan.planner.ops.table import kind_of, mutates, op_of
from fuseplan.planner.work.aten_overheads import aten_overheads
from fuseplan.planner.work.kernel_overheads import kernel_overheads, lanes, launches, threads
from fuseplan.planner.work.library_work import library_work


def kernel_work(ir: KernelIR, hot: Sequence[bool] | None = None, device_type: str = "cpu") -> Work:
    """Work of one launch of a static kernel; ``hot`` says per input whether it was just produced (None: all of them).

    ``dram_bytes`` counts each distinct element once however often the body reads it; ``l2_bytes`` counts what later
    passes over a row read again; flops follow the op table. What is gathered counts as hot: popular rows come back.
    """
    repeated = 0.0
    flops: dict[str, float] = {}
    for segment in ir.segments:
        passes = sweeps(segment, centre=not is_cpu(device_type))
        for load in segment.loads:
            if load.gather is None and segment.col_axis in load.index.axes():
                elements = footprint(load.index, segment.extents())
                repeated += (passes - 1) * elements * ITEMSIZE[ir.buffers[load.buffer].dtype]
        _count_flops(segment, flops)
    gathered = gathered_elements(ir)
    moved = {
        number: _reached_bytes(ir.buffers[number], indices, gathered.get(number, 0))
        for number, indices in _touched(ir).items()
    }
    cold = [number for number, is_hot in enumerate(hot or ()) if not is_hot]
    return replace(
        kernel_overheads(ir),
        flops=flops,
        dram_bytes=float(sum(moved.values())),
        l2_bytes=repeated,
        launches=1 if is_cpu(device_type) else launches(ir),
        written_bytes=float(sum(nbytes for number, nbytes in moved.items() if ir.buffers[number].is_output)),
        cold_bytes=float(sum(moved.get(number, 0) for number in cold if number not in gathered)),
        gathered_bytes=float(sum(
            min(gathered[number] * ITEMSIZE[ir.buffers[number].dtype], ir.buffers[number].distinct_bytes())
            for number in cold if number in gathered
        )),
        elements=float(sum(math.prod(segment.extents()) for segment in ir.segments)),
        lanes=lanes(ir) if is_cpu(device_type) else 0.0,
        threads=threads(ir) if is_cpu(device_type) else 0,
        more_results=max(0, len(ir.outputs) - len(ir.overwritten) - 1),
    )


def _touched(ir: KernelIR) -> dict[int, dict[Index, int]]:
    """Elements that loads and stores reach, by buffer and index; a buffer that is only gathered from has none."""
    touched: dict[int, dict[Index, int]] = {}
    for segment in ir.bodies:
        sizes = segment.extents()
        for load in segment.loads:
            own = touched.setdefault(load.buffer, {})
            if load.gather is None:
                own[load.index] = footprint(load.index, sizes)
        for store in segment.stores:
            touched.setdefault(store.buffer, {})[store.index] = _stored(segment, store, sizes)
    return touched


def _stored(segment: Segment, store: Store, sizes: tuple[int, ...]) -> int:
    """Elements that a store reaches; where data says which rows, each of them another one."""
    axes = set() if store.scatter is None else value_axes(segment)[store.scatter.value] - store.index.axes()
    return footprint(store.index, sizes) * math.prod(sizes[axis] for axis in axes)


def _reached_bytes(buffer: Buffer, indices: Mapping[Index, int], gathered: int) -> float:
    """Bytes of a buffer in so many elements, each once."""
    return float(min((sum(indices.values()) + gathered) * ITEMSIZE[buffer.dtype], buffer.distinct_bytes()))


def moved_bytes(kernels: Iterable[Lowered]) -> dict[str, float]:
    """Bytes that static kernels read or write of each value; what several of them touch alike counts once."""
    touched: dict[str, dict[Index, int]] = {}
    gathered: dict[str, int] = {}
    buffers: dict[str, Buffer] = {}
    for one in kernels:
        names = (*one.inputs, *one.outputs)
        for number, indices in _touched(one.ir).items():
            buffers[names[number]] = one.ir.buffers[number]
            touched.setdefault(names[number], {}).update(indices)
        for number, elements in gathered_elements(one.ir).items():
            gathered[names[number]] = max(elements, gathered.get(names[number], 0))
    return {name: _reached_bytes(buffers[name], touched[name], gathered.get(name, 0)) for name in touched}


def launch_mode(config: Config, regime: str) -> Mode:
    """How a generated GPU kernel of a configuration is launched in a regime."""
    if regime != "graph":
        return "kernel"
    overlap = overlap_of(config)
    return "early" if overlap == "early" else "overlapped" if overlap != "none" else "graph"


def _count_flops(segment: Segment, flops: dict[str, float]) -> None:
    sizes = segment.extents()
    rows, elements = math.prod(sizes[:-1]), math.prod(sizes)
    places = (store.scatter.value for store in segment.stores if store.scatter is not None)
    for value in ancestors(segment.body, (*(store.value for store in segment.stores), *places)):
        instr, once_per_row = segment.body[value], segment.per_row[value]
        if isinstance(instr, Reduce | Scan):
            unit, cost, count = "fp32", REDUCTIONS[instr.kind].flops, elements
        elif isinstance(instr, Apply):
            spec = op_spec(instr.op)
            unit, cost, count = spec.unit, spec.flops, rows if once_per_row else elements
        else:
            continue
        if instr.dtype == "float64":
            unit = "fp64"
        flops[unit] = flops.get(unit, 0.0) + cost * count
    for dot in {one for one in segment.body if isinstance(one, Dot)}:
        inner = segment.products[dot.product].left.cols
        unit = "fp32" if rows == 1 else "bf16_matmul"
        flops[unit] = flops.get(unit, 0.0) + 2.0 * elements * inner


def op_work(graph: DataflowGraph, name: str) -> Work:
    """Work of one op run alone by ATen: a kernel for compute ops, a library call for opaque ones, nothing for views."""
    node = graph.op(name)
    kind = kind_of(node, graph.specs)
    if kind == "view":
        return Work()
    if kind == "compute":
        try:
            return _aten_work(graph, node)
        except NotLowerable:
            pass
    cold = {value for value, hot in zip(node.inputs, hot_inputs(graph, node.inputs), strict=True) if not hot}
    return library_work(node, node.inputs, node.outputs, graph.specs, call_name(graph, node), cold)


def _aten_work(graph: DataflowGraph, node: OpNode) -> Work:
    lowered = lower(graph, (node.name,), "fp32", node.outputs[: 1 + len(op_of(node.op).others)])
    fused = kernel_work(lowered.ir, hot_inputs(graph, lowered.inputs))
    effort = aten_overheads(graph, node)
    return replace(
        fused, row_bytes=0.0, row_loaded_bytes=0.0, steps=effort.steps, serial_steps=effort.serial_steps,
        views=len(group_nodes(graph, lowered)) - 1, call=call_name(graph, node), lanes=0.0, threads=0, more_results=0,
    )


def call_name(graph: DataflowGraph, node: OpNode) -> str:
    """``Work.call``: op and type read; ``.number`` with a Python number, ``.one`` with a tensor of one element."""
    specs = [graph.specs[value] for value in node.inputs or node.outputs]
    number = len(node.inputs) == 1 and isinstance(node.attrs.get("other"), int | float)
    one = len(specs) > 1 and any(spec.numel == 1 for spec in specs)
    return f"{node.op}.{specs[0].dtype}{'.number' if number else '.one' if one else ''}"


def hot_inputs(graph: DataflowGraph, values: Iterable[str]) -> tuple[bool, ...]:
    """Per value, True for an activation just produced; False for a weight, and for a cache that was written into."""
    def is_fresh(value: str) -> bool:
        node = graph.maker(value)
        if node is None or mutates(node):
            return False
        return kind_of(node, graph.specs) != "view" or (bool(node.inputs) and is_fresh(node.inputs[0]))

    return tuple(value in graph.fresh or is_fresh(value) for value in values)
