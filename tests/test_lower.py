"""Whole groups: the kernel a group lowers to, against the ATen chain in float64 (and bit for bit in eager numerics)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder, wide
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.kernels.index import symbol
from fuseplan.kernels.ir import Load, Reduce, Round, validate
from fuseplan.kernels.reference import run_reference
from fuseplan.planner.graph import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.lower import Lowered, NotLowerable, lower
from fuseplan.planner.pricing import chain_work, kernel_work
from fuseplan.planner.recipes import kind_of
from fuseplan.planner.subject import _widened, chain_module, group_nodes, group_subject


def compute_ops(graph: DataflowGraph) -> list[str]:
    return [node.name for node in graph if kind_of(node, graph.specs) == "compute"]


def check(builder: Builder, *outputs: str, tolerance: float = 1e-9) -> Lowered:
    """Lower all compute ops as one group and compare every output with the float64 chain."""
    graph = builder.graph(*outputs)
    lowered = lower(graph, compute_ops(graph))
    validate(lowered.ir)
    results = run_reference(lowered.ir, builder.values(lowered.inputs))
    nodes = [_widened(node) for node in group_nodes(graph, compute_ops(graph), lowered)]
    expected = chain_module(nodes, lowered.inputs, lowered.outputs, "cpu")(*wide(builder.values(lowered.inputs)))
    for value, result, wanted in zip(lowered.outputs, results, expected, strict=True):
        assert result.shape == wanted.shape, value
        torch.testing.assert_close(result.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    return lowered


def rms_norm(b: Builder, x: str, weight: str, dtype: str) -> str:
    """The norm as Hugging Face's Llama spells it."""
    wide_x = b("aten.to.dtype", x, dtype="float32")
    mean = b("aten.mean.dim", b("aten.pow.Tensor_Scalar", wide_x, exponent=2), dim=(-1,), keepdim=True)
    scale = b("aten.rsqrt.default", b("aten.add.Tensor", mean, other=1e-5))
    normed = b("aten.to.dtype", b("aten.mul.Tensor", wide_x, scale), dtype=dtype)
    return b("aten.mul.Tensor", weight, normed)


def rope(b: Builder, x: str, cos: str, sin: str) -> str:
    half = b.tensors[x].shape[-1] // 2
    first = b("aten.slice.Tensor", x, dim=3, start=0, end=half)
    second = b("aten.slice.Tensor", x, dim=3, start=half, end=2**63 - 1)
    rotated = b("aten.cat.default", b("aten.neg.default", second), first, dim=-1)
    return b("aten.add.Tensor", b("aten.mul.Tensor", x, cos), b("aten.mul.Tensor", rotated, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 127), (2, 5, 33), (4, 1, 33)])
def test_add_rms_norm_has_two_outputs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    b = Builder(x=torch.randn(shape).to(dtype), y=torch.randn(shape).to(dtype), w=torch.randn(shape[-1]).to(dtype))
    total = b("aten.add.Tensor", "x", "y")
    lowered = check(b, total, rms_norm(b, total, "w", str(dtype).split(".")[1]))
    assert len(lowered.outputs) == 2
    assert len(lowered.ir.segments) == 1
    loads = [instr for instr in lowered.ir.segments[0].body if isinstance(instr, Load)]
    assert len(loads) == 3  # x, y and w, once each


def test_swiglu_is_one_flat_row() -> None:
    b = Builder(gate=torch.randn(3, 5, 31), up=torch.randn(3, 5, 31))
    lowered = check(b, b("aten.mul.Tensor", b("aten.silu.default", "gate"), "up"))
    (segment,) = lowered.ir.segments
    assert (segment.rows, segment.cols) == ((), 3 * 5 * 31)


def test_swiglu_of_a_merged_projection_reads_slices() -> None:
    b = Builder(both=torch.randn(4, 62))
    gate, up = b.many("aten.chunk.default", "both", outputs=2, chunks=2, dim=-1)
    lowered = check(b, b("aten.mul.Tensor", b("aten.silu.default", gate), up))
    assert lowered.inputs == ("both",)
    assert kernel_work(lowered.ir).dram_bytes == 4 * 62 * 4 + 4 * 31 * 4


