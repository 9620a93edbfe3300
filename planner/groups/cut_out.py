"""A region cut out of its graph: a graph that holds it alone, in which it has the same key."""

from __future__ import annotations

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Region, TensorSpec
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.convex import Dependencies, bits
from fuseplan.planner.groups.regions import find_regions

#: Stands for whatever op lies on a path that leaves the region and comes back. Nothing runs it.
_OUTSIDE = "fuseplan.outside.default"


def cut_out(graph: DataflowGraph, region: Region) -> DataflowGraph:
    """A static graph with the ops of ``region`` alone, under their names; what it reads are its inputs.

    Raises:
        ValueError: By itself it would not be the region that it is in ``graph``.
    """
    alone = _cut(graph, region, [])
    if apart := _detours(graph, region) - _detours(alone, region):
        alone = _cut(graph, region, sorted(apart))
    if find_region(alone, region.key) is None:
        raise ValueError("its key depends on ops around it")
    return alone


def find_region(graph: DataflowGraph, key: str) -> Region | None:
    """The region of this key; None where the graph has none."""
    return next((one for one in find_regions(graph) if one.key == key), None)


def _cut(graph: DataflowGraph, region: Region, detours: list[tuple[str, str]]) -> DataflowGraph:
    inside = set(region.ops)
    nodes, order = [], [pair for pair in graph.orders() if inside.issuperset(pair)]
    specs = {value: graph.specs[value] for value in region.inputs}
    for name in sorted(region.ops, key=graph.position):
        node = graph.op(name)
        if before := [first for first, last in detours if last == name]:
            stand_in = f"outside of {name}"
            nodes.append(OpNode(_OUTSIDE, (), (stand_in,)))
            specs[stand_in] = TensorSpec((), "float32", ())
            order += [*((first, stand_in) for first in before), (stand_in, name)]
        nodes.append(node)
        specs |= {value: graph.specs[value] for value in node.outputs}
    paths = {name: graph.paths[name] for name in region.ops if name in graph.paths}
    alone = DataflowGraph(nodes, specs, region.inputs, region.outputs, order=order, paths=paths)
    alone.rounds = graph.rounds.intersection(specs)
    return alone


def _detours(graph: DataflowGraph, region: Region) -> set[tuple[str, str]]:
    """Pairs of the region's ops that a path through others orders."""
    flow = compute_graph_of(graph)
    members = sorted(at for at in map(flow.position.__getitem__, region.ops) if flow.is_member(at))
    detours = Dependencies.of(flow, members).detours
    return {(flow.names[members[a]], flow.names[members[b]]) for b, row in enumerate(detours) for a in bits(row)}
