"""Masks of attention: constant ones are dropped, boolean ones made numbers once; same results, or left alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_samples import Function, attention_of, imitate_cuda, rewritten, targets
from dispatch_samples import fresh_start
from torch.nn.functional import scaled_dot_product_attention

from fuseplan.planner.dispatch_stats import reset_stats, stats
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.rewrites import attention
from fuseplan.planner.rewrites.attention import AttentionRewrites
from fuseplan.planner.rewrites.attention_call import ATTENTION
from fuseplan.planner.runtime.options import parse_options

pytestmark = pytest.mark.uncovered


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch, lambda _: "cudnn")


def heads(length: int, batch: int = 2, count: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(length)
    query, key, value = torch.randn(3, batch, count, length, 8, dtype=dtype).unbind()
    return query, key, value


# -- constant masks ---------------------------------------------------------------------------------------


def compared(query: torch.Tensor) -> torch.Tensor:
    at = torch.arange(query.shape[2])
    return at[None, :] <= at[:, None]


def lower(query: torch.Tensor) -> torch.Tensor:
    length = query.shape[2]
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None].expand(query.shape[0], 1, length, length)


def of_packed_sequences(query: torch.Tensor) -> torch.Tensor:
    """As models tell sequences apart that are packed into one row: there is one."""
    batch, _, length, _ = query.shape
    positions = torch.arange(length).unsqueeze(0)
    started = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = started[:, :, None] == started[:, None, :]
    return (same & compared(query)).expand(batch, 1, length, length)


def of_every_head(query: torch.Tensor) -> torch.Tensor:
    return compared(query).expand(*query.shape[:2], -1, -1)


@pytest.mark.parametrize("mask", [compared, lower, of_packed_sequences, of_every_head])
@pytest.mark.parametrize("length", [2, 17, 127])
def test_a_constant_causal_mask_is_said_to_be_causal(mask: Function, length: int) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, mask(query), scale=0.3).transpose(1, 2) * 2

    found = rewritten(attend, *heads(length))
    assert found.done == AttentionRewrites(dropped_masks=1)
    (call,) = attention_of(found.module)
    assert call["attn_mask"] is None and call["is_causal"] and call["scale"] == 0.3
    assert targets(found.module) == [ATTENTION, torch.ops.aten.transpose.int, torch.ops.aten.mul.Tensor]


@pytest.mark.parametrize("length", [1, 5])
def test_a_mask_that_hides_nothing_is_no_mask(length: int) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(key.shape[2]) < length
        return scaled_dot_product_attention(query[:, :, :1], key, value, seen[None, None, None])

    found = rewritten(attend, *heads(length))
    assert found.done.dropped_masks == 1
    (call,) = attention_of(found.module)
    assert call["attn_mask"] is None and not call["is_causal"]


def test_layers_share_what_is_found_and_other_readers_keep_the_mask() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = compared(query)
        once = scaled_dot_product_attention(query, key, value, mask)
        return scaled_dot_product_attention(once, key, value, mask), mask.sum(-1)

    assert rewritten(attend, *heads(9)).done.dropped_masks == 2


def test_halves_of_one_projection_and_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a split are no calls of ATen; and masks are worked out on the CPU whatever the default device is."""
    def attend(both: torch.Tensor) -> torch.Tensor:
        query, key = both.split(8, -1)
        with torch.no_grad():
            return scaled_dot_product_attention(query, key, key, compared(query))

    (both,) = torch.randn(1, 2, 3, 5, 16)
    evaluate = attention._kind

    def elsewhere(*args: Any) -> str:
        with torch.device("meta"):
            return evaluate(*args)

    monkeypatch.setattr(attention, "_kind", elsewhere)
    assert rewritten(attend, both).done.dropped_masks == 1


def window(query: torch.Tensor) -> torch.Tensor:
    at = torch.arange(query.shape[2])
    return compared(query) & (at[:, None] - at[None, :] < 4)


def one_column_missing(query: torch.Tensor) -> torch.Tensor:
    return compared(query) & (torch.arange(query.shape[2]) != 1)


def strict(query: torch.Tensor) -> torch.Tensor:
    at = torch.arange(query.shape[2])
    return (at[None, :] < at[:, None]) | (at[None, :] == 0)


def random(query: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2, (query.shape[2], query.shape[2])) <= 1


def added(query: torch.Tensor) -> torch.Tensor:
    return torch.where(compared(query), 0.0, -torch.inf)


def of_data(query: torch.Tensor) -> torch.Tensor:
    return compared(query) | (query[0, 0, :, 0] > 1e9)


def by_floats(query: torch.Tensor) -> torch.Tensor:
    at = torch.arange(query.shape[2], dtype=torch.float32)
    return at[None, :] <= at[:, None]


@pytest.mark.parametrize("mask", [window, one_column_missing, strict, random, added, of_data, by_floats])
def test_other_masks_are_left_alone(mask: Function) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, mask(query))

    assert rewritten(attend, *heads(7)).done == AttentionRewrites()


