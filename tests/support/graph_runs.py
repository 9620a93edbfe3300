"""Running a whole dataflow graph op by op: the oracle of what a plan computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.graph.dataflow import DataflowGraph, TensorSpec, bind_value
from fuseplan.planner.graph.execute import run_node


def run_graph(
    graph: DataflowGraph,
    inputs: Mapping[str, torch.Tensor],
    symbols: Mapping[str, int | float] | None = None,
    opaque: Mapping[str, Callable[..., Any]] | None = None,
) -> list[torch.Tensor]:
    """Execute a whole graph op by op in capture order: the unfused oracle.

    Args:
        inputs: A tensor for every name in ``graph.inputs``. Inputs that the model mutates are written to.
        symbols: Values of dynamic sizes that no input shape shows.
        opaque: Callables for ops that are no ATen call, by op name in the graph.

    Returns:
        One tensor per ``graph.outputs``.

    Raises:
        ShapeError: An input is missing or does not fit its spec.
    """
    missing = [name for name in graph.inputs if name not in inputs]
    if missing:
        raise ShapeError(f"graph input {missing[0]} is missing ({len(missing)} of {len(graph.inputs)} are)")
    sizes = graph.completed(
        {**bind_symbols(graph.specs, {name: inputs[name] for name in graph.inputs}), **(symbols or {})}
    )
    device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
    values: dict[str, torch.Tensor] = dict(inputs)
    for node in graph:
        operands = [values[name] for name in node.inputs]
        if opaque is not None and node.name in opaque:
            results = list(opaque[node.name](*operands))
        else:
            attrs = {name: bind_value(value, sizes) for name, value in node.attrs.items()}
            results = run_node(replace(node, attrs=attrs), operands, operands[0].device if operands else device)
        values.update(zip(node.outputs, results, strict=True))
    return [values[name] for name in graph.outputs]


def bind_symbols(specs: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Values of the dynamic sizes that stand alone as a dimension of some tensor.

    Raises:
        ShapeError: A tensor's rank or a fixed size differs from its spec, or one symbol would get two values.
    """
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        spec = specs[name]
        if len(spec.shape) != tensor.dim():
            raise ShapeError(f"input {name} has shape {tuple(tensor.shape)}, the graph was captured for {spec.shape}")
        for expected, actual in zip(spec.shape, tensor.shape, strict=True):
            wanted = found.setdefault(expected.name, actual) if isinstance(expected, sympy.Symbol) else expected
            if isinstance(wanted, int) and wanted != actual:
                shape = tuple(tensor.shape)
                raise ShapeError(f"input {name} has shape {shape}, the graph was captured for {spec.shape}")
    return found
