"""The floor of a whole step: what memory and arithmetic alone take, as if the step were a single perfect kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from fuseplan.costmodel.device import DeviceSpec, DeviceSpecError, Mode
from fuseplan.costmodel.roofline import lower_bound
from fuseplan.costmodel.work import Work
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.candidates import Candidate, same_values, single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import find_regions, unique_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.ops.table import written_value
from fuseplan.planner.work.group_work import moved_bytes, op_work
from fuseplan.planner.work.library_work import read_bytes


def floor_us(table: GroupTable, spec: DeviceSpec, mode: Mode, seen_gbps: float = 0.0) -> float | None:
    """Microseconds that no plan of a static graph can beat; None where a peak that it needs was not measured.

    One launch, and the larger of two times: the arithmetic of all ops, and each byte once of weights, caches and other
    inputs read and of results written. Caches count whole: which of their rows a mask hides is data. Memory is as fast
    as when it was probed, or as it was seen to be since (``seen_gbps``).
    """
    try:
        return lower_bound(step_work(table), spec, mode, seen_gbps)
    except DeviceSpecError:
        return None


def step_work(table: GroupTable) -> Work:
    """The work of all regions of a static graph as one perfect kernel."""
    graph, moved, flops = table.graph, dict[str, float](), defaultdict[str, float](float)
    for occurrences in unique_regions(find_regions(graph)).values():
        first = occurrences[0]
        singles = single_candidates(graph, first)
        for one in singles:
            for unit, count in op_work(graph, one.ops[0]).flops.items():
                flops[unit] += count * len(occurrences)
        touched = _touched(table, singles)
        for occurrence in occurrences:
            names = same_values(graph, first, occurrence)
            for value, nbytes in touched.items():
                name = names.get(value, value)
                moved[name] = max(nbytes, moved.get(name, 0.0))
    return Work(flops=dict(flops), dram_bytes=sum(_outside(graph, moved).values()), launches=1)


def _touched(table: GroupTable, singles: list[Candidate]) -> dict[str, float]:
    """Bytes that a region's ops read or write of each value, each byte once."""
    kernels = {one.ops[0]: table.kernel(one) for one in singles}
    touched = moved_bytes(kernel for kernel in kernels.values() if kernel is not None)
    for name, kernel in kernels.items():
        for value, nbytes in _called(table.graph, name) if kernel is None else ():
            touched[value] = max(nbytes, touched.get(value, 0.0))
    return touched


def _called(graph: DataflowGraph, name: str) -> Iterator[tuple[str, float]]:
    """Source values that a library's call reads or writes, with their bytes."""
    node, flow = graph.op(name), compute_graph_of(graph)
    for value in node.inputs:
        for source in flow.sources_of(value):
            yield source, read_bytes(value, node, graph.specs)
    for value in node.outputs:
        yield value, read_bytes(value, node, graph.specs)


def _outside(graph: DataflowGraph, moved: Mapping[str, float]) -> dict[str, float]:
    """What of it no region makes, or is a result: caches that are written in place count as what they were."""
    flow, found = compute_graph_of(graph), dict[str, float]()
    for value, nbytes in moved.items():
        root = _root(graph, value)
        at = flow.producer.get(root)
        if at is None or not flow.is_member(at) or root in flow.escapes:
            found[root] = max(nbytes, found.get(root, 0.0))
    return found


def _root(graph: DataflowGraph, value: str) -> str:
    """The value whose memory an op wrote to, where one did."""
    flow = compute_graph_of(graph)
    while (at := flow.producer.get(value)) is not None and (written := written_value(flow.nodes[at])) is not None:
        sources = flow.sources_of(written)
        if len(sources) != 1:
            break
        (value,) = sources
    return value
