"""Dataflow graphs as JSON: data only, so that a file from anywhere can be read without running anything in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, TensorSpec


def graph_to_json(graph: DataflowGraph) -> dict[str, Any]:
    """A static graph as data that JSON has; ValueError where an attribute or a size cannot be written."""
    return {
        "nodes": [
            {"op": node.op, "inputs": list(node.inputs), "outputs": list(node.outputs),
             "attrs": {name: _to_json(value) for name, value in node.attrs.items()}}
            for node in graph
        ],
        "specs": {
            name: [_to_json(spec.shape), spec.dtype, _to_json(spec.strides)] for name, spec in graph.specs.items()
        },
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "order": [list(pair) for pair in graph.orders()],
        "paths": {name: list(paths) for name, paths in graph.paths.items()},
        "rounds": sorted(graph.rounds),
    }


def graph_from_json(data: Mapping[str, Any]) -> DataflowGraph:
    """The graph that :func:`graph_to_json` wrote; ValueError, KeyError or TypeError where data has another form."""
    nodes = [
        OpNode(node["op"], tuple(node["inputs"]), tuple(node["outputs"]),
               {name: _from_json(value) for name, value in node["attrs"].items()})
        for node in data["nodes"]
    ]
    specs = {
        name: TensorSpec(_from_json(shape), dtype, _from_json(strides))
        for name, (shape, dtype, strides) in data["specs"].items()
    }
    order = [(before, after) for before, after in data["order"]]
    paths = {name: tuple(map(str, paths)) for name, paths in data.get("paths", {}).items()}
    graph = DataflowGraph(nodes, specs, data["inputs"], data["outputs"], order=order, paths=paths)
    graph.rounds = frozenset(map(str, data.get("rounds", ())))
    return graph


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    if isinstance(value, Ref):
        return {"ref": value.position}
    raise ValueError(f"a {type(value).__name__} is no data")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        return Ref(int(value["ref"])) if "ref" in value else float(value["float"])
    return value
