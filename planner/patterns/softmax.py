"""Softmax patterns: plain rows, attention scores, MoE routing, sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.patterns.pattern import InputSpecs, Pattern, Shape, dense, soft_capped


def _softmax(x: Tensor) -> Tensor:
    """Softmax of rows in fp32, rounded to the dtype of its input."""
    return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)


def _masked_softmax(scores: Tensor) -> Tensor:
    """Softmax of scores [..., S, T] where query ``s`` sees keys up to ``s + T - S``."""
    queries, keys = scores.shape[-2:]
    last = torch.arange(queries, device=scores.device).unsqueeze(1) + (keys - queries)
    seen = torch.arange(keys, device=scores.device) <= last
    return _softmax(scores.masked_fill(torch.logical_not(seen), float("-inf")))


def _score_inputs(shape: Shape, dtype: str) -> InputSpecs:
    queries, keys = shape[-2:]
    if keys < queries:
        raise ShapeError(f"needs at least as many keys as queries, not {queries}x{keys}")
    return {"scores": dense(shape, dtype)}


def _sampling_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities of the next token: logits [..., vocabulary] over a temperature for each row, in fp32."""
    return torch.softmax(logits.float() / temperature.unsqueeze(-1), -1, dtype=torch.float32)


def _top(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Values and experts of a token: a quarter of them, at most 8 (2 of 8 as in Mixtral, 8 of 128 as in Qwen 3)."""
    values, experts = scores.topk(max(1, min(8, scores.shape[-1] // 4)), -1)
    return values, experts


def _moe_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Mixtral and Qwen: softmax over the experts, and the largest weights made to sum to one. ``topk`` stays a call."""
    weights, experts = _top(torch.softmax(logits, -1, dtype=torch.float32))
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def _moe_sigmoid(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek V3: experts are chosen by biased sigmoid scores, and weighted by the scores without the bias."""
    scores = torch.sigmoid(logits.float())
    _, experts = _top(scores + bias)
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, experts


_ROUTED = ("weights", "experts")
SOFTMAX_PATTERNS = {
    "softmax": Pattern(_softmax),
    "causal_softmax": Pattern(lambda x: _masked_softmax(x * 0.125), _score_inputs),
    # Gemma 2's attention scores.
    "soft_cap_softmax": Pattern(lambda x: _masked_softmax(soft_capped(x * 0.0625, 50.0)), _score_inputs),
    "sampling_softmax": Pattern(
        _sampling_softmax,
        lambda shape, dtype: {"logits": dense(shape, dtype), "temperature": dense(shape[:-1], "float32")},
    ),
    "moe_softmax": Pattern(_moe_softmax, outputs=_ROUTED),
    "moe_sigmoid": Pattern(
        _moe_sigmoid, lambda shape, dtype: {"logits": dense(shape, dtype), "bias": dense(shape[-1:], "float32")},
        _ROUTED,
    ),
}
