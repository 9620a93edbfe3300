"""What C++ kernels issue, counted by hand on small ones."""

from __future__ import annotations

from dataclasses import replace

import ir_samples as samples
import pytest
import torch
from graphs import Builder

from fuseplan.kernels.cpp.config import BYTES_PER_THREAD, ir_bytes
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import Apply, Buffer, Instr, KernelIR, Load, Reduce, Segment, Store
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.work.group_work import op_work
from fuseplan.planner.work.kernel_overheads import lanes, threads

#: Rows lie apart, for those that follow one another are one.
ROWS, COLS, PITCH = 3, 40, 48
AT = Index.coord(0, ROWS) * PITCH + Index.coord(1, COLS)
#: What is done once a row.
ROW = 64


def kernel(
    *body: Instr, dtypes: tuple[str, str] = ("float32", "float32"), store: Index = AT, rows: int = ROWS
) -> KernelIR:
    buffers = tuple(
        Buffer(name, dtype, (rows, COLS), (PITCH, 1), is_output=name == "y")
        for name, dtype in zip(("x", "y"), dtypes, strict=True)
    )
    return KernelIR(buffers, (Segment((rows,), COLS, body, (Store(1, store, len(body) - 1),)),))


def each(ir: KernelIR, once: int = 1) -> float:
    """Lanes of one element."""
    return (lanes(ir) - ROWS * once * ROW) / (ROWS * COLS)


LOAD = Load("float32", 0, AT)


def test_a_vectorised_loop_issues_one_of_each() -> None:
    assert each(kernel(LOAD, Apply("float32", "neg", (0,)))) == 3  # load, negate, store


def test_narrow_types_are_converted() -> None:
    assert each(kernel(LOAD, dtypes=("bfloat16", "float32"))) == 2 + 1
    assert each(kernel(LOAD, dtypes=("bfloat16", "bfloat16"))) == 2 + 2


def test_special_functions_are_polynomials() -> None:
    assert each(kernel(LOAD, Apply("float32", "exp", (0,)))) == 1 + 10 + 1


def test_strides_are_stored_one_by_one() -> None:
    across = Index.coord(1, COLS) * ROWS + Index.coord(0, ROWS)
    assert each(kernel(LOAD, store=across)) == 1 + 16


def test_bools_are_loaded_one_by_one() -> None:
    assert each(kernel(Load("bool", 0, AT), dtypes=("bool", "bool"))) == 48 + 2


def test_what_one_row_shares_is_issued_once_for_it() -> None:
    ir = kernel(LOAD, Reduce("float32", "sum", 0), Apply("float32", "sqrt", (1,)), store=Index.coord(0, ROWS))
    assert each(ir, once=4) == 2  # a load and a fold; outside the loop the fold, the root, the store and the row itself


def test_segments_add() -> None:
    one = kernel(LOAD)
    two = replace(one, segments=one.segments * 2)
    assert lanes(two) - lanes(one) == lanes(one) == ROWS * (ROW + 2 * COLS)


@pytest.mark.parametrize(("rows", "expected"), [(3, 1), (1000, 1), (2000, 3), (100_000, 162)])
def test_threads_are_worth_waking_for_enough_bytes(rows: int, expected: int) -> None:
    at = Index.coord(0, rows) * PITCH + Index.coord(1, COLS)
    assert threads(kernel(Load("float32", 0, at), store=at, rows=rows)) == expected


def test_no_more_threads_than_tasks_are_worth_waking() -> None:
    """Whatever their bytes: one long fold has ranges, and two long softmaxes are two tasks."""
    long, two = folded(torch.empty(1, 2**22), 1), samples.softmax(2, 2**22).ir
    assert ir_bytes(two) > 100 * BYTES_PER_THREAD
    assert threads(two) == 2 < 16 < threads(long) <= ir_bytes(long) // BYTES_PER_THREAD


def test_an_aten_op_is_known_by_its_name_and_type_and_has_no_lanes() -> None:
    sizes = {"x": (5, 7), "y": (5, 7), "one": (1, 1)}
    specs = {name: TensorSpec.contiguous(shape, "bfloat16") for name, shape in sizes.items()}
    nodes = [OpNode("aten.mul.Tensor", ("x",), ("y",), {"other": 2.0})]
    work = op_work(DataflowGraph(nodes, specs, ["x"], ["y"]), "y")
    assert (work.call, work.elements, work.lanes) == ("aten.mul.Tensor.bfloat16.number", 35.0, 0.0)
    for names, call in (("xx", "bfloat16"), (("x", "one"), "bfloat16.one"), (("one", "x"), "bfloat16.one")):
        nodes = [OpNode("aten.mul.Tensor", tuple(names), ("y",))]
        assert op_work(DataflowGraph(nodes, specs, ["x", "one"], ["y"]), "y").call == f"aten.mul.Tensor.{call}"


def folded(x: torch.Tensor, dim: int) -> KernelIR:
    b = Builder(x=x)
    return lower_group(b.graph(b("aten.amax.default", "x", dim=(dim,))), ("v0_0",)).ir


def test_a_fold_across_memory_costs_no_more_than_one_along_it() -> None:
    across, along = (lanes(folded(torch.empty(shape), dim)) for shape, dim in (((8, 200, 512), 1), ((8, 512, 200), 2)))
    assert across < along
    apart = lanes(folded(torch.empty(8, 200, 1024)[:, :, ::2], 1))  # nowhere are two elements neighbours
    assert apart > 8 * across
