"""Bags of rows of a table as kernels compute them, where all bags are known to be as large; against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder
from kernel_reference import run_reference

from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.groups.candidates import single_candidates
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.ops.table import kind_of

OP = "aten.embedding_bag.padding_idx"
USUAL = {"scale_grad_by_freq": False, "mode": 0, "sparse": False, "per_sample_weights": None,
         "include_last_offset": False, "padding_idx": None}


def bags(bags: int, size: int, dtype: torch.dtype = torch.float32, **changed: Any) -> tuple[Builder, str]:
    """Bags of ``size`` rows each of a table of 11 rows with 37 columns; indices are handed over as a matrix."""
    torch.manual_seed(0)
    b = Builder(table=torch.randn(11, 37).to(dtype), ids=torch.randint(0, 11, (bags, size)))
    offsets = b("aten.arange.start_step", start=0, end=bags * size, step=size, dtype=torch.int64)
    flat = b("aten.reshape.default", "ids", shape=(bags * size,))
    return b, b.many(OP, "table", flat, offsets, outputs=4, **{**USUAL, **changed})[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (127, 3), (5, 16)])
@pytest.mark.parametrize("mode", [0, 1])
def test_sums_and_means(mode: int, count: int, size: int, dtype: torch.dtype) -> None:
    b, value = bags(count, size, dtype, mode=mode)
    graph = b.graph(value)
    lowered = lower_group(graph, [node.name for node in graph if node.op == OP])
    (result,) = run_reference(lowered.ir, b.values(lowered.inputs))
    rows = b.tensors["table"].double()[b.tensors["ids"]]
    expected = rows.sum(1) if mode == 0 else rows.mean(1)
    torch.testing.assert_close(result.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("changed", [{"mode": 2}, {"padding_idx": 3}], ids=str)
def test_other_bags_are_left_to_aten(changed: dict[str, Any]) -> None:
    b, value = bags(3, 4, **changed)
    graph = b.graph(value)
    assert kind_of(next(node for node in graph if node.op == OP), graph.specs) == "opaque"


def test_bags_of_sizes_that_only_data_tell_have_no_kernel() -> None:
    b = Builder(table=torch.randn(11, 5), ids=torch.randint(0, 11, (6,)), offsets=torch.tensor([0, 1, 4]))
    value = b.many(OP, "table", "ids", "offsets", outputs=4, **USUAL)[0]
    graph = b.graph(value)
    with pytest.raises(NotLowerable, match="not known to be of one size"):
        lower_group(graph, [node.name for node in graph])


@pytest.mark.parametrize(("count", "size", "reason"), [(3, 17, "17 rows in a bag")])
def test_large_bags_have_no_kernel(count: int, size: int, reason: str) -> None:
    b, value = bags(count, size)
    graph = b.graph(value)
    with pytest.raises(NotLowerable, match=reason):
        lower_group(graph, [node.name for node in graph if node.op == OP])


def test_a_tune_times_bags_that_are_bags() -> None:
    """Random starts are an error in ATen, and on a GPU the end of the process."""
    b, value = bags(5, 3)
    graph = b.graph(value)
    table = GroupTable(graph, "fp32", "cpu")
    groups = [one for region in find_regions(graph) for one in single_candidates(graph, region)]
    (subject,) = (table.subject(one) for one in groups if graph.op(one.ops[0]).op == OP)
    inputs = subject.make_inputs(0, "cpu")
    (result,) = run_reference(subject.ir, inputs)
    torch.testing.assert_close(result.float(), subject.eager(*inputs)[0])


def test_a_model_with_bags_runs_in_kernels_and_fails_where_eager_fails() -> None:
    """Ten tables and what follows: bags are held, and a row that is not there is an error."""
    tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(11, 16, mode="sum") for _ in range(10))

    def run(ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(ids[at]) for at, table in enumerate(tables)], 1).relu()

    ids = torch.randint(0, 11, (10, 5, 3))
    torch._dynamo.reset()
    call = torch.compile(run, backend="fuseplan", dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(call(ids), run(ids))
        ids[3, 2, 1] = 11
        for one in (run, call):
            with pytest.raises((IndexError, RuntimeError), match=r"11|index|range"):
                one(ids)
