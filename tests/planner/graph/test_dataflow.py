"""The dataflow graph: producers, consumers, bytes on edges, and what it refuses."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from synthetic_decoders import transformer_graph

from fuseplan.kernels.ir.index import symbol
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec


def small() -> DataflowGraph:
    x, half = TensorSpec.contiguous((3, 8), "float32"), TensorSpec((3, 4), "float32", (8, 1))
    nodes = [
        OpNode("aten.split.Tensor", ("x",), ("a", "b"), {"split_size": 4, "dim": 1}),
        OpNode("aten.mul.Tensor", ("a", "b"), ("c",)),
        OpNode("aten.mul.Tensor", ("c", "c"), ("d",)),
        OpNode("aten.exp.default", ("y",), ("e",)),
    ]
    specs = {"x": x, "y": TensorSpec.contiguous((5,), "bfloat16"), "e": TensorSpec.contiguous((5,), "bfloat16")}
    specs |= dict.fromkeys("abcd", half)
    return DataflowGraph(nodes, specs, "xy", "de", order=(("a", "e"), ("a", "c")))


def test_edges_carry_values() -> None:
    graph = small()
    edges = graph.graph.edges
    assert edges["a", "c"] == {"values": ("a", "b")}
    assert edges["c", "d"] == {"values": ("c",)}
    assert edges["a", "e"] == {"values": ()}
    assert nx.is_directed_acyclic_graph(graph.graph)


def test_lookups() -> None:
    graph = small()
    assert [node.name for node in graph] == ["a", "c", "d", "e"]
    assert len(graph) == 4
    assert (graph.producer("b"), graph.producer("x")) == ("a", None)
    assert list(graph.graph.successors("c")) == ["d"], "a value read twice has one reader"
    assert list(graph.graph.successors("d")) == []
    assert [graph.position(name) for name in "acde"] == [0, 1, 2, 3]
    assert graph.op("a").outputs == ("a", "b")


def test_specs() -> None:
    spec = TensorSpec.contiguous((2, 3, 4), "bfloat16")
    assert (spec.strides, spec.numel, spec.nbytes(), spec.is_static) == ((12, 4, 1), 24, 48, True)
    rows = symbol("s0")
    dynamic = TensorSpec.contiguous((rows, 4), "float32")
    assert dynamic.strides == (4, 1)
    assert not dynamic.is_static
    assert dynamic.nbytes({"s0": 5}) == 5 * 4 * 4


def test_malformed_graphs_are_refused() -> None:
    spec = TensorSpec.contiguous((2,), "float32")
    twice = [OpNode("aten.exp.default", ("x",), ("a",)), OpNode("aten.neg.default", ("x",), ("a",))]
    with pytest.raises(ValueError, match="value a is produced twice"):
        DataflowGraph(twice, dict.fromkeys("xa", spec), "x", "a")
    with pytest.raises(ValueError, match="reads ghost, which nothing produces"):
        DataflowGraph([OpNode("aten.exp.default", ("ghost",), ("a",))], {"a": spec}, (), "a")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_capture_order_is_topological(seed: int, size: int) -> None:
    graph = random_graph(seed, size, order=2)
    assert nx.is_directed_acyclic_graph(graph.graph)
    for before, after in graph.graph.edges:
        assert graph.position(before) < graph.position(after)
    for node in graph:
        for value in node.inputs:
            assert graph.producer(value) is None or node.name in graph.graph.successors(graph.producer(value))


@pytest.mark.parametrize("size", [1, 3, 127, 1000])
def test_decoders_have_the_size_asked_for(size: int) -> None:
    graph = transformer_graph(size)
    assert len(graph) == size
    assert graph.outputs
    assert [node.name for node in graph] == [node.name for node in transformer_graph(size)]
