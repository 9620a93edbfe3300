"""Attention of few query rows on CPUs by our kernel: right against float64 for odd sizes and strides, or refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_samples import MASKS, assert_as_good_as_eager, attention, heads, mask_of, on_cuda, run

from fuseplan.kernels.attention.few_rows import MAX_ROWS
from fuseplan.planner.libraries.few_rows_attention import RowsAttention

pytestmark = pytest.mark.slow  # each case compiles a kernel
CALL = RowsAttention()
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", [one for one in MASKS if one != "causal"])
@pytest.mark.parametrize(("batch", "shared", "group", "positions", "keys", "width"), [
    (1, 8, 4, 1, 1027, 64), (2, 3, 1, 1, 65, 128), (1, 2, 2, 3, 127, 12), (3, 1, 7, 1, 1, 80), (1, 1, 1, 2, 4097, 33),
])
def test_sizes_types_and_masks(
    batch: int, shared: int, group: int, positions: int, keys: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(keys)
    query = heads(batch, shared * group, positions, width, dtype, transposed=True)
    key, value = (heads(batch, shared, keys, width, dtype) for _ in range(2))
    mask = mask_of(kind, (batch, 1, positions, keys), dtype)
    assert_as_good_as_eager(CALL, attention(query, key, value, mask, enable_gqa=group > 1))


@settings(max_examples=25, deadline=None)
@given(
    shared=st.integers(1, 3), group=st.integers(1, 4), positions=st.integers(1, 4), keys=st.integers(1, 200),
    width=st.integers(1, 40), depth=st.integers(1, 90), transposed=st.booleans(),
    own=st.sampled_from([(1, 1, 1), (1, 1, 0), (0, 1, 1), (0, 0, 1), (0, 0, 0)]),
)
def test_masks_are_broadcast_and_rows_lie_apart(
    shared: int, group: int, positions: int, keys: int, width: int, depth: int, transposed: bool, own: tuple[int, ...]
) -> None:
    query = heads(2, shared * group, positions, width, transposed=transposed)
    key, value = (heads(2, shared, keys, each, transposed=transposed) for each in (width, depth))
    sizes = [size if is_own else 1 for size, is_own in zip((2, shared * group, positions), own, strict=True)]
    mask = mask_of("numbers", (*sizes, keys), torch.float32)
    assert_as_good_as_eager(CALL, attention(query, key, value, mask, enable_gqa=group > 1, scale=0.3))


@pytest.mark.parametrize("hidden", [False, -math.inf])
def test_keys_that_all_rows_hide_are_not_read(hidden: float) -> None:
    """A cache may hold anything behind its last token, NaN too."""
    query, key, value = heads(1, 4, 1, 64), heads(1, 2, 1500, 64), heads(1, 2, 1500, 64)
    mask = torch.ones(1, 1, 1, 1500, dtype=torch.bool)
    mask[..., 700:] = False
    numbers = mask if hidden is False else torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)
    expected = attention(query, key[:, :, :700], value[:, :, :700], enable_gqa=True).exact()
    given = attention(query, key, value, numbers, enable_gqa=True)
    for whole in given.operands[1:3]:
        whole[:, :, 768:] = torch.nan
    torch.testing.assert_close(run(CALL, given).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_not_finite_stays_in_its_head(dtype: torch.dtype) -> None:
    query, key, value = heads(2, 4, 1, 16, dtype), heads(2, 2, 70, 16, dtype), heads(2, 2, 70, 16, dtype)
    key[0, 1, 69, 3] = torch.nan
    value[1, 0, 5, 7] = torch.inf
    result = run(CALL, attention(query, key, value, enable_gqa=True))
    wrong = ~torch.isfinite(result)
    assert result[0, 2:].isnan().all() and (result[1, :2, :, 7] == torch.inf).all()
    assert int(wrong.sum()) == 2 * 16 + 2


def test_scores_too_large_for_an_exponential() -> None:
    query, key = 300 * heads(1, 2, 1, 32), heads(1, 2, 300, 32)
    assert_as_good_as_eager(CALL, attention(query, key, key))


def test_threads_change_no_bit() -> None:
    given, found = attention(heads(1, 2, 1, 64), heads(1, 2, 5000, 64), heads(1, 2, 5000, 64)), []
    call, threads = CALL.build(given.group), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(call(*given.operands))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_is_refused() -> None:
    one = heads(1, 2, 1, 8)
    for made, word in (
        (attention(heads(1, 2, MAX_ROWS + 1, 8), one, one), "query rows"),
        (on_cuda(attention(one, one, one)), "CPUs only"),
        (attention(heads(1, 2, 3, 8), heads(1, 2, 3, 8), heads(1, 2, 3, 8), is_causal=True), "causal"),
        (attention(one.double(), one.double(), one.double()), "float64"),
        (attention(*(heads(1, 2, 1, 300) for _ in range(3))), "wider"),
        (attention(one, one.expand(1, 2, 8, 8).transpose(2, 3)[:, :, :, :8], heads(1, 2, 8, 8)), "next to each other"),
    ):
        assert word in (CALL.refuse(made.group) or ""), word
