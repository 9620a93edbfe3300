"""Normalisation patterns, with what stands before and behind them in models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseplan.planner.patterns.pattern import InputSpecs, Pattern, Shape, dense


def _normal(wide: Tensor) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps)`` of an fp32 value."""
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's RMSNorm: statistics in fp32, the weight applied in the model's dtype."""
    return weight * _normal(x.float()).to(x.dtype)


def rms_norm_gemma(x: Tensor, weight: Tensor) -> Tensor:
    """Gemma's RMSNorm: ``normal * (1 + weight)``, in fp32 to the end."""
    return (_normal(x.float()) * (weight.float() + 1.0)).to(x.dtype)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = residual + x
    return hidden, rms_norm(hidden, weight)


def _add_rms_norm_gemma(residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = residual + x
    return hidden, rms_norm_gemma(hidden, weight)


def _norm_add_norm_gemma(
    residual: Tensor, x: Tensor, post_weight: Tensor, pre_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Between the blocks of a Gemma 2 layer: the block's output is normalised, added, and normalised again."""
    return _add_rms_norm_gemma(residual, rms_norm_gemma(x, post_weight), pre_weight)


def _residual_chain(
    residual: Tensor, attention: Tensor, mlp: Tensor, shared: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Parallel branches joined before a norm: attention, MLP and a shared expert, as GPT-NeoX and MoE models have."""
    hidden = mlp + shared + attention + residual
    return hidden, rms_norm(hidden, weight)


def _embedding_rms_norm(ids: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What a model begins with: rows of the embedding table, kept for the residual stream, and the first norm."""
    hidden = F.embedding(ids, table)
    return hidden, rms_norm(hidden, weight)


def _embedding_inputs(shape: Shape, dtype: str) -> InputSpecs:
    tokens, vocabulary, columns = shape
    return {
        "ids": dense((1, tokens), "int64"), "table": dense((vocabulary, columns), dtype),
        "weight": dense((columns,), dtype),
    }


_BOTH = ("hidden", "out")
NORM_PATTERNS = {
    "rms_norm": Pattern(rms_norm),
    "add_rms_norm": Pattern(add_rms_norm, outputs=_BOTH),
    "rms_norm_gemma": Pattern(rms_norm_gemma),
    "add_rms_norm_gemma": Pattern(_add_rms_norm_gemma, outputs=_BOTH),
    "norm_add_norm_gemma": Pattern(_norm_add_norm_gemma, outputs=_BOTH),
    "residual_chain": Pattern(_residual_chain, outputs=_BOTH),
    "embedding_rms_norm": Pattern(_embedding_rms_norm, _embedding_inputs, _BOTH),
    "layer_norm": Pattern(lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias)),
}
