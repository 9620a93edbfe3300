"""Modules that are hard to capture."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """Shares a weight between two layers, has a buffer and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Buffer(torch.full((6,), 2.0))
        self.shift = torch.ones(6)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = torch.relu(self.second(self.first(x))) * self.scale + self.shift
        return y if extra is None else y + extra


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y.cos() * 2


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x - 1
