"""Attention of one query position as an op: pages, caps and masks against their formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from decode_attention_samples import masks
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_attention_samples import exact, one_after_another, pool

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.graph.decode_attention import DECODE_ATTENTION, gathered
from fuseplan.planner.graph.execute import run_node


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3), shared=st.integers(1, 3), group=st.integers(1, 3), blocks=st.integers(1, 4),
    page=st.integers(1, 5), heads_last=st.booleans(), kind=st.sampled_from(sorted(masks(1, 1, 1))),
    cap=st.sampled_from([None, 0.7, 30.0]), seed=st.integers(0, 9), index=st.sampled_from([torch.int32, torch.int64]),
)
def test_pages_are_read_as_if_they_followed_one_another(
    batch: int, shared: int, group: int, blocks: int, page: int, heads_last: bool, kind: str, cap: float | None,
    seed: int, index: torch.dtype,
) -> None:
    torch.manual_seed(seed)
    key, value, table = pool(batch, shared, blocks, page, 8, heads_last)
    query, mask = torch.randn(batch, shared * group, 1, 8), masks(batch, shared * group, blocks * page)[kind]
    keys, values = one_after_another(key, table), one_after_another(value, table)
    assert torch.equal(gathered(key, table), keys)
    wide = [one.double() for one in (query, key, value)]
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    found = DECODE_ATTENTION(*wide, table.to(index), wide_mask, cap=cap)
    wanted = exact(query, keys, values, mask, cap)
    # PyTorch's attention has zeros where softmax has NaN.
    torch.testing.assert_close(found, wanted if cap is not None else wanted.nan_to_num(0.0), equal_nan=True)
    assert found.is_contiguous() and found.shape == (batch, shared * group, 1, 8)
    static = DECODE_ATTENTION(wide[0], keys.double(), values.double(), None, wide_mask, cap=cap)
    torch.testing.assert_close(static, found, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [None, 20.0])
def test_it_is_as_right_as_the_ops_that_a_model_would_write(dtype: torch.dtype, cap: float | None) -> None:
    torch.manual_seed(1)
    key, value, table = (one.to(dtype) if one.is_floating_point() else one for one in pool(2, 2, 3, 16, 32))
    query = (4.0 * torch.randn(2, 4, 1, 32)).to(dtype)
    keys, values = one_after_another(key, table), one_after_another(value, table)
    wide = [one.repeat_interleave(2, 1) for one in (keys, values)]
    scores = query @ wide[0].transpose(2, 3) * 0.25
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    eager = torch.softmax(scores, -1, dtype=torch.float32).to(dtype) @ wide[1]
    wanted = exact(query, keys, values, None, cap, scale=0.25)
    error = (DECODE_ATTENTION(query, key, value, table, scale=0.25, cap=cap) - wanted).abs().max()
    assert error <= 2 * (eager - wanted).abs().max() + 2 * torch.finfo(dtype).eps


def test_rows_of_the_least_number_are_as_softmax_has_them() -> None:
    key, value, table = pool(1, 1, 2, 4, 8)
    query, mask = torch.randn(1, 2, 1, 8), torch.full((1, 1, 1, 8), torch.finfo(torch.float32).min)
    found = DECODE_ATTENTION(query, key, value, table, mask, cap=2.0)
    torch.testing.assert_close(found, one_after_another(value, table).mean(2, keepdim=True).expand(1, 2, 1, 8))


def test_pytorch_knows_all_that_it_asks_of_an_op() -> None:
    key, value, table = pool(2, 2, 3, 4, 8, heads_last=True)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    for cap in (None, 5.0):
        args = torch.randn(2, 1, 4, 8).transpose(1, 2), key, value, table, mask
        torch.library.opcheck(DECODE_ATTENTION, args, {"scale": 0.3, "cap": cap})


def test_a_page_that_does_not_exist_raises() -> None:
    key, value, table = pool(1, 1, 2, 4, 8)
    for number in (len(key), -len(key) - 1):
        table[0, 1] = number
        with pytest.raises(IndexError):
            DECODE_ATTENTION(torch.randn(1, 1, 1, 8), key, value, table)


def test_a_graph_may_hold_it_with_and_without_each_operand() -> None:
    key, value, table = pool(1, 2, 2, 4, 8)
    query, mask = torch.randn(1, 2, 1, 8), torch.zeros(1, 1, 1, 8)
    mask[..., 5:] = -math.inf
    keys, values = one_after_another(key, table), one_after_another(value, table)
    for operands, attrs in (
        ((query, key, value, table, mask), {}), ((query, key, value, table), {"attn_mask": None}),
        ((query, keys, values, mask), {"block_table": None}),
        ((query, keys, values), {"block_table": None, "attn_mask": None}),
    ):
        names = tuple(f"x{number}" for number in range(len(operands)))
        node = OpNode("fuseplan.decode_attention.default", names, ("found",), {**attrs, "cap": 3.0})
        (found,) = run_node(node, operands)
        masked = mask if any(one is mask for one in operands) else None
        torch.testing.assert_close(found.double(), exact(query, keys, values, masked, 3.0), rtol=1e-5, atol=1e-6)
