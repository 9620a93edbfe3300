"""Run a function through torch.compile, our normaliser and ``run_graph``, and compare with plain eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from graph_runs import run_graph
from torch import fx

from fuseplan.planner.capture.normalise import Traced, normalise
from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode


def runner(trace: Traced) -> Callable[..., list[Any]]:
    """A callable with the fx module's signature that interprets the dataflow graph instead."""

    higher = [op for op in trace.graph if op.op.startswith("higher_order.")]
    places = {node: at for at, node in enumerate(trace.module.graph.find_nodes(op="placeholder"))}
    opaque = {op.name: _higher_order(trace.module, trace.node_of[op.outputs[0]]) for op in higher}

    def run(*arguments: Any) -> list[Any]:
        inputs = {name: arguments[position] for name, position in trace.placeholders.items()} | constants(trace)
        sizes = {name: int(arguments[places[node]]) for name, node in trace.scalars.items() if node in places}
        tensors = run_graph(trace.graph, inputs, sizes, opaque)
        given, left = dict(zip(places, arguments, strict=True)), iter(tensors)
        leaves = pytree.tree_leaves(trace.module.graph.output_node().args[0], is_leaf=lambda item: item is None)
        return [
            item if not isinstance(item, fx.Node)
            else next(left) if isinstance(item.meta.get("val"), torch.Tensor) else _number(item, given)
            for item in leaves
        ]

    return run


def _number(node: fx.Node, given: dict[fx.Node, Any]) -> Any:
    """A number that a trace returns, computed as the trace does."""
    if node in given:
        return given[node]
    target: Any = node.target
    return target(*fx.map_arg(node.args, lambda one: _number(one, given)))


def constants(trace: Traced) -> dict[str, torch.Tensor]:
    """Graph inputs that the trace holds as attributes."""
    held = (name for name in trace.graph.inputs if name not in trace.placeholders)
    return {name: attrgetter(str(trace.node_of[name].target))(trace.module) for name in held}


def _higher_order(module: fx.GraphModule, node: fx.Node) -> Callable[..., list[torch.Tensor]]:
    """A call of a higher-order op as a function of its tensors; graphs among its arguments are attributes."""
    target: Any = node.target

    def call(*operands: torch.Tensor) -> list[torch.Tensor]:
        left = iter(operands)

        def value(one: fx.Node) -> Any:
            return getattr(module, str(one.target)) if one.op == "get_attr" else next(left)

        return pytree.tree_leaves(target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value)))

    return call


def recording(traces: list[Traced]) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A torch.compile back end that keeps every normalised graph and runs it through ``run_graph``."""

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        traces.append(normalise(trace_predispatch(module, example_inputs)))
        return runner(traces[-1])

    return backend


def check(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Traced:
    """Trace ``function``; assert that the interpreted graph gives eager's results and eager's mutations."""
    traces: list[Traced] = []
    expected_inputs = deepcopy(inputs)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = function(*expected_inputs)
        actual = torch.compile(function, backend=recording(traces), dynamic=dynamic)(*inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(inputs, expected_inputs, rtol=0, atol=0)
    assert len(traces) == 1
    return traces[0]


def ops(graph: DataflowGraph) -> list[str]:
    return [node.op for node in graph]


def only(graph: DataflowGraph, op: str) -> OpNode:
    (found,) = [node for node in graph if node.op == op]
    return found


def ordered(graph: DataflowGraph) -> set[tuple[str, str]]:
    """Op name pairs joined by an edge that carries no value."""
    return {(a, b) for a, b, data in graph.graph.edges(data=True) if not data["values"]}
