"""What kernels do besides bytes and arithmetic, counted by hand on small ones."""

from __future__ import annotations

import pytest
from ir_samples import Sample, dynamic_samples, label, static_samples, total_elements

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import Apply, Buffer, KernelIR, Load, Reduce, Segment, Store
from fuseplan.planner.work.group_work import kernel_work, launch_mode
from fuseplan.planner.work.kernel_overheads import kernel_overheads, reduction_levels

ROWS, COLS = 3, 8


def kernel(fold: bool) -> KernelIR:
    """``y = x + x``, or ``y = x + sum(x)``, on [3, 8] bfloat16."""
    at = Index.coord(0, ROWS) * COLS + Index.coord(1, COLS)
    body = (Load("float32", 0, at), Reduce("float32", "sum", 0)) if fold else (Load("float32", 0, at),)
    body = (*body, Apply("float32", "add", (0, len(body) - 1)))
    buffers = tuple(
        Buffer(name, "bfloat16", (ROWS, COLS), (COLS, 1), is_output=name == "y") for name in ("x", "y")
    )
    return KernelIR(buffers, (Segment((ROWS,), COLS, body, (Store(1, at, len(body) - 1),)),))


def test_a_pointwise_kernel() -> None:
    effort = kernel_overheads(kernel(fold=False))
    # A load, a store, and the addition beyond its half in the flops, for each of four elements.
    assert effort.steps == 2 + 4 * 2.5 / 50
    assert effort.row_bytes == effort.row_loaded_bytes == 0  # any part of it can go anywhere


def test_a_fold_is_bound_to_its_row() -> None:
    effort = kernel_overheads(kernel(fold=True))
    assert effort.steps == pytest.approx(4 + 8 / 32 * 2.5 / 50)
    assert effort.row_bytes == 2 * COLS * 2
    assert effort.row_loaded_bytes == COLS * 2


def test_a_long_row_is_loaded_by_one_multiprocessor() -> None:
    def effort(cols: int) -> Work:
        at = Index.coord(0, ROWS) * cols + Index.coord(1, cols)
        body = (Load("float32", 0, at), Reduce("float32", "sum", 0), Apply("float32", "add", (0, 1)))
        buffers = tuple(
            Buffer(name, "bfloat16", (ROWS, cols), (cols, 1), is_output=name == "y") for name in ("x", "y")
        )
        return kernel_overheads(KernelIR(buffers, (Segment((ROWS,), cols, body, (Store(1, at, 2),)),)))

    # Up to 32 columns for each of 128 threads are in the steps, which grow no further.
    assert effort(8192).steps == effort(4096).steps
    # Held up to 16384 columns; a longer row is loaded again to be stored.
    assert effort(16384).row_loaded_bytes == 16384 * 2
    assert effort(32768).row_loaded_bytes == 2 * 32768 * 2


@pytest.mark.parametrize(("dtype", "rows", "together"), [
    ("float32", 2**20, 32), ("bfloat16", 2**20, 64), ("float32", 8192, 16), ("float32", 16, 8),
])
def test_a_fold_across_memory_loads_rows_of_whole_lines(dtype: str, rows: int, together: int) -> None:
    body = (Load("float32", 0, Index.coord(0, rows) + Index.coord(1, 200) * rows), Reduce("float32", "sum", 0))
    buffers = (Buffer("x", dtype, (200, rows), (rows, 1)), Buffer("y", dtype, (rows,), (1,), is_output=True))
    segment = Segment((rows,), 200, body, (Store(1, Index.coord(0, rows), 1),))
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert kernel_overheads(KernelIR(buffers, (segment,))).row_loaded_bytes == together * 200 * size


def chain(*ops: str) -> Work:
    """``y = f(g(... x))`` on [3, 8] float32, the first function applied first."""
    at = Index.coord(0, ROWS) * COLS + Index.coord(1, COLS)
    body = (Load("float32", 0, at), *(Apply("float32", op, (number,)) for number, op in enumerate(ops)))
    buffers = tuple(
        Buffer(name, "float32", (ROWS, COLS), (COLS, 1), is_output=name == "y") for name in ("x", "y")
    )
    return kernel_overheads(KernelIR(buffers, (Segment((ROWS,), COLS, body, (Store(1, at, len(ops)),)),)))


