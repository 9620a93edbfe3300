"""A region by itself: a graph that holds it alone, in which it has the same key; the same as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Region, TensorSpec
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.groups.candidates import region_dependencies
from fuseplan.planner.groups.regions import find_regions, split_common
from fuseplan.planner.work.group_work import hot_inputs

#: Stands for whatever op lies on a path that leaves the region and comes back. Nothing runs it.
_OUTSIDE = "fuseplan.outside.default"


def extract(graph: DataflowGraph, region: Region) -> DataflowGraph:
    """A static graph with the ops of ``region`` alone, under their names; what it reads are its inputs, ``fresh`` where
    an op makes them. ValueError where by itself it would not be the region that it is in ``graph``.
    """
    alone = _extract(graph, region, [])
    wanted, found = (set(region_dependencies(one, region).detour_pairs()) for one in (graph, alone))
    if apart := wanted - found:
        alone = _extract(graph, region, sorted(apart))
    if find_region(alone, region.key) is None:
        raise ValueError("its key depends on ops around it")
    hot = zip(region.inputs, hot_inputs(graph, region.inputs), strict=True)
    alone.fresh = frozenset(value for value, is_hot in hot if is_hot)
    return alone


def find_region(graph: DataflowGraph, key: str) -> Region | None:
    """The region of this key, or the piece of one; None where the graph has none."""
    found = (one for region in find_regions(graph) for one in (region, *split_common(graph, region)))
    return next((one for one in found if one.key == key), None)


def region_data(graph: DataflowGraph, region: Region) -> dict[str, Any]:
    """A region of a static graph as data for JSON; ValueError where it depends on more, or cannot be written."""
    alone = extract(graph, region)
    return {"graph": graph_to_json(alone), "fresh": [value for value in alone.inputs if value in alone.fresh]}


def region_graph(data: Mapping[str, Any], key: str) -> tuple[DataflowGraph, Region]:
    """The graph of :func:`region_data` and its region of that key; an error that says why where there is none."""
    graph = graph_from_json(data["graph"])
    graph.fresh = frozenset(map(str, data["fresh"]))
    region = find_region(graph, key)
    if region is None:
        raise ValueError("it is that of another region")
    return graph, region


def _extract(graph: DataflowGraph, region: Region, detours: list[tuple[str, str]]) -> DataflowGraph:
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

