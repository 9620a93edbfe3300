"""A process that compiles many shapes keeps the code of those that it still runs, and no other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from mapped_files import mapped

import fuseplan.planner
from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.native.build import default_cache_dir

REASON = CppBackend().unavailable()
pytestmark = [
    pytest.mark.usefixtures("quick_collections"),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped"),
]
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.cos(x) + torch.exp(x)


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x * 2.0 + 1.0, x.shape[-1:])


def written(x: torch.Tensor) -> torch.Tensor:
    held = torch.tanh(x) * 3.0
    x.copy_(held + 1.0)
    return held.sum(-1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [pointwise, normed, written])
def test_kernels_of_dropped_graphs_are_unloaded(function: Function, dynamic: bool, tmp_path: Path) -> None:
    folder, db = default_cache_dir(), tmp_path / "tuning.db"
    compiled(pointwise, db)(torch.randn(2, 65))  # what a process loads once, too
    torch._dynamo.reset()
    gc.collect()
    before = mapped(folder)
    shapes = [(1, 5), (3, 127), (64, 129), (7, 3)]
    for rows, columns in shapes:
        fast = compiled(function, db, dynamic=dynamic)
        for more in (0, 2) if dynamic else (0,):
            given = torch.randn(rows + more, columns)
            expected = function(given.clone())
            torch.testing.assert_close(fast(given), expected)
        if not dynamic:
            torch._dynamo.reset()  # each shape anew; what was compiled before is dropped
    assert fuseplan.planner.stats().groups_fused
    assert mapped(folder) - before  # at least those of the last shape
    del fast
    torch._dynamo.reset()
    gc.collect()
    assert mapped(folder) <= before


def test_a_graph_that_is_kept_keeps_its_kernels(tmp_path: Path) -> None:
    folder, db = default_cache_dir(), tmp_path / "tuning.db"
    x = torch.randn(3, 129)
    fast = compiled(pointwise, db)
    expected = fast(x)
    gc.collect()
    held = mapped(folder)
    assert held and fuseplan.planner.stats().groups_fused
    for columns in (5, 127):
        compiled(normed, db)(torch.randn(3, columns))
    gc.collect()
    assert held <= mapped(folder)
    assert torch.equal(fast(x), expected)
