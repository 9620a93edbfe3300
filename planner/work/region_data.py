"""A region as data: by itself, with what planning it takes from its surroundings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.groups.cut_out import cut_out, find_region
from fuseplan.planner.work.group_work import hot_inputs


def region_data(graph: DataflowGraph, region: Region) -> dict[str, Any]:
    """A region cut out of a static graph, as data that JSON has.

    Raises:
        ValueError: It depends on more of the graph, or an attribute cannot be written.
    """
    alone = cut_out(graph, region)
    hot = zip(region.inputs, hot_inputs(graph, region.inputs), strict=True)
    return {"graph": graph_to_json(alone), "fresh": [value for value, is_hot in hot if is_hot]}


def region_graph(data: Mapping[str, Any], key: str) -> tuple[DataflowGraph, Region]:
    """The graph of :func:`region_data`, and its region of that key.

    Raises:
        Exception: Data of another form, or of another region, where it says so.
    """
    graph = graph_from_json(data["graph"])
    graph.fresh = frozenset(map(str, data["fresh"]))
    region = find_region(graph, key)
    if region is None:
        raise ValueError("it is that of another region")
    return graph, region
