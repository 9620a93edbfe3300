"""Groups built around a matmul: what comes before and after it in the same kernel, against ATen in float64."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from kernel_reference import run_reference
from lower_oracle import rms_norm
from matmul_groups import attention_inputs, gated, heads, hidden, lowered_whole, rotated, weights
from quantised_groups import FORMATS, quantised
from well_formed import validate

from fuseplan.kernels.ir.in_place import Execution, reuse_options
from fuseplan.kernels.ir.ir import Dot, Reduce, Round, RowValue
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.work.group_work import kernel_work


def check(b: Builder, *outputs: str, tolerance: float = 1e-9) -> Lowered:
    """Lower everything as one group, matmuls and all, and compare with the chain in float64."""
    lowered, expected = lowered_whole(b, *outputs)
    validate(lowered.ir)
    results = run_reference(lowered.ir, b.values(lowered.inputs))
    for value, result, wanted in zip(lowered.outputs, results, expected, strict=True):
        assert result.shape == wanted.shape, value
        torch.testing.assert_close(result.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    return lowered


@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 5), (127,)])
def test_a_residual_is_added_to_a_projection(rows: tuple[int, ...]) -> None:
    b = Builder(x=hidden(*rows), residual=hidden(*rows, inner=24), **weights("w"))
    lowered = check(b, b("aten.add.Tensor", b("aten.linear.default", "x", "w"), "residual"))
    (segment,) = lowered.ir.segments
    assert segment.products[0].left.cols == 16 and segment.cols == 24


@pytest.mark.parametrize("order", [("x", "residual"), ("residual", "x")])
def test_no_result_of_a_matmul_lies_in_what_it_reads(order: tuple[str, str]) -> None:
    given = {name: hidden(3, 16) for name in order}
    b = Builder(**given, **weights("w", width=16))
    lowered = check(b, b("aten.add.Tensor", b("aten.linear.default", order[0], "w"), order[1]))
    assert reuse_options(lowered.ir, [Execution(looped=False, replicated=False)]) == {}


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
    b, outputs = gated(2, 24, 16, torch.bfloat16)
    (segment,) = check(b, *outputs).ir.segments
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


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_read_as_they_are_stored(name: str, rows: int) -> None:
    """And only once: what a kernel moves is its operands and its result."""
    b = quantised(name, rows, 32, 64, torch.bfloat16)
    lowered, (expected,) = lowered_whole(b)
    (result,) = run_reference(lowered.ir, b.values(lowered.inputs))
    torch.testing.assert_close(result.double(), expected, rtol=1e-9, atol=1e-9)
    (segment,) = lowered.ir.segments
    assert len(segment.products) == 1 and segment.products[0].dtype == "bfloat16"
    operands = [b.tensors[value].nbytes for value in lowered.inputs]
    assert kernel_work(lowered.ir).dram_bytes == sum(operands) + rows * 32 * 2


@pytest.mark.parametrize("name", ["int8, scaled after", "int8, turned"])
def test_a_byte_is_exact_in_what_it_is_widened_to(name: str) -> None:
    graph = quantised(name, 3, 24, 40, torch.bfloat16).graph()
    lowered = lower_group(graph, [node.name for node in graph if kind_of(node, graph.specs) != "view"], "eager")
    right = lowered.ir.segments[0].products[0].right
    assert not any(isinstance(instr, Round) for instr in right.body)


@pytest.mark.parametrize(("dtype", "factors"), [(torch.bfloat16, True), (torch.float16, False)])
def test_the_scale_of_an_output_channel_multiplies_the_sum(dtype: torch.dtype, factors: bool) -> None:
    """In float16 only where weights without it fit, as bytes do."""
    def buffers_of_weights(stored: torch.dtype) -> int:
        b = Builder(x=hidden(3, dtype=dtype), scale=torch.rand(24, 1).to(dtype),
                    w=(torch.randn(24, 16) * 8).to(stored))
        wide = b("aten.to.dtype", "w", dtype=str(dtype).removeprefix("torch.")) if stored != dtype else "w"
        lowered, (expected,) = lowered_whole(b, b("aten.linear.default", "x", b("aten.mul.Tensor", wide, "scale")))
        (result,) = run_reference(lowered.ir, b.values(lowered.inputs))
        torch.testing.assert_close(result.double(), expected, rtol=1e-9, atol=1e-9)
        return len({load.buffer for load in lowered.ir.segments[0].products[0].right.loads})

    assert buffers_of_weights(torch.int8) == 1
    assert buffers_of_weights(dtype) == (1 if factors else 2)


def test_weights_whose_rows_are_folded_stay_outside() -> None:
    b = Builder(x=hidden(3), **weights("w"))
    norm = b("aten.amax.default", b("aten.abs.default", "w"), dim=[1], keepdim=True)
    with pytest.raises(NotLowerable, match="rows of its weights are folded"):
        lowered_whole(b, b("aten.linear.default", "x", b("aten.div.Tensor", "w", norm)))


@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 5)])
def test_a_rotation_reads_each_half_of_a_head_once(rows: tuple[int, int]) -> None:
    length = rows[1]
    b = Builder(x=hidden(*rows), cos=torch.randn(length, 8), sin=torch.randn(length, 8), **weights("w"))
    lowered = check(b, rotated(b, heads(b, "x", "w")))
    (segment,) = lowered.ir.segments
    assert sum(isinstance(one, Dot) for one in segment.body) == 2
    assert segment.cols == 3 * 4 and len(segment.products) == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_projections_of_one_input_share_a_kernel(rows: int) -> None:
    b, outputs = attention_inputs(rows, 40, torch.bfloat16)
    lowered = check(b, *outputs)
    assert len({one.left for segment in lowered.ir.segments for one in segment.products}) == 1
    assert sum(len(segment.products) for segment in lowered.ir.segments) == 3


@pytest.mark.parametrize(("after", "reason"), [
    ("softmax", "folds its columns"), ("turned", "across the columns"), ("one", "same in all columns"),
])
def test_what_one_kernel_cannot_be_is_refused(after: str, reason: str) -> None:
    b = Builder(x=hidden(1, 1) if after == "one" else hidden(2, 8), **weights("w", width=1 if after == "one" else 8))
    made = b("aten.linear.default", "x", "w")
    if after == "softmax":
        out = b("aten.softmax.int", made, dim=-1)
    elif after == "one":
        out = b("aten.relu.default", made)
    else:
        turned = b("aten.transpose.int", made, dim0=1, dim1=2)
        out = b("aten.clone.default", turned, memory_format=torch.contiguous_format)
    with pytest.raises(NotLowerable, match=reason):
        lowered_whole(b, out)
