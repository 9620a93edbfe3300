"""Modules of kernels are Triton's to unload; nothing of ours keeps those of graphs that Dynamo has dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dispatch_samples import compiled, fresh_start

import fuseplan.planner

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.cos(x) + torch.exp(x)


def loaded() -> int:
    """Kernels that are loaded on a device; their objects go with the last reference to them."""
    from triton.compiler import CompiledKernel

    gc.collect()
    return sum(isinstance(one, CompiledKernel) and one.function is not None for one in gc.get_objects())


def test_kernels_of_dropped_graphs_are_let_go(tmp_path: Path) -> None:
    db = tmp_path / "tuning.db"
    before = loaded()
    kept = compiled(pointwise, db, dynamic=False)
    x = torch.randn(3, 129, device="cuda")
    expected = kept(x)
    one = loaded()
    assert one > before and fuseplan.planner.stats().groups_fused
    for columns in (1, 5, 127, 2048):
        torch.testing.assert_close(kept(given := torch.randn(7, columns, device="cuda")), pointwise(given))
    assert loaded() > one
    assert torch.equal(kept(x), expected)
    del kept
    torch._dynamo.reset()
    assert loaded() == before
