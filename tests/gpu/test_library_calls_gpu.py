"""Every library call on a GPU: as good as eager mode, in its layout, in a CUDA graph, or refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from library_samples import MASKS, Sample, assert_as_good_as_eager, attention, heads, mask_of, run, sample

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.libraries.attention_calls import ATTENTION_CALLS, AttentionCall
from fuseplan.planner.libraries.matmul_calls import MATMUL_CALLS

pytestmark = pytest.mark.gpu

CUDA_MATMULS = [call for call in MATMUL_CALLS if call.name != "matmul.onednn"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def whole(
    batch: int, kv_heads: int, times: int, tokens: int, length: int, kind: str = "none", width: int = 64,
    dtype: torch.dtype = torch.bfloat16, mask_heads: int = 1, cache: int = 0, **attrs: Any,
) -> Sample:
    """Attention over a cache that is ``cache`` positions longer than what is read."""
    query = heads(batch, kv_heads * times, tokens, width, dtype, "cuda", transposed=True)
    key, value = (heads(batch, kv_heads, length + cache, width, dtype, "cuda")[:, :, :length] for _ in range(2))
    mask = mask_of(kind, (batch, mask_heads, tokens, length), dtype, "cuda")
    if kind == "causal":
        attrs["is_causal"] = True
    return attention(query, key, value, mask, enable_gqa=times > 1, **attrs)


def check(call: Any, made: Sample) -> None:
    """As good as eager mode, and as attention computed op by op."""
    reason = call.refuse(made.group)
    if reason is not None:
        pytest.skip(reason)
    assert_as_good_as_eager(call, made)


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("kind", MASKS[:-1])
@pytest.mark.parametrize("times", [1, 4, 8])
@pytest.mark.parametrize(("tokens", "length"), [(1, 127), (1, 1024), (3, 127), (127, 127), (127, 3), (1, 1)])
def test_forms_of_masks(call: AttentionCall, kind: str, times: int, tokens: int, length: int) -> None:
    check(call, whole(3, 2, times, tokens, length, kind, cache=5))


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [4, 12, 72, 128, 256])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_types_widths_and_scales(call: AttentionCall, dtype: torch.dtype, width: int, scale: float | None) -> None:
    check(call, whole(2, 3, 4, 1, 65, "none", width, dtype, scale=scale))


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("shape", [(1, 17), (5, 17), (8, 5, 17), (1, 1, 1, 17), (2, 8, 5, 17), (2, 1, 1, 17)])
@pytest.mark.parametrize("kind", ["numbers", "boolean"])
def test_shapes_of_masks(call: AttentionCall, shape: tuple[int, ...], kind: str) -> None:
    query, key = heads(2, 8, 5, 64, torch.bfloat16, "cuda"), heads(2, 2, 17, 64, torch.bfloat16, "cuda")
    check(call, attention(query, key, key, mask_of(kind, shape, torch.bfloat16, "cuda"), enable_gqa=True))


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("length", [16, 17])
def test_masks_that_are_parts_of_others(call: AttentionCall, length: int) -> None:
    query, key = heads(2, 8, 1, 64, torch.bfloat16, "cuda"), heads(2, 2, length, 64, torch.bfloat16, "cuda")
    for kind in ("numbers", "boolean"):
        mask = mask_of(kind, (2, 1, 3, length + 4), torch.bfloat16, "cuda")
        assert mask is not None
        made = attention(query, key, key, mask[:, :, 1:2, :length], enable_gqa=True)
        if call.refuse(made.group) is None:
            assert_as_good_as_eager(call, made)


def seeing_nothing(number: float | None, times: int) -> Sample:
    """The last of two rows sees no key: by a boolean mask, or by this number."""
    query, key = heads(2, 2 * times, 2, 64, torch.bfloat16, "cuda"), heads(2, 2, 33, 64, torch.bfloat16, "cuda")
    mask = torch.ones(2, 1, 2, 33, dtype=torch.bool, device="cuda")
    mask[:, :, -1] = False
    if number is not None:
        mask = torch.where(mask, 0.0, number).to(torch.bfloat16)
    return attention(query, key, key.clone(), mask, enable_gqa=times > 1)


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("number", [None, -65504.0, -math.inf])
@pytest.mark.parametrize("times", [1, 4])
def test_rows_without_keys_are_as_in_eager_mode(call: AttentionCall, number: float | None, times: int) -> None:
    made = seeing_nothing(number, times)
    reason = call.refuse(made.group)
    if reason is not None:
        pytest.skip(reason)
    torch.testing.assert_close(run(call, made), made.eager(), rtol=3e-2, atol=3e-2, equal_nan=True)


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("kind", ["none", "numbers", "boolean"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention_in_a_graph(call: AttentionCall, kind: str, tokens: int) -> None:
    made = whole(3, 2, 4, tokens, 127, kind)
    reason = call.refuse(made.group)
    if reason is not None:
        pytest.skip(reason)
    replayed(call, made)


def replayed(call: Any, made: Sample) -> None:
    """A replay on other numbers than those of the capture is the call on them."""
    built = call.build(made.group)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        built(*made.operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = built(*made.operands)
    with torch.no_grad():
        made.operands[0].copy_(torch.randn_like(made.operands[0]))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, built(*made.operands), rtol=2e-2, atol=2e-2)


def test_hopper_has_every_back_end() -> None:
    """No rule here refuses what PyTorch's own choice would take."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    plain, masked = whole(2, 2, 4, 1, 1024), whole(2, 2, 4, 1, 1024, "numbers")
    for made, refused in ((plain, set()), (masked, {"sdpa.flash"})):
        assert {call.name for call in ATTENTION_CALLS if call.refuse(made.group) is not None} == refused