def test_rope_of_q_and_k_together_needs_no_mask() -> None:
    b = Builder(q=torch.randn(2, 3, 4 * 16), k=torch.randn(2, 3, 2 * 16),
                cos=torch.randn(1, 3, 16), sin=torch.randn(1, 3, 16))
    cos, sin = (b("aten.unsqueeze.default", name, dim=1) for name in ("cos", "sin"))
    outputs = []
    for name, heads in (("q", 4), ("k", 2)):
        split = b("aten.view.default", name, size=(2, 3, heads, 16))
        outputs.append(rope(b, b("aten.transpose.int", split, dim0=1, dim1=2), cos, sin))
    lowered = check(b, *outputs)
    assert lowered.inputs == ("q", "cos", "sin", "k")
    assert len(lowered.ir.segments) == 2
    for segment in lowered.ir.segments:
        assert segment.cols == 8  # both halves of a head side by side
        assert all(instr.mask is None for instr in segment.body if isinstance(instr, Load))


def test_rope_of_half_a_head_is_cut_into_quarters() -> None:
    b = Builder(q=torch.randn(2, 5, 3, 16), cos=torch.randn(2, 1, 5, 8), sin=torch.randn(2, 1, 5, 8))
    head = b("aten.transpose.int", "q", dim0=1, dim1=2)
    turned = rope(b, b("aten.slice.Tensor", head, dim=3, start=0, end=8), "cos", "sin")
    out = b("aten.cat.default", turned, b("aten.slice.Tensor", head, dim=3, start=8, end=16), dim=-1)
    (segment,) = check(b, out).ir.segments
    assert segment.cols == 4 and len(segment.stores) == 4
    assert all(instr.mask is None for instr in segment.body if isinstance(instr, Load))


@pytest.mark.parametrize("repeats", [3, 4, 8, 16, 128])
def test_words_along_a_row_become_rows(repeats: int) -> None:
    """Each element of the source is loaded once per word; words too short to be a row stay where they are."""
    b = Builder(x=torch.randn(3, 5), y=torch.randn(3, 5 * repeats))
    spread = b("aten.repeat_interleave.self_int", "x", repeats=repeats, dim=-1)
    (segment,) = check(b, b("aten.mul.Tensor", spread, "y")).ir.segments
    assert segment.cols == (repeats if repeats >= 8 else 5 * repeats)
    loads = [instr.index for instr in segment.body if isinstance(instr, Load)]
    assert all(index.is_affine_in(segment.col_axis) for index in loads) == (repeats >= 8)


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("int8", 127.0)])
def test_a_quantised_value_is_rounded_where_the_group_uses_it(dtype: str, largest: float) -> None:
    b = Builder(x=torch.randn(3, 33) * 9)
    scale = b("aten.div.Tensor", b("aten.amax.default", b("aten.abs.default", "x"), dim=(-1,), keepdim=True),
              other=largest)
    number = b("aten.round.default", b("aten.div.Tensor", "x", scale)) if dtype == "int8" else b(
        "aten.div.Tensor", "x", scale)
    narrow = b("aten.to.dtype", b("aten.clamp.default", number, min=-largest, max=largest), dtype=dtype)
    back = b("aten.mul.Tensor", b("aten.to.dtype", narrow, dtype="float32"), scale)
    lowered = check(b, b("aten.sub.Tensor", "x", back))
    rounds = [instr.to for instr in lowered.ir.segments[0].body if isinstance(instr, Round)]
    assert rounds == [dtype]
    (stored,) = lower(b.graph(narrow), compute_ops(b.graph(narrow))).ir.segments
    assert not any(isinstance(instr, Round) for instr in stored.body)  # the store rounds


