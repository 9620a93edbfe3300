"""Matmuls of few rows run by our kernel where nothing was measured, but is known from elsewhere to be faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fuseplan
from fuseplan.search.store.database import Database


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "dtype", "capability", "calls"), [
    (1, torch.bfloat16, "AVX512", 2),
    (3, torch.float32, "AVX512", 2),
    (5, torch.bfloat16, "AVX512", 0),
    (1, torch.float16, "AVX512", 0),
    (1, torch.bfloat16, "AVX2", 0),
])
def test_large_weights_and_few_rows_on_a_cpu_that_is_known(
    rows: int, dtype: torch.dtype, capability: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    torch.manual_seed(0)
    torch._dynamo.reset()
    fuseplan.reset_stats()
    small = nn.Linear(1031, 7, dtype=dtype)  # of its weights a cache holds all
    model = nn.Sequential(nn.Linear(513, 1031, dtype=dtype), nn.SiLU(), nn.Linear(1031, 515, bias=False, dtype=dtype),
                          nn.SiLU(), nn.Linear(515, 1031, dtype=dtype), nn.SiLU(), small).eval()
    model[2].weight.data = model[2].weight.data[:, :].t().contiguous().t()  # no row of these lies in one piece
    x = torch.randn(rows, 513, dtype=dtype)
    db = tmp_path / "empty.db"
    Database(db).close()
    groups = fuseplan.explain(model, x, db=db).groups
    with torch.no_grad():
        found = torch.compile(model, backend="fuseplan", options={"db": str(db)})(x)
        eager = model(x)
        exact = model.double()(x.double())
    assert fuseplan.stats().library_calls == calls
    assert groups.loc[groups["runs"] == "library call matmul.rows", "uses"].sum() == calls
    assert (found - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.parametrize(("positions", "capability", "calls"), [(1, "AVX512", 1), (17, "AVX512", 0), (1, "AVX2", 0)])
def test_attention_of_few_rows_on_a_cpu_that_is_known(
    positions: int, capability: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    torch.manual_seed(0)
    torch._dynamo.reset()
    fuseplan.reset_stats()
    query, key, value = torch.randn(2, 4, positions, 32), torch.randn(2, 2, 301, 32), torch.randn(2, 2, 301, 32)
    seen = (torch.arange(301) < 200).expand(2, 1, 1, 301)
    db = tmp_path / "empty.db"
    Database(db).close()

    def attend(*operands: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*operands, seen, enable_gqa=True)

    with torch.no_grad():
        found = torch.compile(attend, backend="fuseplan", options={"db": str(db)})(query, key, value)
    exact = attend(query.double(), key.double(), value.double())
    assert fuseplan.stats().library_calls == calls
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
