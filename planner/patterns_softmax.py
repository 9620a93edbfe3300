"""Softmax patterns: attention scores, MoE routing, sampling."""

from __future__ import annotations

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.pattern import OVER_ROWS, Built, Ops, Pattern, Shape, dense
from fuseplan.planner.patterns_pointwise import soft_capped

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


def softmax_patterns() -> dict[str, Pattern]:
    """Rows of the pattern table."""
    return {
        "causal_softmax": Pattern(_causal_softmax, *_SCORES, "softmax(scores / 8, later keys masked)"),
        "soft_cap_softmax": Pattern(
            _soft_cap_softmax, *_SCORES, "softmax(50 * tanh(scores / 16 / 50), later keys masked)"
        ),
        "sampling_softmax": Pattern(
            _sampling_softmax, "rows x vocabulary", "8x128256", OVER_ROWS[2], "softmax(logits / temperature of the row)"
        ),
    }
