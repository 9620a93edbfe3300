"""Matmuls of few rows with narrow weights on a CPU: right against float64 for odd sizes and strides, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Builder
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_groups import gated, lowered_whole, residual, with_dynamic_rows
from quantised_groups import Written, quantised
from torch import Tensor

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.contraction import MAX_ROWS
from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.tunable_group import chain_module
from fuseplan.planner.lowering.lower import Lowered, group_nodes
from fuseplan.planner.ops.table import kind_of

BACKEND, TARGET = CppBackend(), Target("cpu", "native", 2)
#: Errors that rounding to a type makes, of the largest result.
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


def run(lowered: Lowered, b: Builder) -> list[Tensor]:
    assert BACKEND.refuse(lowered.ir, TARGET) is None
    kernel = BACKEND.fused_callable(lowered.ir, BACKEND.default_config(lowered.ir, TARGET), TARGET)
    made = kernel(*b.values(lowered.inputs))
    return list(made) if isinstance(made, tuple) else [made]


def assert_as_good_as_eager(b: Builder, *outputs: str) -> Lowered:
    """One kernel for all of a graph, whose distance from float64 is eager's at most, but for one rounding."""
    lowered, expected = lowered_whole(b, *outputs)
    plain = chain_module(group_nodes(b.graph(*outputs), lowered), lowered.inputs, lowered.outputs, "cpu")
    eager = plain(*(value.clone() for value in b.values(lowered.inputs)))
    for one, own, exact in zip(run(lowered, b), eager, expected, strict=True):
        assert one.shape == exact.shape
        ours, theirs = (float((result.double() - exact).abs().max() / exact.abs().max()) for result in (one, own))
        assert ours <= theirs + ROUNDING[one.dtype], (ours, theirs)
    return lowered


SIZES = ((1, 25, 127), (3, 33, 48), (16, 40, 128), (11, 70, 1024))
ROW_BY_ROW = ("int8, scaled after", "int8, scaled before", "int8, turned", "fp8, one scale", "fp8, by channels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_formats_at_odd_sizes(name: str, dtype: torch.dtype) -> None:
    for rows, width, inner in SIZES if dtype == torch.bfloat16 else SIZES[1:2]:
        assert_as_good_as_eager(quantised(name, rows, width, inner, dtype))


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, MAX_ROWS), inner=st.integers(2, 70), cols=st.integers(2, 40), more=st.integers(0, 5))
def test_rows_may_lie_apart(rows: int, inner: int, cols: int, more: int) -> None:
    x = torch.randn(rows, inner + more)[:, :inner]
    w = torch.randint(-128, 128, (cols, inner + more), dtype=torch.int8)[:, :inner]
    assert_as_good_as_eager(Written(lambda x, w, s: F.linear(x, w.float()) * s, x, w, torch.rand(cols)))


