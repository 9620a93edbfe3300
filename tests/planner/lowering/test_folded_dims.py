"""Folds over any dimensions: what they lower to, and C++ kernels of them against eager mode in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import Builder
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kernel_reference import run_reference
from lower_oracle import check

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.lowering.lower import NotLowerable, lower
from fuseplan.planner.ops.table import why_refused

TARGET = Target("cpu", "native", 2)
NEEDS_COMPILER = pytest.mark.skipif(CppBackend().unavailable() is not None, reason="no C++ compiler")
IMAGE = torch.randn(2, 12, 5, 7)

Fold = Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]
#: Ops that fold several dimensions, or the first of those only, and how eager mode spells them.
SEVERAL: dict[str, Fold] = {
    "aten.sum.dim_IntList": lambda x, dims, keep: x.sum(dims, keep),
    "aten.mean.dim": lambda x, dims, keep: x.mean(dims, keep),
    "aten.amax.default": lambda x, dims, keep: x.amax(dims, keep),
    "aten.var.correction": lambda x, dims, keep: x.var(dims, correction=1, keepdim=keep),
    "aten.logsumexp.default": lambda x, dims, keep: x.logsumexp(dims, keep),
    "aten.any.dims": lambda x, dims, keep: x.any(dims, keep),
    "aten.linalg_vector_norm.default": lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep),
}
ONE: dict[str, Fold] = {
    "aten.prod.dim_int": lambda x, dims, keep: x.prod(dims[0], keep),
    "aten.argmax.default": lambda x, dims, keep: x.argmax(dims[0], keep),
    "aten.min.dim": lambda x, dims, keep: x.min(dims[0], keep).indices,
    "aten.softmax.int": lambda x, dims, keep: x.softmax(dims[0]),
    "aten.log_softmax.int": lambda x, dims, keep: x.log_softmax(dims[0]),
}
#: Those that have no result where nothing is folded.
NEVER_EMPTY = ("aten.amax.default", "aten.logsumexp.default", "aten.argmax.default", "aten.min.dim")


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CppBackend]:
    yield CppBackend(tmp_path_factory.mktemp("kernels"))


def operand(shape: list[int], order: list[int], dtype: torch.dtype, special: list[float], seed: int) -> torch.Tensor:
    """Numbers of which some are ``special``, of ``shape``, in memory in another order of its dimensions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn([shape[dim] for dim in order], generator=generator) * 2
    for number, value in enumerate(special):
        if x.numel():
            x.view(-1)[(number * 7 + seed) % x.numel()] = value
    x = x.permute([order.index(dim) for dim in range(len(shape))])
    return (x * 3).nan_to_num(0, 9, -9).to(dtype) if not dtype.is_floating_point else x.to(dtype)


def folded(b: Builder, op: str, dims: tuple[int, ...], keep: bool) -> str:
    """The value of a fold, of ``max.dim`` the position."""
    attrs: dict[str, Any] = {"keepdim": keep, "dim": dims if op in SEVERAL else dims[0]}
    if "softmax" in op:
        attrs.pop("keepdim")
    if "var" in op:
        attrs["correction"] = 1
    return b.many(op, "x", outputs=2, **attrs)[1] if op == "aten.min.dim" else b(op, "x", **attrs)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, torch.Tensor, tuple[int, ...], bool]:
    op = draw(st.sampled_from([*SEVERAL, *ONE]))
    rank = draw(st.integers(1, 4))
    sizes = [1, 2, 3, 17, 40] if op in NEVER_EMPTY else [0, 1, 2, 3, 17, 40]
    shape = [draw(st.sampled_from(sizes)) for _ in range(rank)]
    dims = tuple(draw(st.permutations(range(rank)))[: 1 if op in ONE else draw(st.integers(1, rank))])
    whole = (".sum", "amax", "any", "prod", "argmax", "min.dim")
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    if any(word in op for word in whole):
        dtypes += [torch.int64, torch.uint8]
    special = draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), max_size=2))
    order = draw(st.permutations(range(rank)))
    x = operand(shape, order, draw(st.sampled_from(dtypes)), special, draw(st.integers(0, 99)))
    return op, x, dims, draw(st.booleans())


@NEEDS_COMPILER
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture,
                                                                HealthCheck.too_slow])
@given(case=cases(), numerics=st.sampled_from(["fp32", "eager"]))
def test_a_fold_of_any_dimensions_is_that_of_eager_mode(
    backend: CppBackend, case: tuple[str, torch.Tensor, tuple[int, ...], bool], numerics: str
) -> None:
    op, x, dims, keep = case
    b = Builder(x=x)
    value = folded(b, op, dims, keep)
    assume(b.tensors[value].numel())  # no group has an empty result
    result = b("aten.neg.default", value) if b.tensors[value].dtype != torch.bool else value
    graph = b.graph(result)
    try:
        lowered = lower(graph, {graph.maker(value).name, graph.maker(result).name}, numerics, (result,))
    except NotLowerable as reason:
        assert any(words in str(reason) for words in (
            "one run of memory", "by itself", "dtype uint8", "reduces all")), reason
        return
    (made,) = lowered.ir.outputs
    found = torch.empty_strided(made.shape, made.strides, dtype=getattr(torch, made.dtype))
    backend.load(lowered.ir, backend.default_config(lowered.ir, TARGET), TARGET)(x, found)
    wide = x.double() if x.is_floating_point() else x
    expected = (SEVERAL | ONE)[op](wide, dims, keep)
    expected = expected if expected.dtype == torch.bool else -expected
    assert found.shape == expected.shape
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 2e-5}.get(found.dtype, 1e-9)
    if not found.is_floating_point():
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_a_fold_shares_its_kernel_with_what_is_before_and_after_it() -> None:
    b = Builder(x=torch.randn(3, 9, 11), y=torch.randn(11))
    shifted = b("aten.add.Tensor", "x", "y")
    mean = b("aten.mean.dim", shifted, dim=(1,), keepdim=True)
    centred = b("aten.sub.Tensor", shifted, mean)
    lowered = check(b, mean, b("aten.mul.Tensor", centred, centred), shifted)
    (segment,) = lowered.ir.segments
    assert (segment.rows, segment.cols) == ((3, 11), 9)


