"""The kernel a whole group lowers to, against its ATen chain in float64; and the norm that many groups have."""

from __future__ import annotations

import torch
from graphs import Builder, wide
from kernel_reference import run_reference
from well_formed import validate

from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.tunable_group import _widened, chain_module
from fuseplan.planner.lowering.lower import Lowered, group_nodes
from fuseplan.planner.ops.table import kind_of


def compute_ops(graph: DataflowGraph) -> list[str]:
    return [node.name for node in graph if kind_of(node, graph.specs) == "compute"]


def check(builder: Builder, *outputs: str, tolerance: float = 1e-9) -> Lowered:
    """Lower all compute ops as one group and compare every output with the float64 chain."""
    graph = builder.graph(*outputs)
    lowered = lower_group(graph, compute_ops(graph))
    validate(lowered.ir)
    results = run_reference(lowered.ir, builder.values(lowered.inputs))
    nodes = [_widened(node) for node in group_nodes(graph, lowered)]
    expected = chain_module(nodes, lowered.inputs, lowered.outputs, "cpu")(*wide(builder.values(lowered.inputs)))
    for value, result, wanted in zip(lowered.outputs, results, expected, strict=True):
        assert result.shape == wanted.shape, value
        torch.testing.assert_close(result.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    return lowered


def rms_norm(b: Builder, x: str, weight: str, dtype: str) -> str:
    """The norm as Hugging Face's Llama spells it."""
    wide_x = b("aten.to.dtype", x, dtype="float32")
    mean = b("aten.mean.dim", b("aten.pow.Tensor_Scalar", wide_x, exponent=2), dim=(-1,), keepdim=True)
    scale = b("aten.rsqrt.default", b("aten.add.Tensor", mean, other=1e-5))
    normed = b("aten.to.dtype", b("aten.mul.Tensor", wide_x, scale), dtype=dtype)
    return b("aten.mul.Tensor", weight, normed)
