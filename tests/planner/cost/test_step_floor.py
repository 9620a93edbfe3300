"""The floor of a step: bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from costmodel_samples import CPU
from graphs import Builder

from fuseplan.costmodel.device import Peak
from fuseplan.planner.cost.step_floor import floor_us, step_work
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.group_table import GroupTable


def work_of(graph: DataflowGraph) -> float:
    return step_work(GroupTable(graph, "fp32", "cpu")).dram_bytes


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_weights_count_once_each_and_nothing_between_counts(layers: int) -> None:
    b = Builder(x=torch.randn(3, 40), **{f"w{at}": torch.randn(40, 40) for at in range(layers)})
    value = "x"
    for at in range(layers):
        value = b("aten.silu.default", b("aten.linear.default", b("aten.mul.Tensor", value, value), f"w{at}"))
    assert work_of(b.graph(value)) == 4 * (3 * 40 + layers * 40 * 40 + 3 * 40)


def test_a_weight_that_layers_share_counts_once() -> None:
    b = Builder(x=torch.randn(3, 40), w=torch.randn(40, 40))
    value = "x"
    for _ in range(4):
        value = b("aten.silu.default", b("aten.linear.default", value, "w"))
    graph = b.graph(value)
    assert work_of(graph) == 4 * (3 * 40 + 40 * 40 + 3 * 40)
    assert step_work(GroupTable(graph, "fp32", "cpu")).flops["fp32_matmul"] == 4 * 2 * 3 * 40 * 40


def test_of_a_table_the_rows_that_are_looked_up_count() -> None:
    b = Builder(table=torch.randn(1000, 64), ids=torch.tensor([3, 1, 999]))
    rows = b("aten.silu.default", b("aten.embedding.default", "table", "ids"))
    assert work_of(b.graph(rows)) == 4 * (3 * 64 + 3 * 64) + 3 * 8


def test_a_cache_that_is_written_and_read_counts_once() -> None:
    heads, places, width = 2, 50, 16
    b = Builder(
        q=torch.randn(1, heads, 1, width), k=torch.randn(1, heads, 1, width), at=torch.tensor([7]),
        keys=torch.randn(1, heads, places, width), values=torch.randn(1, heads, places, width),
    )
    written = b("aten.index_copy_.default", "keys", "at", b("aten.neg.default", "k"), dim=2)
    out = b("aten.scaled_dot_product_attention.default", "q", written, "values")
    row = heads * width
    assert work_of(b.graph(out)) == 4 * (2 * places * row + row + row + row) + 8  # both caches, q, k, result; the place


def test_the_floor_is_the_larger_of_memory_and_arithmetic_and_unknown_without_a_peak() -> None:
    spec = replace(CPU, peaks={**CPU.peaks, "fp32_matmul": Peak(1e11, 2e11)})
    for rows, by_memory in ((1, True), (4096, False)):
        b = Builder(x=torch.randn(rows, 1024), w=torch.randn(1024, 1024))
        table = GroupTable(b.graph(b("aten.linear.default", "x", "w")), "fp32", "cpu")
        memory_us = 4 * (1024 * 1024 + 2 * rows * 1024) / 60e3  # at the best bandwidth from memory, 60 GB/s
        arithmetic_us = 2 * rows * 1024 * 1024 / 2e5  # at the best rate, 200 GFLOP/s
        floor = floor_us(table, spec, "eager")
        assert floor is not None and (memory_us > arithmetic_us) is by_memory
        assert max(memory_us, arithmetic_us) <= floor <= max(memory_us, arithmetic_us) + 2.0  # and a launch
        assert floor_us(table, replace(spec, peaks={}), "eager") is None