def test_rectangular_large_dynamic_and_written_masks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def rectangular(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query[:, :, :3], key, value, compared(query)[:3])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, compared(query))

    def written(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = compared(query)
        mask[2:].logical_and_(query[0, 0, 2:, :1] > 0)
        mask[:, 0] = True
        return scaled_dot_product_attention(query, key, value, mask)

    for function in (rectangular, written):
        assert rewritten(function, *heads(7)).done == AttentionRewrites()
    assert rewritten(attend, *heads(7), dynamic=True).done == AttentionRewrites()
    monkeypatch.setattr(attention, "MOST_BYTES", 48)
    assert rewritten(attend, *heads(7)).done == AttentionRewrites()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_would_show_what_is_hidden_keeps_the_mask(scale: float) -> None:
    """CPU kernels scale the minus infinity of causal attention."""
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, compared(query), scale=scale)

    assert rewritten(attend, *heads(6)).done == AttentionRewrites()


def test_dropout_keeps_the_mask() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, compared(query), dropout_p=1.0)

    assert rewritten(attend, *heads(6)).done == AttentionRewrites()


def test_masks_of_custom_ops_and_those_that_cannot_be_worked_out_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("fuseplan_test_masks", "FRAGMENT") as library:
        library.define("current(Tensor positions) -> Tensor")
        library.impl("current", lambda positions: positions[:, None] >= 0, "CompositeExplicitAutograd")

        def current(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            mask = torch.ops.fuseplan_test_masks.current(torch.arange(query.shape[2]))
            return scaled_dot_product_attention(query, key, value, mask)

        assert rewritten(current, *heads(6)).done == AttentionRewrites()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, compared(query))

    def fail(_: Any) -> torch.Tensor:
        raise NotImplementedError("no kernel for this on a CPU")

    monkeypatch.setattr(attention, "_evaluated", fail)
    assert rewritten(attend, *heads(6)).done == AttentionRewrites()


def in_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention as a projection leaves it: with a mask of three dimensions its result is contiguous, without not."""
    return scaled_dot_product_attention(query, key, value, compared(query)[None])


def viewed(*args: torch.Tensor) -> torch.Tensor:
    return in_rows(*args).view(6, -1) + 1


def written_by_part(*args: torch.Tensor) -> torch.Tensor:
    found = in_rows(*args)
    found.transpose(1, 2).reshape(2, 7, 24).add_(1.0)
    return found + 1


def by_address(*args: torch.Tensor) -> torch.Tensor:
    return in_rows(*args).as_strided((2, 3), (56, 8)) + 1


def read_by_index(*args: torch.Tensor) -> torch.Tensor:
    first, second = in_rows(*args).split(4, -1)
    return (first * second).transpose(1, 2).reshape(2, 7, 12) + 1


@pytest.mark.parametrize(("function", "dropped"), [
    (in_rows, 0), (viewed, 0), (written_by_part, 0), (by_address, 0), (read_by_index, 1),
])
def test_a_result_changes_its_layout_only_where_nothing_can_tell(function: Function, dropped: int) -> None:
    args = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in heads(7)]
    found = rewritten(function, *args)
    assert found.done.dropped_masks == dropped
    assert found.result.stride() == function(*args).stride()
    for node in found.module.graph.find_nodes(op="call_function", target=torch.ops.aten.split.Tensor):
        assert [part.stride() for part in node.meta["val"]] == [(168, 8, 24, 1)] * 2


def test_what_is_written_to_a_part_of_a_result_is_seen(tmp_path: Any) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = scaled_dot_product_attention(query, key, value, compared(query))
        first, _ = found.transpose(1, 2).split(4, -1)
        before = first.sigmoid()
        first.mul_(2.0)
        return found.sigmoid()[..., :4].transpose(1, 2) + before

    reset_stats()
    with torch.no_grad():
        compiled = torch.compile(attend, backend="fuseplan", options={"db": str(tmp_path / "tuning.db")})
        args = [one.clone() for one in heads(9)]
        torch.testing.assert_close(compiled(*args), attend(*args))
    assert stats().dropped_masks == 1 and not stats().fallbacks


def test_a_prefill_of_llama(tmp_path: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=50,
    )).eval()
    tokens = torch.randint(0, 50, (2, 9))
    for masks, dropped in ((True, 2), (False, 0)):
        torch._dynamo.reset()
        reset_stats()
        options = {"db": str(tmp_path / "tuning.db"), "attention_masks": masks}
        with torch.no_grad():
            expected = model(input_ids=tokens, use_cache=False).logits
            compiled = torch.compile(model, backend="fuseplan", options=options)
            result = compiled(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(result, expected)
        assert stats().dropped_masks == dropped and not stats().fallbacks
        assert ("constant attention masks removed" in str(stats())) == masks


# -- boolean masks ----------------------------------------------------------------------------------------


def two_layers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    mask = seen[:, None, None] & (torch.arange(key.shape[2]) != 1)
    once = scaled_dot_product_attention(query, key, value, mask)
    return scaled_dot_product_attention(once, key, value, mask)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.0"])
def test_a_boolean_mask_becomes_numbers_once(
    dtype: torch.dtype, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    args = (*heads(11, dtype=dtype), torch.arange(22).view(2, 11) % 3 != 0)
    found = rewritten(two_layers, *args)
    assert found.done == AttentionRewrites(added_masks=2)
    calls = attention_of(found.module)
    assert calls[0]["attn_mask"] is calls[1]["attn_mask"]
    numbers = calls[0]["attn_mask"].meta["val"]
    assert numbers.dtype == dtype and numbers.shape == (2, 1, 1, 11)
    (where,) = (node for node in found.module.graph.nodes if node.target is torch.ops.aten.where.Scalar)
    assert where.args[1:] == (0.0, -65504.0 if version.startswith("2.11") else -torch.inf)


@pytest.mark.parametrize("backend", ["efficient", "math"])
def test_what_is_masked_is_what_the_plain_op_takes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see nothing depend on it: only with cuDNN, before 2.12, the number is finite."""
    imitate_cuda(monkeypatch, lambda _: backend)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    seen = torch.ones(2, 5, dtype=torch.bool)
    seen[1] = False
    found = rewritten(two_layers, *heads(5), seen)
    assert found.done == AttentionRewrites(added_masks=2)
    (where,) = (node for node in found.module.graph.nodes if node.target is torch.ops.aten.where.Scalar)
    assert where.args[1:] == (0.0, -torch.inf)


