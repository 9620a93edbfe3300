"""Every recipe against the ATen op it stands for, in float64, on odd shapes, strides and broadcasts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder, wide
from kernel_reference import run_reference
from op_samples import BAGS, COUNTS, GAIN, HOLES, IMAGE, MORE, SAMPLES, TIES, B, P, T, X

from fuseplan.planner.graph.dataflow import Ref
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.tunable_group import _widened, chain_module
from fuseplan.planner.lowering.lower import group_nodes, lower
from fuseplan.planner.ops.table import OPS, kind_of, mutates, op_of, why_opaque


@pytest.mark.parametrize(("op", "operands", "attrs"), SAMPLES, ids=[f"{s[0]}-{n}" for n, s in enumerate(SAMPLES)])
def test_recipe_computes_the_aten_op(op: str, operands: tuple[torch.Tensor, ...], attrs: dict[str, Any]) -> None:
    names = [f"x{number}" for number in range(len(operands))]
    builder = Builder(**dict(zip(names, operands, strict=True)))
    value = builder(op, *names, **attrs)
    graph = builder.graph(value)
    lowered = lower(graph, (value,), "fp32", (value,))
    (result,) = run_reference(lowered.ir, builder.values(lowered.inputs))
    nodes = [_widened(node) for node in group_nodes(graph, lowered)]
    inputs = wide(builder.values(builder.inputs))
    (expected,) = chain_module(nodes, builder.inputs, (value,), "cpu")(*inputs)
    assert result.shape == expected.shape
    if expected.dtype == torch.float8_e4m3fn:  # the interpreter leaves the rounding of results to its caller
        result = result.to(expected.dtype)
    # Integer division has a float32 result that widening the float operands does not reach.
    tolerance = 1e-9 if expected.dtype != torch.float32 else 1e-6
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


#: Ops that write to an operand: ``test_cache_writes.py`` has their samples.
WRITES = ("aten.copy_.default", "aten.index_copy_.default")
#: Ops with a value and its position as results.
PAIRS = ("aten.max.dim", "aten.min.dim", "aten.cummax.default", "aten.cummin.default")


@pytest.mark.parametrize("op", PAIRS)
@pytest.mark.parametrize("operand", [X, T, TIES, HOLES, COUNTS], ids=["plain", "strided", "ties", "nan", "integers"])
@pytest.mark.parametrize("kept", [0, 1], ids=["value", "position"])
def test_an_extreme_and_its_position(op: str, operand: torch.Tensor, kept: int) -> None:
    builder = Builder(x=operand)
    kept_dim = {} if "cum" in op else {"keepdim": True}
    values = builder.many(op, "x", outputs=2, dim=-1, **kept_dim)
    for wanted in (values, values[kept : kept + 1]):
        graph = builder.graph(*wanted)
        lowered = lower_group(graph, values[:1])
        assert set(lowered.outputs) == set(wanted)
        results = run_reference(lowered.ir, builder.values(lowered.inputs))
        for value, result in zip(lowered.outputs, results, strict=True):
            torch.testing.assert_close(result, builder.tensors[value].to(result.dtype), rtol=0, atol=0, equal_nan=True)


def test_every_recipe_has_a_sample() -> None:
    fusible = {name for name, op in OPS.items() if op.is_fusible}
    assert fusible == {*PAIRS, *WRITES, *BAGS, *(op for op, _, _ in SAMPLES)}


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "words"),
    [
        ("aten.var.correction", (torch.randn(1, 1).expand(256, 129),), {"dim": (0, 1)}, "all of 2 dimensions"),
        ("aten.argmax.default", (torch.randn(32769),), {}, "all of 1 dimensions"),
        ("aten.mean.dim", (IMAGE,), {"dim": (0, 2, 3)}, "one run of memory"),
        ("aten.group_norm.default", (IMAGE.transpose(2, 3),), {
            "num_groups": 2, "weight": None, "bias": None}, "one run of memory"),
        ("aten.conv2d.default", (IMAGE, torch.randn(IMAGE.shape[1], 1, 2, 2)), {
            "bias": None, "groups": IMAGE.shape[1]}, "come last"),
        ("aten.conv2d.default", (IMAGE.to(memory_format=torch.channels_last), torch.randn(3, IMAGE.shape[1], 2, 2)), {
            "bias": None}, "sums over channels"),
        ("aten.max_pool2d.default", (IMAGE,), {"kernel_size": (2, 2)}, "come last"),
        ("aten.avg_pool2d.default", (IMAGE.to(memory_format=torch.channels_last),), {
            "kernel_size": (3, 3), "padding": (1, 1), "count_include_pad": False}, "leave margins out"),
        ("aten.max_pool2d.default", (IMAGE.to(memory_format=torch.channels_last),), {
            "kernel_size": (2, 2), "ceil_mode": True}, "end outside"),
        ("aten.upsample_bilinear2d.vec", (IMAGE.to(memory_format=torch.channels_last),), {
            "output_size": (6, 10), "align_corners": True, "scale_factors": None}, "corners"),
        ("aten.upsample_bilinear2d.vec", (IMAGE.to(memory_format=torch.channels_last),), {
            "output_size": (6, 15), "align_corners": False, "scale_factors": None}, "power of two"),
        ("aten.upsample_nearest1d.default", (IMAGE[0],), {"output_size": (10,), "scales": 2.1}, "power of two"),
        *((f"aten.upsample_{kind}2d.vec", (IMAGE.to(memory_format=torch.channels_last),), {
            "output_size": None, "scale_factors": (2.1, 2.0)} | more, "power of two")
          for kind, more in (("nearest", {}), ("bilinear", {"align_corners": False}))),
        ("aten.index.Tensor", (X, B), {"indices": (Ref(1),)}, "as many elements as are true"),
        ("aten.floor_divide.default", (COUNTS, MORE + 1), {}, "no number"),
        ("aten.div.Tensor_mode", (COUNTS,), {"other": 2, "rounding_mode": "trunc"}, "trunc"),
        ("aten.pad.default", (X,), {"pad": (1, 1), "mode": "reflect"}, "reflect"),
        ("aten.diff.default", (X,), {"n": 2}, "order 2"),
        ("aten.upsample_nearest1d.default", (X,), {"output_size": (21,)}, "power of two"),
        ("aten.adaptive_avg_pool2d.default", (IMAGE,), {"output_size": (1, 2)}, "1 x 1"),
        ("aten.batch_norm.default", (IMAGE, GAIN, GAIN), {
            "weight": None, "bias": None, "training": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": True},
         "training"),
        ("aten.softmax.int", (torch.tensor(1.0),), {"dim": 0}, "a scalar"),
        ("aten.div.Tensor", (X.to(torch.complex64), P), {}, "complex64"),
        ("aten.linear.default", (X, torch.randn(4, 7)), {}, "no recipe"),
        ("aten.to.dtype", (X,), {"dtype": "float8_e5m2"}, "float8_e5m2"),
        ("aten.dropout.default", (X,), {"p": 0.5, "train": True}, "training"),
        ("aten.arange.start_step", (), {"start": 5, "end": 0, "step": -1}, "not positive"),
        ("aten.copysign.Tensor", (X, T), {}, "no recipe"),
    ],
)
def test_what_cannot_be_lowered_says_why(
    op: str, operands: tuple[torch.Tensor, ...], attrs: dict[str, Any], words: str
) -> None:
    names = [f"x{number}" for number in range(len(operands))]
    builder = Builder(**dict(zip(names, operands, strict=True)))
    graph = builder.graph(builder(op, *names, **attrs))
    node = next(iter(graph))
    assert kind_of(node, graph.specs) in (("anchor",) if op_of(op).is_anchor else ("foreign", "opaque"))
    assert words in (why_opaque(node, graph.specs) or "")


def test_mutations_are_known_by_name() -> None:
    from fuseplan.planner.graph.dataflow import OpNode

    assert mutates(OpNode("aten.add_.Tensor", ("x", "y"), ("z",)))
    assert mutates(OpNode("aten.index_copy_.default", ("x",), ("z",)))
    assert mutates(OpNode("aten.add.out", ("x", "y"), ("z",)))
    assert not mutates(OpNode("aten.add.Tensor", ("x", "y"), ("z",)))
    assert not mutates(OpNode("aten.__and__.Tensor", ("x", "y"), ("z",)))
