"""Small modules for ``--module toy_models:<name>``."""

from __future__ import annotations

import torch
from torch import nn


class Gated(nn.Module):
    """A gated feed-forward block: two matmuls, silu and a product between them."""

    def __init__(self, width: int = 16, inner: int = 24, out: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        hidden: torch.Tensor = self.down(torch.nn.functional.silu(gate) * up)
        return hidden


def gated() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Gated(), torch.randn(3, 16)


def widened() -> tuple[nn.Module, torch.Tensor]:
    """The block with another matmul at its end."""
    torch.manual_seed(0)
    return Gated(out=20), torch.randn(3, 16)


def broken() -> tuple[nn.Module, torch.Tensor]:
    raise RuntimeError("no weights here")


class Two(Gated):
    """The block, and a tanh after a running sum: a region of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.rrelu(super().forward(x)))


def two_regions() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Two(), torch.randn(3, 16)


class Siblings(nn.Module):
    """Gate and up as two matmuls that read one value."""

    def __init__(self, width: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner)
        self.up = nn.Linear(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


def siblings() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Siblings(), torch.randn(3, 16)
