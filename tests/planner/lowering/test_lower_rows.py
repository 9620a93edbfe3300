"""The order in which a kernel walks its rows: as its results lie in memory, once for what shares them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder
from hypothesis import given, settings
from hypothesis import strategies as st
from lower_oracle import check, compute_ops, rms_norm

from fuseplan.kernels.ir.ir import Load, Reduce
from fuseplan.kernels.ir.reduction_loops import folds_across, lies_apart
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.lowering.lower import Lowered, NotLowerable


def rows_of(lowered: Lowered) -> list[tuple[Any, ...]]:
    return [segment.rows for segment in lowered.ir.segments]


def heads_of(positions: int, heads: int, dim: int = 16) -> torch.Tensor:
    """[heads, positions, dim], with positions before heads in memory."""
    return torch.randn(positions, heads, dim).transpose(0, 1)


def test_per_row_output_beside_per_element_output() -> None:
    b = Builder(x=torch.randn(5, 9))
    mean = b("aten.mean.dim", "x", dim=(-1,), keepdim=True)
    lowered = check(b, mean, b("aten.sub.Tensor", "x", mean))
    (segment,) = lowered.ir.segments
    assert [segment.store_per_row(store) for store in segment.stores] == [True, False]


def test_transposed_output_is_walked_in_memory_order() -> None:
    b = Builder(x=torch.randn(6, 4).t())
    lowered = check(b, b("aten.exp.default", "x"))
    (segment,) = lowered.ir.segments
    assert (segment.rows, segment.cols) == ((), 24)  # 4x6 with strides (1, 4) is one run of addresses


def test_rows_of_a_norm_are_walked_as_its_result_lies_in_memory() -> None:
    b = Builder(x=heads_of(5, 3), w=torch.randn(16))
    normed = rms_norm(b, "x", "w", "float32")
    assert rows_of(check(b, normed)) == [(15,)]  # one run of addresses
    small = b("aten.amax.default", "x", dim=(-1,), keepdim=True)
    lowered = check(b, small, normed)
    assert rows_of(lowered) == [(5, 3)]  # the smaller result follows, whatever its own layout
    assert sum(isinstance(instr, Load) for instr in lowered.ir.segments[0].body) == 2


def test_a_pointwise_result_follows_the_reduction_that_walks_its_rows() -> None:
    b = Builder(x=torch.randn(3, 5, 16), y=heads_of(5, 3), w=torch.randn(16))
    total = b("aten.add.Tensor", "x", "y")
    gated = b("aten.mul.Tensor", "y", rms_norm(b, total, "w", "float32"))
    assert [b.tensors[value].stride() for value in (total, gated)] == [(80, 16, 1), (16, 48, 1)]
    lowered = check(b, total, gated)
    assert rows_of(lowered) == [(5, 3)]
    assert sum(isinstance(instr, Load) for instr in lowered.ir.segments[0].body) == 3  # x, y and w, once each


@pytest.mark.parametrize("turned", [False, True])
def test_the_order_of_one_reduction_is_none_of_another_of_mirrored_rows(turned: bool) -> None:
    b = Builder(x=heads_of(5, 3), y=heads_of(3, 5))
    names = ("y", "x") if turned else ("x", "y")
    lowered = check(b, *(b("aten.mul.Tensor", name, b("aten.sum.dim_IntList", name, dim=(-1,), keepdim=True))
                         for name in names))
    assert rows_of(lowered) == [(15,), (15,)]


def test_reductions_of_rows_of_other_lengths_have_orders_of_their_own() -> None:
    b = Builder(x=heads_of(5, 3, 16), y=torch.randn(3, 5, 8))
    lowered = check(b, *(b("aten.mul.Tensor", name, b("aten.sum.dim_IntList", name, dim=(-1,), keepdim=True))
                         for name in "xy"))
    assert rows_of(lowered) == [(15,), (15,)]


def test_a_fold_to_the_folded_size_has_rows_alone() -> None:
    b = Builder(x=torch.randn(7, 7), y=torch.randn(7))
    total = b("aten.sum.dim_IntList", "x", dim=(-1,))
    lowered = check(b, b("aten.exp.default", "x"), b("aten.mul.Tensor", total, "y"), total)
    assert rows_of(lowered) == [(7,)]  # one walk of x serves all three
    assert sum(isinstance(instr, Reduce) for segment in lowered.ir.segments for instr in segment.body) == 1


@pytest.mark.parametrize("shape", [(7, 7), (3, 5, 5), (1, 1), (0, 0), (4, 1)])
def test_statistics_of_a_square_in_every_order(shape: tuple[int, ...]) -> None:
    b = Builder(x=torch.randn(shape))
    mean = b("aten.mean.dim", "x", dim=(-1,))
    check(b, b("aten.transpose.int", b("aten.sub.Tensor", "x", b("aten.unsqueeze.default", mean, dim=-1)),
               dim0=-1, dim1=-2), b("aten.neg.default", mean))


@pytest.mark.parametrize("shape", [(65, 65), (65, 33)])
def test_what_is_folded_across_memory_is_stored_along_it(shape: tuple[int, ...]) -> None:
    """Of a square both walks have equal extents; as one they would read and write elements that lie apart."""
    b = Builder(x=torch.randn(shape))
    doubled = b("aten.mul.Tensor", "x", "x")
    lowered = check(b, doubled, b("aten.mean.dim", doubled, dim=(0,)), b("aten.amax.default", doubled, dim=(0,)))
    assert all(folds_across(one) or lies_apart(one, one.col_axis) == 0 for one in lowered.ir.segments)
    assert sum(map(folds_across, lowered.ir.segments)) == 1  # one walk for both folds


def test_a_row_is_not_folded_again_for_each_of_its_elements() -> None:
    """A softmax walks the columns, the sum is asked for across them: as one kernel it would fold n rows n times."""
    b = Builder(x=torch.randn(7, 7))
    both = b("aten.add.Tensor", b("aten.softmax.int", "x", dim=-1), b("aten.sum.dim_IntList", "x", dim=(-1,)))
    graph = b.graph(both)
    with pytest.raises(NotLowerable, match="again for each"):
        lower_group(graph, compute_ops(graph))


@pytest.mark.parametrize("keepdim", [False, True])
def test_as_many_channels_as_positions_are_no_rows(keepdim: bool) -> None:
    b = Builder(x=torch.randn(3, 12, 3, 4))
    pooled = b("aten.mean.dim", "x", dim=(2, 3), keepdim=keepdim)
    assert [(segment.rows, segment.cols) for segment in check(b, pooled).ir.segments] == [((36,), 12)]


def test_what_a_group_norm_reads_is_stored_as_its_rows_are_walked() -> None:
    b = Builder(x=torch.randn(2, 6, 3, 5), t=torch.randn(2, 6, 1, 1), w=torch.randn(6))
    total = b("aten.add.Tensor", "x", "t")
    gated = b("aten.silu.default", b("aten.group_norm.default", total, "w", num_groups=3, bias=None))
    lowered = check(b, total, gated)
    assert [(segment.rows, segment.cols) for segment in lowered.ir.segments] == [((2, 3), 30)]


def test_a_pooled_scale_is_applied_where_it_is_made() -> None:
    b = Builder(x=torch.randn(3, 4, 3, 5))
    scale = b("aten.sigmoid.default", b("aten.mean.dim", "x", dim=(2, 3), keepdim=True))
    lowered = check(b, b("aten.mul.Tensor", "x", scale))
    assert [(segment.rows, segment.cols) for segment in lowered.ir.segments] == [((12,), 15)]


_LAYOUTS = st.permutations(range(4))


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(*[st.sampled_from((1, 2, 3, 0))] * 3, st.sampled_from((1, 5, 8))), st.tuples(_LAYOUTS, _LAYOUTS),
    st.lists(st.sampled_from(("sum", "gated", "total", "turned", "top", "copy")), min_size=1, max_size=4, unique=True),
)
def test_reductions_over_any_layout(
    shape: tuple[int, ...], layouts: tuple[list[int], list[int]], wanted: list[str]
) -> None:
    """What shares rows is one group, in whatever order its results lie in memory."""
    x, y = (
        torch.randn([shape[dim] for dim in layout]).permute([layout.index(dim) for dim in range(4)])
        for layout in layouts
    )
    b = Builder(x=x, y=y, w=torch.randn(shape[-1]))
    total = b("aten.add.Tensor", "x", "y")
    norm = rms_norm(b, total, "w", "float32")
    turned = b("aten.transpose.int", norm, dim0=1, dim1=2)
    made = {
        "sum": b("aten.sum.dim_IntList", total, dim=(-1,)), "gated": b("aten.mul.Tensor", "y", norm), "total": total,
        "turned": b("aten.neg.default", turned),
        "top": b("aten.amax.default", "x", dim=(-1,), keepdim=True),
        "copy": b("aten.clone.default", turned, memory_format=torch.contiguous_format),
    }
    check(b, *(made[name] for name in wanted))
