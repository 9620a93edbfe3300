"""Attention of one token over shared keys and values, without their copies: same results, and left alone otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_samples import Function, targets
from dispatch_samples import fresh_start
from static_caches import cache_argument
from torch import fx
from torch.nn.functional import scaled_dot_product_attention

from fuseplan.planner.capture.trace import record, trace_predispatch
from fuseplan.planner.dispatch_stats import reset_stats, stats
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.rewrites.grouped_queries import fold_grouped_queries
from fuseplan.planner.runtime.options import parse_options

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def traced(function: Function, *args: Any, dynamic: bool = False) -> fx.GraphModule:
    traces: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Function:
        traces.append(trace_predispatch(graph, example_inputs, grouped_queries=False))
        return graph.forward

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    (trace,) = traces
    return trace


def repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def inputs(
    batch: int, heads: int, kv_heads: int, length: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query as a projection leaves it, and slices of a longer cache."""
    torch.manual_seed(heads)
    query = torch.randn(batch, 1, heads, width, dtype=dtype).transpose(1, 2)
    cache = torch.randn(2, batch, kv_heads, length + 3, width, dtype=dtype)[..., :length, :]
    return query, cache[0], cache[1]


def mask_of(kind: str, batch: int, length: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    keep = torch.rand(1 if kind == "one" else batch, 1, 1, length) > 0.4
    keep[..., 0] = True
    if kind == "bool":
        return keep
    added = torch.where(keep, torch.randn(keep.shape), -torch.inf)
    return added[0, 0] if kind == "two dimensions" else added


@pytest.mark.parametrize("kind", ["none", "bool", "float", "one", "two dimensions"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "length", "width"), [(1, 8, 2, 17, 16), (3, 6, 1, 1, 8)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_head_sees_what_it_saw(
    kind: str, batch: int, heads: int, kv_heads: int, length: int, width: int, scale: float | None
) -> None:
    query, key, value = inputs(batch, heads, kv_heads, length, width)
    mask, times = mask_of(kind, batch, length), heads // kv_heads

    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = scaled_dot_product_attention(query, repeat(key, times), repeat(value, times), mask, scale=scale)
        return found.transpose(1, 2).reshape(batch, 1, heads * width)

    module = traced(decode, query, key, value)
    assert fold_grouped_queries(module) == 1
    assert torch.ops.aten.expand.default not in targets(module)
    (attention,) = module.graph.find_nodes(op="call_function", target=ATTENTION)
    assert attention.args[0].meta["val"].shape == (batch, kv_heads, times, width)
    arguments = [*([mask] if mask is not None else []), query, key, value]
    exact = decode(query.double(), key.double(), value.double()) if mask is None or mask.dtype == torch.bool else None
    found = run(module, arguments)
    torch.testing.assert_close(found, decode(query, key, value))
    if exact is not None:
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def run(module: fx.GraphModule, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The module's result, its placeholders filled by shape and values of ``tensors`` in the order Dynamo gave them."""
    left = list(tensors)
    filled = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        name = next(
            at for at, one in enumerate(left) if one.shape == value.shape and one.stride() == value.stride()
            and one.dtype == value.dtype
        )
        filled.append(left.pop(name))
    with torch.no_grad():
        found = module(*filled)
    result: torch.Tensor = found[0] if isinstance(found, tuple | list) else found
    return result


@pytest.mark.parametrize("spelling", ["repeat_interleave", "enable_gqa"])
def test_other_spellings(spelling: str) -> None:
    query, key, value = inputs(2, 6, 2, 9, 8)

    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if spelling == "enable_gqa":
            return scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return scaled_dot_product_attention(
            query, key.repeat_interleave(3, dim=1), value.repeat_interleave(3, dim=-3)
        )

    module = traced(decode, query, key, value)
    assert fold_grouped_queries(module) == 1
    assert torch.ops.aten.repeat_interleave.self_int not in targets(module)
    (attention,) = module.graph.find_nodes(op="call_function", target=ATTENTION)
    assert "enable_gqa" not in attention.kwargs
    torch.testing.assert_close(run(module, [query, key, value]), decode(query, key, value))


def test_keys_that_are_the_values_too() -> None:
    query, key, _ = inputs(2, 6, 2, 9, 8)

    def decode(query: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        wide = repeat(both, 3)
        return scaled_dot_product_attention(query, wide, wide)

    module = traced(decode, query, key)
    assert fold_grouped_queries(module) == 1
    assert torch.ops.aten.expand.default not in targets(module)
    torch.testing.assert_close(run(module, [query, key]), decode(query, key))


def two_positions(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query.expand(-1, -1, 2, -1), repeat(key, 3), repeat(value, 3))


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3), is_causal=True)


def mask_by_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    bias = torch.arange(6.0)[:, None, None] * torch.arange(9.0)
    return scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3), bias[None])


def keys_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, repeat(key, 3), value.repeat(1, 3, 1, 1))


