"""Matmuls in other forms: what is not refused agrees with eager mode and float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import Builder
from hypothesis import given, settings
from hypothesis import strategies as st
from library_samples import Sample, assert_as_good_as_eager, linear, on_cuda, product, run, sample

from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.implementations.tunable_group import op_group
from fuseplan.planner.libraries.library_calls import LIBRARY_CALLS
from fuseplan.planner.libraries.matmul_calls import MATMUL_CALLS, MatmulCall

CALLS = {call.name: call for call in MATMUL_CALLS}


def reason(name: str, given: Sample) -> str:
    return CALLS[name].refuse(given.group) or ""


def check(name: str, given: Sample) -> None:
    assert not reason(name, given)
    assert_as_good_as_eager(CALLS[name], given)


@pytest.mark.parametrize("shape", [(1, 33), (3, 33), (127, 33), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_onednn(shape: tuple[int, ...], bias: bool) -> None:
    made = linear(*shape, n=7, bias=bias)
    check("matmul.onednn", made)
    assert "CPUs only" in reason("matmul.onednn", on_cuda(made))
    assert "anyway" in reason("matmul.onednn", linear(*shape, n=7, bias=bias, dtype=torch.bfloat16))


def test_unbatched() -> None:
    left, right = torch.randn(3, 5, 7), torch.randn(1, 7, 9)
    for op in ("bmm", "matmul"):
        check("matmul.unbatched", product(op, left, right.expand(3, 7, 9)))
        check("matmul.unbatched", product(op, left[:1], right))
        assert "its own" in reason("matmul.unbatched", product(op, left, right.repeat(3, 1, 1)))
    check("matmul.unbatched", product("matmul", left, right))
    assert "broadcast" in reason("matmul.unbatched", product("matmul", left[:1], right.expand(3, 7, 9)))
    assert "no batch" in reason("matmul.unbatched", product("matmul", left, right[0]))


@pytest.mark.parametrize("k", [1, 33, 127])
def test_a_single_row(k: int) -> None:
    for bias in (False, True):
        check("matmul.gemv", linear(1, k, bias=bias))
        check("matmul.gemv", linear(1, 1, k, bias=bias))
    row, matrix = torch.randn(1, k), torch.randn(k, 9)
    for op in ("mm", "matmul"):
        check("matmul.gemv", product(op, row, matrix))
    check("matmul.gemv", product("addmm", row, matrix, torch.randn(9)))
    assert "several rows" in reason("matmul.gemv", linear(2, k))


def test_a_bias_is_added_by_the_matmul() -> None:
    torch.manual_seed(0)
    left = torch.randn(3, 5, 7).transpose(0, 1)
    check("matmul.addmm", product("linear", left, torch.randn(9, 7), torch.randn(9)))
    check("matmul.addmm", linear(2, 3, 5, 7))
    assert "anyway" in reason("matmul.addmm", linear(3, 7))
    assert "no linear op with a bias" in reason("matmul.addmm", linear(2, 3, 5, 7, bias=False))


def test_scaled_and_wide_biases_are_refused() -> None:
    left, right = torch.randn(1, 7), torch.randn(7, 9)
    assert "scales" in reason("matmul.gemv", product("addmm", left, right, torch.randn(9), beta=2))
    assert "one row" in reason("matmul.gemv", product("addmm", left, right, torch.randn(1, 9)))


def test_whole_numbers_and_mixed_types_are_refused() -> None:
    left, right = torch.ones(1, 7, dtype=torch.int64), torch.ones(7, 9, dtype=torch.int64)
    assert "float32" in reason("matmul.gemv", product("mm", left, right))


def test_a_call_that_refuses_does_not_build() -> None:
    for made, word in ((linear(2, 7), "several rows"), (product("mm", torch.ones(1, 0), torch.ones(0, 9)), "empty")):
        with pytest.raises(RefusedError, match=word):
            CALLS["matmul.gemv"].build(made.group)


def test_the_library_that_is_preferred_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = torch._C._BlasBackend
    set_to: list[Any] = []
    monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: kinds.Default)
    monkeypatch.setattr(torch._C, "_set_blas_preferred_backend", set_to.append)
    made, lt = on_cuda(linear(3, 7)), CALLS["matmul.cublaslt"]
    assert "anyway" in reason("matmul.cublas", made)
    assert "CUDA" in reason("matmul.cublaslt", linear(3, 7))
    assert lt.refuse(made.group) is None
    torch.testing.assert_close(run(lt, made), made.eager())
    assert set_to == [kinds.Cublaslt, kinds.Default]
    with pytest.raises(RuntimeError):
        lt.build(made.group)(*(one[..., :2] for one in made.operands))
    assert set_to[2:] == [kinds.Cublaslt, kinds.Default]


@given(
    call=st.sampled_from(MATMUL_CALLS), op=st.sampled_from(["linear", "mm", "bmm", "addmm", "matmul"]),
    rows=st.integers(1, 4), k=st.integers(1, 5), n=st.integers(1, 5), batch=st.integers(1, 3), dims=st.integers(2, 3),
    bias=st.booleans(), flipped=st.booleans(), broadcast=st.booleans(), seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_what_is_not_refused_agrees(
    call: MatmulCall, op: str, rows: int, k: int, n: int, batch: int, dims: int, bias: bool, flipped: bool,
    broadcast: bool, seed: int,
) -> None:
    torch.manual_seed(seed)
    batched = (batch,) if op == "bmm" or (dims == 3 and op in ("linear", "matmul")) else ()
    left = torch.randn(*batched, rows, k)
    if flipped:
        left = torch.randn(*batched, k, rows).mT
    right = torch.randn(n, k) if op == "linear" else torch.randn(k, n)
    if op == "bmm" or (op == "matmul" and broadcast and batched):
        right = right.expand(batch, k, n) if broadcast else torch.randn(batch, k, n)
        left = left[:1] if op == "matmul" and flipped else left
    elif flipped:
        right = right.mT.contiguous().mT
    row = torch.randn(n) if op == "addmm" or (op == "linear" and bias) else None
    made = product(op, left, right, row)
    if call.refuse(made.group) is None:
        assert_as_good_as_eager(call, made)


def test_every_call_has_a_name_of_its_own_and_refuses_other_ops() -> None:
    assert len({call.name for call in LIBRARY_CALLS}) == len(LIBRARY_CALLS)
    relu = on_cuda(sample(OpNode("aten.relu.default", ("x",), ("y",)), {"x": torch.randn(3)}))
    assert all(call.refuse(relu.group) for call in LIBRARY_CALLS)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "n"), [((127, 33), 40), ((4097, 1), 3), ((2, 65, 24), 57), ((64, 8), 127)], ids=str)
def test_padded(shape: tuple[int, ...], n: int, bias: bool) -> None:
    made = on_cuda(linear(*shape, n=n, bias=bias, dtype=torch.bfloat16))
    check("matmul.padded", made)
    loose = replace(made.group, only_returned=True)
    result, strict = (CALLS["matmul.padded"].build(one)(*made.operands) for one in (loose, made.group))
    assert torch.equal(result, strict)
    assert strict.is_contiguous()
    assert result.view(-1, n).stride() == (-(-n // 64) * 64, 1)  # flattened as any logits


def test_what_needs_no_padding() -> None:
    for made, word in (
        (linear(127, 33, n=7, dtype=torch.bfloat16), "CUDA devices"), (on_cuda(linear(127, 33, n=7)), "16 bits"),
        (on_cuda(linear(127, 32, n=64, dtype=torch.bfloat16)), "aligned"),
        (on_cuda(linear(3, 33, n=7, dtype=torch.bfloat16)), "few rows"),
    ):
        assert word in reason("matmul.padded", made)


def test_only_what_nothing_in_the_graph_reads_may_stay_padded() -> None:
    b = Builder(x=torch.randn(127, 33), w=torch.randn(7, 33))
    logits = b("aten.linear.default", "x", "w", bias=None)
    flat = b("aten.view.default", logits, size=[889])

    def is_loose(*outputs: str) -> bool:
        return op_group(b.graph(*outputs), [logits], [logits], "cuda").only_returned

    assert not is_loose(logits, flat)  # the view needs rows that follow each other
    alone = Builder(x=torch.randn(127, 33), w=torch.randn(7, 33))
    made = alone("aten.linear.default", "x", "w", bias=None)
    assert op_group(alone.graph(made), [made], [made], "cuda").only_returned
