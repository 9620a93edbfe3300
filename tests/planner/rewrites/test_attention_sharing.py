"""Keys and values that query heads share, on a GPU whose back ends are imitated, and which runs the plain op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_samples import Function, attention_of, imitate_cuda, rewritten, targets
from dispatch_samples import fresh_start
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.functional import scaled_dot_product_attention

from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.rewrites.attention import AttentionRewrites, rewrite_attention
from fuseplan.planner.rewrites.attention_call import ATTENTION, chosen_backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch, lambda _: "cudnn")


def repeated(x: torch.Tensor) -> torch.Tensor:
    batch, count, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, count, 2, length, width).reshape(batch, count * 2, length, width)


def shared(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, repeated(key), repeated(value), scale=0.4)


def grouped(length: int, tokens: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    return torch.randn(2, 6, tokens, 8), torch.randn(2, 3, length, 8), torch.randn(2, 3, length, 8)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("tokens", [1, 4])
def test_cudnn_reads_shared_keys_as_they_are(tokens: int) -> None:
    found = rewritten(shared, *grouped(9, tokens))
    assert found.done == AttentionRewrites(grouped_queries=1)
    (call,) = attention_of(found.module)
    assert call["enable_gqa"] and call["scale"] == 0.4 and call["key"].op == "placeholder"
    assert targets(found.module) == [ATTENTION]
    assert rewrite_attention(found.module) == AttentionRewrites()


@pytest.mark.usefixtures("cudnn")
def test_a_scale_of_zero_is_no_default() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, repeated(key), repeated(value), scale=0.0)

    (call,) = attention_of(rewritten(attend, *grouped(5, 2)).module)
    assert call["enable_gqa"] and call["scale"] == 0.0


@pytest.mark.usefixtures("cudnn")
def test_a_query_that_is_broadcast_over_copies_keeps_them() -> None:
    query, key, value = grouped(5, 2)
    assert rewritten(shared, query[:, :1], key[:, :1], value[:, :1]).done == AttentionRewrites()
    assert rewritten(shared, query[0], key[:1], value[:1]).done == AttentionRewrites()


@pytest.mark.usefixtures("cudnn")
def test_a_copy_that_is_written_to_stays() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        many = repeated(key)
        many[:, 0] = 0.0
        return scaled_dot_product_attention(query, many, repeated(value))

    assert rewritten(attend, *grouped(5, 2)).done == AttentionRewrites()


@pytest.mark.usefixtures("cudnn")
def test_sizes_may_be_dynamic_with_cudnn() -> None:
    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value, mask = repeated(key), repeated(value), seen[:, None, None]
        once = scaled_dot_product_attention(query, key, value, mask)
        return once, scaled_dot_product_attention(once, key, value, mask)

    done: list[AttentionRewrites] = []

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Function:
        trace = trace_predispatch(graph, example_inputs)
        done.append(trace.meta["attention"])
        return trace.forward

    compiled = torch.compile(attend, backend=backend, dynamic=True)
    for batch, length, tokens in ((2, 9, 4), (3, 17, 5), (127, 5, 2)):
        torch.manual_seed(batch)
        query, key, value = (torch.randn(batch, *rest, 8) for rest in ((6, tokens), (3, length), (3, length)))
        seen = torch.rand(batch, length) > 0.3
        seen[:, 0] = True
        torch.testing.assert_close(compiled(query, key, value, seen), attend(query, key, value, seen))
    assert done == [AttentionRewrites(grouped_queries=2, added_masks=2)]


@pytest.mark.usefixtures("cudnn")
def test_keys_that_are_written_after_they_were_copied_stay_copied() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key = key.clone()
        many = repeated(key)
        key.zero_()
        return scaled_dot_product_attention(query, many, repeated(value))

    assert rewritten(attend, *grouped(5, 1)).done == AttentionRewrites()


@pytest.mark.usefixtures("cudnn")
def test_what_is_written_beside_a_copy_does_not_matter() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        many, value = repeated(key), value.clone()
        value[:, :, 1] = 0.5
        return scaled_dot_product_attention(query, many, repeated(value))

    assert rewritten(attend, *grouped(5, 1)).done == AttentionRewrites(grouped_queries=1)


def test_any_fused_backend_that_shares_keys_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them is faster is not asked here."""
    imitate_cuda(monkeypatch, lambda call: "flash" if call["enable_gqa"] else "efficient")
    assert rewritten(shared, *grouped(5, 2)).done == AttentionRewrites(grouped_queries=1)


