"""Attention of one query position over a cache, ``fuseplan::decode_attention``: registered with PyTorch when imported.

Keys and values may be in pages that a block table lists, and scores capped (Gemma 2). A kernel may read pages where
they lie; the op itself gathers them, and computes what a model in plain PyTorch would.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("fuseplan", "FRAGMENT")
_LIBRARY.define(
    "decode_attention(Tensor query, Tensor key, Tensor value, Tensor? block_table=None, Tensor? attn_mask=None, *, "
    "float? scale=None, float? cap=None, bool wraps=True) -> Tensor"
)


def gathered(pages: torch.Tensor, block_table: torch.Tensor, wraps: bool = True) -> torch.Tensor:
    """A copy of the pages of each sequence, one after another: ``[batch, kv heads, blocks * rows, width]``.

    Pages are ``[pages, kv heads, rows, width]``, the block table ``[batch, blocks]``. Negative numbers of pages count
    from the end if that ``wraps``; IndexError where there is no such page.
    """
    (batch, blocks), (_, heads, rows, width) = block_table.shape, pages.shape
    if not wraps:  # what follows finds none of these
        block_table = block_table.where(block_table >= 0, pages.shape[0])
    if pages.stride(1) < pages.stride(2):  # rows hold all heads: what is gathered is in order without a second copy
        found = pages.transpose(1, 2)[block_table]
        return found.reshape(batch, blocks * rows, heads, width).transpose(1, 2)
    return pages[block_table].transpose(1, 2).reshape(batch, heads, blocks * rows, width)


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_table: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None, *, scale: float | None = None, cap: float | None = None, wraps: bool = True,
) -> torch.Tensor:
    """The result ``[batch, heads, 1, width]``, contiguous, by ATen's ops.

    Query heads, ``[batch, heads, 1, width]``, share keys and values in groups of neighbours. These are
    ``[batch, kv heads, length, width]``, or pages as :func:`gathered` takes them. The mask is as PyTorch's attention
    takes it. Scores are scaled, and become ``cap * tanh(scores / cap)`` before the mask where there is a ``cap``. A row
    of nothing but minus infinity is zero, as PyTorch's attention has it; with a ``cap`` NaN, as softmax has it.
    """
    if block_table is not None:
        key, value = gathered(key, block_table, wraps), gathered(value, block_table, wraps)
    (batch, heads, _, width), shared = query.shape, key.shape[1]
    # Heads of a group as positions of one head: nothing is copied for each of them.
    folded = query.reshape(batch, shared, heads // shared, width)
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] != 1:
        attn_mask = attn_mask.reshape(*attn_mask.shape[:-3], shared, heads // shared, attn_mask.shape[-1])
    if cap is None:
        found = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask, scale=scale)
    else:
        found = _capped(folded, key, value, attn_mask, width**-0.5 if scale is None else scale, cap)
    return found.reshape(batch, heads, 1, found.shape[-1]).contiguous()


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, cap: float
) -> torch.Tensor:
    scores = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / cap) * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return torch.matmul(weights.to(query.dtype), value)


_LIBRARY.impl("decode_attention", decode_attention, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fuseplan::decode_attention",
    lambda query, key, value, *_, **__: query.new_empty((*query.shape[:-1], value.shape[-1])), lib=_LIBRARY,
)

#: The op: ``DECODE_ATTENTION(query, key, value, block_table, attn_mask, scale=..., cap=...)``.
DECODE_ATTENTION: torch._ops.OpOverload = torch.ops.fuseplan.decode_attention.default
