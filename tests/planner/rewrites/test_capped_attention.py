"""Chains of capped attention as one op, in Gemma 2 and by hand, and what keeps them from being that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_samples import rewritten, targets
from dispatch_samples import compiled, fresh_start
from paged_attention_samples import exact

import fuseplan.planner
from fuseplan.planner.graph.decode_attention import DECODE_ATTENTION
from fuseplan.planner.rewrites.attention import AttentionRewrites

pytestmark = pytest.mark.uncovered

BATCH, HEADS, SHARED, LENGTH, WIDTH, CAP, SCALE = 2, 6, 3, 11, 16, 5.0, 0.3
Attend = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def inputs(dtype: torch.dtype = torch.float32, positions: int = 1) -> tuple[torch.Tensor, ...]:
    """Query, key, value, and a mask of the least number behind some length."""
    query, key, value = torch.randn(BATCH, HEADS, positions, WIDTH), *torch.randn(2, BATCH, SHARED, LENGTH, WIDTH)
    hidden = torch.arange(LENGTH) >= torch.tensor([LENGTH, 4])[:, None, None, None]
    mask = torch.zeros(BATCH, 1, 1, LENGTH).masked_fill(hidden, torch.finfo(dtype).min)
    return tuple(one.to(dtype) for one in (3.0 * query, key, value, mask))


def repeated(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, None].expand(-1, -1, HEADS // SHARED, -1, -1).reshape(x.shape[0], HEADS, *x.shape[2:])


def chain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """As Hugging Face writes it."""
    scores = torch.matmul(query, repeated(key).transpose(2, 3)) * SCALE
    scores = torch.tanh(scores / CAP) * CAP
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, p=0.0, training=False)
    return torch.matmul(weights, repeated(value)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [True, False])
def test_a_chain_is_one_op_over_what_heads_share(dtype: torch.dtype, masked: bool) -> None:
    *given, mask = inputs(dtype)
    run = chain if masked else lambda *args: chain(*args[:3], None)
    found = rewritten(run, *given, mask, decode_attention=True)
    assert found.done == AttentionRewrites(capped_attention=1)
    (node,) = found.module.graph.find_nodes(op="call_function", target=DECODE_ATTENTION)
    assert [one.op if one is not None else None for one in node.args] == [
        "placeholder", "placeholder", "placeholder", None, "placeholder" if masked else None]
    assert node.kwargs == {"scale": SCALE, "cap": CAP}
    assert not {torch.ops.aten.matmul.default, torch.ops.aten.tanh.default, torch.ops.aten.reshape.default} & set(
        targets(found.module))
    wanted = exact(*given, mask if masked else None, CAP, SCALE).transpose(1, 2)
    eager = run(*given, mask)
    assert (found.result - wanted).abs().max() <= 2 * (eager - wanted).abs().max() + 2 * torch.finfo(dtype).eps


def test_rows_that_see_nothing_are_as_in_the_chain() -> None:
    """NaN by minus infinity, and the mean of all values by the least number."""
    *given, mask = inputs()
    run = torch.compile(chain, backend="fuseplan", options={"decode_attention": True, "on_miss": "unfused"})
    for hidden in (-torch.inf, torch.finfo(torch.float32).min):
        mask[1] = hidden
        torch.testing.assert_close(run(*given, mask), chain(*given, mask), equal_nan=True)
    assert fuseplan.planner.stats().capped_attention == 1


def test_pages_are_read_under_a_cap() -> None:
    def paged(query: Any, key: Any, value: Any, mask: Any, table: Any) -> torch.Tensor:
        found = [one[table].transpose(1, 2).reshape(BATCH, SHARED, -1, WIDTH) for one in (key, value)]
        return chain(query, *found, mask)

    query = inputs()[0]
    pages = [torch.randn(7, SHARED, 4, WIDTH) for _ in range(2)]
    table, mask = torch.randint(-7, 7, (BATCH, 3)), torch.zeros(1, 1, 1, 12)
    mask[..., 9:] = -torch.inf
    found = rewritten(paged, query, *pages, mask, table, decode_attention=True)
    assert found.done == AttentionRewrites(capped_attention=1)
    assert torch.ops.aten.index.Tensor not in targets(found.module)
    (node,) = found.module.graph.find_nodes(op="call_function", target=DECODE_ATTENTION)
    assert node.args[1].op == node.args[3].op == "placeholder"


def changed(**parts: Any) -> Attend:
    """The chain with something else in one place."""
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> Any:
        scores = torch.matmul(query, repeated(key).transpose(2, 3)) * parts.get("scale", SCALE)
        raw = scores
        scores = parts.get("curve", torch.tanh)(scores / parts.get("below", CAP)) * CAP + mask
        weights = torch.softmax(scores, parts.get("dim", -1), dtype=torch.float32).to(query.dtype)
        found = torch.matmul(weights, repeated(value))
        return (found, weights) if "shown" in parts else found + raw.sum() if "read" in parts else found

    return attend


@pytest.mark.parametrize("parts", [
    {"scale": -0.5}, {"curve": torch.sigmoid}, {"below": 2.0}, {"dim": 1}, {"shown": True}, {"read": True},
], ids=lambda parts: next(iter(parts)))
def test_other_chains_stay_as_they_are(parts: dict[str, Any]) -> None:
    found = rewritten(changed(**parts), *inputs(), decode_attention=True)
    assert found.done == AttentionRewrites()


def test_several_positions_and_what_is_written_on_the_way() -> None:
    query, key, value, mask = inputs(positions=2)
    found = rewritten(chain, query, key, value, mask, decode_attention=True)
    assert found.done == AttentionRewrites()

    def written(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        key.copy_(value)
        keys = repeated(key)
        key.zero_()
        scores = torch.tanh(torch.matmul(query, keys.transpose(2, 3)) / CAP) * CAP
        return torch.matmul(torch.softmax(scores + mask, -1), repeated(value))

    found = rewritten(written, *inputs(), decode_attention=True)
    assert found.done == AttentionRewrites()


def test_without_a_cap_a_chain_stays_as_it_is() -> None:
    def attend(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        scores = torch.matmul(query, repeated(key).transpose(2, 3)) * SCALE + mask
        return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), repeated(value))

    assert rewritten(attend, *inputs(), decode_attention=True).done == AttentionRewrites()


def test_gemma_2_decodes_as_in_eager_mode(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, attn_implementation="eager",
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    words = torch.randint(0, 61, (2, 10))

    def decoded(run: Any) -> torch.Tensor:
        cache = transformers.StaticCache(config=config, max_cache_len=16)
        found = [model(words[:, :7], past_key_values=cache, use_cache=True).logits[:, -1]]
        for at in range(7, 10):  # fills the sliding window, moves it, and reads what was moved
            place = torch.tensor([at])
            step = run(words[:, at : at + 1], past_key_values=cache, use_cache=True, position_ids=place[None])
            found.append(step.logits[:, -1])
        return torch.stack(found)

    eager = decoded(model)
    run = compiled(model, tmp_path / "tuning.db", decode_attention=True, dynamic=False)
    torch.testing.assert_close(decoded(run), eager, rtol=2e-4, atol=2e-4)
    stats = fuseplan.planner.stats()
    assert stats.capped_attention >= 2 and not stats.fallbacks, stats