# -- matmuls ----------------------------------------------------------------------------------------------


def operand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def matmuls(rows: int, k: int, n: int, dtype: torch.dtype) -> list[Sample]:
    """Every op that a library may take."""
    x, w, b = (operand(*shape, dtype=dtype) for shape in ((rows, k), (n, k), (n,)))
    batch = operand(3, rows, k, dtype=dtype)
    linear = OpNode("aten.linear.default", ("x", "w", "b"), ("y",))
    plain = OpNode("aten.linear.default", ("x", "w"), ("y",), {"bias": None})
    addmm = OpNode("aten.addmm.default", ("b", "x", "v"), ("y",))
    both, v = {"x": x, "w": w, "b": b}, w.t().contiguous()
    mm, matmul, bmm = (OpNode(f"aten.{name}.default", ("x", "v"), ("y",)) for name in ("mm", "matmul", "bmm"))
    return [
        sample(linear, both), sample(plain, {"x": x, "w": w}), sample(linear, both | {"x": batch}),
        sample(linear, both | {"x": batch.transpose(0, 1)}), sample(plain, {"x": batch, "w": w}),
        sample(addmm, {"b": b, "x": x, "v": v}), sample(mm, {"x": x, "v": v}), sample(mm, {"x": x, "v": w.t()}),
        sample(matmul, {"x": batch, "v": v}), sample(bmm, {"x": batch, "v": v.expand(3, k, n)}),
        sample(bmm, {"x": batch, "v": operand(3, k, n, dtype=dtype)}),
    ]


@pytest.mark.parametrize("call", CUDA_MATMULS, ids=lambda call: call.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 64, 128), (1, 33, 7), (3, 127, 65), (127, 256, 72), (16, 1, 1)])
def test_forms_of_matmuls(call: Any, dtype: torch.dtype, rows: int, k: int, n: int) -> None:
    before = torch._C._get_blas_preferred_backend()
    reasons: Counter[str | None] = Counter()
    for made in matmuls(rows, k, n, dtype):
        reason = call.refuse(made.group)
        reasons[reason] += 1
        if reason is None:
            assert_as_good_as_eager(call, made, slack=3.0)
    assert torch._C._get_blas_preferred_backend() == before
    if not reasons[None]:
        pytest.skip(", ".join(map(str, reasons)))


@pytest.mark.parametrize("library", ["Cublas", "Cublaslt"])
def test_the_other_library_can_be_asked_for(library: str) -> None:
    before = torch._C._get_blas_preferred_backend()
    (call,) = [one for one in MATMUL_CALLS if one.name == f"matmul.{library.lower()}"]
    other = {"Cublas": torch._C._BlasBackend.Cublaslt, "Cublaslt": torch._C._BlasBackend.Cublas}[library]
    try:
        torch._C._set_blas_preferred_backend(other)
        for made in matmuls(5, 64, 72, torch.bfloat16):
            assert call.refuse(made.group) is None
            assert_as_good_as_eager(call, made, slack=3.0)
        assert torch._C._get_blas_preferred_backend() == other
    finally:
        torch._C._set_blas_preferred_backend(before)


@pytest.mark.parametrize("call", CUDA_MATMULS, ids=lambda call: call.name)
def test_matmuls_in_a_graph(call: Any) -> None:
    taken = [made for made in matmuls(1, 64, 72, torch.bfloat16) if call.refuse(made.group) is None]
    if not taken:
        pytest.skip("it refuses all")
    for made in taken:
        replayed(call, made)
