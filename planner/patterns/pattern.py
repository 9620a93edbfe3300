"""What a named pattern is: a PyTorch function and its inputs; the table is :mod:`fuseplan.planner.patterns.table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fuseplan.planner.graph.dataflow import TensorSpec

Shape: TypeAlias = tuple[int, ...]
Specs: TypeAlias = dict[str, TensorSpec]
#: ``inputs(shape, dtype)``: the layout of each argument by name.
Inputs: TypeAlias = Callable[[Shape, str], Specs]

#: ``dims``, ``example`` and ``ranks`` of most patterns.
OVER_ROWS: tuple[str, str, tuple[int, ...]] = ("rows x columns (or batch x rows x columns)", "32x4096", (2, 3))


@dataclass(frozen=True)
class Pattern:
    """A named pattern.

    Attributes:
        compute: The function, on tensors in the order of ``inputs``; one tensor or several.
        inputs: Layout of its arguments for a shape and dtype; a :class:`ShapeError` where the shape does not fit.
        dims: What the dimensions of the shape mean.
        example: A shape.
        ranks: Numbers of dimensions it takes.
        summary: Its formula.
        outputs: Names of its results.
        dtype: The dtype it is built in unless one is given.
        typed: ``compute`` also takes the ``dtype``, which none of its tensors has.
    """

    compute: Callable[..., Any]
    inputs: Inputs
    dims: str
    example: str
    ranks: tuple[int, ...]
    summary: str
    outputs: tuple[str, ...] = ("out",)
    dtype: str = "bfloat16"
    typed: bool = False


def dense(shape: Shape, dtype: str) -> TensorSpec:
    """A contiguous tensor."""
    return TensorSpec.contiguous(shape, dtype)


def rows(*names: str, weights: Sequence[str] = ()) -> Inputs:
    """Inputs of the pattern's shape, and ``weights`` as long as a row."""
    return lambda shape, dtype: {
        **{name: dense(shape, dtype) for name in names}, **{name: dense(shape[-1:], dtype) for name in weights}
    }
