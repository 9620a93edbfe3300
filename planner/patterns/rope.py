"""Rotary embedding of q and k, as models lay them out: projected [B, S, H, D], used as [B, H, S, D]."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.patterns.norm import rms_norm
from fuseplan.planner.patterns.pattern import InputSpecs, Pattern, Shape, dense


def _turned(x: Tensor, pairs: bool) -> Tensor:
    """The last dimension with pairs (a, b) replaced by (-b, a): of neighbours (``pairs``, GPT-J), or half a head apart.
    """
    width = x.shape[-1]
    if pairs:
        return torch.stack([-x[..., 1:width:2], x[..., 0:width:2]], -1).flatten(-2)
    return torch.cat([-x[..., width // 2 : width], x[..., : width // 2]], -1)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, share: int = 1, pairs: bool = False) -> tuple[Tensor, ...]:
    """``x cos + turned(x) sin`` of the first ``1 / share`` of each head; tables [B, S, D] of ``pairs`` have angles
    once.
    """
    if pairs:
        cos, sin = (table.repeat_interleave(2, -1) for table in (cos, sin))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        x, dim = x.transpose(1, 2), x.shape[-1]
        head = x[..., : dim // share]
        out = head * cos + _turned(head, pairs) * sin
        return out if share == 1 else torch.cat([out, x[..., dim // share : dim]], -1)

    return rotated(q), rotated(k)


def _qk_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor
) -> tuple[Tensor, ...]:
    """Qwen 3 and Gemma 3: each head of q and k is normalised, then turned."""
    return _rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)


def _inputs(shape: Shape, dtype: str, share: int = 1, pairs: bool = False) -> InputSpecs:
    batch, heads, tokens, dim = shape
    if dim % (2 * share):
        multiple = "even" if share == 1 else f"a multiple of {2 * share}"
        raise ShapeError(f"rotates pairs, so the head dimension must be {multiple}, not {dim}")
    projected = dense((batch, tokens, heads, dim), dtype)
    table = dense((batch, tokens, dim // share // (2 if pairs else 1)), dtype)
    return {"q": projected, "k": projected, "cos": table, "sin": table}


_RESULTS = ("q_out", "k_out")
ROPE_PATTERNS = {
    name: Pattern(partial(_rope, share=share, pairs=pairs), partial(_inputs, share=share, pairs=pairs), _RESULTS)
    for name, share, pairs in (
        ("rope", 1, False), ("rope_interleaved", 1, True), ("rope_partial", 2, False),
        ("rope_partial_interleaved", 2, True),
    )
}
ROPE_PATTERNS["qk_norm_rope"] = Pattern(
    _qk_norm_rope,
    lambda shape, dtype: _inputs(shape, dtype) | dict.fromkeys(("q_weight", "k_weight"), dense(shape[-1:], dtype)),
    _RESULTS)
