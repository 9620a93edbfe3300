"""What a named pattern is, and what patterns are built with. The table is in :mod:`fuseplan.planner.patterns.table`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from fuseplan.planner.graph.dataflow import OpNode, TensorSpec

Shape: TypeAlias = tuple[int, ...]
#: Nodes, input specs and output names.
Built: TypeAlias = tuple[list[OpNode], dict[str, TensorSpec], tuple[str, ...]]

#: What most patterns take.
ROWS = "rows x columns (or batch x rows x columns)"
#: ``dims``, ``example`` and ``ranks`` of those.
OVER_ROWS: tuple[str, str, tuple[int, ...]] = (ROWS, "32x4096", (2, 3))


@dataclass(frozen=True)
class Pattern:
    """A named pattern.

    Attributes:
        build: Nodes, input specs and output names for a shape and dtype.
        dims: What the dimensions of the shape mean.
        example: A shape.
        ranks: Numbers of dimensions it takes.
        summary: Its formula.
        dtype: The dtype it is built in unless one is given.
    """

    build: Callable[[Shape, str], Built]
    dims: str
    example: str
    ranks: tuple[int, ...]
    summary: str
    dtype: str = "bfloat16"


class Ops:
    """Collects the ATen calls of a pattern: each call of it adds one and returns the name of its result.

    >>> ops = Ops()
    >>> ops("mul.Tensor", ops("silu.default", "gate"), "up", to="out")
    'out'
    >>> [node.op for node in ops.nodes]
    ['aten.silu.default', 'aten.mul.Tensor']
    """

    def __init__(self) -> None:
        self.nodes: list[OpNode] = []

    def __call__(self, op: str, *inputs: str, to: str | None = None, **attrs: Any) -> str:
        result = to or f"v{len(self.nodes)}"
        self.nodes.append(OpNode(f"aten.{op}", inputs, (result,), attrs))
        return result

    def pair(self, op: str, *inputs: str, **attrs: Any) -> tuple[str, str]:
        """A call with two results."""
        results = (f"v{len(self.nodes)}_0", f"v{len(self.nodes)}_1")
        self.nodes.append(OpNode(f"aten.{op}", inputs, results, attrs))
        return results

    def cast(self, value: str, dtype: str, to: str | None = None) -> str:
        """``value.to(dtype)``."""
        return self("to.dtype", value, to=to, dtype=dtype)

    def built(self, specs: dict[str, TensorSpec], *outputs: str) -> Built:
        """What a pattern's ``build`` returns."""
        return self.nodes, specs, outputs


def dense(shape: Shape, dtype: str) -> TensorSpec:
    """A contiguous tensor."""
    return TensorSpec.contiguous(shape, dtype)
