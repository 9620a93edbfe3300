"""Dataflow graphs as JSON: data only, so that a file from anywhere can be read without running anything in it."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from fuseplan.kernels.ir.index import Size, as_size, symbol
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, TensorSpec


def graph_to_json(graph: DataflowGraph) -> dict[str, Any]:
    """The graph as lists, dicts, strings and numbers.

    Raises:
        ValueError: An attribute is no data, or a size is no sum, product, quotient or remainder.
    """
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
        "symbols": dict(graph.symbols),
        "order": [[a, b] for a, b, data in graph.graph.edges(data=True) if not data["values"]],
    }


def graph_from_json(data: Mapping[str, Any]) -> DataflowGraph:
    """The graph that :func:`graph_to_json` wrote.

    Raises:
        ValueError, KeyError, TypeError: The data has another form.
    """
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
    return DataflowGraph(nodes, specs, data["inputs"], data["outputs"], data["symbols"], order)


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    if isinstance(value, Ref):
        return {"ref": value.position}
    if isinstance(value, sympy.Expr):
        text = str(value)
        if parse_size(text) != value:
            raise ValueError(f"size {text} cannot be written as text")
        return {"size": text}
    raise ValueError(f"a {type(value).__name__} is no data")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "ref":
            return Ref(int(content))
        return float(content) if kind == "float" else parse_size(content)
    return value


def parse_size(text: str) -> Size:
    """A size from its text: numbers, symbols, ``+ - * // **`` and ``Mod(a, b)``. Nothing is evaluated as code.

    Raises:
        ValueError: The text holds anything else.

    >>> parse_size("2*s0 + 1")
    2*s0 + 1
    """
    try:
        return as_size(_size_of(ast.parse(text, mode="eval").body))
    except SyntaxError:
        raise ValueError(f"{text!r} is no size") from None


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: FloorDiv, ast.Pow: operator.pow,
}


def _size_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return symbol(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_size_of(node.operand)
    if isinstance(node, ast.BinOp):
        combine = _BINARY.get(type(node.op))
        if combine is not None:
            return combine(_size_of(node.left), _size_of(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Mod" and len(node.args) == 2:
        return Mod(*(sympy.sympify(_size_of(argument)) for argument in node.args))
    raise ValueError(f"{ast.unparse(node)!r} is no size")
