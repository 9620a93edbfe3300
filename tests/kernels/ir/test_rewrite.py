"""Rewrites keep a kernel's meaning: the reference interpreter agrees before and after."""

from __future__ import annotations

import math

import ir_samples as samples
import pytest
import torch
from kernel_reference import run_reference
from well_formed import validate

from fuseplan.kernels.ir.coalesce import coalesce, split_columns
from fuseplan.kernels.ir.index import Index, symbol
from fuseplan.kernels.ir.ir import Apply, Const, Iota, KernelIR, Load, Round, Segment
from fuseplan.kernels.ir.rewrite import cheaper_arithmetic, without_repeated_clamps

SAMPLES = [
    pytest.param(one, id=samples.label(one)) for one in [*samples.static_samples(), *samples.dynamic_samples()]
]


def cat_columns(widths: tuple[int, ...], rows: int = 3) -> samples.Sample:
    """``cat`` of several operands along the last dimension, by nested masks and selects."""
    total = sum(widths)
    buffers = [samples.contiguous(f"x{n}", "float32", (rows, width)) for n, width in enumerate(widths)]
    buffers.append(samples.contiguous("y", "float32", (rows, total), True))
    b = samples.Body(buffers, (rows,), total)
    r, c = b.at

    def choose(number: int, start: int, guard: int | None) -> int:
        if number == len(widths) - 1:
            return b.load(f"x{number}", (r, c + -start), mask=guard)
        inside = b("lt", b.iota(c), b.iota(Index(start + widths[number])))
        mask = inside if guard is None else b("logical_and", guard, inside)
        here = b.load(f"x{number}", (r, c + -start), mask=mask)
        outside = b("logical_not", inside)
        rest = outside if guard is None else b("logical_and", guard, outside)
        return b("where", inside, here, choose(number + 1, start + widths[number], rest))

    b.store("y", (r, c), choose(0, 0, None))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    validate(ir)
    return samples.Sample("cat_columns", ir)


def assert_same(sample: samples.Sample, segments: tuple[Segment, ...]) -> None:
    rewritten = KernelIR(sample.ir.buffers, segments)
    validate(rewritten)
    inputs = sample.inputs()
    before = run_reference(sample.ir, inputs, sample.symbols)
    after = run_reference(rewritten, inputs, sample.symbols)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sample", SAMPLES)
def test_collapsing_keeps_the_meaning(sample: samples.Sample) -> None:
    assert_same(sample, tuple(coalesce(segment, within_divisions=True) for segment in sample.ir.segments))


@pytest.mark.parametrize("sample", SAMPLES)
def test_splitting_keeps_the_meaning(sample: samples.Sample) -> None:
    assert_same(sample, tuple(piece for segment in sample.ir.segments for piece in split_columns(segment)))


def test_a_contiguous_pointwise_kernel_becomes_one_row() -> None:
    collapsed = coalesce(samples.geglu(5, 33).ir.segments[0], within_divisions=True)
    assert (collapsed.rows, collapsed.cols) == ((), 165)


def test_a_broadcast_column_keeps_the_rows_apart() -> None:
    assert coalesce(samples.broadcast_add(5, 33).ir.segments[0], within_divisions=True).rows == (5,)


def test_rows_of_a_reduction_never_join_the_columns() -> None:
    segment = samples.softmax(6, 8).ir.segments[0]
    assert coalesce(segment, within_divisions=True) == segment


def test_row_axes_merge_above_a_reduction() -> None:
    buffers = [samples.contiguous("x", "float32", (2, 3, 4)), samples.contiguous("y", "float32", (2, 3), True)]
    b = samples.Body(buffers, (2, 3), 4)
    b.store("y", b.at[:2], b.reduce("sum", b.load("x", b.at)))
    sample = samples.Sample("row_sums", KernelIR(tuple(buffers), (b.segment(),)))
    collapsed = coalesce(sample.ir.segments[0], within_divisions=True)
    assert collapsed.rows == (6,)
    assert_same(sample, (collapsed,))


def test_symbolic_rows_merge_when_strides_agree_for_every_size() -> None:
    n = symbol("n")
    buffers = [samples.contiguous("x", "float32", (n, 3, 8)), samples.contiguous("y", "float32", (n, 3, 8), True)]
    b = samples.Body(buffers, (n, 3), 8)
    b.store("y", b.at, b("neg", b.load("x", b.at)))
    collapsed = coalesce(b.segment(), within_divisions=True)
    assert (collapsed.rows, collapsed.cols) == ((), 24 * n)


