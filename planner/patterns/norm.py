"""Normalisation patterns, with what stands before and behind them in models."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.patterns.pattern import OVER_ROWS, Built, Ops, Pattern, Shape, dense

_EPSILON = 1e-6


def _normal(ops: Ops, wide: str) -> str:
    """``x * rsqrt(mean(x^2) + eps)`` of an fp32 value."""
    variance = ops("mean.dim", ops("pow.Tensor_Scalar", wide, exponent=2), dim=(-1,), keepdim=True)
    scale = ops("rsqrt.default", ops("add.Tensor", variance, other=_EPSILON))
    return ops("mul.Tensor", wide, scale)


def rms_norm(ops: Ops, value: str, weight: str, dtype: str, to: str | None = None) -> str:
    """Llama's RMSNorm: statistics in fp32, the weight applied in the model's dtype."""
    normal = _normal(ops, ops.cast(value, "float32"))
    return ops("mul.Tensor", weight, ops.cast(normal, dtype), to=to)


def rms_norm_gemma(ops: Ops, value: str, weight: str, dtype: str, to: str | None = None) -> str:
    """Gemma's RMSNorm: ``normal * (1 + weight)``, in fp32 to the end."""
    normal = _normal(ops, ops.cast(value, "float32"))
    gain = ops("add.Tensor", ops.cast(weight, "float32"), other=1.0)
    return ops.cast(ops("mul.Tensor", normal, gain), dtype, to=to)


def norm_inputs(shape: Shape, dtype: str, rows: Sequence[str] = ("x",), weights: Sequence[str] = ("weight",)
                ) -> dict[str, TensorSpec]:
    """Specs of row operands and of weights as long as a row."""
    return {**{name: dense(shape, dtype) for name in rows}, **{name: dense(shape[-1:], dtype) for name in weights}}


def _rms_norm(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    return ops.built(norm_inputs(shape, dtype), rms_norm(ops, "x", "weight", dtype, to="out"))


def _rms_norm_gemma(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    return ops.built(norm_inputs(shape, dtype), rms_norm_gemma(ops, "x", "weight", dtype, to="out"))


def _add_rms_norm(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    hidden = ops("add.Tensor", "residual", "x", to="hidden")
    out = rms_norm(ops, hidden, "weight", dtype, to="out")
    return ops.built(norm_inputs(shape, dtype, ("residual", "x")), hidden, out)


def _add_rms_norm_gemma(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    hidden = ops("add.Tensor", "residual", "x", to="hidden")
    out = rms_norm_gemma(ops, hidden, "weight", dtype, to="out")
    return ops.built(norm_inputs(shape, dtype, ("residual", "x")), hidden, out)


def _norm_add_norm_gemma(shape: Shape, dtype: str) -> Built:
    """Between the blocks of a Gemma 2 layer: the block's output is normalised, added, and normalised again."""
    ops = Ops()
    inner = rms_norm_gemma(ops, "x", "post_weight", dtype)
    hidden = ops("add.Tensor", "residual", inner, to="hidden")
    out = rms_norm_gemma(ops, hidden, "pre_weight", dtype, to="out")
    return ops.built(norm_inputs(shape, dtype, ("residual", "x"), ("post_weight", "pre_weight")), hidden, out)


def _residual_chain(shape: Shape, dtype: str) -> Built:
    """Parallel branches joined before a norm: attention, MLP and a shared expert, as GPT-NeoX and MoE models have."""
    ops = Ops()
    branches = ("residual", "attention", "mlp", "shared")
    hidden = ops("add.Tensor", "mlp", "shared")
    hidden = ops("add.Tensor", hidden, "attention")
    hidden = ops("add.Tensor", hidden, "residual", to="hidden")
    out = rms_norm(ops, hidden, "weight", dtype, to="out")
    return ops.built(norm_inputs(shape, dtype, branches), hidden, out)


def _embedding_rms_norm(shape: Shape, dtype: str) -> Built:
    """What a model begins with: rows of the embedding table, kept for the residual stream, and the first norm."""
    tokens, vocabulary, hidden_size = shape
    ops = Ops()
    hidden = ops("embedding.default", "table", "ids", to="hidden")
    specs = {
        "ids": dense((1, tokens), "int64"), "table": dense((vocabulary, hidden_size), dtype),
        "weight": dense((hidden_size,), dtype),
    }
    return ops.built(specs, hidden, rms_norm(ops, hidden, "weight", dtype, to="out"))


def _layer_norm(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    out = ops("layer_norm.default", "x", "weight", "bias", to="out", normalized_shape=shape[-1:], eps=1e-5)
    return ops.built(norm_inputs(shape, dtype, ("x",), ("weight", "bias")), out)


def norm_patterns() -> dict[str, Pattern]:
    """Rows of the pattern table."""
    return {
        "rms_norm": Pattern(_rms_norm, *OVER_ROWS, "x / sqrt(mean(x^2) + eps) * weight"),
        "add_rms_norm": Pattern(_add_rms_norm, *OVER_ROWS, "h = residual + x; h and rms_norm(h)"),
        "rms_norm_gemma": Pattern(_rms_norm_gemma, *OVER_ROWS, "x / sqrt(mean(x^2) + eps) * (1 + weight), in fp32"),
        "add_rms_norm_gemma": Pattern(_add_rms_norm_gemma, *OVER_ROWS, "h = residual + x; h and Gemma's rms_norm(h)"),
        "norm_add_norm_gemma": Pattern(
            _norm_add_norm_gemma, *OVER_ROWS, "h = residual + rms_norm(x); h and rms_norm(h), both Gemma's"
        ),
        "residual_chain": Pattern(_residual_chain, *OVER_ROWS, "h = the sum of four branches; h and rms_norm(h)"),
        "embedding_rms_norm": Pattern(
            _embedding_rms_norm, "tokens x vocabulary x columns", "32x32000x4096", (3,),
            "h = embedding(ids, table); h and rms_norm(h)",
        ),
        "layer_norm": Pattern(_layer_norm, *OVER_ROWS, "(x - mean) / sqrt(var + eps) * weight + bias"),
    }
