"""Zeros keep eager's sign, and NaN stays NaN, in compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start

import fuseplan.planner
from fuseplan.kernels.cpp.backend import CppBackend

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
SPECIAL = (-0.0, 0.0, math.nan, -math.inf, math.inf, -1.0, 1.0, -1e-40, 1e-40, 0.5, -0.5, 2.5, -2.5)

FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda x, y: F.relu(x),
    "relu6": lambda x, y: F.relu6(x),
    "clamp": lambda x, y: x.clamp(0.0, 1.0),
    "clamp_min": lambda x, y: x.clamp_min(0.0),
    "clamp_max": lambda x, y: x.clamp_max(0.0),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "abs": lambda x, y: x.abs(),
    "neg": lambda x, y: -x,
    "sqrt": lambda x, y: x.sqrt(),
    "floor": lambda x, y: x.floor(),
    "ceil": lambda x, y: x.ceil(),
    "round": lambda x, y: x.round(),
    "leaky_relu": lambda x, y: F.leaky_relu(x),
    "square": lambda x, y: x**2,
    "cube": lambda x, y: x**3,
    "pow": torch.pow,
    "div": lambda x, y: x / y,
    "sin": lambda x, y: x.sin(),
    "tanh": lambda x, y: x.tanh(),
    "erf": lambda x, y: x.erf(),
    "elu": lambda x, y: F.elu(x),
    "celu": lambda x, y: F.celu(x, 0.75),
    "prelu": lambda x, y: F.prelu(x, x.new_full((1,), 0.25)),
    "hardshrink": lambda x, y: F.hardshrink(x),
    "threshold": lambda x, y: F.threshold(x, 0.5, -0.0),  # beside zeros of the other sign in one kernel
    "threshold to 0": lambda x, y: F.threshold(x, 0.5, 0.0),
    "sign": lambda x, y: x.sign(),
    "trunc": lambda x, y: x.trunc(),
    "frac": lambda x, y: x.frac(),
    "log1p": lambda x, y: x.log1p(),
    "expm1": lambda x, y: x.expm1(),
    "nan_to_num": lambda x, y: x.nan_to_num(),
    "nan_to_num by -0.0": lambda x, y: x.nan_to_num(nan=-0.0),
    "nan_to_num by what is no number": lambda x, y: x.nan_to_num(posinf=math.nan),
    "nan_to_num that swaps infinities": lambda x, y: x.nan_to_num(posinf=-math.inf, neginf=math.inf),
    "pad": lambda x, y: F.pad(x, (2, 3), value=-0.0) * 2,
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "clamp by tensors": lambda x, y: x.clamp(y.minimum(-y), y.maximum(-y)),
    "clamp_min by a tensor": lambda x, y: torch.clamp_min(x, y),
    "clamp_max by a tensor": lambda x, y: torch.clamp_max(x, y),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def signs(values: torch.Tensor) -> torch.Tensor:
    """2 for NaN, else -1 or 1; that of a zero counts."""
    return torch.where(values.isnan(), 2.0, torch.copysign(torch.ones_like(values), values))


def test_signs_are_eager_s(tmp_path: Path) -> None:
    def all_of_them(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, y) for function in FUNCTIONS.values()]

    # Lengths of whole vectors and odd ones, and every pair of numbers.
    for repeats in (1, 3):
        x = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL)).repeat(repeats)
        y = torch.tensor(SPECIAL).repeat(len(SPECIAL) * repeats)
        results = compiled(all_of_them, tmp_path / "tuning.db", dynamic=False)(x, y)
        for name, result, expected in zip(FUNCTIONS, results, all_of_them(x, y), strict=True):
            assert torch.equal(signs(result), signs(expected)), name
            assert torch.equal(result == 0, expected == 0), name
    assert fuseplan.planner.stats().fallbacks == {}
