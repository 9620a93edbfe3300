"""Integers wrap around as ATen's do: a C++ compiler may not take an overflow for impossible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def wrapping(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Maxima of negated numbers begin at the smallest number, which has no negative of its own."""
    return (-x).amax(-1), (x * -1).amin(-1), x + 1 > x, x - 1 < x, (x * 2) // 2, x.abs().amax(-1), (-x).sum(-1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("width", [3, 16, 127])
def test_results_are_eagers_up_to_the_largest_number(dtype: torch.dtype, width: int, tmp_path: Path) -> None:
    torch._dynamo.reset()
    limits = torch.iinfo(dtype)
    numbers = torch.randint(-9, 9, (4, width), dtype=dtype)
    numbers[1, 0], numbers[2, -1] = limits.min, limits.max
    call = torch.compile(wrapping, backend="fuseplan", options={"db": str(tmp_path / "tuning.db")}, dynamic=False)
    with torch.no_grad():
        for number, (got, wanted) in enumerate(zip(call(numbers), wrapping(numbers), strict=True)):
            assert torch.equal(got, wanted), number
