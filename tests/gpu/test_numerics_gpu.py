"""What a program asks for and can see, on a GPU: roundings, shifts, signs of zeros, errors, default configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import compiled, fresh_start
from model_families import build, inputs

import fuseplan.planner

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def split(x: torch.Tensor, half: torch.dtype) -> Any:
    high = x.to(half)
    low = (x - high.float()).to(half)
    return high, low, x - high.float() - low.float(), (x * 3).to(half).float() * 2


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cols", [1, 127, 4096])
def test_the_parts_of_a_number(half: torch.dtype, cols: int, tmp_path: Path) -> None:
    x = torch.randn(37, cols, device="cuda")
    results = compiled(split, tmp_path / "tuning.db")(x, half)
    for result, expected in zip(results, split(x, half), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert fuseplan.planner.stats().fallbacks == {}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_shifts_by_any_amount(dtype: torch.dtype, tmp_path: Path) -> None:
    def shifts(x: torch.Tensor, by: torch.Tensor) -> Any:
        return (x >> by) | 0, (x << by) | 0, (x >> 8) + 0

    limits = torch.iinfo(dtype)
    x = torch.tensor([0, 1, 3, limits.max, limits.min, limits.max // 2 + 1], dtype=dtype, device="cuda")[:, None]
    by = torch.tensor([0, 1, 7, 8, 9, limits.bits - 1, limits.bits, 127, limits.min], dtype=dtype, device="cuda")
    for result, expected in zip(compiled(shifts, tmp_path / "tuning.db")(x, by), shifts(x, by), strict=True):
        assert torch.equal(result, expected)


def test_signs_of_zeros(tmp_path: Path) -> None:
    def bounded(x: torch.Tensor) -> Any:
        return x.relu(), x.clamp(0.0, 1.0), x.clamp_max(0.0), -x, x.abs(), x.floor(), x.sqrt()

    x = torch.tensor([-0.0, 0.0, math.nan, -math.inf, math.inf, -1.0, 0.5], device="cuda").repeat(37)
    for result, expected in zip(compiled(bounded, tmp_path / "tuning.db")(x), bounded(x), strict=True):
        assert torch.equal(result.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(result[numbers].signbit(), expected[numbers].signbit())


def test_a_dtype_that_eager_refuses(tmp_path: Path) -> None:
    def writes(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return cache.index_copy_(0, at, new * 2) + 1

    given = torch.zeros(4, 8), torch.tensor([1]), torch.ones(1, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(writes, tmp_path / "tuning.db")(*(one.cuda() for one in given))


@pytest.mark.parametrize("family", ["mamba2", "deepseek-v3"])
def test_a_prompt_is_planned_without_failures(family: str, tmp_path: Path) -> None:
    model = build(family, dtype=torch.bfloat16).cuda()
    given = {name: value.cuda() for name, value in inputs(family, 2, 41).items()}
    compiled(model, tmp_path / "tuning.db")(**given)
    said = [*fuseplan.planner.stats().fallbacks, *fuseplan.planner.stats().notes]
    assert not [reason for reason in said if "planning failed" in reason or "choices here" in reason]
