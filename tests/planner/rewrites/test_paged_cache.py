"""Attention over gathered pages as one op that reads them, and what keeps it from being that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_samples import attention_of, rewritten, targets
from dispatch_samples import fresh_start
from torch import fx
from torch.nn.functional import embedding, scaled_dot_product_attention

from fuseplan.planner.graph.decode_attention import DECODE_ATTENTION
from fuseplan.planner.rewrites.attention import AttentionRewrites

BATCH, HEADS, SHARED, BLOCKS, PAGE, WIDTH, COUNT = 2, 6, 3, 5, 4, 16, 13
LENGTH = BLOCKS * PAGE
Attend = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def inputs(
    page: tuple[int, ...] = (SHARED, PAGE, WIDTH), positions: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Query, pages of keys and values, block table, and a mask of lengths."""
    torch.manual_seed(0)
    table = torch.randint(-COUNT, COUNT, (BATCH, BLOCKS))
    seen = torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH // 2])[:, None]
    shapes = (BATCH, HEADS, positions, WIDTH), (COUNT, *page), (COUNT, *page)
    return *(torch.randn(*shape).to(dtype) for shape in shapes), table, seen[:, None, None]


def heads_first(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return pages[table].permute(0, 2, 1, 3, 4).reshape(BATCH, SHARED, LENGTH, WIDTH)


def repeated(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, None].expand(BATCH, SHARED, HEADS // SHARED, LENGTH, WIDTH).reshape(BATCH, HEADS, LENGTH, WIDTH)


def paged(gather: Attend, **options: Any) -> Attend:
    def attend(query: torch.Tensor, key: Any, value: Any, table: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, gather(key, table), gather(value, table), mask, **options)

    return attend


#: Ways to gather pages of a shape: by heads that are shared, or repeated.
GATHERS: dict[str, tuple[tuple[int, ...], Attend, bool]] = {
    "heads first": ((SHARED, PAGE, WIDTH), heads_first, True),
    "transposed, copied": ((SHARED, PAGE, WIDTH),
        lambda x, t: x[t].transpose(1, 2).contiguous().view(BATCH, SHARED, LENGTH, WIDTH), True),
    "rows first": ((PAGE, SHARED, WIDTH),
        lambda x, t: x[t].reshape(BATCH, LENGTH, SHARED, WIDTH).transpose(1, 2), True),
    "rows first, flattened": ((PAGE, SHARED, WIDTH),
        lambda x, t: x[t].flatten(1, 2).permute(0, 2, 1, 3).contiguous(), True),
    "repeated": ((SHARED, PAGE, WIDTH), lambda x, t: repeated(heads_first(x, t)), False),
    "interleaved": ((PAGE, SHARED, WIDTH),
        lambda x, t: x[t].view(BATCH, LENGTH, SHARED, WIDTH).repeat_interleave(2, 2).transpose(1, 2), False),
    "flat indices": ((SHARED, PAGE, WIDTH),
        lambda x, t: x.index_select(0, t.flatten() % COUNT).view(BATCH, BLOCKS, SHARED, PAGE, WIDTH).transpose(1, 2)
        .flatten(2, 3), True),
    "embedding": ((PAGE * SHARED * WIDTH,),
        lambda x, t: embedding(t % COUNT, x).view(BATCH, LENGTH, SHARED, WIDTH).transpose(1, 2), True),
    "rows as pages": ((SHARED, WIDTH),
        lambda x, t: x[t.repeat_interleave(PAGE, 1)].transpose(1, 2), True),
    "part of a pool": ((2, SHARED, PAGE, WIDTH), lambda x, t: heads_first(x[:, 1], t), True),
    "one head": ((1, PAGE, WIDTH), lambda x, t: x[t].view(BATCH, 1, LENGTH, WIDTH), True),
    "one head, widened": ((PAGE, WIDTH),
        lambda x, t: x[t].view(BATCH, 1, LENGTH, WIDTH).expand(-1, HEADS, -1, -1), False),
}


def storage_of(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_gathered_pages_are_read_where_they_lie(name: str, index: torch.dtype) -> None:
    page, gather, shared = GATHERS[name]
    query, key, value, table, mask = inputs(page)
    found = rewritten(
        paged(gather, enable_gqa=shared, scale=0.3), query, key, value, table.to(index), mask, decode_attention=True)
    assert found.done.paged_attention == 1 and not attention_of(found.module)
    (node,) = found.module.graph.find_nodes(op="call_function", target=DECODE_ATTENTION)
    query_of, keys, values, listed, masked = node.args
    looked_up = {"wraps": False} if name in ("flat indices", "embedding") else {}
    assert node.kwargs == {"scale": 0.3, **looked_up} and masked.meta["val"].dtype == torch.bool
    heads, rows = 1 if "one head" in name else SHARED, 1 if name == "rows as pages" else PAGE
    assert listed.meta["val"].shape == (BATCH, LENGTH // rows) and query_of.op == "placeholder"
    given = {storage_of(node) for node in found.module.graph.find_nodes(op="placeholder")}
    for pages in (keys, values):  # views of what was given: nothing is copied
        assert pages.meta["val"].shape == (COUNT, heads, rows, WIDTH) and storage_of(pages) in given
    moving = {torch.ops.aten.index.Tensor, torch.ops.aten.clone.default, torch.ops.aten.reshape.default}
    assert not moving & set(targets(found.module))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mask_of_numbers_without_batch(dtype: torch.dtype) -> None:
    def attend(*args: torch.Tensor) -> torch.Tensor:
        *given, mask = args
        numbers = torch.zeros(1, 1, LENGTH, dtype=dtype).masked_fill(~mask[1], -torch.inf)
        return paged(heads_first, enable_gqa=True)(*given, numbers)

    found = rewritten(attend, *inputs(dtype=dtype), decode_attention=True)
    assert found.done.paged_attention == 1


def test_a_table_that_is_converted_twice_is_one() -> None:
    query, key, value, table, mask = inputs()
    attend = paged(lambda x, t: heads_first(x, t.long()), enable_gqa=True)
    found = rewritten(attend, query, key, value, table.int(), mask, decode_attention=True)
    assert found.done.paged_attention == 1
    assert targets(found.module).count(torch.ops.aten.to.dtype) == 1


def test_pages_that_were_written_before_are_read() -> None:
    def attend(query: Any, key: Any, value: Any, table: Any, mask: Any, new: Any) -> torch.Tensor:
        at = table[:, 1]
        key.index_put_((at, torch.tensor([0, 2]), torch.tensor([1, 3])), new)
        value.index_copy_(0, at, new[:, None, None].expand(BATCH, SHARED, PAGE, WIDTH))
        return paged(heads_first, enable_gqa=True)(query, key, value, table, mask)

    query, key, value, table, mask = inputs()
    table[:, 1] = torch.tensor([3, 7])
    found = rewritten(attend, query, key, value, table, mask, torch.randn(BATCH, WIDTH), decode_attention=True)
    assert found.done.paged_attention == 1
    order = targets(found.module)
    assert order.index(torch.ops.aten.index_put_.default) < order.index(DECODE_ATTENTION)


def refused(function: Attend, *args: torch.Tensor) -> None:
    found = rewritten(function, *args, decode_attention=True, grouped_queries=False)
    assert found.done == AttentionRewrites() and len(attention_of(found.module)) == 1


def test_pages_that_are_written_before_attention_are_gathered_first() -> None:
    def attend(query: Any, key: Any, value: Any, table: Any, mask: Any) -> torch.Tensor:
        key.copy_(value + 1.0)  # the first call of several changes nothing for the others
        keys, values = heads_first(key, table), heads_first(value, table)
        key.mul_(2.0)
        return scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    refused(attend, *inputs())


def test_a_table_that_is_written_between_two_conversions() -> None:
    def attend(query: Any, key: Any, value: Any, table: Any, mask: Any) -> torch.Tensor:
        table.fill_(3)
        keys = heads_first(key, table.long())
        table.add_(1)
        return scaled_dot_product_attention(query, keys, heads_first(value, table.long()), mask, enable_gqa=True)

    query, key, value, table, mask = inputs()
    refused(attend, query, key, value, table.int(), mask)


def test_copies_that_others_read_or_change_are_made() -> None:
    def shown(query: Any, key: Any, value: Any, table: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys = heads_first(key, table)
        return scaled_dot_product_attention(query, keys, heads_first(value, table), mask, enable_gqa=True), keys

    def changed(query: Any, key: Any, value: Any, table: Any, mask: Any) -> torch.Tensor:
        keys = heads_first(key, table).mul_(2.0)
        return scaled_dot_product_attention(query, keys, heads_first(value, table), mask, enable_gqa=True)

    def scaled(query: Any, key: Any, value: Any, table: Any, mask: Any) -> torch.Tensor:
        keys = heads_first(key, table) * 2.0
        return scaled_dot_product_attention(query, keys, heads_first(value, table), mask, enable_gqa=True)

    for function in (shown, changed, scaled):
        refused(function, *inputs())


@pytest.mark.parametrize("gather", [
    lambda x, t: x[t].reshape(BATCH, SHARED, LENGTH, WIDTH),  # heads and blocks are mixed up
    lambda x, t: x[t].permute(0, 2, 3, 1, 4).reshape(BATCH, SHARED, LENGTH, WIDTH),  # rows of all pages interleaved
    lambda x, t: x[t.T].permute(1, 2, 0, 3, 4).reshape(BATCH, SHARED, LENGTH, WIDTH),  # blocks first
    lambda x, t: x[t].permute(0, 2, 1, 3, 4).reshape(BATCH, SHARED, LENGTH, WIDTH).flip(2),
    lambda x, t: x[:, :, t[0, :4] % 4].expand(COUNT, -1, -1, -1)[:2].repeat(1, 1, 5, 1),  # no pages, but rows
    lambda x, t: heads_first(torch.cat([x, x]), t)[:, :, :LENGTH].contiguous() + 0.0,
])
def test_other_orders_stay_as_they_are(gather: Attend) -> None:
    refused(paged(gather, enable_gqa=True), *inputs())


def test_a_part_of_the_keys_is_no_whole_table() -> None:
    def attend(query: Any, key: Any, value: Any, table: Any, mask: Any) -> torch.Tensor:
        keys, values = (heads_first(one, table)[:, :, : LENGTH - PAGE] for one in (key, value))
        return scaled_dot_product_attention(query, keys, values, mask[..., : LENGTH - PAGE], enable_gqa=True)

    refused(attend, *inputs())


def test_several_positions_causal_calls_and_two_tables() -> None:
    refused(paged(heads_first, enable_gqa=True), *inputs(positions=2))
    query, key, value, table, mask = inputs()

    def causal(query: Any, key: Any, value: Any, table: Any, _: Any) -> torch.Tensor:
        return scaled_dot_product_attention(
            query, heads_first(key, table), heads_first(value, table), is_causal=True, enable_gqa=True)

    def other(query: Any, key: Any, value: Any, table: Any, mask: Any) -> torch.Tensor:
        return scaled_dot_product_attention(
            query, heads_first(key, table), heads_first(value, table.flip(0)), mask, enable_gqa=True)

    refused(causal, query, key, value, table, mask)
    refused(other, query, key, value, table, mask)


def test_it_is_done_where_there_is_a_kernel_alone() -> None:
    attend = paged(heads_first, enable_gqa=True)
    for wanted in (None, False):
        found = rewritten(attend, *inputs(), decode_attention=wanted, grouped_queries=False)
        assert found.done == AttentionRewrites()
