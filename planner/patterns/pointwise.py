"""Patterns without reductions: gated activations, soft-cap, the chains of pointwise ops that fusers are shown with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseplan.planner.patterns.pattern import OVER_ROWS, Pattern, rows

GATED = rows("gate", "up")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, as Gemma 2 bounds its attention scores and logits."""
    return torch.tanh(x / cap) * cap


def _pointwise_chain(x: Tensor) -> Tensor:
    """Eleven ops of one operand each, every one of them a launch in eager mode."""
    x = torch.relu((x + 1.0) * 2.0 - 0.5)
    return torch.sqrt(torch.abs(torch.neg(torch.exp(torch.tanh(torch.sigmoid(x)))))) * 0.5


_CHAIN = ("any", "1024x1024", (1, 2, 3))
POINTWISE_PATTERNS = {
    "swiglu": Pattern(swiglu, GATED, *OVER_ROWS, "silu(gate) * up"),
    "geglu": Pattern(lambda gate, up: F.gelu(gate) * up, GATED, *OVER_ROWS, "gelu(gate) * up, with erf"),
    "geglu_tanh": Pattern(
        lambda gate, up: F.gelu(gate, approximate="tanh") * up, GATED, *OVER_ROWS, "gelu(gate) * up, with tanh"
    ),
    "soft_cap": Pattern(lambda x: soft_capped(x, 30.0), rows("x"), *OVER_ROWS, "30 * tanh(x / 30)"),
    "pointwise_chain": Pattern(_pointwise_chain, rows("x"), *_CHAIN, "11 pointwise ops in a row", dtype="float32"),
    "sin_chain": Pattern(
        lambda x: torch.sin((x + 1.0) * 2.0), rows("x"), "any", "10000000", (1, 2, 3), "sin((x + 1) * 2)",
        dtype="float32",
    ),
}
