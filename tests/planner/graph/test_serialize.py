"""Graphs survive a trip through JSON text, and hostile text is refused."""

from __future__ import annotations

import json
import math

import pytest

from fuseplan.kernels.ir.index import symbol
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, TensorSpec
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json


def sample() -> DataflowGraph:
    spec = TensorSpec((4, 15), "bfloat16", (15, 1))
    attrs = {
        "dim": (-1,),
        "flag": True,
        "none": None,
        "scale": 0.125,
        "low": -math.inf,
        "dtype": "float32",
        "indices": (None, Ref(1)),
    }
    nodes = [
        OpNode("aten.sum.default", ("x",), ("a",), {}),
        OpNode("aten.add_.Tensor", ("x", "y"), ("b",), attrs),
        OpNode("aten.topk.default", ("b",), ("c", "d"), {"k": 2}),
    ]
    specs = dict.fromkeys("xyabcd", spec)
    return DataflowGraph(nodes, specs, ["x", "y"], ["d", "a"], order=[("a", "b")])


def one_op(attribute: str, value: object) -> DataflowGraph:
    spec = TensorSpec.contiguous((2,), "float32")
    node = OpNode("aten.mul.Tensor", ("x",), ("y",), {attribute: value})
    return DataflowGraph([node], {"x": spec, "y": spec}, ["x"], ["y"])


def test_a_graph_comes_back_equal() -> None:
    graph = sample()
    back = graph_from_json(json.loads(json.dumps(graph_to_json(graph), allow_nan=False)))
    assert list(back) == list(graph)
    assert [dict(node.attrs) for node in back] == [dict(node.attrs) for node in graph]
    assert back.specs == graph.specs
    assert (back.inputs, back.outputs) == (graph.inputs, graph.outputs)
    assert dict(back.graph.edges) == dict(graph.graph.edges)
    assert type(back.op("b").attrs["flag"]) is bool


def test_nan_comes_back_as_nan() -> None:
    graph = one_op("other", math.nan)
    back = graph_from_json(json.loads(json.dumps(graph_to_json(graph), allow_nan=False)))
    assert math.isnan(back.op("y").attrs["other"])


@pytest.mark.parametrize("value", [object(), symbol("s0"), {1, 2}])
def test_what_is_no_data_is_not_written(value: object) -> None:
    with pytest.raises(ValueError, match="no data"):
        graph_to_json(one_op("odd", value))
