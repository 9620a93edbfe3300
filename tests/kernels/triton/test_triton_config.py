"""Default blocks of pointwise Triton kernels, for segments of unlike shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import ir_samples as samples
import pytest

from fuseplan.kernels.gpu.overlap import plainly
from fuseplan.kernels.gpu.tile import live_words, programs, tile_of
from fuseplan.kernels.ir.backend import SM90, Config, Target
from fuseplan.kernels.ir.index import Coord, Index
from fuseplan.kernels.ir.ir import Apply, Buffer, Const, Gather, Iota, KernelIR, Load, Segment, Store, operands
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.kernels.triton.config import default_config, full_tile, infeasible, tunables
from fuseplan.kernels.triton.emitter import emit_triton
from fuseplan.search.tune.space import enumerate_space


def copies(*shapes: tuple[int, int]) -> KernelIR:
    """One segment for each (rows, columns), which copies its own buffer."""
    inputs = [Buffer(f"x{n}", "bfloat16", shape, (shape[1], 1)) for n, shape in enumerate(shapes)]
    outputs = [Buffer(f"y{n}", "bfloat16", shape, (shape[1], 1), is_output=True) for n, shape in enumerate(shapes)]
    segments = []
    for number, (rows, cols) in enumerate(shapes):
        at = Index.build(0, ((Coord(0, rows), cols), (Coord(1, cols), 1)))
        segments.append(Segment(
            (rows,), cols, (Load("bfloat16", number, at),), (Store(len(shapes) + number, at, 0),)
        ))
    return KernelIR((*inputs, *outputs), tuple(segments))


SHAPES = [
    ((1, 4_000_000), (16384, 64)),  # a long flat segment beside many narrow rows
    ((16384, 64), (1, 4_000_000)),
    ((1, 8192), (4096, 16)),
    ((100_000, 3), (1, 127)),
    ((512, 14336), (100_000, 64)),
    ((4096, 1100),),
    ((4097, 127), (3, 4097), (1, 1)),
    ((32, 14336), (32, 128), (8, 128)),
    ((1, 1),),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_no_segment_gets_needlessly_many_programs(shapes: tuple[tuple[int, int], ...]) -> None:
    ir = copies(*shapes)
    config = default_config(ir, SM90)
    assert infeasible(ir, config, SM90) is None
    assert all(config[tunable.name] in tunable.choices for tunable in tunables(ir, SM90))
    largest = max(tile_of(segment, config).elements for segment in ir.segments)
    assert largest <= 1024
    elements = sum(rows * cols for rows, cols in shapes)
    # Blocks of 1024 (of 256 in small kernels) would do; powers of two may leave most of half of each idle, and blocks
    # of at most 128 rows much more of very narrow ones.
    least = sum(
        max(math.ceil(rows * cols / (1024 if elements >= 1024 * 264 else 256)), math.ceil(rows / 128))
        for rows, cols in shapes
    )
    assert programs(ir, config, {}) <= 2 * least


def test_one_shape_keeps_the_widest_block() -> None:
    assert plainly(default_config(copies((512, 14336)), SM90)) == {"block_rows": 1, "block_cols": 1024, "num_warps": 4}
    assert plainly(default_config(copies((16384, 128), (4096, 128)), SM90)) == {
        "block_rows": 8, "block_cols": 128, "num_warps": 4,
    }
    # 1024 columns at a time would leave nearly half of the lanes idle.
    assert default_config(copies((4096, 1100)), SM90)["block_cols"] == 256


def position_compare(rows: int, cols: int) -> KernelIR:
    """``out[r, c] = k[c] <= q[r]``: one byte for each element, positions of eight bytes that rows share."""
    buffers = (
        Buffer("k", "int64", (cols,), (1,)), Buffer("q", "int64", (rows,), (1,)),
        Buffer("out", "bool", (rows, cols), (cols, 1), is_output=True),
    )
    body = (
        Load("int64", 0, Index.build(0, ((Coord(1, cols), 1),))),
        Load("int64", 1, Index.build(0, ((Coord(0, rows), 1),))),
        Apply("bool", "le", (0, 1)),
    )
    at = Index.build(0, ((Coord(0, rows), cols), (Coord(1, cols), 1)))
    return KernelIR(buffers, (Segment((rows,), cols, body, (Store(2, at, 2),)),))


@pytest.mark.parametrize(("rows", "cols"), [(8192, 2048), (2048, 2048), (4097, 4097), (127, 4097), (3, 127), (1, 1)])
def test_rows_of_narrow_elements_share_what_they_load(rows: int, cols: int) -> None:
    ir = position_compare(rows, cols)
    config = default_config(ir, SM90)
    assert infeasible(ir, config, SM90) is None
    assert all(config[tunable.name] in tunable.choices for tunable in tunables(ir, SM90))
    tile = tile_of(ir.segments[0], config)
    assert tile.elements <= 4096
    if rows * cols >= 2048 * 2048:
        assert tile.cols <= 512 and tile.rows >= 4 and programs(ir, config, {}) >= 2 * SM90.cores


def test_gathered_rows_are_not_shared() -> None:
    rows, cols = 2048, 4096
    buffers = (
        Buffer("ids", "int64", (rows,), (1,)), Buffer("table", "bfloat16", (32, cols), (cols, 1)),
        Buffer("out", "bfloat16", (rows, cols), (cols, 1), is_output=True),
    )
    column = Index.build(0, ((Coord(1, cols), 1),))
    body = (
        Load("int64", 0, Index.build(0, ((Coord(0, rows), 1),))), Const("int64", 32), Apply("bool", "lt", (0, 1)),
        Load("float32", 1, column, mask=2, gather=Gather(0, cols, 32)),
    )
    at = Index.build(0, ((Coord(0, rows), cols), (Coord(1, cols), 1)))
    ir = KernelIR(buffers, (Segment((rows,), cols, body, (Store(2, at, 3),)),))
    assert tile_of(ir.segments[0], default_config(ir, SM90)).elements == 1024


@pytest.mark.parametrize(("rows", "block_rows", "shared"), [(8, 8, True), (8, 4, True), (12, 8, False), (8, 1, False)])
def test_a_row_that_a_block_shares_is_loaded_once(rows: int, block_rows: int, shared: bool) -> None:
    ir = samples.pair_mask(3, rows, 64).ir
    source = emit_triton(ir, {"block_rows": block_rows, "block_cols": 64, "num_warps": 1})
    assert ("first_row // " in source) == shared


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)])
def test_a_tile_of_nothing_has_a_size(shape: tuple[int, int]) -> None:
    ir = copies(shape)
    assert min(full_tile(ir, ir.segments[0])) >= 1


# -- rows walked in blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [SM90, replace(SM90, in_graph=True)])
def test_many_wide_rows_that_are_read_twice_are_suggested_in_halves(target: Target) -> None:
    backend = TritonBackend()
    for many in (samples.rms_norm(16384, 8192, "bfloat16").ir, samples.softmax(4096, 8192, "bfloat16").ir):
        halves, *_ = backend.suggestions(many, target)
        assert halves == {**default_config(many, target), "block_cols": 4096, "num_warps": 16}
        (tile,) = (tile_of(segment, halves) for segment in many.segments)
        assert tile.looped and infeasible(many, halves, target) is None
        assert enumerate_space(backend, many, target).find(halves) is not None
    for other in (
        samples.rms_norm(512, 8192, "bfloat16"), samples.rms_norm(16384, 1024, "bfloat16"),
        samples.softmax(4096, 32768, "bfloat16"), samples.softmax(9, 9, symbols={"n": 9}),
    ):
        assert backend.suggestions(other.ir, target) == ()


@pytest.mark.parametrize(("rows", "cols", "at_once"), [(16384, 2048, 1), (4096, 2048, 2), (4096, 4096, 1)])
def test_short_halves_of_not_very_many_rows_are_taken_two_at_a_time(rows: int, cols: int, at_once: int) -> None:
    backend, ir = TritonBackend(), samples.layer_norm(rows, cols, "bfloat16").ir  # three passes
    (halves,) = backend.suggestions(ir, SM90)
    assert (halves["block_rows"], halves["block_cols"], halves["num_warps"]) == (at_once, cols // 2, cols // 512)
    assert enumerate_space(backend, ir, SM90).find(halves) is not None


def test_rows_that_are_read_four_times_are_not_walked_in_halves() -> None:
    buffers = samples.softmax(4096, 4096, "bfloat16").ir.buffers
    b = samples.Body(buffers, (4096,), 4096)
    x = b.load("x", b.at)
    for _ in range(3):
        x = b("sub", x, b.reduce("max", b("mul", x, x)))
    b.store("y", b.at, x)
    assert TritonBackend().suggestions(KernelIR(buffers, (b.segment(),)), SM90) == ()


@pytest.mark.parametrize(("cols", "warps"), [(5120, 4), (8192, None), (2560, 2), (3000, None), (14336, 8)])
def test_a_padded_row_is_suggested_the_warps_that_end_with_it(cols: int, warps: int | None) -> None:
    backend, ir = TritonBackend(), samples.rms_norm(600, cols, "bfloat16").ir
    default = default_config(ir, SM90)
    found = [one["num_warps"] for one in backend.suggestions(ir, SM90)]
    assert found == ([] if warps is None else [warps])
    assert warps is None or int(default["num_warps"]) > warps
    for one in backend.suggestions(ir, SM90):
        assert one["loads"] == "late" and enumerate_space(backend, ir, SM90).find(one) is not None


def test_a_softmax_in_blocks_runs_few_large_programs() -> None:
    """So that the rows of all of them stay in the cache for their second pass."""
    assert default_config(samples.softmax(4096, 32768, "bfloat16").ir, SM90)["num_warps"] == 32
    assert default_config(samples.rms_norm(4096, 32768, "bfloat16").ir, SM90)["num_warps"] == 16


def softmax_beside_a_sum(rows: int, cols: int) -> KernelIR:
    """A pass folds the maximum and a sum of something else: there is no chunk to rescale."""
    buffers = (*samples.softmax(rows, cols, "bfloat16").ir.buffers, samples.contiguous("t", "float32", (rows,), True))
    b = samples.Body(buffers, (rows,), cols)
    x = b.load("x", b.at)
    power = b("exp", b("sub", x, b.reduce("max", x)))
    b.store("y", b.at, b("div", power, b.reduce("sum", power)))
    b.store("t", b.at[:1], b.reduce("sum", x))
    return KernelIR(buffers, (b.segment(),))


def test_what_rescales_no_sum_is_not_chosen_for_as_if_it_did() -> None:
    norm = samples.rms_norm(4096, 32768, "bfloat16").ir
    default = default_config(norm, SM90)
    assert default_config(softmax_beside_a_sum(4096, 32768), SM90)["num_warps"] == default["num_warps"] == 16


def test_the_cache_is_told_which_loads_come_again() -> None:
    softmax = samples.softmax(3, 4096, "bfloat16").ir
    looped = {**default_config(softmax, SM90), "block_rows": 1, "block_cols": 1024, "num_warps": 4}

    def loads(ir: KernelIR, config: Config) -> list[str]:
        return [line.strip() for line in emit_triton(ir, config).splitlines() if "tl.load(" in line]

    first, last = loads(softmax, looped)
    assert 'eviction_policy="evict_last"' in first and 'eviction_policy="evict_first"' in last
    two_rows = loads(softmax, {**looped, "block_rows": 2})
    assert [("evict_last" in line, "evict_first" in line) for line in two_rows] == [(True, False)] * 2 + [(False, True)]
    assert not any("evict" in line for line in loads(softmax, {**looped, "block_cols": 4096}))
    norm = samples.rms_norm(3, 4096, "bfloat16").ir
    policies = ["evict" in line for line in loads(norm, {**looped, "num_stages": 1})]
    assert sorted(policies) == [False, True, True]  # the weight belongs to every row


def test_a_softmax_held_in_registers_needs_one_word_an_element() -> None:
    ir = samples.softmax(4096, 32768, "bfloat16").ir
    (segment,) = ir.segments
    assert live_words(segment) == 2 and live_words(segment, in_place=True) == 1
    held = {**default_config(ir, SM90), "block_cols": 32768, "num_warps": 32}
    assert infeasible(ir, held, SM90) is None
    assert infeasible(ir, {**held, "num_warps": 4}, SM90) is not None


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sample", samples.static_samples(), ids=samples.label)
def test_words_are_live_from_where_they_are_made_to_their_last_use(sample: samples.Sample, in_place: bool) -> None:
    for segment in sample.ir.bodies:
        readers = [(at, operands(instr)) for at, instr in enumerate(segment.body)]
        readers.append((len(segment.body), tuple(store.value for store in segment.stores)))

        def words(value: int, segment: Segment = segment) -> int:
            instr = segment.body[value]
            once = segment.per_row[value] or isinstance(instr, Const | Iota)
            return 0 if once else 2 if instr.dtype in ("float64", "int64") else 1

        live = [
            sum(words(value) for value in range(now + 1)
                if any(value in read for at, read in readers if at >= now + in_place))
            for now in range(len(segment.body))
        ]
        assert live_words(segment, in_place) == max(live, default=0)
