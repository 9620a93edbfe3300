"""Attention by each of PyTorch's back ends: what is not refused agrees with eager mode and float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_samples import MASKS, Sample, assert_as_good_as_eager, attention, heads, mask_of, run, sample
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.libraries.attention_calls import ATTENTION_CALLS, AttentionCall
from fuseplan.planner.libraries.library_call import OpGroup
from fuseplan.planner.rewrites import attention_backends
from fuseplan.planner.rewrites.attention_backends import Attention

FLASH = AttentionCall("flash")
CPU_CALLS = [AttentionCall("math")]


def whole(
    batch: int, kv_heads: int, times: int, tokens: int, length: int, kind: str = "none", width: int = 8,
    dtype: torch.dtype = torch.float32, **attrs: Any,
) -> Sample:
    torch.manual_seed(length)
    query = heads(batch, kv_heads * times, tokens, width, dtype, transposed=True)
    key, value = (heads(batch, kv_heads, length, width, dtype) for _ in range(2))
    mask = mask_of(kind, (batch, 1, tokens, length), dtype)
    if kind == "causal":
        attrs["is_causal"] = True
    return attention(query, key, value, mask, enable_gqa=times > 1, **attrs)


def on_cuda(given: Sample) -> OpGroup:
    return replace(given.group, device_type="cuda")


@pytest.mark.parametrize("call", CPU_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("times", [1, 4, 8])
@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (1, 127), (3, 127), (3, 3), (127, 3)])
def test_forms_of_masks(call: AttentionCall, kind: str, times: int, tokens: int, length: int) -> None:
    made = whole(3, 2, times, tokens, length, kind)
    assert call.refuse(made.group) is None
    assert_as_good_as_eager(call, made)


@pytest.mark.parametrize("call", CPU_CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_types_and_scales(call: AttentionCall, dtype: torch.dtype, scale: float | None) -> None:
    made = whole(1, 3, 4, 1, 127, "boolean", dtype=dtype, scale=scale)
    assert call.refuse(made.group) is None
    assert_as_good_as_eager(call, made)


def test_rows_without_keys_are_zero() -> None:
    made = whole(2, 2, 1, 3, 7, "rows without keys")
    result = run(AttentionCall("math"), made)
    assert (result[:, :, -1] == 0).all() and torch.isfinite(result).all()


@pytest.mark.parametrize("call", CPU_CALLS, ids=lambda call: call.name)
def test_one_tensor_may_be_two_operands(call: AttentionCall) -> None:
    query, cache = heads(2, 6, 1, 8), heads(2, 3, 5, 8)
    node = OpNode("aten.scaled_dot_product_attention.default", ("q", "kv", "kv"), ("found",),
                  {"attn_mask": None, "enable_gqa": True})
    assert_as_good_as_eager(call, sample(node, {"q": query, "kv": cache}))


@given(
    call=st.sampled_from(CPU_CALLS), batch=st.integers(1, 3), kv_heads=st.integers(1, 3),
    times=st.sampled_from([1, 2, 4]), tokens=st.sampled_from([1, 1, 2, 7]), length=st.integers(1, 9),
    widths=st.sampled_from([(8, 8), (5, 5), (1, 1), (8, 4)]), scale=st.sampled_from([None, 0.5, 0.0, -0.5]),
    kind=st.sampled_from(MASKS), broadcast=st.lists(st.booleans(), min_size=4, max_size=4),
    dims=st.integers(1, 4), sliced=st.booleans(), shared=st.booleans(), seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_what_is_not_refused_agrees(
    call: AttentionCall, batch: int, kv_heads: int, times: int, tokens: int, length: int, widths: tuple[int, int],
    scale: float | None, kind: str, broadcast: list[bool], dims: int, sliced: bool, shared: bool, seed: int,
) -> None:
    torch.manual_seed(seed)
    query = heads(batch, kv_heads * times, tokens, widths[0], transposed=sliced)
    key, value = (heads(batch, kv_heads, length + 2, width)[:, :, 1 : length + 1] for width in widths)
    if sliced:  # elements of a head do not follow one another
        key = key.mT.contiguous().mT
    sizes = [1 if one else size for one, size in zip(broadcast, (batch, kv_heads * times, tokens, length), strict=True)]
    try:
        made = attention(query, key, value, mask_of(kind, sizes[-dims:], torch.float32), is_causal=kind == "causal",
                         scale=scale, enable_gqa=shared)
    except (RuntimeError, IndexError):
        return  # eager mode cannot
    if call.refuse(made.group) is None:
        assert_as_good_as_eager(call, made)


# -- refusals ---------------------------------------------------------------------------------------------

HALF = torch.bfloat16


def of(width: int = 64, dtype: torch.dtype = HALF, length: int = 17, kind: str = "none", **more: Any) -> Sample:
    return whole(2, 2, more.pop("times", 1), more.pop("tokens", 17), length, kind, width, dtype, **more)


@pytest.mark.parametrize(("name", "made", "word"), [
    ("sdpa.flash", of(kind="boolean"), "no mask"),
    ("sdpa.flash", of(kind="numbers"), "no mask"),
    ("sdpa.flash", of(kind="causal", tokens=3), "last key"),
    ("sdpa.flash", of(width=264), "wider"),
    ("sdpa.flash", of(dtype=torch.float32), "float32"),
    ("sdpa.efficient", of(width=12), "multiple of 8"),
    ("sdpa.efficient", of(dtype=torch.float64), "float64"),
    ("sdpa.cudnn", of(width=12), "multiple of 8"),
    ("sdpa.cudnn", of(dtype=torch.float32), "float32"),
    ("sdpa.cudnn", of(length=1, tokens=1), "single key"),
    ("sdpa.math", of(dropout_p=0.5), "dropout"),
    ("sdpa.math", of(scale=-1.0), "scale"),
])
def test_gpu_rules(name: str, made: Sample, word: str) -> None:
    (call,) = [one for one in ATTENTION_CALLS if one.name == name]
    assert word in (call.refuse(on_cuda(made)) or "")


@pytest.mark.parametrize(("name", "made"), [
    ("sdpa.flash", of(width=12)),
    ("sdpa.flash", of(kind="causal", times=4)),
    ("sdpa.efficient", of(kind="boolean", times=4)),
    ("sdpa.efficient", of(kind="causal", tokens=3)),
    ("sdpa.efficient", of(dtype=torch.float32, width=12)),
    ("sdpa.cudnn", of(kind="numbers", times=4)),
    ("sdpa.math", of(dtype=torch.float64, width=5)),
])
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks PyTorch about its device, too")
def test_gpu_rules_accept(name: str, made: Sample) -> None:
    (call,) = [one for one in ATTENTION_CALLS if one.name == name]
    assert call.refuse(on_cuda(made)) is None


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("kind", ["none", "causal", "numbers"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks PyTorch about its device, too")
def test_gpu_calls_are_what_pytorch_takes(backend: str, kind: str) -> None:
    """On tensors without memory, which PyTorch lets be on a GPU that there is not."""
    made = of(kind=kind, times=4, length=16, tokens=16, dtype=HALF)
    call, group = AttentionCall(backend), on_cuda(made)
    if call.refuse(group) is not None:
        assert backend == "flash" and kind == "numbers"
        return
    with FakeTensorMode():
        found = call.build(group)(*(
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda") for one in made.operands
        ))
    assert found.shape == made.eager().shape and found.dtype == HALF and found.device.type == "cuda"


def test_pytorch_has_the_last_word_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture, a version of cuDNN, or a user's switch that no rule here knows."""
    asked = []

    def says_no(params: Any) -> bool:
        asked.append((params.query.shape, params.enable_gqa))
        return False

    def on_this_device(call: Attention) -> dict[str, Any]:
        query, key, value = (torch.empty(tuple(map(int, spec.shape))) for spec in call.operands)
        return {"query": query, "key": key, "value": value, "attn_mask": None, "dropout_p": 0.0,
                "is_causal": call.causal, "enable_gqa": call.shared}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_backends, "fake_call", on_this_device)
    for name in ("flash", "efficient", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", says_no)
        reason = AttentionCall(name).refuse(on_cuda(of(times=4, tokens=1)))
        assert reason is not None and f"can_use_{name}_attention" in reason
    # The efficient kernel is asked about keys that are copied for every head.
    assert asked == [((2, 8, 1, 64), True), ((2, 8, 1, 64), False), ((2, 8, 1, 64), True)]
    assert AttentionCall("math").refuse(on_cuda(of(times=4))) is None


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_on_cpus_the_op_calls_flash_attention_itself(kind: str, times: int, dtype: torch.dtype) -> None:
    """So that both names are one call, and no choice."""
    made = whole(2, 3, times, 1, 127, kind, dtype=dtype)
    with torch.profiler.profile() as profile:
        made.eager()
    called = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called
    assert "what ATen's op calls" in (FLASH.refuse(made.group) or "")


def test_rows_that_do_not_start_at_whole_vectors() -> None:
    padded = heads(2, 2, 17, 65, HALF)[..., :64]
    made = on_cuda(attention(padded, padded, padded))
    for name in ("flash", "efficient", "cudnn"):
        assert "16 bytes" in (AttentionCall(name).refuse(made) or "")
    assert AttentionCall("math").refuse(made) is None


def test_back_ends_of_gpus_and_other_ops_are_refused() -> None:
    for call in ATTENTION_CALLS:
        reason = call.refuse(whole(1, 3, 4, 1, 17, dtype=HALF).group)
        assert reason is None if call in CPU_CALLS else ("ATen's op" if call == FLASH else "CUDA") in (reason or "")
        assert "no call of attention" in (call.refuse(on_cuda(relu())) or "")


def relu() -> Sample:
    return sample(OpNode("aten.relu.default", ("x",), ("found",)), {"x": torch.randn(3)})


def test_a_call_that_refuses_does_not_build() -> None:
    with pytest.raises(RefusedError, match="dropout"):
        AttentionCall("math").build(of(dropout_p=0.5).group)


def test_three_dimensions_are_left_to_the_op() -> None:
    query = torch.randn(2, 3, 8)
    for call in CPU_CALLS:
        assert "four dimensions" in (call.refuse(attention(query, query, query).group) or "")


def test_dynamic_sizes_are_refused() -> None:
    import sympy

    made = of().group
    spec = made.specs["key"]
    specs = dict(made.specs) | {"key": replace(spec, shape=(sympy.Symbol("s0"), *spec.shape[1:]))}
    assert all("static" in (call.refuse(replace(made, specs=specs)) or "") for call in CPU_CALLS)


def test_every_call_has_a_name_of_its_own() -> None:
    names = [call.name for call in ATTENTION_CALLS]
    assert len(set(names)) == len(names) and math.prod(name.startswith("sdpa.") for name in names)
