"""Matmuls in other forms: what is not refused agrees with eager mode and float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_samples import Sample, assert_as_good_as_eager, run, sample

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.libraries.library_calls import library_calls, library_groups, named
from fuseplan.planner.libraries.matmul_calls import MATMUL_CALLS

CPU_CALLS = [call for call in MATMUL_CALLS if "cpu" in call.device_types]
AFTER: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("aten.relu.default", {}),
    "gelu": ("aten.gelu.default", {}),
    "gelu by tanh": ("aten.gelu.default", {"approximate": "tanh"}),
    "silu": ("aten.silu.default", {}),
}


def product(
    op: str, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None, after: str | None = None,
    added: torch.Tensor | None = None, **attrs: Any,
) -> Sample:
    """A matmul, an activation or an addition after it."""
    operands = {"left": left, "right": right} | ({} if bias is None else {"bias": bias})
    names = ("bias", "left", "right") if op == "addmm" else tuple(operands)
    if op == "linear" and bias is None:
        attrs["bias"] = None
    nodes = [OpNode(f"aten.{op}.default", names, ("product",), attrs)]
    if after is not None:
        name, more = AFTER[after]
        nodes.append(OpNode(name, ("product",), ("found",), more))
    if added is not None:
        operands["added"] = added
        nodes.append(OpNode("aten.add.Tensor", ("added", "product"), ("found",)))
    return sample(nodes, operands)


def linear(*shape: int, n: int = 16, bias: bool = True, dtype: torch.dtype = torch.float32, **more: Any) -> Sample:
    torch.manual_seed(n)
    left, right = torch.randn(*shape, dtype=dtype), torch.randn(n, shape[-1], dtype=dtype)
    return product("linear", left, right, torch.randn(n, dtype=dtype) if bias else None, **more)


def reason(name: str, given: Sample, device: str = "cpu") -> str | None:
    call = named(name)
    assert call is not None
    return call.refuse(replace(given.group, device_type=device))


def check(name: str, given: Sample) -> None:
    call = named(name)
    assert call is not None and call.refuse(given.group) is None
    assert_as_good_as_eager(call, given)


@pytest.mark.parametrize("rows", [1, 3, 127])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("after", [None, *AFTER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_with_what_follows(rows: int, bias: bool, after: str | None, dtype: torch.dtype) -> None:
    made = linear(rows, 33, n=7, bias=bias, after=after, dtype=dtype)
    if dtype != torch.float32 and "does not compute" in (reason("matmul.onednn", made) or ""):
        pytest.skip("oneDNN has no bfloat16 on this processor")
    check("matmul.onednn", made)


@pytest.mark.parametrize("shape", [(3, 127, 33), (2, 1, 5), (127, 3, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_batched(shape: tuple[int, ...], bias: bool) -> None:
    check("matmul.batched", linear(*shape, bias=bias))
    left, right = torch.randn(shape), torch.randn(shape[-1], 9)
    check("matmul.batched", product("matmul", left, right))


def test_unbatched() -> None:
    left, right = torch.randn(3, 5, 7), torch.randn(1, 7, 9)
    for op in ("bmm", "matmul"):
        check("matmul.unbatched", product(op, left, right.expand(3, 7, 9)))
        check("matmul.unbatched", product(op, left[:1], right))
        own = product(op, left, right.repeat(3, 1, 1))
        assert "its own" in (reason("matmul.unbatched", own) or "")
    wide = product("matmul", left[:1], right.expand(3, 7, 9))
    assert "broadcast" in (reason("matmul.unbatched", wide) or "")


@pytest.mark.parametrize("k", [1, 33, 127])
def test_a_single_row(k: int) -> None:
    for bias in (False, True):
        check("matmul.gemv", linear(1, k, bias=bias))
        check("matmul.gemv", linear(1, 1, k, bias=bias))
    row, matrix = torch.randn(1, k), torch.randn(k, 9)
    for op in ("mm", "matmul"):
        check("matmul.gemv", product(op, row, matrix))
    check("matmul.gemv", product("addmm", row, matrix, torch.randn(9)))
    assert "several rows" in (reason("matmul.gemv", linear(2, k)) or "")


@pytest.mark.parametrize("whole", [False, True])
def test_a_residual_is_added_by_the_matmul(whole: bool) -> None:
    check("matmul.addmm", linear(2, 3, 33, bias=False, added=torch.randn(2, 3, 16) if whole else torch.randn(16)))
    left, right = torch.randn(5, 7), torch.randn(7, 9)
    check("matmul.addmm", product("mm", left, right, added=torch.randn(5, 9) if whole else torch.randn(9)))
    narrow = linear(2, 3, 33, bias=False, added=torch.randn(3, 1))
    assert "neither a row" in (reason("matmul.addmm", narrow) or "")


def test_a_bias_is_added_by_the_matmul() -> None:
    torch.manual_seed(0)
    left = torch.randn(3, 5, 7).transpose(0, 1)
    check("matmul.addmm", product("linear", left, torch.randn(9, 7), torch.randn(9)))
    assert "anyway" in (reason("matmul.addmm", linear(3, 7)) or "")
    assert "nothing" in (reason("matmul.addmm", linear(2, 3, 7, bias=False)) or "")


def test_a_product_that_is_read_elsewhere_is_no_group() -> None:
    made = linear(3, 7, after="relu")
    both = replace(made.group, outputs=("product", "found"))
    both = replace(both, specs=dict(both.specs) | {"product": both.specs["found"]})
    call = named("matmul.onednn")
    assert call is not None and "elsewhere" in (call.refuse(both) or "")
    twice = sample([made.group.nodes[0], OpNode("aten.add.Tensor", ("product", "product"), ("found",))],
                   dict(zip(made.group.inputs, made.operands, strict=True)))
    assert reason("matmul.addmm", twice) is not None


@pytest.mark.parametrize(("after", "bias", "word"), [
    ("relu", True, None), ("gelu by tanh", True, None), ("gelu", True, "tanh"), ("relu", False, "no bias"),
])
def test_what_the_epilogue_of_cublaslt_can(after: str, bias: bool, word: str | None) -> None:
    found = reason("matmul.addmm_activation", linear(3, 7, bias=bias, after=after), "cuda")
    assert found is None if word is None else word in (found or "")


def test_scaled_and_wide_biases_are_refused() -> None:
    left, right = torch.randn(1, 7), torch.randn(7, 9)
    assert "scales" in (reason("matmul.gemv", product("addmm", left, right, torch.randn(9), beta=2)) or "")
    assert "one row" in (reason("matmul.gemv", product("addmm", left, right, torch.randn(1, 9))) or "")


def test_whole_numbers_and_mixed_types_are_refused() -> None:
    left, right = torch.ones(1, 7, dtype=torch.int64), torch.ones(7, 9, dtype=torch.int64)
    assert "float32" in (reason("matmul.gemv", product("mm", left, right)) or "")


def test_the_library_that_is_preferred_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = torch._C._BlasBackend
    set_to: list[Any] = []
    monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: kinds.Default)
    monkeypatch.setattr(torch._C, "_set_blas_preferred_backend", set_to.append)
    made = linear(3, 7)
    assert "anyway" in (reason("matmul.cublas", made, "cuda") or "")
    assert reason("matmul.cublaslt", made, "cuda") is None
    assert "cuda only" in (reason("matmul.cublaslt", made) or "")
    lt = named("matmul.cublaslt")
    assert lt is not None
    torch.testing.assert_close(run(lt, made), made.eager())
    assert set_to == [kinds.Cublaslt, kinds.Default]
    with pytest.raises(RuntimeError):
        lt.build(made.group)(*(one[..., :2] for one in made.operands))
    assert set_to[2:] == [kinds.Cublaslt, kinds.Default]


@given(
    call=st.sampled_from(CPU_CALLS), op=st.sampled_from(["linear", "mm", "bmm", "addmm", "matmul"]),
    rows=st.integers(1, 4), k=st.integers(1, 5), n=st.integers(1, 5), batch=st.integers(1, 3), dims=st.integers(2, 3),
    bias=st.booleans(), after=st.sampled_from([None, *AFTER]), added=st.sampled_from([None, 1, 2]),
    flipped=st.booleans(), broadcast=st.booleans(), seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_what_is_not_refused_agrees(
    call: Any, op: str, rows: int, k: int, n: int, batch: int, dims: int, bias: bool, after: str | None,
    added: int | None, flipped: bool, broadcast: bool, seed: int,
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
    term = torch.randn(*batched, rows, n) if added == 2 else torch.randn(n) if added == 1 else None
    made = product(op, left, right, row, after if term is None else None, term)
    if call.refuse(made.group) is None:
        assert_as_good_as_eager(call, made)


# -- the list of all calls --------------------------------------------------------------------------------


def test_names_find_their_calls() -> None:
    for device in ("cpu", "cuda"):
        calls = library_calls(device)
        assert len({call.name for call in calls}) == len(calls)
        assert all(named(call.name) is call and device in call.device_types for call in calls)
    assert named("sdpa.unheard") is None and library_calls("tpu") == ()


def test_groups_are_what_calls_take() -> None:
    groups = library_groups("cuda")
    assert ("aten.linear.default", "aten.gelu.default") in groups
    assert ("aten.scaled_dot_product_attention.default",) in groups
    assert ("aten.relu.default",) not in groups
    made = linear(3, 7, after="relu")
    for call in library_calls("cpu"):
        if ("aten.linear.default", "aten.relu.default") not in call.takes:
            assert call.refuse(made.group) is not None