def tiled_not_grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Heads 0 and 2, 1 and 3, ... share: not the neighbours."""
    tiled = [x[:, None].expand(2, 3, 2, 9, 8).reshape(2, 6, 9, 8) for x in (key, value)]
    return scaled_dot_product_attention(query, *tiled)


def nothing_is_shared(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query[:, :2], repeat(key, 1), repeat(value, 1))


def written_between(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What was copied must not see what is written afterwards."""
    key = key.clone()
    wide = repeat(key, 3)
    key.zero_()
    return scaled_dot_product_attention(query, wide, repeat(value, 3)) + key.sum()


def copy_written(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What is written to the copy is not in what was copied."""
    wide = repeat(key, 3)
    wide[:, 0] = 0.0
    return scaled_dot_product_attention(query, wide, repeat(value, 3))


@pytest.mark.parametrize("function", [
    two_positions, causal, mask_by_head, keys_alone, tiled_not_grouped, nothing_is_shared, written_between,
    copy_written,
])
def test_what_is_left_alone(function: Function) -> None:
    args = inputs(2, 6, 2, 9, 8)
    module = traced(function, *args)
    before = targets(module)
    assert fold_grouped_queries(module) == 0
    assert targets(module) == before


def test_dropout_and_dynamic_heads_are_left_alone() -> None:
    query, key, value = inputs(2, 6, 2, 9, 8)

    def dropped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3), dropout_p=0.5)

    assert fold_grouped_queries(traced(dropped, query, key, value)) == 0
    torch._dynamo.reset()

    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3))

    assert fold_grouped_queries(traced(decode, query, key, value, dynamic=True)) == 0


@pytest.mark.parametrize("masked", [False, True])
def test_the_number_of_sequences_and_the_length_may_be_dynamic(masked: bool) -> None:
    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        mask = seen[:, None, None] if masked else None
        return scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3), mask).transpose(1, 2).flatten(2)

    folded: list[int] = []

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Function:
        trace = trace_predispatch(graph, example_inputs, grouped_queries=False)
        folded.append(fold_grouped_queries(trace))
        assert not any(target is torch.ops.aten.expand.default for target in targets(trace))
        return trace.forward

    compiled = torch.compile(decode, backend=backend)
    for batch, length in ((2, 9), (3, 17), (127, 5)):
        query, key, value = inputs(batch, 6, 2, length, 8)
        seen = torch.rand(batch, length) > 0.3
        seen[:, 0] = True
        for one, axes in ((query, (0,)), (key, (0, 2)), (value, (0, 2)), (seen, (0, 1))):
            torch._dynamo.mark_dynamic(one, axes)
        torch.testing.assert_close(compiled(query, key, value, seen), decode(query, key, value, seen))
    assert folded == [1]


def test_a_copy_that_something_else_reads_stays() -> None:
    query, key, value = inputs(2, 6, 2, 9, 8)

    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        wide = repeat(key, 3)
        return scaled_dot_product_attention(query, wide, repeat(value, 3)) + wide.sum()

    module = traced(decode, query, key, value)
    assert fold_grouped_queries(module) == 1
    assert targets(module).count(torch.ops.aten.expand.default) == 1
    torch.testing.assert_close(run(module, [query, key, value]), decode(query, key, value))


def test_what_is_written_to_a_result_is_seen(tmp_path: Any) -> None:
    """Views of views of the result lie in its memory, in the trace as well: reads and writes keep their order."""
    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3))
        part = found.transpose(1, 2)[..., :4].squeeze(1)
        before = found.sigmoid()
        part.mul_(3.0)
        return before + found.sigmoid()

    args = [one.clone() for one in inputs(2, 6, 2, 9, 8)]
    reset_stats()
    with torch.no_grad():
        found = torch.compile(decode, backend="fuseplan", options={"db": str(tmp_path / "tuning.db")})(*args)
        torch.testing.assert_close(found, decode(*args))
    assert stats().grouped_queries == 1 and not stats().fallbacks


def test_a_reshaped_result_that_is_written_to_stays_one_with_the_result() -> None:
    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3))
        row = found.reshape(2, 48)
        row.add_(1.0)
        return found * 2

    def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3))
        return found.reshape(2, 48) @ found.reshape(48, 2)

    args = inputs(2, 6, 2, 9, 8)
    for function, reshaped in ((decode, 3), (read, 3)):
        torch._dynamo.reset()
        module = traced(function, *args)
        assert fold_grouped_queries(module) == 1
        assert targets(module).count(torch.ops.aten.reshape.default) == reshaped
        (attention,) = module.graph.find_nodes(op="call_function", target=ATTENTION)
        read_alone = all(user.op == "call_function" and len(user.args[1]) == 2 for user in attention.users)
        assert read_alone == (function is read)
        torch.testing.assert_close(run(module, list(args)), function(*args))


def test_where_it_was_not_measured_it_is_asked_for() -> None:
    args = [one.to("meta") for one in inputs(2, 6, 2, 9, 8)]

    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3))

    module = traced(decode, *args)
    assert fold_grouped_queries(module) == 0 and fold_grouped_queries(module, False) == 0
    assert fold_grouped_queries(module, True) == 1


@pytest.mark.parametrize(("option", "folded"), [(None, 2), (False, 0)])
def test_a_decode_step_of_llama(option: bool | None, folded: int, tmp_path: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=50,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    options = {"db": str(tmp_path / "tuning.db"), "grouped_queries": option}
    compiled = torch.compile(model, backend="fuseplan", options=options)
    reset_stats()
    logits = []
    for call in (model, compiled):
        cache = StaticCache(config=config, max_cache_len=16)
        with torch.no_grad():
            tokens = torch.arange(5)[None].repeat(3, 1)
            model(input_ids=tokens, **cache_argument(model, cache), cache_position=torch.arange(5), use_cache=True)
            steps = [
                call(
                    input_ids=torch.full((3, 1), 7 + at), **cache_argument(model, cache),
                    cache_position=torch.tensor([5 + at]), use_cache=True,
                ).logits
                for at in range(3)
            ]
        logits.append(torch.stack(steps))
    torch.testing.assert_close(logits[0], logits[1])
    assert stats().grouped_queries % 2 == 0 and (stats().grouped_queries > 0) == (folded > 0)
    assert ("without a copy" in str(stats())) == (folded > 0)
    assert not stats().fallbacks


def test_plans_are_made_for_what_runs() -> None:
    """The offline trace is folded like the one at run time: no region is planned that only makes copies."""
    query, key, value = inputs(2, 6, 2, 9, 8)

    def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, repeat(key, 3), repeat(value, 3))

    (trace,) = record(decode, (query, key, value), {})
    assert not any(op.op.startswith("aten.expand") for op in trace.graph)


def test_a_wrong_option_says_what_it_may_be() -> None:
    assert parse_options({"grouped_queries": True}).grouped_queries is True
    with pytest.raises(ConfigError, match=r"grouped_queries.*True, False or None"):
        parse_options({"grouped_queries": "yes"})
