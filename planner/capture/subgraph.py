"""Hand-built graphs: ops by short or full name, checked, put in order, and traced like any model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import networkx as nx
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.capture.modules import traceable
from fuseplan.planner.capture.normalise import Traced, normalise
from fuseplan.planner.errors import GraphError, ShapeError, UnknownOpError, in_words
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.graph.execute import bind_call, parameters_of, resolve_op, run_node
from fuseplan.planner.ops.table import OPS

#: Names that are no ATen op but that people write.
_ALIASES = {"cast": "to", "rmsnorm": "rms_norm", "layernorm": "layer_norm", "concat": "cat", "swish": "silu"}


@dataclass(frozen=True)
class SubGraph:
    """Ops over named values, in any order. Short names (``"add"``) mean the ATen overload that fits the operands.

    >>> swiglu = SubGraph(
    ...     (OpNode("silu", ("gate",), ("act",)), OpNode("mul", ("act", "up"), ("out",))), ("gate", "up"), ("out",)
    ... )
    >>> [node.op for node in swiglu.ordered]
    ['aten.silu.default', 'aten.mul.Tensor']
    """

    nodes: tuple[OpNode, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("nodes", "input_names", "output_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @cached_property
    def ordered(self) -> tuple[OpNode, ...]:
        """The ops with full names, each after the ops it reads.

        GraphError where a value is missing or produced twice, or where they form a cycle; also as :func:`full_name`.
        """
        return tuple(replace(node, op=full_name(node)) for node in _in_order(self))

    @cached_property
    def signature(self) -> str:
        """Text that is equal for equal graphs."""
        nodes = [(node.op, node.inputs, node.outputs, sorted(node.attrs.items())) for node in self.nodes]
        return repr((nodes, self.input_names, self.output_names))


def _in_order(graph: SubGraph) -> list[OpNode]:
    producer: dict[str, int] = {}
    for number, node in enumerate(graph.nodes):
        for value in node.outputs:
            if value in producer or value in graph.input_names:
                raise GraphError(f"value {value!r} is produced twice; give every op its own output names")
            producer[value] = number
    for value in graph.output_names:
        if value not in producer and value not in graph.input_names:
            raise GraphError(f"output {value!r} is produced by no op; known values: {_listed(producer)}")
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(graph.nodes)))
    for reader, node in enumerate(graph.nodes):
        for value in node.inputs:
            if value in producer:
                order.add_edge(producer[value], reader)
            elif value not in graph.input_names:
                known = _listed([*graph.input_names, *producer])
                raise GraphError(f"op {node.op} reads {value!r}, which nothing produces; known values: {known}")
    try:  # an order that is right already is kept
        return [graph.nodes[number] for number in nx.lexicographical_topological_sort(order)]
    except nx.NetworkXUnfeasible:
        cycle = _listed(graph.nodes[before].name for before, _ in nx.find_cycle(order))
        raise GraphError(f"the graph has a cycle through {cycle}") from None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"


def full_name(node: OpNode) -> str:
    """The ATen overload a node means: ``"add"`` with two tensors is ``"aten.add.Tensor"``.

    UnknownOpError where PyTorch has no such op, GraphError where no overload takes these operands and attributes.
    """
    if "." in node.op:
        if (reason := _misfit(node, node.op)) is not None:
            raise GraphError(f"op {node.op} ({node.name}): {reason}")
        return node.op
    short = _ALIASES.get(node.op, node.op)
    packet = getattr(torch.ops.aten, short, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        planned = {name.split(".")[1] for name, op in OPS.items() if op.build is not None or op.view or op.is_anchor}
        raise UnknownOpError(node.op, sorted(planned | _ALIASES.keys()))
    names = [f"aten.{short}.{overload}" for overload in packet.overloads() if "out" not in overload]
    usable = [name for name in names if "Dimname" not in str(resolve_op(name)._schema)]
    fitting = [name for name in usable if _misfit(node, name) is None]
    if not fitting:
        reasons = "; ".join(f"{name}: {_misfit(node, name)}" for name in usable[:3])
        raise GraphError(f"no overload of {node.op} ({node.name}) takes its operands: {reasons}")
    return min(fitting, key=lambda name: (_unlikely(node, name), names.index(name)))


def _misfit(node: OpNode, op: str) -> str | None:
    """Why ``op`` cannot be called with the node's operands and attributes, None when it can."""
    parameters = [parameter.name for parameter in parameters_of(op)]
    unknown = [name for name in node.attrs if name not in parameters]
    if unknown:
        return f"it has no argument {unknown[0]!r}; it takes {', '.join(parameters)}"
    try:
        bind_call(replace(node, op=op), [object()] * len(node.inputs))
    except ShapeError as error:
        return str(error)
    return None


def _unlikely(node: OpNode, op: str) -> tuple[bool, int]:
    """Orders overloads as eager dispatches: ``x + 2`` is ``add.Tensor``, but ``x ** 2`` is ``pow.Tensor_Scalar``."""
    tensors = {parameter.name for parameter in parameters_of(op) if parameter.is_tensor}
    return op.endswith(".Scalar"), sum(name in tensors and value is not None for name, value in node.attrs.items())


def trace_subgraph(graph: SubGraph, specs: Mapping[str, TensorSpec], device: str = "cpu") -> Traced:
    """Trace and normalise a hand-built graph with inputs of these layouts, as the back end does with a model.

    GraphError where the graph is malformed, ShapeError where an input does not fit an op.
    """
    return trace_function(runner(graph, device), [specs[name] for name in graph.input_names], device)


def trace_function(function: Callable[..., Any], specs: Iterable[TensorSpec], device: str = "cpu") -> Traced:
    """The normalised trace of a function of tensors with these layouts."""
    with FakeTensorMode(), traceable():
        fakes = [torch.empty_strided(one.shape, one.strides, dtype=torch_dtype(one.dtype), device=device)
                 for one in specs]
        return normalise(make_fx(lambda *tensors: function(*tensors), pre_dispatch=True)(*fakes))


def runner(graph: SubGraph, device: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The graph as its ATen ops, called one by one with its inputs in order; raises what ``graph.ordered`` does.

    In a call a :class:`ShapeError` names an op that cannot take its operands, and their shapes.
    """
    nodes = graph.ordered

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(graph.input_names, tensors, strict=True))
        for node in nodes:
            operands = [values[name] for name in node.inputs]
            try:
                results = run_node(node, operands, operands[0].device if operands else device)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                shapes = ", ".join(f"{name} {tuple(values[name].shape)}" for name in node.inputs)
                raise ShapeError(f"op {node.op} ({node.name}) cannot take {shapes}: {in_words(error)}") from error
            if len(results) != len(node.outputs):
                raise GraphError(f"op {node.op} ({node.name}) has {len(results)} results, not {len(node.outputs)}")
            values.update(zip(node.outputs, results, strict=True))
        return tuple(values[name] for name in graph.output_names)

    return run