@pytest.mark.parametrize(
    ("saturates", "clamped", "nan"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_float8_overflows_as_this_pytorch_does(
    saturates: bool, clamped: bool, nan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuseplan.planner.recipes_convert.float8_saturates", lambda: saturates)
    b = Builder(x=torch.tensor([463.0, 465.0, -1e4]))
    source = b("aten.clamp.default", "x", min=-448.0, max=448.0) if clamped else "x"
    graph = b.graph(b("aten.to.dtype", source, dtype="float8_e4m3fn"))
    lowered = lower(graph, compute_ops(graph))
    (result,) = run_reference(lowered.ir, b.values(lowered.inputs))
    assert result.isnan().tolist() == [False, nan, nan]


def test_norm_of_heads_then_rope() -> None:
    b = Builder(q=torch.randn(2, 3, 4 * 16), w=torch.randn(16), cos=torch.randn(1, 1, 3, 16),
                sin=torch.randn(1, 1, 3, 16))
    split = b("aten.view.default", "q", size=(2, 3, 4, 16))
    normed = b("aten.transpose.int", rms_norm(b, split, "w", "float32"), dim0=1, dim1=2)
    lowered = check(b, rope(b, normed, "cos", "sin"))
    reductions = [i for s in lowered.ir.segments for i in s.body if isinstance(i, Reduce)]
    assert len(reductions) == 1  # one sum over both halves of a head


@pytest.mark.parametrize("widths", [(3, 5), (4, 4, 4), (1, 6, 2), (5, 0, 2)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat_of_computed_parts(widths: tuple[int, ...], dim: int) -> None:
    parts = {f"p{n}": torch.randn([width if axis == dim % 3 else 6 for axis in range(3)])
             for n, width in enumerate(widths)}
    b = Builder(**parts)
    negated = [b("aten.neg.default", name) for name in parts]
    check(b, b("aten.exp.default", b("aten.cat.default", *negated, dim=dim)))


@pytest.mark.parametrize("size", [1, 3, 17])
def test_causal_softmax(size: int) -> None:
    b = Builder(scores=torch.randn(2, size, size))
    keep = b("aten.le.Tensor", b("aten.arange.default", end=size),
             b("aten.unsqueeze.default", b("aten.arange.default", end=size), dim=1))
    masked = b("aten.where.ScalarOther", keep, "scores", other=float("-inf"))
    scaled = b("aten.mul.Tensor", masked, other=0.125)
    lowered = check(b, b("aten.softmax.int", scaled, dim=-1))
    assert lowered.inputs == ("scores",)


def test_layer_norm_then_gelu_with_strided_input() -> None:
    b = Builder(x=torch.randn(33, 4, 2).permute(2, 1, 0), w=torch.randn(33), c=torch.randn(33))
    normed = b("aten.layer_norm.default", "x", "w", "c", normalized_shape=(33,), eps=1e-5)
    check(b, b("aten.gelu.default", normed, approximate="tanh"))


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


def rows_of(lowered: Lowered) -> list[tuple[Any, ...]]:
    return [segment.rows for segment in lowered.ir.segments]


def heads_of(positions: int, heads: int, dim: int = 16) -> torch.Tensor:
    """[heads, positions, dim], with positions before heads in memory."""
    return torch.randn(positions, heads, dim).transpose(0, 1)


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


def test_reductions_of_different_lengths_are_refused() -> None:
    b = Builder(x=torch.randn(3, 8), y=torch.randn(3, 5))
    total = b("aten.add.Tensor", b("aten.sum.dim_IntList", "x", dim=(-1,)), b("aten.sum.dim_IntList", "y", dim=(-1,)))
    graph = b.graph(total)
    with pytest.raises(NotLowerable, match="different lengths"):
        lower(graph, compute_ops(graph))


def test_statistics_of_transposed_rows_are_refused() -> None:
    b = Builder(x=torch.randn(4, 4))
    mean = b("aten.mean.dim", "x", dim=(-1,), keepdim=True)
    turned = b("aten.transpose.int", mean, dim0=0, dim1=1)
    graph = b.graph(b("aten.softmax.int", b("aten.mul.Tensor", "x", turned), dim=-1))
    with pytest.raises(NotLowerable, match="columns"):
        lower(graph, compute_ops(graph))


def test_what_nobody_uses_is_refused() -> None:
    b = Builder(x=torch.randn(4))
    value = b("aten.exp.default", "x")
    graph = b.graph("x")
    with pytest.raises(NotLowerable, match="nothing outside"):
        lower(graph, (value,))


UNARY = ("aten.exp.default", "aten.tanh.default", "aten.neg.default", "aten.sigmoid.default")
BINARY = ("aten.add.Tensor", "aten.mul.Tensor", "aten.maximum.default")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[tuple[str, Any]]]:
    """Input shapes that broadcast to (3, 4, 6), and a list of steps over earlier values."""
    shapes = [tuple(draw(st.sampled_from([(3, 4, 6), (4, 6), (6,), (1,), (4, 1), (3, 1, 6)]))) for _ in range(2)]
    steps = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["unary", "binary", "binary", "softmax", "sum", "transpose", "slice"]))
        steps.append((kind, (draw(st.integers(0, 99)), draw(st.integers(0, 99)), number)))
    return [(3, 4, 6), *shapes], steps


@settings(max_examples=60, deadline=None)
@given(programs())
def test_random_groups(program: tuple[list[tuple[int, ...]], list[tuple[str, Any]]]) -> None:
    """Either the group computes what the chain computes, or the lowering says that it cannot."""
    shapes, steps = program
    torch.manual_seed(len(steps))
    b = Builder(**{f"x{n}": torch.randn(shape) for n, shape in enumerate(shapes)})
    values = list(b.inputs)
    for kind, (first, second, _) in steps:
        a, c = values[first % len(values)], values[second % len(values)]
        rank = b.tensors[a].dim()
        if kind == "unary":
            values.append(b(UNARY[second % 4], a))
        elif kind == "binary":
            try:
                torch.broadcast_shapes(b.tensors[a].shape, b.tensors[c].shape)
            except RuntimeError:
                continue
            values.append(b(BINARY[first % 3], a, c))
        elif kind == "softmax":
            values.append(b("aten.softmax.int", a, dim=-1))
        elif kind == "sum":
            values.append(b("aten.sum.dim_IntList", a, dim=(-1,), keepdim=True))
        elif kind == "transpose" and rank > 1:
            values.append(b("aten.transpose.int", a, dim0=0, dim1=rank - 1))
        elif kind == "slice" and b.tensors[a].shape[-1] > 1:
            values.append(b("aten.slice.Tensor", a, dim=rank - 1, start=1, end=2**63 - 1))
    graph = b.graph(values[-1])
    outputs = [value for value in values[3:] if kind_of(b.nodes[_position(b, value)], graph.specs) == "compute"]
    if not outputs:
        return
    try:
        check(b, *outputs[-2:])
    except NotLowerable as refused:
        assert str(refused)


def _position(b: Builder, value: str) -> int:
    return next(number for number, node in enumerate(b.nodes) if value in node.outputs)


def test_eager_numerics_rounds_where_aten_rounds() -> None:
    b = Builder(x=torch.randn(64).bfloat16(), y=torch.randn(64).bfloat16())
    value = b("aten.mul.Tensor", b("aten.add.Tensor", "x", "y"), "y")
    graph = b.graph(value)
    exact = run_reference(lower(graph, compute_ops(graph), "eager").ir, b.values(("x", "y")), float_dtype=torch.float32)
    loose = run_reference(lower(graph, compute_ops(graph)).ir, b.values(("x", "y")), float_dtype=torch.float32)
    assert torch.equal(exact[0].bfloat16(), b.tensors[value])
    assert not torch.equal(loose[0].bfloat16(), b.tensors[value])


def test_dynamic_rows_become_symbols() -> None:
    s = symbol("s0")
    spec = TensorSpec.contiguous((s, 16), "float32")
    nodes = [OpNode("aten.exp.default", ("x",), ("e",)),
             OpNode("aten.sum.dim_IntList", ("e",), ("t",), {"dim": (-1,), "keepdim": True}),
             OpNode("aten.div.Tensor", ("e", "t"), ("y",))]
    specs = {"x": spec, "e": spec, "t": TensorSpec.contiguous((s, 1), "float32"), "y": spec}
    graph = DataflowGraph(nodes, specs, ("x",), ("y",), {"s0": 4})
    lowered = lower(graph, ("e", "t", "y"))
    assert lowered.ir.symbols == ("s0",)
    for rows in (1, 5):
        x = torch.randn(rows, 16)
        (result,) = run_reference(lowered.ir, [x], {"s0": rows})
        torch.testing.assert_close(result, torch.softmax(x.double(), -1))


def test_work_is_counted_exactly() -> None:
    b = Builder(x=torch.randn(3, 8), w=torch.randn(8))
    value = b("aten.mul.Tensor", b("aten.softmax.int", "x", dim=-1), "w")
    graph = b.graph(value)
    work = kernel_work(lower(graph, compute_ops(graph)).ir)
    # x read once: 3*8*4; w once: 8*4; result written: 3*8*4.
    assert work.dram_bytes == 96 + 32 + 96
    # Three sweeps (max, sum, store); x is read again in two of them, w (per column) too: 2 * (96 + 32).
    assert work.l2_bytes == 2 * (96 + 32)
    # fp32: max 24, subtraction 24, sum 24, multiply 24 twice; sfu: exp 24, one reciprocal a row.
    assert work.flops == {"fp32": 120.0, "sfu": 27.0}
    assert work.launches == 1
    unfused = chain_work(graph, [node.name for node in graph])
    assert [part.dram_bytes for part in unfused] == [192, 96 + 32 + 96]


def test_subject_runs_the_chain_and_the_oracle() -> None:
    b = Builder(x=torch.randn(2, 3, 8).bfloat16(), w=torch.randn(8).bfloat16())
    value = rms_norm(b, "x", "w", "bfloat16")
    graph = b.graph(value)
    subject = group_subject(graph, compute_ops(graph), "key")
    inputs = subject.make_inputs(1, "cpu")
    (eager,), (reference,) = subject.eager(*inputs), subject.reference(*inputs)
    assert reference.dtype == torch.float64
    assert 0 < (eager.double() - reference).abs().max() < 0.1
    (fused,) = run_reference(subject.ir, inputs)
    torch.testing.assert_close(fused, reference)
    assert subject.label.endswith("2x3x8 bfloat16")




@pytest.mark.parametrize(("build", "expected"), [
    (lambda b: b("aten.rsqrt.default", "x"), True),
    (lambda b: b("aten.rsqrt.default", b("aten.add.Tensor", "x", other=1e-5)), True),
    (lambda b: b("aten.pow.Tensor_Scalar", "x", exponent=0.5), True),
    (lambda b: b("aten.pow.Tensor_Scalar", "x", exponent=3), False),
    (lambda b: rms_norm(b, "x", "w", "float32"), False),
    (lambda b: b("aten.log.default", b("aten.softmax.int", "x", dim=-1)), False),
    (lambda b: b("aten.sqrt.default", b("aten.sub.Tensor", b("aten.exp.default", "x"), other=2.0)), True),
])
def test_groups_are_fed_numbers_they_are_defined_for(build: Any, expected: bool) -> None:
    b = Builder(x=torch.rand(4, 8) + 3, w=torch.ones(8))
    graph = b.graph(build(b))
    subject = group_subject(graph, compute_ops(graph), "key")
    inputs = subject.make_inputs(0, "cpu")
    assert bool((inputs[0] > 0).all()) == expected
    if expected:
        assert torch.isfinite(subject.reference(*inputs)[0]).any()
    else:
        assert torch.isfinite(subject.reference(*inputs)[0]).all()
