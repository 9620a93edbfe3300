"""What a named pattern is, a PyTorch function and its inputs; and the patterns without reductions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

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
        given: Layout of its arguments for a shape and dtype; else :func:`usual_inputs`. A :class:`ShapeError` of it
            goes on after the pattern's name.
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


def dense(shape: Shape, dtype: str) -> TensorSpec:
    """A contiguous tensor."""
    return TensorSpec.contiguous(shape, dtype)


def usual_inputs(compute: Callable[..., Any]) -> Inputs:
    """Inputs named as a function's arguments: weights and biases as long as a row, others of the pattern's shape."""
    return lambda shape, dtype: {
        name: dense(shape[-1:] if name.endswith(("weight", "bias")) else shape, dtype)
        for name in inspect.signature(compute).parameters
    }


# -- patterns without reductions ------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, as Gemma 2 bounds its attention scores and logits."""
    return torch.tanh(x / cap) * cap


def _pointwise_chain(x: Tensor) -> Tensor:
    """Eleven ops of one operand each, every one of them a launch in eager mode."""
    x = torch.relu((x + 1.0) * 2.0 - 0.5)
    return torch.sqrt(torch.abs(torch.neg(torch.exp(torch.tanh(torch.sigmoid(x)))))) * 0.5


POINTWISE_PATTERNS = {
    "swiglu": Pattern(swiglu),
    "geglu": Pattern(lambda gate, up: F.gelu(gate) * up),
    "geglu_tanh": Pattern(lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "soft_cap": Pattern(lambda x: soft_capped(x, 30.0)),
    "pointwise_chain": Pattern(_pointwise_chain, dtype="float32"),
    "sin_chain": Pattern(lambda x: torch.sin((x + 1.0) * 2.0), dtype="float32"),
}
