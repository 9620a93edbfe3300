"""Narrow weights of a model that nobody tuned, on a CPU: matmuls of few rows read them as they are stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuseplan
from fuseplan.kernels.cpp.contraction import MAX_ROWS
from fuseplan.search.store.database import Database


class Projection(nn.Module):
    """A linear whose weights are int8 or fp8, with a scale a row, or pairs of four bits in a byte."""

    def __init__(self, kind: str, inner: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        stored = {
            "int8": lambda: torch.randint(-128, 128, (width, inner), dtype=torch.int8),
            "fp8": lambda: torch.randn(width, inner).to(torch.float8_e4m3fn),
            "pairs": lambda: torch.randint(0, 256, (width, inner // 2), dtype=torch.uint8),
        }[kind]()
        self.register_buffer("weight", stored)
        self.register_buffer("scale", (torch.rand(width) / inner).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.weight, self.scale
        assert isinstance(weight, Tensor) and isinstance(scale, Tensor)
        if self.kind == "pairs":
            weight = torch.stack((weight & 15, weight >> 4), -1).reshape(len(weight), -1).to(x.dtype) - 8
            return F.linear(x, weight * scale[:, None])
        return F.linear(x, weight.to(x.dtype)) * scale


class Gated(nn.Module):
    """SwiGLU behind a norm, and a residual."""

    def __init__(self, kind: str, inner: int = 128, width: int = 516) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(inner, dtype=torch.bfloat16)
        self.gate, self.up = (Projection(kind, inner, width) for _ in range(2))
        self.down = Projection(kind, width, inner)

    def forward(self, x: Tensor) -> Any:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS + 1])
@pytest.mark.parametrize("kind", ["int8", "fp8", "pairs"])
def test_a_model_that_nobody_tuned(kind: str, rows: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    fuseplan.reset_stats()
    model, x, db = Gated(kind).eval(), torch.randn(rows, 128).bfloat16(), tmp_path / "empty.db"
    Database(db).close()
    with torch.no_grad():
        groups = fuseplan.explain(model, x, db=db).groups
        found = torch.compile(model, backend="fuseplan", options={"db": str(db)})(x)
        eager, exact = model(x), copy.deepcopy(model).double()(x.double())
    assert not fuseplan.stats().fallbacks
    matmuls = groups[groups["ops"].str.contains("linear")]
    assert len(matmuls) and ((matmuls["runs"] == "one cpp kernel") == (rows <= MAX_ROWS)).all()
    assert (found - exact).norm() <= 1.1 * (eager - exact).norm()
