"""Groups built around a matmul: what comes before and after it in the same kernel, against ATen in float64."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder, wide
from kernel_reference import run_reference
from lower_oracle import rms_norm

from fuseplan.kernels.ir.ir import Dot, Reduce, RowValue
from fuseplan.kernels.ir.validate import validate
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.subject import _widened, chain_module
from fuseplan.planner.lowering.lower import Lowered, group_nodes
from fuseplan.planner.lowering.recipes import kind_of


def check(b: Builder, *outputs: str, tolerance: float = 1e-9) -> Lowered:
    """Lower everything as one group, matmuls and all, and compare with the chain in float64."""
    graph = b.graph(*outputs)
    ops = [node.name for node in graph if kind_of(node, graph.specs) != "view"]
    lowered = lower_group(graph, ops)
    validate(lowered.ir)
    results = run_reference(lowered.ir, b.values(lowered.inputs))
    nodes = [_widened(node) for node in group_nodes(graph, lowered)]
    expected = chain_module(nodes, lowered.inputs, lowered.outputs, "cpu")(*wide(b.values(lowered.inputs)))
    for value, result, wanted in zip(lowered.outputs, results, expected, strict=True):
        assert result.shape == wanted.shape, value
        torch.testing.assert_close(result.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    return lowered


def weights(*names: str, width: int = 24, inner: int = 16, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(width, inner, generator=generator).to(dtype) for name in names}


def hidden(*rows: int, inner: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*rows, inner, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 5), (127,)])
def test_a_residual_is_added_to_a_projection(rows: tuple[int, ...]) -> None:
    b = Builder(x=hidden(*rows), residual=hidden(*rows, inner=24), **weights("w"))
    lowered = check(b, b("aten.add.Tensor", b("aten.linear.default", "x", "w"), "residual"))
    (segment,) = lowered.ir.segments
    assert segment.products[0].left.cols == 16 and segment.cols == 24


@pytest.mark.parametrize("op", ["linear", "mm", "matmul", "addmm"])
def test_every_matmul_with_and_without_bias(op: str) -> None:
    b = Builder(x=hidden(3), bias=torch.randn(24), w=torch.randn(16, 24), **weights("rows"))
    b.tensors |= {"x": b.tensors["x"].float(), "rows": b.tensors["rows"].float()}
    made = {
        "linear": lambda: b("aten.linear.default", "x", "rows", "bias"),
        "mm": lambda: b("aten.mm.default", "x", "w"),
        "matmul": lambda: b("aten.matmul.default", "x", "w"),
        "addmm": lambda: b("aten.addmm.default", "bias", "x", "w"),
    }[op]()
    check(b, b("aten.relu.default", made), tolerance=1e-6)


def test_gate_and_up_read_one_input() -> None:
    b = Builder(x=hidden(2, 1), **weights("gate", "up"))
    gate, up = (b("aten.linear.default", "x", name) for name in ("gate", "up"))
    lowered = check(b, b("aten.mul.Tensor", b("aten.silu.default", gate), up))
    (segment,) = lowered.ir.segments
    first, second = segment.products
    assert first.left == second.left and first.right != second.right


def test_the_scale_of_a_norm_multiplies_the_sum() -> None:
    b = Builder(x=hidden(3, 1), gamma=torch.randn(16).bfloat16(), **weights("w"))
    lowered = check(b, b("aten.linear.default", rms_norm(b, "x", "gamma", "bfloat16"), "w"))
    (segment,) = lowered.ir.segments
    assert any(isinstance(one, RowValue) for one in segment.body)
    left = segment.products[0].left
    before = left.body[: left.body.index(next(one for one in left.body if isinstance(one, Reduce)))]
    assert not left.per_row[segment.products[0].left_value]
    assert not any(isinstance(one, Reduce) for one in before)


def rotated(b: Builder, x: str) -> str:
    """Rotary embedding of heads of 8."""
    low, high = (b("aten.slice.Tensor", x, dim=3, start=start, end=start + 4) for start in (0, 4))
    half = b("aten.cat.default", b("aten.neg.default", high), low, dim=-1)
    return b("aten.add.Tensor", b("aten.mul.Tensor", x, "cos"), b("aten.mul.Tensor", half, "sin"))


@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 5)])
def test_a_rotation_reads_each_half_of_a_head_once(rows: tuple[int, int]) -> None:
    batch, length = rows
    b = Builder(x=hidden(*rows), cos=torch.randn(length, 8), sin=torch.randn(length, 8), **weights("w"))
    heads = b("aten.view.default", b("aten.linear.default", "x", "w"), size=[batch, length, 3, 8])
    lowered = check(b, rotated(b, b("aten.transpose.int", heads, dim0=1, dim1=2)))
    (segment,) = lowered.ir.segments
    assert sum(isinstance(one, Dot) for one in segment.body) == 2
    assert segment.cols == 3 * 4 and len(segment.products) == 1


def test_projections_of_one_input_share_a_kernel() -> None:
    b = Builder(x=hidden(2, 1), gamma=torch.randn(16).bfloat16(), cos=torch.randn(1, 8), sin=torch.randn(1, 8),
                cache=torch.zeros(2, 3, 6, 8).bfloat16(), at=torch.tensor([4]), **weights("q", "k", "v"))
    normed = rms_norm(b, "x", "gamma", "bfloat16")
    q, k, v = (
        b("aten.transpose.int", b("aten.view.default", b("aten.linear.default", normed, name), size=[2, 1, 3, 8]),
          dim0=1, dim1=2)
        for name in "qkv"
    )
    written = b("aten.index_copy_.default", "cache", "at", b("aten.to.dtype", rotated(b, k), dtype="bfloat16"), dim=2)
    lowered = check(b, rotated(b, q), v, written)
    assert len(lowered.ir.segments) >= 2
    assert len({one.left for segment in lowered.ir.segments for one in segment.products}) == 1


@pytest.mark.parametrize(("after", "reason"), [("softmax", "folds its columns"), ("turned", "across the columns")])
def test_what_one_kernel_cannot_be_is_refused(after: str, reason: str) -> None:
    b = Builder(x=hidden(2, 8), **weights("w", width=8, inner=16))
    made = b("aten.linear.default", "x", "w")
    if after == "softmax":
        out = b("aten.softmax.int", made, dim=-1)
    else:
        out = b("aten.clone.default", b("aten.transpose.int", made, dim0=1, dim1=2))
    graph = b.graph(out)
    with pytest.raises(NotLowerable, match=reason):
        lower_group(graph, [node.name for node in graph if kind_of(node, graph.specs) != "view"])