@pytest.mark.parametrize("widths", [(32, 16, 40), (16, 16), (100, 17)])
def test_a_cat_is_cut_into_plain_copies(widths: tuple[int, ...]) -> None:
    sample = cat_columns(widths)
    pieces = split_columns(sample.ir.segments[0])
    assert tuple(piece.cols for piece in pieces) == widths
    assert_same(sample, pieces)
    for piece in pieces:
        needed = piece.body[piece.stores[0].value]
        assert isinstance(needed, Load)
        assert needed.mask is None


def test_pieces_narrower_than_a_vector_are_not_cut() -> None:
    assert len(split_columns(cat_columns((40, 3, 40)).ir.segments[0])) == 1


def test_a_mask_over_rows_and_columns_stays() -> None:
    segment = samples.position_mask(4, 64).ir.segments[0]
    assert split_columns(segment) == (segment,)


def test_an_equality_inside_a_piece_is_not_folded_away() -> None:
    buffers = [samples.contiguous("y", "float32", (2, 48), True), samples.contiguous("z", "bool", (2, 48), True)]
    b = samples.Body(buffers, (2,), 48)
    r, c = b.at
    at_seven = b("eq", b.iota(c * 2), b.const(14, "int64"))
    low = b("ge", b.const(20, "int64"), b.iota(c))
    b.store("y", (r, c), b("where", at_seven, b.const(1.0), b.const(0.0)))
    b.store("z", (r, c), b("logical_or", low, at_seven))
    sample = samples.Sample("one_hot", KernelIR(tuple(buffers), (b.segment(),)))
    assert_same(sample, split_columns(sample.ir.segments[0]))