def _grouped(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """A scale and a zero point for each group of 32."""
    groups = w.view(*s.shape, -1).to(x.dtype)
    return F.linear(x, ((groups - z[..., None].to(x.dtype)) * s[..., None]).view(w.shape))


def _of_pairs(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Two numbers of four bits in a byte, scaled by 64."""
    numbers = torch.stack((w & 15, w >> 4), -1).reshape(len(w), -1)
    return F.linear(x, ((numbers.to(x.dtype) - 8).view(*s.shape, -1) * s[..., None]).view(len(w), -1))


def _of_words(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Eight numbers of four bits in an int32."""
    numbers = (w[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).reshape(len(w), -1)
    return F.linear(x, (numbers - 8).to(x.dtype)) * s


def _bytes(*shape: int, signed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    low, dtype = (-128, torch.int8) if signed else (0, torch.uint8)
    return torch.randint(low, low + 256, shape, generator=generator, dtype=dtype)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "groups of int8": (_grouped, lambda: (_bytes(19, 256, signed=True), torch.rand(19, 8), _bytes(19, 8, signed=True))),
    "groups of uint8": (_grouped, lambda: (_bytes(19, 256), torch.rand(19, 8), _bytes(19, 8))),
    "pairs in bytes": (_of_pairs, lambda: (_bytes(19, 128), torch.rand(19, 4))),
    "words of eight": (
        _of_words, lambda: (_bytes(19, 128).view(torch.int32), torch.rand(19))),
    "a zero point each": (
        lambda x, w, z, s: F.linear(x, w.to(x.dtype) - z[:, None]) * s,
        lambda: (_bytes(19, 256), torch.randint(0, 256, (19,)).float(), torch.rand(19))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_groups_zero_points_and_words(name: str, dtype: torch.dtype) -> None:
    function, packed = CASES[name]
    weights = [one.to(dtype) if one.is_floating_point() else one for one in packed()]
    for rows in (1, 9):
        assert_as_good_as_eager(Written(function, torch.randn(rows, 256).to(dtype), *weights))


def _gated(x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, s: Tensor) -> Tensor:
    wide = x.float()
    normed = gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    return F.silu(F.linear(normed, gate.to(x.dtype)) * s) * (F.linear(normed, up.to(x.dtype)) * s)


def _halves(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    """Both halves of one projection, whose rows of weights do not begin at a vector; rows have two dimensions."""
    gate, up = F.linear(F.gelu(x), w.to(x.dtype)).chunk(2, -1)
    return residual + gate * up


def _heads(x: Tensor, q: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Projections of one input read head by head, and one of them turned."""
    one, other = ((F.linear(x, w.to(x.dtype)) * s).view(len(x), -1, 8).transpose(0, 1) for w in (q, k))
    return torch.cat((-one[..., 4:], one[..., :4]), -1), other + 1.0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("function", "given"), [
    (_gated, lambda: (torch.rand(96), _bytes(37, 96, signed=True), _bytes(37, 96, signed=True), torch.rand(37) / 64)),
    (_heads, lambda: (_bytes(24, 96, signed=True), _bytes(24, 96, signed=True), torch.rand(24))),
], ids=["gated", "heads"])
def test_prologues_and_epilogues(
    function: Callable[..., Any], given: Callable[[], tuple[Tensor, ...]], rows: int
) -> None:
    weights = [one.bfloat16() if one.is_floating_point() else one for one in given()]
    assert_as_good_as_eager(Written(function, torch.randn(rows, 96).bfloat16(), *weights))


def test_halves_of_a_projection_of_a_batch() -> None:
    x, residual = (torch.randn(2, 3, size).bfloat16() for size in (96, 21))
    assert_as_good_as_eager(Written(_halves, x, _bytes(42, 96, signed=True), residual))


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, w = torch.ones(3, 45), torch.ones(7, 45).to(torch.float8_e4m3fn)
    x[1, 44], w[2, 44] = torch.inf, torch.nan
    b = Written(lambda x, w: F.linear(x, w.to(x.dtype)) + 1.0, x, w)
    (result,) = run(lowered_whole(b)[0], b)
    expected = torch.full((3, 7), 46.0)
    expected[1], expected[:, 2] = torch.inf, torch.nan
    torch.testing.assert_close(result, expected, equal_nan=True)


def test_weights_are_not_made_beyond_the_end_of_a_row() -> None:
    """There, zeros would be divided by zeros."""
    x, w, d = torch.randn(2, 45), _bytes(7, 45, signed=True), torch.rand(45) + 1.0
    assert_as_good_as_eager(Written(lambda x, w, d: F.linear(x, w.to(x.dtype) / d), x, w, d))


def test_every_rounding_that_eager_mode_makes() -> None:
    b = quantised("int8, scaled before", 3, 40, 128, torch.bfloat16)
    graph = b.graph()
    names = [node.name for node in graph if kind_of(node, graph.specs) != "view"]
    (made,) = run(lower_group(graph, names, "eager"), b)
    x, w, s = b.arguments
    rounded = (w.bfloat16() * s[:, None]).double()
    assert float((made - (x.double() @ rounded.t())).abs().max()) <= float(made.abs().max()) * 2**-8


def test_what_is_refused() -> None:
    bfloat16 = torch.bfloat16
    cases = (
        (quantised("int8, scaled after", MAX_ROWS + 1, 24, 32, bfloat16), (), "more than"),
        (quantised("int8, by columns", 2, 24, 32, bfloat16), (), "row by row"),
        (quantised("bfloat16, widened", 2, 24, 32, bfloat16), (), "as wide"),
        (quantised("int8, scaled after", 2, 24, 32, torch.float64), (), "float64"),
        (*residual(2, 24, 32, bfloat16), "as wide"), (*gated(2, 24, 32, bfloat16), "as wide"),
    )
    for b, outputs, word in cases:
        assert word in (BACKEND.refuse(lowered_whole(b, *outputs)[0].ir, TARGET) or "")
    dynamic = with_dynamic_rows(1, 24, 16, bfloat16)
    lowered = lower_group(dynamic, [node.name for node in dynamic])
    assert "dynamic" in (BACKEND.refuse(lowered.ir, TARGET) or "")


def test_only_threads_are_searched() -> None:
    lowered, _ = lowered_whole(quantised("int8, scaled after", 1, 2048, 1024, torch.bfloat16))
    space = BACKEND.tunables(lowered.ir, TARGET)
    assert {one.name for one in space if len(one.choices) > 1} == {"threads"}
    assert BACKEND.refuse_config(lowered.ir, BACKEND.default_config(lowered.ir, TARGET), TARGET) is None
