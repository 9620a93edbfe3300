"""Linears whose weights are stored in few bits, as a module writes them in plain PyTorch, traced as groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from graphs import Builder
from torch import Tensor, fx
from tracing import constants, runner

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
            self.tensors |= {**named, **constants(trace)}
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
    return (torch.rand(shape, generator=_generator()) / 16 + 1 / 64).to(dtype)


def _int8(width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    weight = torch.randint(-128, 128, (width, inner), generator=_generator(), dtype=torch.int8)
    return weight, _scales(width, dtype=dtype)


def _turned(x: Tensor, w: Tensor, s: Tensor, bias: Tensor) -> Tensor:
    """As torchao's linear of int8 weights has it, where it calls no kernel of its own."""
    made = torch.mm(x.reshape(-1, x.shape[-1]), w.t().to(x.dtype)) * s.to(x.dtype)
    made = made.reshape(*x.shape[:-1], made.shape[-1])
    made += bias
    return made


def _fp8(*blocks: int) -> Callable[[int, int, torch.dtype], tuple[Tensor, ...]]:
    """Weights with a scale for each block of so many elements; for all of them without any."""

    def packed(width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weight = torch.randn(width, inner, generator=_generator()).to(torch.float8_e4m3fn)
        counts = (-(-size // block) for size, block in zip((width, inner), blocks, strict=False))
        return weight, _scales(*counts, dtype=dtype)

    return packed


def _blocks_viewed(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    width, inner = w.shape
    blocks = w.to(x.dtype).view(width // 8, 8, inner // 8, 8) * s[:, None, :, None]
    return F.linear(x, blocks.view(width, inner))


def _blocks_repeated(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    width, inner = w.shape
    scales = s.repeat_interleave(16, 0)[:width].repeat_interleave(16, 1)[:, :inner]
    return F.linear(x, w.to(x.dtype) * scales)


def _pairs(width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two numbers in a byte, the first in its lower half; a scale for each eight."""
    words = torch.randint(0, 256, (width, inner // 2), generator=_generator(), dtype=torch.uint8)
    return words, _scales(width, inner // 8, dtype=dtype)


def _of_pairs(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    numbers = torch.stack((w & 15, w >> 4), -1).reshape(len(w), -1)
    groups = (numbers.to(x.dtype) - 8).view(*s.shape, -1) * s[..., None]
    return F.linear(x, groups.view(len(w), -1))


def _awq(width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Eight columns of weights [inner, width] in a word, the even ones first; zeros and scales for eight rows each."""
    def words(rows: int) -> Tensor:
        shape = (rows, width // 8)
        return torch.randint(-(2**31), 2**31, shape, generator=_generator(), dtype=torch.int64).to(torch.int32)

    return words(inner), words(inner // 8), _scales(inner // 8, width, dtype=dtype)


def _awq_by_shifts(x: Tensor, w: Tensor, z: Tensor, s: Tensor) -> Tensor:
    """The shifts are put in the order of the columns."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(2, 4).t().reshape(8)

    def numbers(words: Tensor) -> Tensor:
        return (torch.bitwise_right_shift(words[:, :, None], shifts) & 15).view(len(words), -1)

    groups = numbers(z).repeat_interleave(8, 0), s.repeat_interleave(8, 0)
    return x @ ((numbers(w) - groups[0]) * groups[1])


def _awq_by_numbers(x: Tensor, w: Tensor, z: Tensor, s: Tensor) -> Tensor:
    """The numbers are put in order, by a reshape."""
    def numbers(words: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        spread = torch.bitwise_right_shift(words[:, :, None], shifts) & 15
        return spread.view(len(words), -1, 2, 4).transpose(2, 3).reshape(len(words), -1)

    groups = numbers(w).view(len(z), 8, -1) - numbers(z)[:, None]
    return x @ (groups * s[:, None]).view(len(w), -1)


#: Name -> how weights are stored and read.
FORMATS: dict[str, Format] = {
    "int8, scaled after": Format(lambda x, w, s: F.linear(x, w.to(x.dtype)) * s, _int8),
    "int8, scaled before": Format(lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, None]), _int8),
    "int8, turned": Format(_turned, lambda *sizes: (*_int8(*sizes), _scales(sizes[0], dtype=sizes[2]))),
    "int8, by columns": Format(
        lambda x, w, s: (x @ w.to(x.dtype)) * s,
        lambda width, inner, dtype: (_int8(inner, width, dtype)[0], _int8(width, inner, dtype)[1]),
    ),
    "fp8, one scale": Format(lambda x, w, s: F.linear(x, w.to(x.dtype) * s), _fp8()),
    "fp8, by channels": Format(lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, None]), _fp8(1)),
    "fp8, by blocks": Format(_blocks_viewed, _fp8(8, 8), unit=(8, 8)),
    "fp8, by ragged blocks": Format(_blocks_repeated, _fp8(16, 16)),
    "int4, in pairs": Format(_of_pairs, _pairs, unit=(1, 8)),
    "int4, as AWQ by shifts": Format(_awq_by_shifts, _awq, unit=(8, 8)),
    "int4, as AWQ by numbers": Format(_awq_by_numbers, _awq, unit=(8, 8)),
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
    sizes = ((1, 25, 127), (3, 33, 40), (17, 24, 128), (65, 40, 40), (1, 40, 128))
    sizes = {torch.bfloat16: sizes, torch.float16: sizes[2:3], torch.float32: sizes[2:3]}[dtype]
    for name, made in FORMATS.items():
        for rows, width, inner in sizes:
            across, along = made.unit
            if width % across == 0 and inner % along == 0:
                yield f"{name} {rows} {width} {inner}", quantised(name, rows, width, inner, dtype), ()
