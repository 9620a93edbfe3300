"""Decoder layers one by one: how far eager's results and a contestant's are from the same layer in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from decoder_layers import HELD, MODELS, Cache, Layer, Sizes, example, places_read
from torch import nn

#: The token's place in the caches: a mask hides the rest.
PLACE = HELD * 3 // 4
#: A layer: (layer, x, cos, sin, at, cache) -> x. The cache is written.
Call = Callable[..., torch.Tensor]


@dataclass
class Errors:
    """Squares of errors and of exact values, added up over inputs; ``eager`` and ``ours`` are relative, of norms."""

    eager_squares: float = 0.0
    ours_squares: float = 0.0
    exact_squares: float = 0.0

    def add(self, eager: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor) -> None:
        self.eager_squares += float((eager.double() - exact).square().sum())
        self.ours_squares += float((ours.double() - exact).square().sum())
        self.exact_squares += float(exact.square().sum())

    @property
    def eager(self) -> float:
        return math.sqrt(self.eager_squares / self.exact_squares)

    @property
    def ours(self) -> float:
        return math.sqrt(self.ours_squares / self.exact_squares)

    @property
    def ratio(self) -> float:
        """Ours over eager's: 1 where both are exact."""
        if self.eager_squares == 0:
            return 1.0 if self.ours_squares == 0 else math.inf
        return math.sqrt(self.ours_squares / self.eager_squares)

    def cells(self) -> list[str]:
        return [f"{self.eager:.2e}", f"{self.ours:.2e}", f"{self.ratio:.3f}"]


@dataclass
class LayerRow:
    """One layer of a cell: errors by what they are of (``output``, and in decoding ``keys`` and ``values``)."""

    model: str
    cell: str
    layer: int
    errors: dict[str, Errors] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def judge(self, allowed: float) -> None:
        """Errors that are too large become problems; NaN is never within bounds."""
        for what, one in self.errors.items():
            if not one.ratio <= allowed:
                self.problems.append(f"{what}: {one.ratio:.3f} times eager's error, {allowed} are allowed")


def run_layer(
    layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor | None, cache: Cache
) -> torch.Tensor:
    """Eager's call; compiled, the parameters are inputs, so that one graph serves all layers."""
    result: torch.Tensor = layer(x, cos, sin, at, cache, places_read(at))
    return result


def made_layers(sizes: Sizes, count: int, device: str, dtype: torch.dtype) -> list[Layer]:
    """Layers with other weights each, of variance 1 / inputs.

    ``nn.Linear``'s own have a third of that, and three such in a row would vanish beside the residual.
    """
    torch.manual_seed(1)
    with torch.device(device):
        layers = [Layer(sizes) for _ in range(count)]
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return [layer.to(dtype).eval() for layer in layers]


def layer_rows(
    ours: Call, name: str, cell: tuple[int, int], count: int, inputs: int, device: str, dtype: torch.dtype
) -> Iterator[LayerRow]:
    """The errors of each layer in turn, over several inputs; not judged yet."""
    batch, length = cell
    layers = made_layers(MODELS[name], count, device, dtype)
    x, cos, sin, at, caches = example(MODELS[name], count, batch, length, device, dtype, PLACE)
    entering = [x, *(torch.randn_like(x) for _ in range(inputs - 1))]
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        row = LayerRow(name, f"{batch}x{length}", number)
        exact = copy.deepcopy(layer).double()
        for which, entered in enumerate(entering):
            entering[which] = _compare(row, ours, layer, exact, entered, (cos, sin, at), cache)
        yield row


def copied(cache: Cache, dtype: torch.dtype) -> Cache:
    keys, values = (one.to(dtype, copy=True) for one in cache)
    return keys, values


def _compare(
    row: LayerRow, ours: Call, layer: Layer, exact: Layer, x: torch.Tensor, place: Sequence[Any], cache: Cache
) -> torch.Tensor:
    """Add the errors of one call to a row; eager's output. Each contestant writes to caches of its own."""
    cos, sin, at = place
    exact_cache, eager_cache, our_cache = (copied(cache, dtype) for dtype in (torch.float64, x.dtype, x.dtype))
    wide = run_layer(exact, x.double(), cos.double(), sin.double(), at, exact_cache)
    eager = run_layer(layer, x, cos, sin, at, eager_cache)
    entered = x.clone()
    found = ours(layer, x, cos, sin, at, our_cache)
    if (found.dtype, found.shape) != (eager.dtype, eager.shape):
        row.problems.append(f"{found.dtype} {tuple(found.shape)}, eager's is {eager.dtype} {tuple(eager.shape)}")
        return eager
    row.errors.setdefault("output", Errors()).add(eager, found, wide)
    if not torch.equal(entered, x):
        row.problems.append("its input is overwritten")
    if at is not None:
        for number, what in enumerate(("keys", "values")):
            held, before = our_cache[number], cache[number]
            written = [one[number].index_select(2, at) for one in (eager_cache, our_cache, exact_cache)]
            row.errors.setdefault(what, Errors()).add(*written)
            if not torch.equal(held.index_copy_(2, at, before.index_select(2, at)), before):
                row.problems.append(f"other {what} of the cache are overwritten")
    return eager
