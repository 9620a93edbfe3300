"""Matmuls of few rows on CPUs by our own kernel: right against float64 for odd sizes and strides, or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_samples import assert_as_good_as_eager, linear, on_cuda, product

from fuseplan.kernels.cpp.matmul import MAX_ROWS, FewRows
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.libraries.few_rows import FewRowsMatmul

CALL = FewRowsMatmul()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "cols"), [
    (1, 4097, 3), (3, 127, 33), (8, 1, 1), (2, 64, 127), (5, 17, 9),
    (8, 4127, 61), (12, 2500, 50), (16, 4097, 75),  # more of the activations than a first-level cache holds
])
@pytest.mark.parametrize("bias", [False, True])
def test_sizes_and_types(rows: int, inner: int, cols: int, bias: bool, dtype: torch.dtype) -> None:
    assert_as_good_as_eager(CALL, linear(rows, 1, inner, n=cols, bias=bias, dtype=dtype))


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, MAX_ROWS), inner=st.integers(1, 70), cols=st.integers(1, 40), more=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rows_of_weights_may_lie_apart(rows: int, inner: int, cols: int, more: int, dtype: torch.dtype) -> None:
    given, weights = torch.randn(rows, inner, dtype=dtype), torch.randn(cols, inner + more, dtype=dtype)[:, :inner]
    assert_as_good_as_eager(CALL, product("linear", given, weights))
    assert_as_good_as_eager(CALL, product("mm", given, weights.t()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    weights = torch.ones(7, 45, dtype=dtype)
    weights[2, 44], weights[5, 40] = torch.nan, torch.inf
    made = product("linear", torch.ones(3, 45, dtype=dtype), weights)
    result = CALL.build(made.group)(*made.operands)
    expected = torch.tensor([45.0, 45, torch.nan, 45, 45, torch.inf, 45], dtype=dtype).expand(3, 7)
    torch.testing.assert_close(result, expected, equal_nan=True)


def test_a_bias_that_is_added() -> None:
    weights = torch.randn(9, 7).t()
    assert_as_good_as_eager(CALL, product("addmm", torch.randn(3, 7), weights, torch.randn(9)))


def test_what_is_refused() -> None:
    for made, word in (
        (linear(MAX_ROWS + 1, 7), "more than"), (on_cuda(linear(1, 7)), "CPUs only"),
        (product("mm", torch.randn(2, 7), torch.randn(7, 9)), "row by row"),
        (product("linear", torch.randn(7, 2).t(), torch.randn(9, 7)), "row by row"),
        (product("bmm", torch.randn(2, 3, 7), torch.randn(2, 7, 9)), "row by row"),
        (product("mm", torch.randn(2, 7).double(), torch.randn(9, 7).double().t()), "float32"),
    ):
        assert word in (CALL.refuse(made.group) or ""), word
        with pytest.raises(RefusedError, match=word):
            CALL.build(made.group)


def test_a_call_is_repeatable() -> None:
    made = linear(3, 1, 4097, n=127, dtype=torch.bfloat16)
    call = CALL.build(made.group)
    first = call(*made.operands)
    assert all(torch.equal(call(*made.operands), first) for _ in range(5))


@pytest.mark.parametrize(("rows", "inner", "cols"), [(1, 515, 127), (4, 4097, 61), (8, 2048, 203), (16, 1031, 97)])
def test_threads_do_not_change_a_bit(rows: int, inner: int, cols: int) -> None:
    call = FewRows(rows, cols, inner, inner, "bfloat16", False, (rows, cols)).build()
    x, w = torch.randn(rows, inner).bfloat16(), torch.randn(cols, inner).bfloat16()
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(call(x, w))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