def test_what_does_not_wait_for_one_another_takes_no_steps() -> None:
    at = Index.coord(0, ROWS) * COLS + Index.coord(1, COLS)

    def steps(*applied: tuple[int, int]) -> float:
        """Beyond issuing, of sums of two loads and of earlier sums."""
        loads = (Load("float32", 0, at), Load("float32", 1, at))
        body = (*loads, *(Apply("float32", "add", pair) for pair in applied))
        buffers = tuple(
            Buffer(name, "float32", (ROWS, COLS), (COLS, 1), is_output=name == "z") for name in ("x", "y", "z")
        )
        ir = KernelIR(buffers, (Segment((ROWS,), COLS, body, (Store(2, at, len(body) - 1),)),))
        effort = kernel_overheads(ir)
        return effort.steps - 4 * (3 + len(applied) / 2) / 50  # two loads, a store, and half of each addition

    assert steps((0, 1)) == pytest.approx(2)
    assert steps((0, 1), (2, 0), (3, 1)) == pytest.approx(4)  # one after the other
    assert steps((0, 1), (1, 0), (2, 3)) == pytest.approx(3)  # two beside each other


@pytest.mark.parametrize(("op", "special", "issued"), [
    # Uses of the special-function unit in Triton's machine code for sm_90, and instructions beside a load and a store.
    ("erf", 1, 1), ("tanh", 2, 1), ("sigmoid", 2, 1), ("exp", 1, 1), ("rsqrt", 1, 1), ("neg", 0, 0.5),
])
def test_functions_take_what_their_machine_code_has(op: str, special: float, issued: float) -> None:
    effort = chain(op)
    assert effort.special == special * ROWS * COLS
    assert effort.steps == pytest.approx(2 + 4 * (1 + 1 + issued) / 50)


@pytest.mark.parametrize(("weight", "rows_a_block"), [
    (Index.coord(2, 64), 16),  # 64 columns: blocks of 16 rows of bfloat16 in and out
    (Index.coord(0, 3) * 64 + Index.coord(2, 64), 1),  # rows of a group share it, but the kernel's tile does not tell
    (Index.coord(0, 3), 64),  # one for each row
])
def test_rows_of_a_block_compute_once_what_they_share(weight: Index, rows_a_block: int) -> None:
    """``y[g, r, c] = x[g, r, c] + exp(w)``."""
    at = (Index.coord(0, 3) * 40 + Index.coord(1, 40)) * 64 + Index.coord(2, 64)
    body = (Load("float32", 0, at), Load("float32", 1, weight), Apply("float32", "exp", (1,)),
            Apply("float32", "add", (0, 2)))
    buffers = (
        Buffer("x", "bfloat16", (3, 40, 64), (40 * 64, 64, 1)), Buffer("w", "float32", (3, 64), (64, 1)),
        Buffer("y", "bfloat16", (3, 40, 64), (40 * 64, 64, 1), is_output=True),
    )
    effort = kernel_overheads(KernelIR(buffers, (Segment((3, 40), 64, body, (Store(2, at, 3),)),)))
    assert effort.special == 3 * 40 * 64 / rows_a_block


def test_a_row_is_swept_again_only_to_store_elements_of_it() -> None:
    at, row = Index.coord(0, ROWS) * COLS + Index.coord(1, COLS), Index.coord(0, ROWS)
    buffers = (Buffer("x", "bfloat16", (ROWS, COLS), (COLS, 1)), Buffer("y", "float32", (ROWS,), (1,), is_output=True))
    body = (Load("float32", 0, at), Reduce("float32", "sum", 0))
    assert kernel_work(KernelIR(buffers, (Segment((ROWS,), COLS, body, (Store(1, row, 1),)),))).l2_bytes == 0
    assert kernel_work(kernel(fold=True)).l2_bytes == ROWS * COLS * 2


def test_work_tells_results_and_weights_apart() -> None:
    work = kernel_work(kernel(fold=False), hot=(False,))
    assert (work.dram_bytes, work.written_bytes, work.cold_bytes) == (96, 48, 48)
    assert kernel_work(kernel(fold=False)).cold_bytes == 0


@pytest.mark.parametrize(
    "sample", [one for one in (*static_samples(), *dynamic_samples()) if total_elements(one)], ids=label
)
def test_every_kernel_has_an_effort(sample: Sample) -> None:
    ir = sample.ir.bind(sample.symbols)
    effort, work = kernel_overheads(ir), kernel_work(ir)
    assert effort.steps >= 0
    assert 0 < work.written_bytes <= work.dram_bytes
    assert (effort.row_bytes > 0) <= any(reduction_levels(segment) for segment in ir.segments)


@pytest.mark.parametrize(("overlap", "graph_mode"), [
    (None, "graph"), ("none", "graph"), ("wait", "overlapped"), ("late", "overlapped"), ("early", "early"),
])
def test_a_config_says_how_its_kernel_is_launched(overlap: str | None, graph_mode: str) -> None:
    config: Config = {"block_cols": 64, **({} if overlap is None else {"overlap": overlap})}
    assert launch_mode(config, "graph") == graph_mode
    assert launch_mode(config, "eager") == "kernel"
