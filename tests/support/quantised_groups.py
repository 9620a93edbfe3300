"""Linears whose weights are stored in few bits, as a module writes them in plain PyTorch, traced as groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from graphs import Builder
from torch import Tensor, fx
from tracing import runner

from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.graph.dataflow import DataflowGraph


class Written(Builder):
    """The graph of a function as ``torch.compile`` traces it; its first argument is ``x``."""

    def __init__(self, function: Callable[..., Any], *arguments: Tensor) -> None:
        super().__init__(x=arguments[0])
        self.arguments = arguments
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function, backend=self._traced)(*arguments)

    def _traced(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        trace = normalise(trace_predispatch(module, example_inputs))

        def run(*given: Any) -> list[Any]:
            named = {name: given[position] for name, position in trace.placeholders.items()}
            self.tensors |= {**named, **trace.constants}
            return runner(trace)(*given)

        self.traced = trace.graph
        return run

    def graph(self, *outputs: str) -> DataflowGraph:
        return self.traced


@dataclass(frozen=True)
class Format:
    """``function(x, *packed(width, inner, dtype))`` is a linear of ``width`` outputs, a multiple of ``unit``."""

    function: Callable[..., Tensor]
    packed: Callable[[int, int, torch.dtype], tuple[Tensor, ...]]
    unit: tuple[int, int] = (1, 1)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _scales(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(*shape, generator=_generator()) / 16 + 1 / 64).to(dtype)


def _int8(width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    weight = torch.randint(-128, 128, (width, inner), generator=_generator(), dtype=torch.int8)
    return weight, _scales(width, dtype=dtype)


#: Name -> how weights are stored and read.
FORMATS: dict[str, Format] = {
    "int8, scaled after": Format(lambda x, w, s: F.linear(x, w.to(x.dtype)) * s, _int8),
    "int8, scaled before": Format(lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, None]), _int8),
    "int8, turned": Format(lambda x, w, s: (x @ w.t().to(x.dtype)) * s, _int8),
    "int8, by columns": Format(
        lambda x, w, s: (x @ w.to(x.dtype)) * s,
        lambda width, inner, dtype: (_int8(inner, width, dtype)[0], _int8(width, inner, dtype)[1]),
    ),
    "bfloat16, widened": Format(
        lambda x, w: F.linear(x, w.to(x.dtype)),
        lambda width, inner, dtype: (torch.randn(width, inner, generator=_generator()).bfloat16(),),
    ),
}


def quantised(name: str, rows: int, width: int, inner: int, dtype: torch.dtype) -> Written:
    """One linear; rows of ``x`` lie apart."""
    made = FORMATS[name]
    x = torch.randn(rows, inner + 8, generator=_generator()).to(dtype)[:, :inner]
    return Written(made.function, x, *made.packed(width, inner, dtype))


def quantised_groups(dtype: torch.dtype) -> Iterator[tuple[str, Builder, tuple[str, ...]]]:
    """All formats at odd sizes; fewer of them in types that differ in rounding alone."""
    sizes = ((1, 25, 127), (3, 33, 40), (17, 24, 128), (127, 40, 40), (1, 40, 128))
    sizes = {torch.bfloat16: sizes, torch.float16: sizes[2:3], torch.float32: sizes[1:3]}[dtype]
    for name, made in FORMATS.items():
        for rows, width, inner in sizes:
            across, along = made.unit
            if width % across == 0 and inner % along == 0:
                yield f"{name} {rows} {width} {inner}", quantised(name, rows, width, inner, dtype), ()
