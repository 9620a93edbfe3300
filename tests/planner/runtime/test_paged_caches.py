"""A model whose KV cache lies in pages, through ``torch.compile``: written, read, as right as eager, and planned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import compiled, fresh_start
from fast_tunes import count_instead_of_timing
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import fuseplan.planner

BATCH, HEADS, SHARED, WIDTH, BLOCKS = 3, 4, 2, 16, 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


class Layer(nn.Module):
    """One token of each sequence: its key and value are written to a page, and all pages of the sequence are read."""

    def __init__(self, page: int, rows_first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        count = BATCH * BLOCKS + 2
        self.page, self.rows_first = page, rows_first
        shape = (count, page, SHARED, WIDTH) if rows_first else (count, SHARED, page, WIDTH)
        self.keys, self.values = (nn.Buffer(torch.zeros(shape, dtype=dtype)) for _ in range(2))
        self.into = nn.Linear(WIDTH, (HEADS + 2 * SHARED) * WIDTH, dtype=dtype)
        self.out = nn.Linear(HEADS * WIDTH, WIDTH, dtype=dtype)

    def _pages(self, pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        found = pages[table]
        if self.rows_first:
            return found.reshape(BATCH, -1, SHARED, WIDTH).transpose(1, 2)
        return found.transpose(1, 2).reshape(BATCH, SHARED, -1, WIDTH)

    def _write(self, pages: torch.Tensor, new: torch.Tensor, number: torch.Tensor, row: torch.Tensor) -> None:
        place = (number, row) if self.rows_first else (number, slice(None), row)
        pages[place] = new

    def forward(self, x: torch.Tensor, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        mixed = self.into(torch.nn.functional.silu(x)).view(BATCH, HEADS + 2 * SHARED, WIDTH)
        query, key, value = mixed.split((HEADS, SHARED, SHARED), 1)
        number = table.gather(1, (at // self.page)[:, None])[:, 0]
        self._write(self.keys, key, number, at % self.page)
        self._write(self.values, value, number, at % self.page)
        seen = torch.arange(BLOCKS * self.page) <= at[:, None]
        found = scaled_dot_product_attention(
            query.unsqueeze(2), self._pages(self.keys, table), self._pages(self.values, table), seen[:, None, None],
            enable_gqa=True)
        return x + self.out(found.transpose(1, 2).flatten(1))


class Model(nn.Module):
    def __init__(self, page: int, rows_first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(page, rows_first, dtype) for _ in range(2))

    def forward(self, x: torch.Tensor, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, table, at)
        return x


def decoded(run: Any, dtype: torch.dtype, page: int, steps: int, index: torch.dtype) -> torch.Tensor:
    """Some tokens one after another, from lengths of their own, on pages in no order."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(BATCH * BLOCKS + 2, generator=generator)[: BATCH * BLOCKS].view(BATCH, BLOCKS)
    at = torch.tensor([0, page - 1, 2 * page])
    found = []
    for step in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        found.append(run(x, table.to(index), at + step))
    return torch.stack(found)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [(16, False, torch.int64), (16, True, torch.int32), (5, False, torch.int32), (5, True, torch.int64)]


# Each pair of a dtype, a layout and a choice.
@pytest.mark.parametrize(("page", "rows_first", "index", "dtype", "wanted"), [
    (*layout, dtype, True if (row + column) % 2 else None)
    for row, layout in enumerate(LAYOUTS) for column, dtype in enumerate(DTYPES)
])
def test_decoding_over_pages_is_as_right_as_eager(
    page: int, rows_first: bool, index: torch.dtype, dtype: torch.dtype, wanted: bool | None, tmp_path: Path
) -> None:
    eager = Model(page, rows_first, dtype)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    run = compiled(ours, tmp_path / "tuning.db", decode_attention=wanted)
    result = decoded(run, dtype, page, 4, index)
    theirs, wide = decoded(eager, dtype, page, 4, index), decoded(exact, torch.float64, page, 4, index)
    allowed = 2 * (theirs - wide).abs().max() + 8 * torch.finfo(dtype).eps
    assert (result - wide).abs().max() <= allowed
    for (name, one), other in zip(ours.named_buffers(), exact.buffers(), strict=True):
        assert (one - other).abs().max() <= allowed, name
    stats = fuseplan.planner.stats()
    assert stats.paged_attention == (2 if wanted else 0) and not stats.fallbacks, stats


def test_a_plan_is_tuned_stored_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_instead_of_timing(monkeypatch)
    model = Model(16, False, torch.float32)
    before = decoded(copy.deepcopy(model), torch.float32, 16, 2, torch.int64)
    options = {"decode_attention": True, "numerics": "fp32"}
    tuned = compiled(copy.deepcopy(model), tmp_path / "tuning.db", on_miss="tune", **options)
    torch.testing.assert_close(decoded(tuned, torch.float32, 16, 2, torch.int64), before)
    first = fuseplan.planner.stats()
    assert first.paged_attention == 2 and not first.fallbacks, first
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    again = compiled(copy.deepcopy(model), tmp_path / "tuning.db", on_miss="unfused", **options)
    torch.testing.assert_close(decoded(again, torch.float32, 16, 2, torch.int64), before)
    stats = fuseplan.planner.stats()
    assert stats.misses == 0 and stats.from_database + stats.planned_unfused > 0 and not stats.fallbacks, stats


def test_a_page_that_does_not_exist_raises_as_in_eager(tmp_path: Path) -> None:
    model = Model(16, False, torch.float32)
    run = compiled(model, tmp_path / "tuning.db", decode_attention=True)
    table, at = torch.zeros(BATCH, BLOCKS, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64)
    run(torch.randn(BATCH, WIDTH), table, at)
    table[1, 2] = BATCH * BLOCKS + 2
    with pytest.raises(IndexError):
        run(torch.randn(BATCH, WIDTH), table, at)
