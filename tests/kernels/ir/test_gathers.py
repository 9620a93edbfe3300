"""Lookups by data: what they compute, that they never leave their table, and the operands they are tried on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import Builder
from kernel_reference import run_reference
from well_formed import validate

from fuseplan.kernels.ir.backend import OutsideTable
from fuseplan.kernels.ir.gathers import gathered_elements, index_limits, tables, value_axes
from fuseplan.kernels.ir.index import Index, symbol
from fuseplan.kernels.ir.ir import ITEMSIZE, Load, Segment
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.sample_inputs import MOST_TABLE_ROWS, sample_inputs
from fuseplan.planner.implementations.tunable_group import group_subject
from fuseplan.planner.lowering.lower import Lowered, NotLowerable
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.patterns.table import pattern_graph
from fuseplan.planner.work.group_work import kernel_work

TABLE = torch.randn(11, 6)


def compute_ops(graph: DataflowGraph) -> list[str]:
    return [node.name for node in graph if kind_of(node, graph.specs) == "compute"]


def lowered_all(builder: Builder, *outputs: str) -> Lowered:
    graph = builder.graph(*outputs)
    return lower_group(graph, compute_ops(graph))


def run(lowered: Lowered, builder: Builder) -> list[torch.Tensor]:
    return run_reference(lowered.ir, builder.values(lowered.inputs))


@pytest.mark.parametrize("bad", [-1, 11, 2**40, -(2**40)])
def test_an_index_outside_the_table_fails(bad: int) -> None:
    ids = torch.tensor([[3, 0], [10, 1]])
    builder = Builder(table=TABLE, ids=ids)
    lowered = lowered_all(builder, builder("aten.mul.Tensor", builder("aten.embedding.default", "table", "ids"),
                                           other=2.0))
    (result,) = run(lowered, builder)
    torch.testing.assert_close(result, 2 * TABLE[ids].double())
    ids[1, 0] = bad
    with pytest.raises(OutsideTable):
        run(lowered, builder)


def test_a_table_is_read_through_its_views() -> None:
    builder = Builder(x=torch.randn(5, 3, 8), at=torch.tensor([7, 2, 2, 0]))
    turned = builder("aten.permute.default", "x", dims=(2, 0, 1))
    part = builder("aten.slice.Tensor", turned, dim=1, start=1, end=4)
    lowered = lowered_all(builder, builder("aten.neg.default", builder("aten.index_select.default", part, "at", dim=0)))
    (result,) = run(lowered, builder)
    expected = -builder.tensors["x"].permute(2, 0, 1)[:, 1:4].index_select(0, builder.tensors["at"])
    torch.testing.assert_close(result, expected.double())


def test_a_lookup_in_one_part_of_a_cat_keeps_both_masks() -> None:
    builder = Builder(table=TABLE, ids=torch.tensor([4, 9]), x=torch.randn(3, 6))
    rows = builder("aten.embedding.default", "table", "ids")
    lowered = lowered_all(builder, builder("aten.cat.default", rows, "x", dim=0))
    (result,) = run(lowered, builder)
    torch.testing.assert_close(result, torch.cat([TABLE[[4, 9]], builder.tensors["x"]]).double())


def test_the_parts_of_a_cat_that_look_up_nothing_excuse_an_index() -> None:
    ids = torch.tensor([7, 12])
    builder = Builder(table=TABLE, ids=ids, x=torch.randn(3, 6))
    rows = builder("aten.embedding.default", "table", builder("aten.sub.Tensor", "ids", other=3))
    lowered = lowered_all(builder, builder("aten.cat.default", rows, "x", dim=0))
    (result,) = run(lowered, builder)  # where no number is read, 0 - 3 is no position of the table
    torch.testing.assert_close(result, torch.cat([TABLE[[4, 9]], builder.tensors["x"]]).double())
    ids[1] = 2
    with pytest.raises(OutsideTable):
        run(lowered, builder)


def test_indices_may_be_computed_in_the_group() -> None:
    builder = Builder(table=TABLE, ids=torch.tensor([4, 9, 1]))
    shifted = builder("aten.bitwise_xor.Scalar", "ids", other=1)
    lowered = lowered_all(builder, builder("aten.embedding.default", "table", shifted))
    (result,) = run(lowered, builder)
    torch.testing.assert_close(result, TABLE[[5, 8, 0]].double())


def test_a_flat_view_is_looked_up_in_place() -> None:
    builder = Builder(x=torch.randn(4, 6), at=torch.tensor([5, 23, 6]))
    flat = builder("aten.view.default", "x", size=(24,))
    lowered = lowered_all(builder, builder("aten.index_select.default", flat, "at", dim=0))
    (result,) = run(lowered, builder)
    torch.testing.assert_close(result, builder.tensors["x"].flatten()[[5, 23, 6]].double())


def test_what_the_group_computes_is_no_table() -> None:
    builder = Builder(table=TABLE, ids=torch.tensor([4, 9]))
    doubled = builder("aten.mul.Tensor", "table", other=2.0)
    with pytest.raises(NotLowerable, match=r"aten.embedding.default looks up v0_0, which the group computes"):
        lowered_all(builder, builder("aten.embedding.default", doubled, "ids"))


def test_a_gather_without_a_mask_is_malformed() -> None:
    builder = Builder(table=TABLE, ids=torch.tensor([4, 9]))
    ir = lowered_all(builder, builder("aten.embedding.default", "table", "ids")).ir
    (segment,) = ir.segments
    body = tuple(replace(i, mask=None) if isinstance(i, Load) and i.gather else i for i in segment.body)
    with pytest.raises(ValueError, match="gather without a mask"):
        validate(replace(ir, segments=(Segment(segment.rows, segment.cols, body, segment.stores),)))


def test_dynamic_tokens_and_vocabulary() -> None:
    n, v = symbol("n"), symbol("v")
    specs = {
        "table": TensorSpec((v, 6), "float32", (6, 1)), "ids": TensorSpec((n,), "int64", (1,)),
        "rows": TensorSpec((n, 6), "float32", (6, 1)),
    }
    graph = DataflowGraph(
        [OpNode("aten.embedding.default", ("table", "ids"), ("rows",))], specs, ("table", "ids"), ("rows",),
        {"n": 2, "v": 11},
    )
    lowered = lower_group(graph, ("rows",))
    assert lowered.ir.symbols == ("n", "v")
    inputs = {"table": TABLE, "ids": torch.tensor([1, 10, 3])}
    given = [inputs[name] for name in lowered.inputs]
    (result,) = run_reference(lowered.ir, given, {"n": 3, "v": 11})
    torch.testing.assert_close(result, TABLE[[1, 10, 3]].double())
    with pytest.raises(OutsideTable):
        run_reference(lowered.ir, given, {"n": 3, "v": 10})


def test_only_what_can_be_looked_up_counts_as_work() -> None:
    graph = pattern_graph("embedding_rms_norm", "5x100000x64")
    subject = group_subject(graph, compute_ops(graph), "key")
    ((table, rows),) = tables(subject.ir).items()
    assert rows == 100000
    assert gathered_elements(subject.ir) == {table: 5 * 64}
    ((ids, limit),) = index_limits(subject.ir).items()
    assert subject.ir.buffers[ids].dtype == "int64" and limit == 100000
    # 5 ids, 5 rows of the table, one weight; two results.
    assert subject.work.dram_bytes == 5 * 8 + (5 + 1 + 5 + 5) * 64 * ITEMSIZE["bfloat16"]
    assert subject.work.gathered_bytes == 5 * 64 * ITEMSIZE["bfloat16"]
    assert kernel_work(subject.ir, subject.hot_inputs) == subject.work
    # A table that was just produced is in the cache as a whole.
    assert kernel_work(subject.ir).gathered_bytes == 0


def test_axes_follow_operands_and_stop_at_folds() -> None:
    graph = pattern_graph("rms_norm", "5x64")
    (segment,) = group_subject(graph, compute_ops(graph), "key").ir.segments
    axes = value_axes(segment)
    for instr, own, per_row in zip(segment.body, axes, segment.per_row, strict=True):
        assert per_row == (segment.col_axis not in own)
        if isinstance(instr, Load) and instr.index == Index.coord(1, 64):
            assert own == {1}


def test_samples_suit_what_is_done_with_them() -> None:
    generator = torch.Generator().manual_seed(0)

    def samples(name: str, shape: str) -> dict[str, torch.Tensor]:
        graph = pattern_graph(name, shape)
        subject = group_subject(graph, compute_ops(graph), "key")
        made = sample_inputs(subject.ir, subject.nodes, subject.inputs, generator)
        return dict(zip(subject.inputs, made, strict=True))

    looked_up = samples("embedding_rms_norm", "500x100000x64")
    table = next(tensor for tensor in looked_up.values() if tensor.dim() == 2 and tensor.is_floating_point())
    ids = next(tensor for tensor in looked_up.values() if tensor.dtype == torch.int64)
    assert table.shape == (MOST_TABLE_ROWS, 64)
    assert 1000 < int(ids.max()) < MOST_TABLE_ROWS and int(ids.min()) >= 0
    scale = next(tensor for tensor in samples("rms_norm_fp8_tensor", "3x64").values() if tensor.shape == (1,))
    assert float(scale) >= 0.1
    words = next(t for t in samples("dequantise_awq", "128x64").values() if t.dtype == torch.int32)
    assert int(words.min()) < -(2**30) and int(words.max()) > 2**30
    weights = next(t for t in samples("dequantise_int8", "128x64").values() if t.dtype == torch.int8)
    assert int(weights.min()) < -100 and int(weights.max()) > 100
