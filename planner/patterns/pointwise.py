"""Patterns without reductions: gated activations, soft-cap, the chains of pointwise ops that fusers are shown with."""

from __future__ import annotations

from collections.abc import Callable

from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.patterns.pattern import OVER_ROWS, Built, Ops, Pattern, Shape, dense


def gated(ops: Ops, activation: str = "silu.default", to: str | None = None, **attrs: str) -> str:
    """``activation(gate) * up``."""
    return ops("mul.Tensor", ops(activation, "gate", **attrs), "up", to=to)


def gate_and_up(shape: Shape, dtype: str) -> dict[str, TensorSpec]:
    """Inputs of a gated activation."""
    return {"gate": dense(shape, dtype), "up": dense(shape, dtype)}


def _gated(activation: str, **attrs: str) -> Callable[[Shape, str], Built]:
    def build(shape: Shape, dtype: str) -> Built:
        ops = Ops()
        return ops.built(gate_and_up(shape, dtype), gated(ops, activation, to="out", **attrs))

    return build


def soft_capped(ops: Ops, value: str, cap: float, to: str | None = None) -> str:
    """``cap * tanh(x / cap)``, as Gemma 2 bounds its attention scores and logits."""
    return ops("mul.Tensor", ops("tanh.default", ops("div.Tensor", value, other=cap)), to=to, other=cap)


def _soft_cap(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    return ops.built({"x": dense(shape, dtype)}, soft_capped(ops, "x", 30.0, to="out"))


def _pointwise_chain(shape: Shape, dtype: str) -> Built:
    """Eleven ops of one operand each, every one of them a launch in eager mode."""
    ops = Ops()
    value = ops("add.Tensor", "x", other=1.0)
    value = ops("mul.Tensor", value, other=2.0)
    value = ops("sub.Tensor", value, other=0.5)
    for name in ("relu", "sigmoid", "tanh", "exp", "neg", "abs"):
        value = ops(f"{name}.default", value)
    value = ops("sqrt.default", value)
    return ops.built({"x": dense(shape, dtype)}, ops("mul.Tensor", value, to="out", other=0.5))


def _sin_chain(shape: Shape, dtype: str) -> Built:
    ops = Ops()
    scaled = ops("mul.Tensor", ops("add.Tensor", "x", other=1.0), other=2.0)
    return ops.built({"x": dense(shape, dtype)}, ops("sin.default", scaled, to="out"))


def pointwise_patterns() -> dict[str, Pattern]:
    """Rows of the pattern table."""
    return {
        "swiglu": Pattern(_gated("silu.default"), *OVER_ROWS, "silu(gate) * up"),
        "geglu": Pattern(_gated("gelu.default", approximate="none"), *OVER_ROWS, "gelu(gate) * up, with erf"),
        "geglu_tanh": Pattern(_gated("gelu.default", approximate="tanh"), *OVER_ROWS, "gelu(gate) * up, with tanh"),
        "soft_cap": Pattern(_soft_cap, *OVER_ROWS, "30 * tanh(x / 30)"),
        "pointwise_chain": Pattern(
            _pointwise_chain, "any", "1024x1024", (1, 2, 3), "11 pointwise ops in a row", "float32"
        ),
        "sin_chain": Pattern(_sin_chain, "any", "10000000", (1, 2, 3), "sin((x + 1) * 2)", "float32"),
    }
