"""The ways to run a merged linear op against float64, on weights that lie apart and side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, TensorSpec
from fuseplan.planner.graph.merged_linear import side_by_side
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.libraries.library_call import OpGroup
from fuseplan.planner.libraries.matmul_calls import MERGED_CALLS, MergedCall
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.work.group_work import op_work

ROWS = (5, 1, 3)
NAMES = ("a", "b", "c")


def group(shape: tuple[int, ...], bias: bool, dtype: torch.dtype, inputs: tuple[str, ...]) -> OpGroup:
    name = str(dtype).removeprefix("torch.")
    biases = tuple(f"{one}_bias" for one in NAMES) if bias else ()
    attrs = {"weights": (Ref(1), Ref(2), Ref(3))} | ({} if bias else {"biases": ()})
    node = OpNode("fuseplan.merged_linear.default", ("x", *NAMES, *biases), ("found",), attrs)
    specs = {"x": TensorSpec.contiguous(shape, name)}
    specs |= {one: TensorSpec.contiguous((rows, shape[-1]), name) for one, rows in zip(NAMES, ROWS, strict=True)}
    specs |= {one: TensorSpec.contiguous((rows,), name) for one, rows in zip(biases, ROWS, strict=False)}
    specs["found"] = TensorSpec.contiguous((*shape[:-1], sum(ROWS)), name)
    return OpGroup(node, inputs or node.inputs, ("found",), specs, "cpu")


def operands(given: OpGroup) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, given.specs["x"].dtype)
    return {name: torch.randn(given.specs[name].shape, dtype=dtype) for name in given.inputs}


@pytest.mark.parametrize("call", MERGED_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 1, 7), (2, 5, 7), (127, 33)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_agree_with_float64(call: MergedCall, shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    order = ("c", "x", "a", "b") if not bias else ()  # inputs in another order than the op's
    one = group(shape, bias, dtype, order)
    assert call.refuse(one) is None
    named = operands(one)
    wide = {name: tensor.double() for name, tensor in named.items()}
    exact = torch.cat([wide["x"] @ wide[name].t() + (wide[f"{name}_bias"] if bias else 0) for name in NAMES], -1)
    eager = torch.cat([
        torch.nn.functional.linear(named["x"], named[name], named[f"{name}_bias"] if bias else None) for name in NAMES
    ], -1)
    packed = dict(named)
    for names in (NAMES, [f"{name}_bias" for name in NAMES] if bias else ()):
        packed |= zip(names, side_by_side([named[name] for name in names]) if names else (), strict=True)
    run = call.build(one)
    for given in (list(packed.values()), list(named.values()), list(packed.values())):
        found = run(*given)
        assert found.shape == one.specs["found"].shape and found.stride() == one.specs["found"].strides
        assert (found.double() - exact).norm() <= (eager.double() - exact).norm() * 1.5 + 1e-6


@pytest.mark.parametrize("call", MERGED_CALLS, ids=lambda call: call.name)
def test_other_groups_are_refused(call: MergedCall) -> None:
    one = group((2, 7), False, torch.float32, ())
    linear = OpNode("aten.linear.default", ("x", "a"), ("found",), {"bias": None})
    assert call.refuse(replace(one, node=linear))


@pytest.mark.parametrize("bias", [False, True])
def test_the_op_in_a_graph(bias: bool) -> None:
    """Its kind, its work, and that a file keeps it."""
    one = group((2, 5, 7), bias, torch.bfloat16, ())
    graph = DataflowGraph([one.node], one.specs, one.inputs, one.outputs, {}, [])
    assert kind_of(one.node, one.specs) == "anchor"
    work = op_work(graph, "found")
    assert work.flops == {"bf16_matmul": 2.0 * 10 * 7 * sum(ROWS)}
    elements = 10 * 7 + 7 * sum(ROWS) + 10 * sum(ROWS) + bias * sum(ROWS)
    assert work.dram_bytes == 2 * elements and work.launches == 1
    again = graph_from_json(graph_to_json(graph))
    assert graph_to_json(again) == graph_to_json(graph)
    assert [node.attrs for node in again] == [node.attrs for node in graph]
