"""Whole groups: the kernel a group lowers to, against the ATen chain in float64 (and bit for bit in eager numerics)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_reference import run_reference
from lower_oracle import check, compute_ops, rms_norm

from fuseplan.kernels.ir.index import symbol
from fuseplan.kernels.ir.ir import Load, Reduce, Round
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.lowering.lower import NotLowerable
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.work.group_work import kernel_work


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


def test_dynamic_rows_become_symbols() -> None:
    s = symbol("s0")
    spec = TensorSpec.contiguous((s, 16), "float32")
    nodes = [OpNode("aten.exp.default", ("x",), ("e",)),
             OpNode("aten.sum.dim_IntList", ("e",), ("t",), {"dim": (-1,), "keepdim": True}),
             OpNode("aten.div.Tensor", ("e", "t"), ("y",))]
    specs = {"x": spec, "e": spec, "t": TensorSpec.contiguous((s, 1), "float32"), "y": spec}
    graph = DataflowGraph(nodes, specs, ("x",), ("y",), {"s0": 4})
    lowered = lower_group(graph, ("e", "t", "y"))
    assert lowered.ir.symbols == ("s0",)
    for rows in (1, 5):
        x = torch.randn(rows, 16)
        (result,) = run_reference(lowered.ir, [x], {"s0": rows})
        torch.testing.assert_close(result, torch.softmax(x.double(), -1))


# -- rounding ---------------------------------------------------------------------------------------------


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
    (stored,) = lower_group(b.graph(narrow), compute_ops(b.graph(narrow))).ir.segments
    assert not any(isinstance(instr, Round) for instr in stored.body)  # the store rounds


@pytest.mark.parametrize(
    ("saturates", "clamped", "nan"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_float8_overflows_as_this_pytorch_does(
    saturates: bool, clamped: bool, nan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuseplan.planner.ops.pointwise.float8_saturates", lambda: saturates)
    b = Builder(x=torch.tensor([463.0, 465.0, -1e4]))
    source = b("aten.clamp.default", "x", min=-448.0, max=448.0) if clamped else "x"
    graph = b.graph(b("aten.to.dtype", source, dtype="float8_e4m3fn"))
    lowered = lower_group(graph, compute_ops(graph))
    (result,) = run_reference(lowered.ir, b.values(lowered.inputs))
    assert result.isnan().tolist() == [False, nan, nan]


def test_eager_numerics_rounds_where_aten_rounds() -> None:
    b = Builder(x=torch.randn(64).bfloat16(), y=torch.randn(64).bfloat16())
    value = b("aten.mul.Tensor", b("aten.add.Tensor", "x", "y"), "y")
    graph = b.graph(value)
    given, ops = b.values(("x", "y")), compute_ops(graph)
    exact = run_reference(lower_group(graph, ops, "eager").ir, given, float_dtype=torch.float32)
    loose = run_reference(lower_group(graph, ops).ir, given, float_dtype=torch.float32)
    assert torch.equal(exact[0].bfloat16(), b.tensors[value])
    assert not torch.equal(loose[0].bfloat16(), b.tensors[value])


# -- groups that are refused, and any group ---------------------------------------------------------------


def test_reductions_of_different_lengths_are_refused() -> None:
    b = Builder(x=torch.randn(3, 8), y=torch.randn(3, 5))
    total = b("aten.add.Tensor", b("aten.sum.dim_IntList", "x", dim=(-1,)), b("aten.sum.dim_IntList", "y", dim=(-1,)))
    graph = b.graph(total)
    with pytest.raises(NotLowerable, match="different lengths"):
        lower_group(graph, compute_ops(graph))


def test_statistics_of_transposed_rows_are_refused() -> None:
    b = Builder(x=torch.randn(4, 4))
    mean = b("aten.mean.dim", "x", dim=(-1,), keepdim=True)
    turned = b("aten.transpose.int", mean, dim0=0, dim1=1)
    graph = b.graph(b("aten.softmax.int", b("aten.mul.Tensor", "x", turned), dim=-1))
    with pytest.raises(NotLowerable, match="columns"):
        lower_group(graph, compute_ops(graph))


def test_what_nobody_uses_is_refused() -> None:
    b = Builder(x=torch.randn(4))
    value = b("aten.exp.default", "x")
    graph = b.graph("x")
    with pytest.raises(NotLowerable, match="nothing outside"):
        lower_group(graph, (value,))


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
    assume(outputs)
    try:
        check(b, *outputs[-2:])
    except NotLowerable as refused:
        assert "rows of different lengths" in str(refused) or "columns" in str(refused)


def _position(b: Builder, value: str) -> int:
    return next(number for number, node in enumerate(b.nodes) if value in node.outputs)
