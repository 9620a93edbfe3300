"""Placing groups in a traced graph: every order that is possible is found, and what is impossible is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.capture.subgraph import SubGraph, trace_subgraph
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.groups.compute_graph import compute_graph_of, lower_group
from fuseplan.planner.implementations.first_call import GroupCall
from fuseplan.planner.implementations.tunable_group import chain_module
from fuseplan.planner.lowering.lower import group_nodes
from fuseplan.planner.runtime.placement import fused_graph

SPEC = TensorSpec.contiguous((3, 3), "float32")


def traced_of(nodes: list[OpNode], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Traced:
    return trace_subgraph(SubGraph(tuple(nodes), inputs, outputs), dict.fromkeys(inputs, SPEC))


class Placed(GroupCall):
    """A group whose call runs its ops one by one."""

    def __init__(self, traced: Traced, ops: tuple[str, ...]) -> None:
        lowered = lower_group(traced.graph, ops)
        super().__init__(f"group_{'_'.join(ops)}", ops, lowered.inputs, lowered.outputs)
        self._module = chain_module(group_nodes(traced.graph, lowered), lowered.inputs, lowered.outputs)

    def __call__(self, *args: Any) -> Any:
        results = self._module(*args)
        return results[0] if len(results) == 1 else results


def calls(graph: fx.Graph) -> list[str]:
    return [node.target.__name__ for node in graph.nodes if getattr(node.target, "__name__", "").startswith("group_")]


def names_of(traced: Traced) -> list[str]:
    return [node.name for node in traced.graph]


def test_a_group_read_before_its_last_input_is_ready_moves_down() -> None:
    """``early`` is read by a matmul of its own; the group also takes a late operand, after that matmul in the trace."""
    traced = traced_of(
        [
            OpNode("mul", ("x", "x"), ("early",)),
            OpNode("relu", ("x",), ("other",)),
            OpNode("matmul", ("other", "w"), ("product",)),
            OpNode("add", ("early", "product"), ("late",)),
            OpNode("neg", ("early",), ("negative",)),
        ],
        ("x", "w"), ("late", "negative"),
    )  # fmt: skip
    mul, _, _, add, neg = names_of(traced)
    graph, refused = fused_graph(traced, [Placed(traced, (mul, add, neg))])
    assert not refused and len(calls(graph)) == 1
    module = fx.GraphModule(traced.module, graph)
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    for one, other in zip(module(x, w), (x * x + x.relu() @ w, -(x * x)), strict=True):
        torch.testing.assert_close(one, other)


def test_groups_that_wait_for_each_other_are_refused_one_by_one() -> None:
    """Two groups of two: each reads what the other produces, so only one of them can stay."""
    traced = traced_of(
        [
            OpNode("neg", ("x",), ("a",)),
            OpNode("exp", ("x",), ("b",)),
            OpNode("mul", ("a", "x"), ("c",)),
            OpNode("add", ("b", "x"), ("d",)),
        ],
        ("x",), ("c", "d"),
    )  # fmt: skip
    neg, exp, mul, add = names_of(traced)
    crossing = [Placed(traced, (neg, add)), Placed(traced, (exp, mul))]
    graph, refused = fused_graph(traced, crossing)
    ((worst, reason),) = refused
    assert worst is crossing[0] and reason == "the group would have to run both before and after another op"
    assert len(calls(graph)) == 1
    x = torch.randn(3, 3)
    for one, other in zip(fx.GraphModule(traced.module, graph)(x), traced.module(x), strict=True):
        torch.testing.assert_close(one, other)


BINARY = ("add", "mul", "sub", "maximum")


@st.composite
def random_graphs(draw: Callable[..., Any]) -> tuple[list[OpNode], list[list[int]]]:
    """Pointwise graphs with a matmul here and there, and any partition of their ops into groups."""
    count = draw(st.integers(2, 9))
    values, nodes = ["x"], []
    for number in range(count):
        operands = (draw(st.sampled_from(values)), draw(st.sampled_from(values)))
        op = draw(st.sampled_from((*BINARY, "linear")))
        nodes.append(OpNode(op, operands if op != "linear" else (operands[0], "w"), (f"v{number}",)))
        values.append(f"v{number}")
    colours = [draw(st.integers(0, 3)) for _ in nodes]
    groups = [[n for n, c in enumerate(colours) if c == colour and nodes[n].op != "linear"] for colour in range(4)]
    return nodes, [group for group in groups if group]


@settings(max_examples=60, deadline=None)
@given(random_graphs())
def test_any_partition_computes_the_same(graph_and_groups: tuple[list[OpNode], list[list[int]]]) -> None:
    nodes, groups = graph_and_groups
    outputs = tuple(node.outputs[0] for node in nodes[-2:])
    traced = trace_subgraph(
        SubGraph(tuple(nodes), ("x", "w"), outputs), {"x": SPEC, "w": SPEC}
    )
    kept = {node.name for node in traced.graph}
    by_position = [node for node in traced.module.graph.nodes if node.op == "call_function"]
    assert len(by_position) == len(nodes)
    placements = []
    for group in groups:
        ops = tuple(by_position[number].name for number in group if by_position[number].name in kept)
        flow = compute_graph_of(traced.graph)
        if ops and flow.outputs_of(ops):
            placements.append(Placed(traced, ops))
    graph, refused = fused_graph(traced, placements)
    graph.lint()
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    for one, other in zip(fx.GraphModule(traced.module, graph)(x, w), traced.module(x, w), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert len(calls(graph)) + len(refused) == len(placements)
    if not refused:
        inside = {name for placement in placements for name in placement.ops}
        assert not inside & {node.name for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
