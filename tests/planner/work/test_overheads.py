"""What kernels do besides bytes and arithmetic, counted by hand on small ones."""

from __future__ import annotations

import pytest
from ir_samples import Sample, dynamic_samples, label, static_samples, total_elements

from fuseplan.costmodel.work import Traffic, Work
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
    assert effort.instructions == 2.5 * ROWS * COLS  # a load, a store, and the addition beyond its half in the flops
    assert effort.steps == 2 + 4 * 2.5 / 50  # and what four elements take to issue
    assert effort.row_bytes == effort.row_loaded_bytes == 0  # any part of it can go anywhere


def test_a_fold_is_bound_to_its_row() -> None:
    effort = kernel_overheads(kernel(fold=True))
    assert effort.instructions == pytest.approx(2.5 * ROWS * COLS)
    assert effort.steps == pytest.approx(4 + 8 / 32 * 2.5 / 50)
    assert effort.row_bytes == 2 * COLS * 2
    assert effort.row_loaded_bytes == COLS * 2
    assert effort.row_instructions == 0


def test_a_long_row_is_loaded_and_computed_by_one_multiprocessor() -> None:
    def effort(cols: int) -> Work:
        at = Index.coord(0, ROWS) * cols + Index.coord(1, cols)
        body = (Load("float32", 0, at), Reduce("float32", "sum", 0), Apply("float32", "add", (0, 1)))
        buffers = tuple(
            Buffer(name, "bfloat16", (ROWS, cols), (cols, 1), is_output=name == "y") for name in ("x", "y")
        )
        return kernel_overheads(KernelIR(buffers, (Segment((ROWS,), cols, body, (Store(1, at, 2),)),)))

    # Up to 32 columns for each of 128 threads are in the steps, which grow no further.
    assert effort(4096).row_instructions == 0
    assert effort(8192).row_instructions == pytest.approx(2.5 * 4096)
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
        return effort.steps - 4 * effort.instructions / (ROWS * COLS) / 50

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
    assert effort.instructions == (1 + 1 + issued) * ROWS * COLS


@pytest.mark.parametrize(("rows", "cols", "barriers"), [
    (32, 64, 2),  # four rows of 64 to a tile of 256, for 64 threads, each with one of the shared operand
    (32, 32, 0),  # half as many of it as threads: each loads what it uses
    (32, 256, 0),  # a row to a tile
    (2**14, 64, 0),  # larger tiles, whose threads are more
])
def test_what_rows_of_a_small_tile_share_is_exchanged(rows: int, cols: int, barriers: int) -> None:
    at = Index.coord(0, rows) * cols + Index.coord(1, cols)

    def steps(weight: Index) -> float:
        body = (Load("float32", 0, at), Load("float32", 1, weight), Apply("float32", "add", (0, 1)))
        buffers = (
            Buffer("x", "bfloat16", (rows, cols), (cols, 1)), Buffer("w", "bfloat16", (rows, cols), (cols, 1)),
            Buffer("y", "bfloat16", (rows, cols), (cols, 1), is_output=True),
        )
        effort = kernel_overheads(KernelIR(buffers, (Segment((rows,), cols, body, (Store(2, at, 2),)),)))
        return effort.steps

    assert steps(Index.coord(1, cols)) - steps(at) == pytest.approx(barriers)


def test_what_groups_of_rows_share_is_loaded_for_each_row() -> None:
    """``y[g, r, c] = x[g, r, c] + w[g, c]``: the kernel's tile does not tell that its rows are of one group."""
    at = (Index.coord(0, 4) * 8 + Index.coord(1, 8)) * 64 + Index.coord(2, 64)

    def steps(weight: Index) -> float:
        body = (Load("float32", 0, at), Load("float32", 1, weight), Apply("float32", "add", (0, 1)))
        buffers = (
            Buffer("x", "bfloat16", (4, 8, 64), (512, 64, 1)), Buffer("w", "bfloat16", (4, 64), (64, 1)),
            Buffer("y", "bfloat16", (4, 8, 64), (512, 64, 1), is_output=True),
        )
        effort = kernel_overheads(KernelIR(buffers, (Segment((4, 8), 64, body, (Store(2, at, 2),)),)))
        return effort.steps - 4 * 3.5 / 50  # two loads, a store and half an addition, whatever rows share

    assert steps(Index.coord(0, 4) * 64 + Index.coord(2, 64)) == pytest.approx(2)
    assert steps(Index.coord(2, 64)) == pytest.approx(2 + 2)


def test_rows_of_a_block_share_what_does_not_depend_on_them() -> None:
    """``y[g, r, c] = x[g, r, c] + w[g, c]``: 64 columns, so blocks of 16 rows of bfloat16 in and out."""
    groups, rows, cols = 3, 40, 64
    at = (Index.coord(0, groups) * rows + Index.coord(1, rows)) * cols + Index.coord(2, cols)

    def requested(weight: Index) -> float:
        body = (Load("float32", 0, at), Load("float32", 1, weight), Apply("float32", "add", (0, 1)))
        buffers = (
            Buffer("x", "bfloat16", (groups, rows, cols), (rows * cols, cols, 1)),
            Buffer("w", "float32", (groups, cols), (cols, 1)),
            Buffer("y", "bfloat16", (groups, rows, cols), (rows * cols, cols, 1), is_output=True),
        )
        segment = Segment((groups, rows), cols, body, (Store(2, at, 2),))
        return kernel_overheads(KernelIR(buffers, (segment,))).requested_bytes

    elements, column = groups * rows * cols, Index.coord(2, cols)
    assert requested(Index.coord(0, groups) * cols + column) == elements * (2 + 2 + 4 / 16)
    assert requested(Index.coord(1, rows) * cols + column) == elements * (2 + 2 + 4)  # the next row needs another
    assert requested(Index.coord(0, groups)) == elements * (2 + 2)  # a number for each row is no matter


