"""What ATen's kernels do besides bytes and arithmetic, counted by hand on small ones."""

from __future__ import annotations

import pytest

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.work.aten_overheads import aten_overheads
from fuseplan.planner.work.group_work import op_work


def graph_of(op: str, inputs: dict[str, TensorSpec], result: TensorSpec, **attrs: object) -> DataflowGraph:
    node = OpNode(op, tuple(inputs), ("y",), attrs)
    return DataflowGraph([node], {**inputs, "y": result}, tuple(inputs), ("y",))


def contiguous(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(shape, dtype)


def test_aten_loads_vectors_of_contiguous_tensors_only() -> None:
    same = {"a": contiguous(4, 8), "b": contiguous(4, 8)}
    graph = graph_of("aten.add.Tensor", same, contiguous(4, 8))
    fast = aten_overheads(graph, graph.op("y"))
    assert (fast.steps, fast.serial_steps) == (0, 0)
    # A size of one broadcasts nothing.
    one = {"a": contiguous(1, 8), "b": contiguous(8)}
    graph = graph_of("aten.add.Tensor", one, contiguous(1, 8))
    assert aten_overheads(graph, graph.op("y")).steps == 0
    for other in (contiguous(8), TensorSpec((4, 8), "float32", (1, 4)), TensorSpec((4, 8), "float32", (16, 1))):
        graph = graph_of("aten.add.Tensor", {"a": contiguous(4, 8), "b": other}, contiguous(4, 8))
        slow = aten_overheads(graph, graph.op("y"))
        assert slow.steps > 0


@pytest.mark.parametrize(
    ("dtype", "rows", "turns"),
    [("float32", 2, 1), ("float32", 64, 2), ("int64", 64, 2), ("bfloat16", 2, 1), ("bfloat16", 64, 4), ("bool", 64, 4)],
)
def test_aten_divides_addresses_one_element_after_the_other(dtype: str, rows: int, turns: int) -> None:
    sliced = {"a": TensorSpec((rows, 8), dtype, (16, 1))}
    op = "aten.logical_not.default" if dtype == "bool" else "aten.neg.default"
    graph = graph_of(op, sliced, contiguous(rows, 8, dtype=dtype))
    # 128 threads to a block, of two elements each, or four of less than four bytes.
    effort = aten_overheads(graph, graph.op("y"))
    assert effort.steps == 5 * turns


@pytest.mark.parametrize("name", ["silu", "sin"])
def test_aten_waits_longer_for_functions_than_for_signs(name: str) -> None:
    strided = TensorSpec((4, 8), "float32", (16, 1))
    for spec, least in ((contiguous(4, 8), 0), (strided, 5)):
        steps = [
            aten_overheads(graph, graph.op("y")).steps
            for graph in (graph_of(f"aten.{op}.default", {"x": spec}, contiguous(4, 8)) for op in (name, "neg"))
        ]
        assert steps[0] > steps[1] == least


def test_aten_looks_types_up_when_it_widens() -> None:
    def steps(given: str, result: str) -> float:
        wide = contiguous(64, dtype=result)
        graph = graph_of("aten.to.dtype", {"x": contiguous(64, dtype=given)}, wide, dtype=result)
        return aten_overheads(graph, graph.op("y")).steps

    assert steps("float32", "bfloat16") == 0
    assert steps("bfloat16", "float32") > 0
    assert steps("int64", "float32") > 0


@pytest.mark.parametrize(
    ("rows", "cols", "turns"), [(1, 4096, 2), (8, 4096, 16), (16, 4096, 32), (2048, 4096, 32), (32, 8192, 4)]
)
def test_aten_shares_a_row_among_threads(rows: int, cols: int, turns: float) -> None:
    graph = graph_of("aten.mean.dim", {"x": contiguous(rows, cols)}, contiguous(rows, 1), dim=(-1,), keepdim=True)
    # One block: a row on 512 threads; 8 rows on 64 each; a warp each from 16 rows on, unless 256 elements a thread.
    assert aten_overheads(graph, graph.op("y")).serial_steps == 4 * turns
    assert op_work(graph, "y").serial_steps == 4 * turns
    assert op_work(graph, "y").row_bytes == 0


def test_aten_gathers_few_rows_in_turn() -> None:
    def serial(rows: int) -> float:
        inputs = {"table": contiguous(100, 8), "ids": contiguous(rows, dtype="int64")}
        graph = graph_of("aten.embedding.default", inputs, contiguous(rows, 8))
        return aten_overheads(graph, graph.op("y")).serial_steps

    assert serial(16) == 2 * serial(8) > 0
    assert serial(17) == 0


@pytest.mark.parametrize(
    ("shape", "dim", "turns"),
    [
        ((4096, 1024), 0, 3 * 4096),  # one thread a row: 2.5 ms of one block on an H200
        ((8, 12, 128, 128), 1, 3 * 12),
        ((4096, 32), 0, 3 * 128),  # 32 threads share a row
        ((64, 64), -2, 3 * 4),
        ((63, 64), 0, 3 * 63),
        ((4096, 1024), 1, 0),  # along memory
        ((4096, 1), 0, 0),
    ],
)
def test_aten_walks_rows_that_lie_across_memory_thrice(shape: tuple[int, ...], dim: int, turns: int) -> None:
    graph = graph_of("aten.softmax.int", {"x": contiguous(*shape)}, contiguous(*shape), dim=dim)
    assert aten_overheads(graph, graph.op("y")).serial_steps == 4 * turns
