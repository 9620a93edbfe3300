"""On CPUs an op that stands alone is a kernel where ATen is known to be slow, and ATen's elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fuseplan
from fuseplan.search.store.database import Database

Function = Callable[[torch.Tensor], torch.Tensor]
SLOW: dict[str, Function] = {
    "std": lambda x: x.std(1),
    "var across": lambda x: x.var(0),
    "argmax": lambda x: x.argmax(1),
    "any": lambda x: x.any(),
    "norm across": lambda x: torch.linalg.vector_norm(x, dim=0),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum across": lambda x: x.cumsum(0),
    "cummax": lambda x: x.cummax(1)[1],
    "tanh": torch.tanh,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gather": lambda x: x.gather(1, torch.zeros(67, 3, dtype=torch.long)),
}
FAST: dict[str, Function] = {
    "sum": lambda x: x.sum(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "gelu": F.gelu,
    "neg": torch.neg,
}


@pytest.mark.parametrize("name", [*SLOW, *FAST])
def test_what_runs_by_itself(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    fuseplan.reset_stats()
    Database(tmp_path / "empty.db").close()
    function, x = {**SLOW, **FAST}[name], torch.randn(67, 257, generator=torch.Generator().manual_seed(0))
    found = torch.compile(function, backend="fuseplan", options={"db": str(tmp_path / "empty.db")})(x)
    assert fuseplan.stats().groups_fused == (name in SLOW)
    torch.testing.assert_close(found, function(x.double()).to(found.dtype), rtol=2e-6, atol=1e-5)


def test_what_is_small_is_left_to_aten(tmp_path: Path) -> None:
    torch._dynamo.reset()
    fuseplan.reset_stats()
    Database(tmp_path / "empty.db").close()
    x = torch.randn(7, 129)
    found = torch.compile(lambda x: x.std(1), backend="fuseplan", options={"db": str(tmp_path / "empty.db")})(x)
    assert fuseplan.stats().groups_fused == 0 and torch.equal(found, x.std(1))
