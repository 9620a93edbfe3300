"""Convolutions with channels last, and what is computed beside them, on a GPU: as near to float64 as eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import fresh_start
from torch import nn

from fuseplan.planner.dispatch_stats import reset_stats, stats

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    reset_stats()
    yield from fresh_start()


def seeded(*modules: nn.Module) -> nn.Module:
    """Modules with numbers of their own in every buffer and parameter, in bfloat16 on the GPU."""
    made = nn.Sequential(*modules).eval()
    for name, value in [*made.named_parameters(), *made.named_buffers()]:
        if value.is_floating_point():
            value.data.uniform_(0.5, 1.5) if "var" in name else value.data.normal_(0, 0.3)
    return made.to("cuda", torch.bfloat16)


class Upsampled(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Conv2d(5, 8, 3, padding=1), nn.Conv2d(8, 4, 1), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = F.silu(self.first(x))
        wide = F.interpolate(made, scale_factor=float(self.factor), mode="bilinear")
        return self.second(torch.cat((wide, wide.abs()), 1)[:, 4:12])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: seeded(nn.Conv2d(5, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 7, 1)),
    "depthwise": lambda: seeded(
        nn.Conv2d(5, 24, 1), nn.BatchNorm2d(24), nn.ReLU6(), nn.Conv2d(24, 24, 3, 2, 1, groups=24),
        nn.BatchNorm2d(24), nn.ReLU6(), nn.Conv2d(24, 8, 1)),
    "multiplied": lambda: seeded(nn.Conv2d(5, 8, 1), nn.Conv2d(8, 16, 5, padding=2, groups=8), nn.GELU()),
    "max pool": lambda: seeded(nn.Conv2d(5, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    "mean pool": lambda: seeded(nn.Conv2d(5, 8, 3), nn.SiLU(), nn.AvgPool2d(2), nn.Conv2d(8, 4, 1)),
    "groups": lambda: seeded(nn.Conv2d(5, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3)),
    "one group": lambda: seeded(nn.Conv2d(5, 16, 3, padding=1), nn.GroupNorm(1, 16), nn.Conv2d(16, 4, 3)),
    "bilinear": lambda: seeded(Upsampled(2)),
    "bilinear by eight": lambda: seeded(Upsampled(8)),
}


@pytest.mark.parametrize("shape", [(2, 5, 31, 33), (1, 5, 16, 127), (3, 5, 9, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_pictures(name: str, shape: tuple[int, ...]) -> None:
    check(MODELS[name](), torch.randn(shape, device="cuda", dtype=torch.bfloat16))
    assert stats().channels_last >= 1


@pytest.mark.parametrize("length", [3, 127, 4097])
def test_lines(length: int) -> None:
    model = seeded(
        nn.Conv1d(5, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, 2, 1, groups=16), nn.Conv1d(16, 8, 1))
    check(model, torch.randn(2, 5, length, device="cuda", dtype=torch.bfloat16))
    assert stats().channels_last == 3


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("channels", [2, 3, 8, 127])
def test_what_is_upsampled_lies_as_eagers_does(mode: str, channels: int) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.relu(), scale_factor=2.0, mode=mode) * 2

    x = torch.randn(2, channels, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    result, expected = torch.compile(run, backend="fuseplan")(x), run(x)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride() and not stats().fallbacks


def test_upsampling_by_a_number_near_two() -> None:
    """Sizes double, and places do not."""
    def run(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.relu(), scale_factor=2.1, mode="nearest") * 2

    x = torch.randn(1, 3, 4, 4, device="cuda")
    torch.testing.assert_close(torch.compile(run, backend="fuseplan")(x), run(x), rtol=0, atol=0)


def check(model: Any, x: torch.Tensor) -> None:
    """Compares with float64 what eager mode and dispatch give, and their layouts."""
    expected = model(x)
    result = torch.compile(model, backend="fuseplan", dynamic=False)(x)
    assert result.stride() == expected.stride()
    exact = model.double()(x.double())
    scale = exact.abs().max()
    error, usual = ((one.double() - exact).abs().max() / scale for one in (result, expected))
    assert error <= 2 * usual + 2**-8
    assert not stats().fallbacks, stats()
