"""A plan serves the same ops with other constants, computes with those, and was stored by other keys in the past."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_tunes import count_instead_of_timing
from report_samples import known_machine
from torch import nn

from fuseplan.planner import stats, tune
from fuseplan.planner.capture.trace import record
from fuseplan.planner.groups.regions import exact_form, find_regions, region_parts
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import PlanRecord

SHAPE, WIDTH = (3, 127), 33


class NormAndLinear(nn.Module):
    """A norm, a linear layer, a soft cap and a power: a region with islands on both sides of a matmul."""

    def __init__(self, eps: float = 1e-5, cap: float = 30.0, power: float = 3.0) -> None:
        super().__init__()
        self.eps, self.cap, self.power = eps, cap, power

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        capped = self.cap * torch.tanh((normal @ weight) / self.cap)
        return capped.abs().pow(self.power) + x[:, :WIDTH].sigmoid() * capped


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(SHAPE) * 0.01, torch.randn(SHAPE[1], WIDTH)


def run(db: Path, function: Callable[..., torch.Tensor], on_miss: str = "model") -> tuple[int, int]:
    """Checks the result; how many groups were found in the database, and how many regions were not."""
    torch._dynamo.reset()
    found, missed = stats().from_database, stats().misses
    options: Any = {"db": str(db), "on_miss": on_miss}
    with torch.no_grad():
        result = torch.compile(function, backend="fuseplan", options=options, dynamic=False)(*inputs())
    expected = function(*(one.double() for one in inputs()))
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-6)
    return stats().from_database - found, stats().misses - missed


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    db = tmp_path_factory.mktemp("constants") / "tuning.db"
    with pytest.MonkeyPatch.context() as patch:
        count_instead_of_timing(patch)
        run(db, NormAndLinear(), "tune")
    return db


def test_other_constants_find_the_plan_and_compute_with_theirs(tuned: Path) -> None:
    exact, _ = run(tuned, NormAndLinear())
    # At inputs this small eps is most of what is divided by: a kernel with the tuned one would be far off.
    assert exact and run(tuned, NormAndLinear(eps=3e-2, cap=50.0)) == (exact, 0)
    for special in ({"cap": 1.0}, {"power": 0.5}, {"power": 2.5}):
        assert run(tuned, NormAndLinear(**special))[1], special


def test_two_of_a_graph_differ_in_a_constant_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_instead_of_timing(monkeypatch)

    def norm(x: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm(x, 1e-5) @ weight - norm(x, 3e-2) @ weight

    run(tmp_path / "tuning.db", both, "tune")
    assert run(tmp_path / "tuning.db", both)[1] == 0


def stored_by_exact_keys(db: Path, target: Path) -> list[PlanRecord]:
    """The plans as earlier versions stored them."""
    graph = record(NormAndLinear(), inputs(), {})[0].graph
    regions = find_regions(graph)
    by_key = {one.key: one for region in regions for one in (region, *region_parts(graph, region))}
    found = []
    for plan in Database(db).plans():
        region = by_key[plan.key.workload]
        old = exact_form(graph, region)
        place = [old.ops.index(name) for name in region.ops]
        groups = tuple(replace(one, ops=tuple(place[at] for at in one.ops)) for one in plan.groups)
        found.append(replace(plan, key=replace(plan.key, workload=old.key), groups=groups, rejected=()))
    with Database(target) as database:
        for plan in found:
            database.put_plan(plan)
    return found


def test_what_earlier_versions_stored_is_found(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "tuning.db"
    plans = stored_by_exact_keys(tuned, old)
    assert {one.key for one in plans} != {one.key for one in Database(tuned).plans()}
    exact, missed = run(old, NormAndLinear())
    assert exact and not missed
    assert run(old, NormAndLinear(eps=3e-2))[1]
    count_instead_of_timing(monkeypatch)
    run(old, NormAndLinear(), "measure")  # takes nothing over: it reads
    assert not stats().fallbacks
    # A tune takes it over, without measuring it again, and then it serves other constants as well.
    known_machine(old)
    before = len(list(Database(old).records()))
    tune(NormAndLinear(), inputs(), device="cpu", db=old)
    assert len(list(Database(old).records())) == before
    assert run(old, NormAndLinear(eps=3e-2)) == (exact, 0)


def test_a_damaged_plan_of_an_earlier_version_is_refused(tuned: Path, tmp_path: Path) -> None:
    old = tmp_path / "tuning.db"
    with Database(old) as database:
        for plan in stored_by_exact_keys(tuned, old):
            groups = tuple(replace(one, ops=tuple(at + 1000 for at in one.ops)) for one in plan.groups)
            database.put_plan(replace(plan, groups=groups))
    run(old, NormAndLinear())
    assert any("an op that the region does not have" in reason for reason in stats().fallbacks)
