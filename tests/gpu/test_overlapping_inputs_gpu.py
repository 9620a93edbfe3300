"""Inputs that overlap in a later call only, on a GPU: launched one by one, and replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from torch import Tensor

import fuseplan.planner

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def step(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
    before = F.silu(x * 1.5)
    cache.index_copy_(0, at, before)
    return F.silu(x + 1) * before + cache.sum(0)


@pytest.mark.parametrize("replays", [False, True])
def test_a_call_whose_inputs_overlap_is_as_in_eager(replays: bool, tmp_path: Path) -> None:
    fast = compiled(step, tmp_path / "tuning.db", cuda_graphs=replays)
    at = torch.tensor([2], device="cuda")
    own, given = (torch.linspace(-1, 1, 9 * 127, device="cuda").view(9, 127) for _ in range(2))
    for overlaps in (False, False, False, False, True, False, True):
        x, same = (base[2:3] if overlaps else base[5:6].clone() for base in (own, given))
        torch.testing.assert_close(fast(given, same, at), step(own, x, at))
        torch.testing.assert_close(given, own)
    done = fuseplan.planner.stats()
    assert sum(done.fallbacks.values()) == 2 and done.groups_fused
    assert bool(done.recordings) == replays