@pytest.mark.parametrize("shape", [(6, 6, 6), (6, 6, 5), (6, 5, 6), (5, 6, 6)])
def test_folded_sizes_that_other_dimensions_have_too_are_told_apart(shape: tuple[int, ...]) -> None:
    for dim, (first, second) in itertools.product(range(3), itertools.permutations(range(3), 2)):
        b = Builder(x=torch.randn(shape))
        share = b("aten.softmax.int", "x", dim=dim)
        turned = b("aten.transpose.int", share, dim0=first, dim1=second)
        check(b, b("aten.mul.Tensor", turned, other=2.0), b("aten.sum.dim_IntList", "x", dim=(dim,)))


@pytest.mark.parametrize("dims", [(2, 3), (1, 2), (0, 1), (1, 2, 3), (0,), (3,)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pictures_are_folded_where_their_dimensions_are_one_run(dims: tuple[int, ...], layout: Any) -> None:
    b = Builder(x=IMAGE.to(memory_format=layout))
    mean = b("aten.mean.dim", "x", dim=dims, keepdim=True)
    strides = sorted((b.tensors["x"].stride(dim), IMAGE.shape[dim]) for dim in dims)
    in_order = [b.tensors["x"].stride(dim) for dim in dims] == [stride for stride, _ in reversed(strides)]
    graph = b.graph(mean)
    if in_order and all(a * size == c for (a, size), (c, _) in itertools.pairwise(strides)):
        check(b, b("aten.sub.Tensor", "x", mean), mean)
    else:
        assert "one run of memory" in str(why_refused(next(iter(graph)), graph.specs))


@NEEDS_COMPILER
@pytest.mark.parametrize("op", SEVERAL)
@pytest.mark.parametrize(("shape", "dims"), [
    ((5, 3, 9, 16), (0, 2, 3)), ((3, 4, 64), (0, 2)), ((2, 3, 5, 131), (1, 3)), ((7, 33, 2, 65), (0, 1, 3)),
])
def test_several_runs_of_memory_are_folded_as_one(
    op: str, shape: tuple[int, ...], dims: tuple[int, ...], backend: CppBackend
) -> None:
    b = Builder(x=operand(list(shape), list(range(len(shape))), torch.float32, [0.0, 9.0], 3))
    lowered = check(b, folded(b, op, dims, False))
    (made,) = lowered.ir.outputs
    found = torch.empty(made.shape, dtype=getattr(torch, made.dtype))
    backend.load(lowered.ir, backend.default_config(lowered.ir, TARGET), TARGET)(b.tensors["x"], found)
    torch.testing.assert_close(found, SEVERAL[op](b.tensors["x"].double(), dims, False).to(found.dtype),
                               rtol=1e-5, atol=1e-4)


def test_what_a_view_mixes_into_other_rows_is_not_folded_again_and_again() -> None:
    b = Builder(x=torch.randn(4, 6, 10), y=torch.randn(4, 60))
    flat = b("aten.view.default", b("aten.softmax.int", "x", dim=1), size=(4, 60))
    with pytest.raises(NotLowerable, match="again"):
        check(b, b("aten.add.Tensor", flat, "y"))


def test_a_sum_of_all_elements_is_one_row() -> None:
    x = torch.randn(5, 8, 9)
    b = Builder(x=x)
    lowered = check(b, b("aten.sum.default", b("aten.mul.Tensor", "x", "x")))
    (found,) = run_reference(lowered.ir, [x])
    torch.testing.assert_close(found.double(), (x.double() * x.double()).sum())


def test_a_softmax_of_one_long_row_stays_in_kernels() -> None:
    b = Builder(x=torch.randn(40_000))
    check(b, b("aten.softmax.int", "x", dim=0))


@NEEDS_COMPILER
def test_rows_that_are_looked_up_are_folded_across(backend: CppBackend) -> None:
    table, at = torch.randn(50, 37), torch.randint(0, 50, (3, 21))
    b = Builder(table=table, at=at, shown=torch.rand(3, 21, 1) > 0.3)
    picked = b("aten.embedding.default", "table", "at")
    masked = b("aten.where.self", "shown", picked, b("aten.neg.default", picked))
    lowered = check(b, b("aten.amax.default", masked, dim=(1,)))
    found = torch.empty(3, 37)
    kernel = backend.load(lowered.ir, backend.default_config(lowered.ir, TARGET), TARGET)
    kernel(*b.values(lowered.inputs), found)
    assert torch.equal(found, b.tensors[lowered.outputs[0]])
    at[1, 4] = 50
    with pytest.raises(IndexError):
        kernel(*b.values(lowered.inputs), found)