def test_divisions_of_the_column_are_cut_where_they_step() -> None:
    buffers = [samples.contiguous("x", "float32", (4, 2, 20)), samples.contiguous("y", "float32", (4, 40), True)]
    b = samples.Body(buffers, (4,), 40)
    r, c = b.at
    b.store("y", (r, c), b.load("x", (r, c // 20, c % 20)))
    direct = samples.Sample("joined", KernelIR(tuple(buffers), (b.segment(),)))
    assert_same(direct, split_columns(direct.ir.segments[0]))

    flipped = samples.Body(buffers, (4,), 40)
    flipped.store("y", (r, c), flipped.load("x", (r, Index(1) - c // 20, c % 20)))
    swapped = samples.Sample("swapped", KernelIR(tuple(buffers), (flipped.segment(),)))
    pieces = split_columns(swapped.ir.segments[0])
    assert [piece.cols for piece in pieces] == [20, 20]
    assert all(piece.body[0].index.is_affine_in(1) for piece in pieces)  # type: ignore[union-attr]
    assert_same(swapped, pieces)


def test_a_decided_bool_that_is_stored_becomes_a_constant() -> None:
    buffers = [samples.contiguous("z", "bool", (2, 64), True)]
    b = samples.Body(buffers, (2,), 64)
    r, c = b.at
    b.store("z", (r, c), b("lt", b.iota(c), b.const(32, "int64")))
    sample = samples.Sample("flags", KernelIR(tuple(buffers), (b.segment(),)))
    pieces = split_columns(sample.ir.segments[0])
    assert [piece.body[piece.stores[0].value] for piece in pieces] == [Const("bool", True), Const("bool", False)]
    assert any(isinstance(instr, Iota) for instr in pieces[0].body)
    assert_same(sample, pieces)


def clamp_kernel(to: str, *clamps: tuple[str, float], bound_first: bool = False, cols: int = 4097) -> samples.Sample:
    """A float32 through the ``clamps`` in turn, stored as ``to``, and rounded to it and stored as it was."""
    buffers = [samples.contiguous("x", "float32", (cols,)), samples.contiguous("y", to, (cols,), True),
               samples.contiguous("back", "float32", (cols,), True)]
    b = samples.Body(buffers, (), cols)
    value = b.load("x", b.at)
    for op, bound in clamps:
        limit = b.const(bound)
        value = b(op, limit, value) if bound_first else b(op, value, limit)
    b.store("y", b.at, value)
    b.store("back", b.at, b.round(value, to))
    edges = samples.FLOAT8_EDGES + samples.FLOAT8_TINY
    return samples.Sample("clamps", KernelIR(tuple(buffers), (b.segment(),)), scale=300.0,
                          overrides=lambda _, tensor: samples.with_edges(tensor, edges))


def without_clamps(sample: samples.Sample) -> Segment:
    found = without_repeated_clamps(sample.ir.segments[0], sample.ir.buffers)
    validate(KernelIR(sample.ir.buffers, (found,)))
    return found


LOW, HIGH = ("maximum", -448.0), ("minimum", 448.0)


@pytest.mark.parametrize("bound_first", [False, True])
@pytest.mark.parametrize("clamps", [
    (LOW, HIGH), (HIGH, LOW), (LOW,), (HIGH,), (("minimum", 464.0), ("maximum", -math.inf)), (LOW, HIGH, LOW, HIGH),
])
def test_a_clamp_that_the_conversion_repeats_is_dropped(
    clamps: tuple[tuple[str, float], ...], bound_first: bool
) -> None:
    sample = clamp_kernel("float8_e4m3fn", *clamps, bound_first=bound_first)
    found = without_clamps(sample)
    rounded = next(instr for instr in found.body if isinstance(instr, Round))
    assert isinstance(found.body[found.stores[0].value], Load) and isinstance(found.body[rounded.arg], Load)
    # The oracle is PyTorch's own conversion of what it clamps; bits, so that zeros have signs.
    (x,) = sample.inputs()
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    y, back = run_reference(KernelIR(sample.ir.buffers, (found,)), [x], float_dtype=torch.float32)
    assert torch.equal(y.to(torch.float8_e4m3fn).view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(back.view(torch.int32), expected.float().view(torch.int32))
    assert_same(sample, (found,))


@pytest.mark.parametrize(("to", "clamps"), [
    ("float8_e4m3fn", (("maximum", -447.0), ("minimum", 447.0))),
    ("float8_e4m3fn", (("maximum", 448.0),)),
    ("float8_e4m3fn", (("minimum", -448.0),)),
    ("float8_e4m3fn", (("minimum", math.nan),)),
    ("float16", (("maximum", -65504.0), ("minimum", 65504.0))),
    ("bfloat16", (LOW, HIGH)),
])
def test_any_other_clamp_stays(to: str, clamps: tuple[tuple[str, float], ...]) -> None:
    sample = clamp_kernel(to, *clamps)
    assert without_clamps(sample) == sample.ir.segments[0]


def test_only_the_outer_clamps_are_dropped() -> None:
    """What lies below an op, or a bound within the range, is a value like any other."""
    sample = clamp_kernel("float8_e4m3fn", HIGH, ("maximum", -3.0), HIGH)
    found = without_clamps(sample)
    kept = found.body[found.stores[0].value]
    assert isinstance(kept, Apply) and kept.op == "maximum"
    assert isinstance(found.body[kept.args[0]], Apply)
    assert_same(sample, (found,))


@pytest.mark.parametrize("sample", SAMPLES)
def test_dropping_clamps_keeps_the_meaning(sample: samples.Sample) -> None:
    assert_same(sample, tuple(without_repeated_clamps(segment, sample.ir.buffers) for segment in sample.ir.segments))


def ops_of(segment: Segment) -> list[str]:
    return [instr.op for instr in segment.body if isinstance(instr, Apply)]


@pytest.mark.parametrize("sample", SAMPLES)
def test_cheaper_arithmetic_keeps_the_meaning_to_within_rounding(sample: samples.Sample) -> None:
    rewritten = KernelIR(sample.ir.buffers, tuple(cheaper_arithmetic(segment) for segment in sample.ir.segments))
    validate(rewritten)
    assert [len(s.stores) for s in rewritten.segments] == [len(s.stores) for s in sample.ir.segments]
    inputs = sample.inputs()
    before = run_reference(sample.ir, inputs, sample.symbols)
    after = run_reference(rewritten, inputs, sample.symbols)
    for one, other in zip(before, after, strict=True):
        exact = not one.is_floating_point()
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12, equal_nan=True)


@pytest.mark.parametrize("one_first", [False, True])
def test_one_plus_tanh_needs_no_tanh(one_first: bool) -> None:
    sample = samples.geglu(3, 5)
    body = sample.ir.segments[0].body
    swapped = tuple(
        Apply(i.dtype, i.op, i.args[::-1]) if one_first and isinstance(i, Apply) and i.op == "add" else i for i in body
    )
    found = cheaper_arithmetic(Segment((3,), 5, swapped, sample.ir.segments[0].stores))
    assert "tanh" in ops_of(sample.ir.segments[0])
    assert "tanh" not in ops_of(found)
    assert ops_of(found).count("sigmoid") == 1


def test_a_tanh_that_something_else_uses_stays() -> None:
    buffers = [samples.contiguous(name, "float32", (4097,), name != "x") for name in ("x", "y", "z")]
    b = samples.Body(buffers, (), 4097)
    tanh = b("tanh", b.load("x", b.at))
    b.store("y", b.at, tanh)
    b.store("z", b.at, b("add", tanh, b.const(1.0)))
    found = cheaper_arithmetic(b.segment())
    assert "tanh" in ops_of(found) and "sigmoid" not in ops_of(found)


@pytest.mark.parametrize(("divisor", "kept"), [(30.0, False), (-0.3, False), (0.0, True), (1e-38, True), (1e38, True)])
def test_a_division_by_an_ordinary_constant_becomes_a_product(divisor: float, kept: bool) -> None:
    buffers = [samples.contiguous("x", "float32", (127,)), samples.contiguous("y", "float32", (127,), True)]
    b = samples.Body(buffers, (), 127)
    b.store("y", b.at, b("div", b.load("x", b.at), b.const(divisor)))
    found = cheaper_arithmetic(b.segment())
    assert ops_of(found) == (["div"] if kept else ["mul"])


@pytest.mark.parametrize(("least", "by", "kept"), [
    (1e-6, 1 / 448, False), (1e-6, 1 / 127, False), (1e-6, 0.5, True), (1e-38, 1 / 448, True), (0.0, 1 / 448, True),
    (None, 1 / 448, True),
])
def test_a_division_by_an_ordinary_number_of_the_row_becomes_a_product(
    least: float | None, by: float, kept: bool
) -> None:
    """As in quantisation: the largest magnitude times a constant, and no less than another."""
    buffers = [samples.contiguous("x", "float32", (3, 127)), samples.contiguous("y", "float32", (3, 127), True)]
    b = samples.Body(buffers, (3,), 127)
    x = b.load("x", b.at)
    scale = b("mul", b.reduce("max", b("abs", x)), b.const(by))
    scale = scale if least is None else b("maximum", scale, b.const(least))
    b.store("y", b.at, b("div", x, scale))
    segment = b.segment()
    found = cheaper_arithmetic(segment)
    assert ("div" in ops_of(found)) is kept
    assert ("reciprocal" in ops_of(found)) is not kept
    for extreme in (3.4028235e38, 1e-45, math.inf, 0.0, math.nan):
        tensor = torch.randn(3, 127, generator=torch.Generator().manual_seed(0))
        tensor[1] = tensor[1].sign() * extreme
        one, other = (
            run_reference(KernelIR(tuple(buffers), (each,)), [tensor])[0].float() for each in (segment, found)
        )
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("extreme", [2.0**127, 3.4028e38, 2.0**-100, 1.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_product_moves_few_numbers_of_an_int8_row_to_the_next_step(extreme: float, narrow: bool) -> None:
    """In float32, against float64: no more often than eager PyTorch, but for those halfway between two steps."""
    rows, cols = 64, 8192
    buffers = [samples.contiguous("x", "float32", (rows, cols)), samples.contiguous("y", "float32", (rows, cols), True)]
    b = samples.Body(buffers, (rows,), cols)
    x = b.load("x", b.at)
    least = 1 / (127 * 512)
    scale = b("maximum", b("div", b.reduce("max", b("abs", x)), b.const(127.0)), b.const(least))
    b.store("y", b.at, b("round", b("div", x, scale)))
    found = cheaper_arithmetic(b.segment())
    assert "div" not in ops_of(found)
    tensor = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    tensor = tensor / tensor.abs().amax(-1, keepdim=True)
    tensor = (tensor.bfloat16().float() if narrow else tensor) * extreme
    (actual,) = run_reference(KernelIR(tuple(buffers), (found,)), [tensor], float_dtype=torch.float32)
    exact = tensor.double()
    exact = (exact / (exact.abs().amax(-1, keepdim=True) / 127.0).clamp(min=least)).round()
    eager = (tensor / (tensor.abs().amax(-1, keepdim=True) / 127.0).clamp(min=least)).round()
    wrong, own = (float((one.double() != exact).double().mean()) for one in (actual, eager))
    assert float((actual.double() - exact).abs().max()) <= 1
    assert wrong <= own + (1e-3 if narrow else 1e-5)


def test_a_division_of_the_row_itself_stays() -> None:
    """Nothing is saved, and one rounding more is lost, where both are numbers of the row."""
    buffers = [samples.contiguous("x", "float32", (3, 127)), samples.contiguous("y", "float32", (3,), True)]
    b = samples.Body(buffers, (3,), 127)
    top = b.reduce("max", b.load("x", b.at))
    b.store("y", b.at[:1], b("div", top, b("maximum", b("mul", top, b.const(0.1)), b.const(1e-6))))
    assert ops_of(cheaper_arithmetic(b.segment())).count("div") == 1