def test_on_cpus_a_boolean_mask_stays() -> None:
    assert rewritten(two_layers, *heads(5), torch.ones(2, 5, dtype=torch.bool)).done == AttentionRewrites()


@pytest.mark.usefixtures("cudnn")
def test_a_mask_that_is_written_to_between_two_layers_is_turned_again() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        mask = seen.clone()
        once = scaled_dot_product_attention(query, key, value, mask[:, None, None])
        twice = scaled_dot_product_attention(once, key, value, mask[:, None, None])
        mask[:, 2] = False
        return twice + scaled_dot_product_attention(twice, key, value, mask[:, None, None])

    args = (*heads(6), torch.ones(2, 6, dtype=torch.bool))
    assert rewritten(attend, *args).done.added_masks == 3


# -- masks across memory ----------------------------------------------------------------------------------


def like_efficient(call: dict[str, Any]) -> str:
    """PyTorch's memory-efficient kernel reads masks whose columns follow one another."""
    mask = call["attn_mask"]
    return "efficient" if mask is None or mask.stride(-1) == 1 else "math"


def biases(length: int, batch: int = 1) -> torch.Tensor:
    """As T5 makes them: an embedding's rows hold a number for each head."""
    return torch.randn(1, length, length, 3).permute(0, 3, 1, 2).expand(batch, 3, length, length)


def biased_layers(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    once = scaled_dot_product_attention(query, key, value, bias, scale=1.0)
    return scaled_dot_product_attention(once, key, value, bias, scale=1.0)


@pytest.mark.parametrize("batch", [1, 2])
def test_biases_across_memory_are_copied_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch, like_efficient)
    found = rewritten(biased_layers, *heads(7), biases(7, batch))
    assert found.done == AttentionRewrites(copied_masks=2)
    first, second = attention_of(found.module)
    assert first["attn_mask"] is second["attn_mask"]
    copied = [node.meta["val"] for node in found.module.graph.nodes if node.target is torch.ops.aten.contiguous.default]
    assert [one.shape for one in copied] == [(1, 3, 7, 7)], "what is broadcast is copied once"


@pytest.mark.parametrize("case", ["rows", "no kernel either way", "a kernel", "on a CPU"])
def test_masks_stay_where_a_copy_gains_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case != "on a CPU":
        chosen = {"no kernel either way": lambda _: "math", "a kernel": lambda _: "cudnn"}.get(case, like_efficient)
        imitate_cuda(monkeypatch, chosen)
    bias = biases(7).contiguous() if case == "rows" else biases(7)
    found = rewritten(biased_layers, *heads(7), bias)
    assert found.done == AttentionRewrites()
    assert torch.ops.aten.contiguous.default not in targets(found.module)


def test_a_bias_that_is_written_to_between_two_layers_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch, like_efficient)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        bias = bias * 2
        once = scaled_dot_product_attention(query, key, value, bias)
        bias[..., 2] = -torch.inf
        return once + scaled_dot_product_attention(query, key, value, bias)

    assert rewritten(attend, *heads(6), biases(6)).done.copied_masks == 2


def test_a_wrong_option_says_what_it_may_be() -> None:
    assert parse_options({"attention_masks": False}).attention_masks is False
    with pytest.raises(ConfigError, match=r"attention_masks.*True or False"):
        parse_options({"attention_masks": "yes"})
