"""The functions of named patterns, with their inputs: gated activations, norms, rotary embeddings and softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.graph.dataflow import TensorSpec

Shape: TypeAlias = tuple[int, ...]
InputSpecs: TypeAlias = dict[str, TensorSpec]
#: ``inputs(shape, dtype)``: the layout of each argument by name.
Inputs: TypeAlias = Callable[[Shape, str], InputSpecs]


@dataclass(frozen=True)
class Pattern:
    """A named pattern's function. What its shapes mean is in :mod:`fuseplan.planner.patterns.listing`.

    Attributes:
        compute: The function, on tensors in the order of ``inputs``; one tensor or several.
        given: Layout of its arguments for a shape and dtype; else :func:`usual_inputs`. Where a shape does not fit it
            raises a :class:`ShapeError`, whose text follows the pattern's name.
        dtype: The one that it is built in unless another is given.
        typed: ``compute`` also takes the ``dtype``, which none of its tensors has.
    """

    compute: Callable[..., Any]
    given: Inputs | None = None
    outputs: tuple[str, ...] = ("out",)
    dtype: str = "bfloat16"
    typed: bool = False

    def inputs(self, shape: Shape, dtype: str) -> InputSpecs:
        """The inputs by name, for activations of this shape."""
        return (self.given or usual_inputs(self.compute))(shape, dtype)


def usual_inputs(compute: Callable[..., Any]) -> Inputs:
    """Inputs named as a function's arguments: weights and biases as long as a row, others of the pattern's shape."""
    return lambda shape, dtype: {
        name: dense(shape[-1:] if name.endswith(("weight", "bias")) else shape, dtype)
        for name in inspect.signature(compute).parameters
    }


#: ``dense(shape, dtype)``: a contiguous tensor.
dense = TensorSpec.contiguous


# -- pointwise ----------------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, as Gemma 2 bounds its attention scores and logits."""
    return torch.tanh(x / cap) * cap


def _pointwise_chain(x: Tensor) -> Tensor:
    """Eleven ops of one operand each, every one of them a launch in eager mode."""
    x = torch.relu((x + 1.0) * 2.0 - 0.5)
    return torch.sqrt(torch.abs(torch.neg(torch.exp(torch.tanh(torch.sigmoid(x)))))) * 0.5


# -- norms, with what stands before and behind them in models -----------------------------------------------


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


# -- rotary embedding of q and k, as models lay them out: projected [B, S, H, D], used as [B, H, S, D] ------


def _turned(x: Tensor, pairs: bool) -> Tensor:
    """The last dimension with pairs (a, b) replaced by (-b, a): of neighbours (``pairs``, GPT-J), or half a head apart.
    """
    width = x.shape[-1]
    if pairs:
        return torch.stack([-x[..., 1:width:2], x[..., 0:width:2]], -1).flatten(-2)
    return torch.cat([-x[..., width // 2 : width], x[..., : width // 2]], -1)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, share: int = 1, pairs: bool = False) -> tuple[Tensor, ...]:
    """``x cos + turned(x) sin`` of the first ``1 / share`` of each head; of ``pairs``, tables have each angle once."""
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


def _rope_inputs(shape: Shape, dtype: str, share: int = 1, pairs: bool = False) -> InputSpecs:
    batch, heads, tokens, dim = shape
    if dim % (2 * share):
        multiple = "even" if share == 1 else f"a multiple of {2 * share}"
        raise ShapeError(f"rotates pairs, so the head dimension must be {multiple}, not {dim}")
    projected = dense((batch, tokens, heads, dim), dtype)
    table = dense((batch, tokens, dim // share // (2 if pairs else 1)), dtype)
    return {"q": projected, "k": projected, "cos": table, "sin": table}


# -- softmax: plain rows, attention scores, MoE routing, sampling -------------------------------------------


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


_BOTH, _ROUTED, _TURNED = ("hidden", "out"), ("weights", "experts"), ("q_out", "k_out")
_ROPES: dict[str, dict[str, Any]] = {
    "rope": {}, "rope_interleaved": {"pairs": True}, "rope_partial": {"share": 2},
    "rope_partial_interleaved": {"share": 2, "pairs": True},
}
#: All patterns but those of quantisation.
FUNCTIONS = {
    "swiglu": Pattern(swiglu),
    "geglu": Pattern(lambda gate, up: F.gelu(gate) * up),
    "geglu_tanh": Pattern(lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "soft_cap": Pattern(lambda x: soft_capped(x, 30.0)),
    "pointwise_chain": Pattern(_pointwise_chain, dtype="float32"),
    "sin_chain": Pattern(lambda x: torch.sin((x + 1.0) * 2.0), dtype="float32"),
    "rms_norm": Pattern(rms_norm),
    "add_rms_norm": Pattern(add_rms_norm, outputs=_BOTH),
    "rms_norm_gemma": Pattern(rms_norm_gemma),
    "add_rms_norm_gemma": Pattern(_add_rms_norm_gemma, outputs=_BOTH),
    "norm_add_norm_gemma": Pattern(_norm_add_norm_gemma, outputs=_BOTH),
    "residual_chain": Pattern(_residual_chain, outputs=_BOTH),
    "embedding_rms_norm": Pattern(_embedding_rms_norm, _embedding_inputs, _BOTH),
    "layer_norm": Pattern(lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias)),
    **{name: Pattern(partial(_rope, **kind), partial(_rope_inputs, **kind), _TURNED) for name, kind in _ROPES.items()},
    "qk_norm_rope": Pattern(
        _qk_norm_rope,
        lambda shape, dtype: _rope_inputs(shape, dtype) | dict.fromkeys(
            ("q_weight", "k_weight"), dense(shape[-1:], dtype)),
        _TURNED),
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