def test_rows_of_a_block_compute_what_they_share_once() -> None:
    """``y[r, c] = x[r, c] + -w[c]``: 64 columns, so blocks of 16 rows of bfloat16 in and out."""
    rows, cols = 40, 64
    at = Index.coord(0, rows) * cols + Index.coord(1, cols)
    body = (
        Load("float32", 0, at), Load("float32", 1, Index.coord(1, cols)), Apply("float32", "neg", (1,)),
        Apply("float32", "add", (0, 2)),
    )
    buffers = (
        Buffer("x", "bfloat16", (rows, cols), (cols, 1)), Buffer("w", "float32", (cols,), (1,)),
        Buffer("y", "bfloat16", (rows, cols), (cols, 1), is_output=True),
    )
    effort = kernel_overheads(KernelIR(buffers, (Segment((rows,), cols, body, (Store(2, at, 3),)),)))
    assert effort.instructions == rows * cols * (2.5 + 1.5 / 16)
    # A thread of a small tile has four elements of one row: it waits for all of their instructions.
    assert effort.steps == pytest.approx(3 + 2 + 4 * (2.5 + 1.5) / 50)


def test_rows_of_a_block_share_no_work_that_some_coordinate_of_a_row_tells_apart() -> None:
    """``y[g, r, c] = -w[g, c]``: the rows of a group have all in common, but the kernel's tile does not tell."""
    at = (Index.coord(0, 3) * 40 + Index.coord(1, 40)) * 64 + Index.coord(2, 64)

    def instructions(weight: Index) -> float:
        body = (Load("float32", 0, weight), Apply("float32", "neg", (0,)))
        buffers = (
            Buffer("w", "float32", (3, 64), (64, 1)),
            Buffer("y", "bfloat16", (3, 40, 64), (40 * 64, 64, 1), is_output=True),
        )
        return kernel_overheads(KernelIR(buffers, (Segment((3, 40), 64, body, (Store(1, at, 1),)),))).instructions

    elements = 3 * 40 * 64
    assert instructions(Index.coord(0, 3) * 64 + Index.coord(2, 64)) == elements * 2.5
    assert instructions(Index.coord(2, 64)) < elements * 1.5


def test_a_row_of_another_width_changes_threads_before_it_is_stored() -> None:
    def steps(stored: str, cols: int) -> float:
        at = Index.coord(0, ROWS) * cols + Index.coord(1, cols)
        body = (Load("float32", 0, at), Reduce("float32", "sum", 0), Apply("float32", "add", (0, 1)))
        buffers = (
            Buffer("x", "bfloat16", (ROWS, cols), (cols, 1)),
            Buffer("y", stored, (ROWS, cols), (cols, 1), is_output=True),
        )
        return kernel_overheads(KernelIR(buffers, (Segment((ROWS,), cols, body, (Store(1, at, 2),)),))).steps

    # 32 elements of four bytes a thread are 8 rounds of 16 bytes; rows of 128 columns have one.
    assert steps("float32", 4096) - steps("bfloat16", 4096) == pytest.approx(8)
    assert steps("float32", 128) - steps("bfloat16", 128) == pytest.approx(1)


def test_segments_are_priced_one_after_the_other() -> None:
    """``y = x + x`` for 3 rows, and ``z = x`` for each of 2 groups: both read x."""
    pointwise = kernel(fold=False)
    at = Index.coord(1, ROWS) * COLS + Index.coord(2, COLS)
    store = Store(2, at + Index.coord(0, 2) * (ROWS * COLS), 0)
    copies = Segment((2, ROWS), COLS, (Load("float32", 0, at),), (store,))
    copied = Buffer("z", "float32", (2, ROWS, COLS), (ROWS * COLS, COLS, 1), is_output=True)
    work = kernel_work(KernelIR((*pointwise.buffers, copied), (*pointwise.segments, copies)))
    elements = ROWS * COLS
    assert work.traffic == (
        Traffic(elements * 4, elements * 4, elements * 2),
        Traffic(elements * (2 + 8), elements * (4 + 8), elements * 8),
    )
    assert work.requested_bytes == sum(part.requested_bytes for part in work.traffic)
    assert kernel_work(pointwise).traffic == ()


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
    assert effort.instructions > 0 and effort.steps >= 0
    assert 0 < work.written_bytes <= work.dram_bytes
    assert (effort.row_bytes > 0) <= any(reduction_levels(segment) for segment in ir.segments)


@pytest.mark.parametrize(("overlap", "graph_mode"), [
    (None, "graph"), ("none", "graph"), ("wait", "overlapped"), ("late", "overlapped"), ("early", "early"),
])
def test_a_config_says_how_its_kernel_is_launched(overlap: str | None, graph_mode: str) -> None:
    config: Config = {"block_cols": 64, **({} if overlap is None else {"overlap": overlap})}
    assert launch_mode(config, "graph") == graph_mode
    assert launch_mode(config, "eager") == "kernel"
