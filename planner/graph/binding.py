"""A graph with its dynamic sizes replaced by numbers: what is planned when a shape is only known by a hint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from fuseplan.kernels.ir.index import evaluate, number
from fuseplan.planner.graph.dataflow import DataflowGraph, TensorSpec


def bind_graph(graph: DataflowGraph, sizes: Mapping[str, int] | None = None) -> DataflowGraph:
    """The same graph with every symbol replaced by ``sizes`` (its capture-time hints where not given).

    Op and value names are kept, so that a plan of the bound graph names groups of the dynamic one.
    """
    if not graph.symbols:
        return graph
    values = graph.completed({**graph.symbols, **(sizes or {})})
    specs = {name: bind_spec(spec, values) for name, spec in graph.specs.items()}
    nodes = [
        replace(node, attrs={name: bind_value(value, values) for name, value in node.attrs.items()}) for node in graph
    ]
    order = [(a, b) for a, b, data in graph.graph.edges(data=True) if not data["values"]]
    made = DataflowGraph(nodes, specs, graph.inputs, graph.outputs, order=order)
    made.fresh = graph.fresh
    return made


def bind_spec(spec: TensorSpec, values: Mapping[str, int | float]) -> TensorSpec:
    if spec.is_static:
        return spec
    shape, strides = (tuple(evaluate(size, values) for size in sizes) for sizes in (spec.shape, spec.strides))
    return TensorSpec(shape, spec.dtype, strides)


def bind_value(value: Any, values: Mapping[str, int | float]) -> Any:
    """An attribute with the sizes and numbers in it replaced, however nested."""
    if isinstance(value, sympy.Expr):
        return number(value, values)
    if isinstance(value, tuple | list):
        return tuple(bind_value(item, values) for item in value)
    return value