def test_copies_stay_where_attention_would_be_computed_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch, lambda call: "efficient" if not call["enable_gqa"] else "math")
    assert rewritten(shared, *grouped(5, 1)).done == AttentionRewrites()
    assert rewritten(shared, *grouped(5, 1), grouped_queries=True).done.grouped_queries == 1
    assert rewritten(shared, *grouped(5, 2), grouped_queries=True).done.grouped_queries == 0


@pytest.mark.parametrize(("order", "usable", "chosen"), [
    ([3, 1, 2, 0, 4], {"cudnn", "flash"}, "cudnn"),
    ([1, 2, 0, 3, 4], {"cudnn", "efficient"}, "efficient"),
    ([4, 3, 1, 2, 0], set(), "math"),
    ([0, 3, 1, 2, 4], {"cudnn", "flash"}, "math"),
])
def test_the_backend_is_the_first_that_can(
    order: list[int], usable: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: order)
    for name in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda _, name=name: name in usable)
    query = torch.randn(1, 2, 3, 8)
    call = {"query": query, "key": query, "value": query, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
            "scale": None, "enable_gqa": False}
    assert chosen_backend(call) == chosen


def test_asking_for_the_backend_ties_no_graph_to_the_sizes_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usable(params: Any) -> bool:
        asked.append([*params.query.shape, *params.query.stride()])
        return False

    for name in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", usable)
    environment = ShapeEnv()
    heads = FakeTensorMode(shape_env=environment).from_tensor(
        torch.randn(2, 3, 37, 8), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 4)
    )
    assert isinstance(heads.shape[2], torch.SymInt)
    before = len(environment.guards)
    call = {"query": heads, "key": heads, "value": heads, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
            "enable_gqa": False}
    assert chosen_backend(call) == "math"
    assert asked and all(sizes == [2, 3, 37, 8, 888, 296, 8, 1] for sizes in asked)
    assert len(environment.guards) == before


def counting(function: Function) -> tuple[Function, list[AttentionRewrites]]:
    """The function compiled with its attention rewritten, and what was done in each of its compilations."""
    done: list[AttentionRewrites] = []

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Function:
        trace = trace_predispatch(graph, example_inputs, grouped_queries=False, attention_masks=False)
        done.append(rewrite_attention(trace))
        return trace.forward

    return torch.compile(function, backend=backend), done


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("width", [8, 12])
def test_dynamic_lengths_share_keys_and_stay_dynamic(width: int) -> None:
    """With a product behind attention, whose fake value C++ alone would not work out for symbols."""
    weight = torch.randn(5, 6 * width)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = scaled_dot_product_attention(query, repeated(key), repeated(value), mask)
        return torch.nn.functional.linear(found.transpose(1, 2).flatten(2), weight)

    compiled, done = counting(attend)
    for length in (9, 17, 6, 127):
        query, key, value = (torch.randn(2, heads, length, width) for heads in (6, 3, 3))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        for one, dims in ((query, (2,)), (key, (2,)), (value, (2,)), (mask, (2, 3))):
            torch._dynamo.mark_dynamic(one, dims)
        torch.testing.assert_close(compiled(query, key, value, mask), attend(query, key, value, mask))
    assert done == [AttentionRewrites(grouped_queries=1, added_masks=1)]


@pytest.mark.usefixtures("cudnn")
def test_keys_are_shared_when_a_cache_has_grown() -> None:
    """As ``generate()`` calls: sizes are worked out between what is copied and attention."""
    def step(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(
            query, repeated(torch.cat([keys, new], -2)), repeated(torch.cat([values, new], -2)),
        )

    compiled, done = counting(step)
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        for length in (9, 10, 40):
            query, new = torch.randn(1, 6, 1, 8), torch.randn(1, 3, 1, 8)
            keys, values = torch.randn(1, 3, length, 8), torch.randn(1, 3, length, 8)
            for one in (keys, values):
                torch._dynamo.mark_dynamic(one, 2)
            torch.testing.assert_close(compiled(query, keys, values, new), step(query, keys, values, new))
    assert done == [AttentionRewrites(grouped_queries=1)]
