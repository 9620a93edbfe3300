"""Single ops by name, and whole graphs op by op."""

from __future__ import annotations

import pytest
import torch
from graph_runs import run_graph

from fuseplan.kernels.ir.index import symbol
from fuseplan.planner.errors import ShapeError, UnknownOpError
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, TensorSpec
from fuseplan.planner.graph.execute import bind_call, resolve_op, run_node

F32 = TensorSpec.contiguous((2, 3), "float32")


def test_an_op_is_found_by_name() -> None:
    assert resolve_op("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert resolve_op("aten.silu") is torch.ops.aten.silu.default


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("aten.ad.Tensor", r"aten\.add"),
        ("aten.add.Tensr", r"aten\.add\.Tensor"),
        ("aten", "aten.<name>.<overload>"),
        ("nosuch.add.Tensor", "nosuch.add.Tensor"),
        ("higher_order.cond", "higher_order.cond"),
    ],
)
def test_an_unknown_op_suggests_the_nearest(name: str, suggestion: str) -> None:
    with pytest.raises(UnknownOpError, match=suggestion):
        resolve_op(name)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (OpNode("aten.add.Tensor", ("x", "y"), ("z",), {"alpha": 2}), lambda x, y: x + 2 * y),
        (OpNode("aten.mul.Tensor", ("x",), ("z",), {"other": 3.0}), lambda x, y: x * 3),
        (OpNode("aten.cat.default", ("x", "y", "x"), ("z",), {"dim": 1}), lambda x, y: torch.cat([x, y, x], 1)),
        (OpNode("aten.to.dtype", ("x",), ("z",), {"dtype": "float16"}), lambda x, y: x.half()),
        (OpNode("aten.sum.dim_IntList", ("x",), ("z",), {"dim": (0, -1), "keepdim": True}),
         lambda x, y: x.sum((0, -1), keepdim=True)),
        (OpNode("aten.linear.default", ("x", "y"), ("z",), {"bias": None}), lambda x, y: x @ y.T),
        (OpNode("aten.full.default", (), ("z",), {"size": (2, 5), "fill_value": 4, "dtype": "int64"}),
         lambda x, y: torch.full((2, 5), 4)),
        (OpNode("aten.clone.default", ("x",), ("z",), {"memory_format": "contiguous_format"}), lambda x, y: x),
    ],
)  # fmt: skip
def test_a_node_runs_as_its_op(node: OpNode, expected) -> None:  # type: ignore[no-untyped-def]
    values = {"x": torch.randn(2, 3), "y": torch.randn(2, 3)}
    (actual,) = run_node(node, [values[name] for name in node.inputs])
    torch.testing.assert_close(actual, expected(values["x"], values["y"]))


def test_operands_inside_lists_do_not_shift_the_others() -> None:
    node = OpNode("aten.index_put.default", ("x", "i", "v"), ("z",), {"indices": (None, Ref(1)), "accumulate": True})
    x, i, v = torch.zeros(2, 3), torch.tensor([2, 2]), torch.ones(2, 2)
    torch.testing.assert_close(run_node(node, [x, i, v])[0], torch.tensor([[0.0, 0, 2], [0, 0, 2]]))


def test_several_results_are_listed() -> None:
    values, indices = run_node(OpNode("aten.topk.default", ("x",), ("v", "i"), {"k": 2}), [torch.tensor([1.0, 3, 2])])
    assert (values.tolist(), indices.tolist()) == ([3, 2], [1, 2])


def test_the_device_is_supplied_to_ops_that_make_tensors() -> None:
    made = run_node(OpNode("aten.arange.default", (), ("z",), {"end": 4, "dtype": "float32"}), [], "meta")[0]
    assert (made.device.type, made.dtype) == ("meta", torch.float32)
    kept = run_node(OpNode("aten.arange.default", (), ("z",), {"end": 4, "device": "cpu"}), [], "meta")[0]
    assert kept.device.type == "cpu"
    like = run_node(OpNode("aten.zeros_like.default", ("x",), ("z",)), [torch.ones(2)], "meta")[0]
    assert like.device.type == "cpu"


@pytest.mark.parametrize(
    ("node", "count", "message"),
    [
        (OpNode("aten.add.Tensor", ("x",), ("z",)), 1, "'other'"),
        (OpNode("aten.transpose.int", ("x",), ("z",), {"dim0": 0}), 1, "'dim1'"),
        (OpNode("aten.exp.default", ("x", "y"), ("z",)), 2, "2 operands"),
    ],
)
def test_a_malformed_node_is_named(node: OpNode, count: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        bind_call(node, [torch.ones(2)] * count)
    assert node.op in str(caught.value)


def graph_of(*nodes: OpNode, inputs: dict[str, TensorSpec], outputs: list[str]) -> DataflowGraph:
    specs = {**inputs, **{value: F32 for node in nodes for value in node.outputs}}
    return DataflowGraph(nodes, specs, inputs, outputs)


def test_a_graph_runs_op_by_op_and_mutates_its_inputs() -> None:
    graph = graph_of(
        OpNode("aten.add_.Tensor", ("x",), ("x1",), {"other": 1}),
        OpNode("aten.mul.Tensor", ("x1", "x"), ("z",)),
        inputs={"x": F32},
        outputs=["z", "x"],
    )
    x = torch.ones(2, 3)
    z, same = run_graph(graph, {"x": x})
    assert same is x
    assert z.tolist() == [[4.0] * 3] * 2


def test_sizes_come_from_input_shapes() -> None:
    n = symbol("n")
    spec = TensorSpec.contiguous((n, 3), "float32")
    graph = graph_of(
        OpNode("aten.expand.default", ("y",), ("w",), {"size": (n, 3), "implicit": False}),
        OpNode("aten.add.Tensor", ("x", "w"), ("z",)),
        inputs={"x": spec, "y": TensorSpec.contiguous((1, 3), "float32")},
        outputs=["z"],
    )
    x, y = torch.randn(7, 3), torch.randn(1, 3)
    torch.testing.assert_close(run_graph(graph, {"x": x, "y": y})[0], x + y)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "x is missing"),
        ({"x": torch.ones(2)}, r"\(2,\)"),
        ({"x": torch.ones(2, 4)}, r"\(2, 4\)"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs: dict[str, torch.Tensor], message: str) -> None:
    graph = graph_of(OpNode("aten.exp.default", ("x",), ("z",)), inputs={"x": F32}, outputs=["z"])
    with pytest.raises(ShapeError, match=message):
        run_graph(graph, inputs)


def test_one_size_cannot_have_two_values() -> None:
    n = symbol("n")
    spec = TensorSpec.contiguous((n,), "float32")
    graph = graph_of(OpNode("aten.add.Tensor", ("x", "y"), ("z",)), inputs={"x": spec, "y": spec}, outputs=["z"])
    with pytest.raises(ShapeError, match="y has shape"):
        run_graph(graph, {"x": torch.ones(3), "y": torch.ones(1)})
