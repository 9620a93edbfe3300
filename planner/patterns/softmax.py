"""Softmax patterns: plain rows, attention scores, MoE routing, sampling."""

from __future__ import annotations

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.patterns.pattern import OVER_ROWS, Built, Ops, Pattern, Shape, dense
from fuseplan.planner.patterns.pointwise import soft_capped

_ROUTING = ("tokens x experts", "32x128", (2,))
_SCORES = ("... x queries x keys", "1x32x128x128", (2, 3, 4))


def _masked_softmax(ops: Ops, scores: str, shape: Shape, dtype: str, name: str) -> str:
    """Softmax in fp32 of scores [..., S, T] where query ``s`` sees keys up to ``s + T - S``."""
    queries, keys = shape[-2:]
    if keys < queries:
        raise ShapeError(f"pattern {name} needs at least as many keys as queries, not {queries}x{keys}")
    row = ops("unsqueeze.default", ops("arange.default", end=queries), dim=1)
    last = ops("add.Tensor", row, other=keys - queries)
    seen = ops("le.Tensor", ops("arange.default", end=keys), last)
    hidden = ops("logical_not.default", seen)
    masked = ops("masked_fill.Scalar", scores, hidden, value=float("-inf"))
    return ops.cast(ops("softmax.int", masked, dim=-1, dtype="float32"), dtype, to="out")


def _softmax(shape: Shape, dtype: str) -> Built:
    """Softmax of rows in fp32, rounded to the dtype of its input."""
    ops = Ops()
    wide = ops("softmax.int", "x", dim=-1, dtype="float32")
    return ops.built({"x": dense(shape, dtype)}, ops.cast(wide, dtype, to="out"))


def _causal_softmax(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    scaled = ops("mul.Tensor", "scores", other=0.125)
    return ops.built({"scores": dense(shape, dtype)}, _masked_softmax(ops, scaled, shape, dtype, "causal_softmax"))


def _soft_cap_softmax(shape: Shape, dtype: str) -> Built:
    """Gemma 2's attention scores: scaled, capped at 50, masked."""
    ops = Ops()
    capped = soft_capped(ops, ops("mul.Tensor", "scores", other=0.0625), 50.0)
    return ops.built({"scores": dense(shape, dtype)}, _masked_softmax(ops, capped, shape, dtype, "soft_cap_softmax"))


def _sampling_softmax(shape: Shape, dtype: str) -> Built:
    """Probabilities of the next token: logits [..., vocabulary] over a temperature for each row, in fp32."""
    ops = Ops()
    wide = ops.cast("logits", "float32")
    cooled = ops("div.Tensor", wide, ops("unsqueeze.default", "temperature", dim=-1))
    specs = {"logits": dense(shape, dtype), "temperature": dense(shape[:-1], "float32")}
    return ops.built(specs, ops("softmax.int", cooled, to="out", dim=-1, dtype="float32"))


def _chosen(experts: int) -> int:
    """Experts for a token: a quarter of them, at most 8 (2 of 8 as in Mixtral, 8 of 128 as in Qwen 3)."""
    return max(1, min(8, experts // 4))


def _moe_softmax(shape: Shape, dtype: str) -> Built:
    """Mixtral and Qwen: softmax over the experts, and the largest weights made to sum to one. ``topk`` stays a call."""
    ops = Ops()
    scores = ops("softmax.int", "logits", dim=-1, dtype="float32")
    weights, experts = ops.pair("topk.default", scores, k=_chosen(shape[-1]), dim=-1)
    total = ops("sum.dim_IntList", weights, dim=(-1,), keepdim=True)
    weights = ops.cast(ops("div.Tensor", weights, total), dtype, to="weights")
    return ops.built({"logits": dense(shape, dtype)}, weights, experts)


def _moe_sigmoid(shape: Shape, dtype: str) -> Built:
    """DeepSeek V3: experts are chosen by biased sigmoid scores, and weighted by the scores without the bias."""
    ops = Ops()
    scores = ops("sigmoid.default", ops.cast("logits", "float32"))
    biased = ops("add.Tensor", scores, "bias")
    _, experts = ops.pair("topk.default", biased, k=_chosen(shape[-1]), dim=-1)
    weights = ops("gather.default", scores, experts, dim=1)
    total = ops("add.Tensor", ops("sum.dim_IntList", weights, dim=(-1,), keepdim=True), other=1e-20)
    weights = ops("mul.Tensor", ops("div.Tensor", weights, total), to="weights", other=2.5)
    specs = {"logits": dense(shape, dtype), "bias": dense(shape[-1:], "float32")}
    return ops.built(specs, weights, experts)


def softmax_patterns() -> dict[str, Pattern]:
    """Rows of the pattern table."""
    return {
        "softmax": Pattern(_softmax, *OVER_ROWS, "exp(x - max(x)) / sum(exp(x - max(x))), in fp32"),
        "causal_softmax": Pattern(_causal_softmax, *_SCORES, "softmax(scores / 8, later keys masked)"),
        "soft_cap_softmax": Pattern(
            _soft_cap_softmax, *_SCORES, "softmax(50 * tanh(scores / 16 / 50), later keys masked)"
        ),
        "sampling_softmax": Pattern(
            _sampling_softmax, "rows x vocabulary", "8x128256", OVER_ROWS[2], "softmax(logits / temperature of the row)"
        ),
        "moe_softmax": Pattern(_moe_softmax, *_ROUTING, "top-k of softmax(logits), made to sum to 1"),
        "moe_sigmoid": Pattern(
            _moe_sigmoid, *_ROUTING, "sigmoid(logits) at the top-k of sigmoid(logits) + bias, made to sum to 2.5"
        ),
    }
