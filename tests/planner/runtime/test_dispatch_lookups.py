"""The plans that the torch.compile back end looks up: hits, misses, sizes between tuned ones, a fresh process."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import Block, compiled, fresh_start, store_plans, swiglu
from paths import SUPPORT
from reference_backend import ReferenceBackend, use

import fuseplan.planner
from fuseplan.planner.tuning.planner import GraphPlan, Planner
from fuseplan.planner.tuning.session import open_session
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import Versions


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    """Interpreted kernels in place of compiled ones."""
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


def test_a_miss_is_counted_logged_once_and_stored(
    db: Path, kernels: ReferenceBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fuseplan")
    x = torch.randn(3, 8)
    for _ in range(2):
        compiled(swiglu, db)(x, x)
        torch._dynamo.reset()
    assert fuseplan.planner.stats().misses == 2
    assert sum("no tuned plan for silu+mul 3x8 float32" in message for message in caplog.messages) == 1
    (row,) = Database(db, mode="read").misses()
    assert row["count"] == 2 and row["payload"]["ops"] == ["aten.silu.default", "aten.mul.Tensor"]


def test_stored_plans_are_hits(db: Path, kernels: ReferenceBackend) -> None:
    model = Block()
    inputs = torch.randn(4, 33), torch.randn(4, 33)
    store_plans(model, inputs, db, ({},))
    result = compiled(model, db)(*inputs)
    for one, other in zip(result, model(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    done = fuseplan.planner.stats()
    assert (done.from_database, done.from_model, done.misses) == (2, 0, 0)
    assert done.lookup_s > 0 and str(done).startswith("1 graph, 1 region: 2 groups fused (2 from the database")


def tuned_by_the_model(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tuners that measure nothing; each says that it was closed."""
    planned: list[str] = []

    class Pretender:
        """Stands for a tuner: plans come from the model, and are stored as tuned."""

        def __init__(self, database: Database) -> None:
            self.database = database

        def __enter__(self) -> Pretender:
            return self

        def __exit__(self, *exc: object) -> None:
            planned.append("closed")

    by_model = Planner.plan_graph

    def plan_graph(planner: Planner, graph: Any, **options: Any) -> GraphPlan:
        tuner, planner.tuner = planner.tuner, None
        regions = by_model(planner, graph).regions
        for region in regions:
            tuner.database.put_plan(region.record)
        return GraphPlan(tuple(replace(region, source="tuned") for region in regions))

    monkeypatch.setattr("fuseplan.planner.tuning.session.Session.tuner", lambda self, budget: Pretender(self.database))
    monkeypatch.setattr("fuseplan.planner.tuning.planner.Planner.plan_graph", plan_graph)
    return planned


@pytest.mark.parametrize("on_miss", ["model", "unfused", "measure"])
def test_plans_by_other_versions_are_used_and_said(
    on_miss: str, db: Path, kernels: ReferenceBackend, monkeypatch: Any
) -> None:
    x = torch.randn(4, 8)
    store_plans(swiglu, (x, x), db, ({},))
    monkeypatch.setattr(Versions, "current", lambda _: Versions("0.0.1", "0.0.1"))
    torch.testing.assert_close(compiled(swiglu, db, on_miss=on_miss)(x, x), swiglu(x, x))
    done = fuseplan.planner.stats()
    assert (done.misses, done.from_database) == (0, 1)
    ((reason, count),) = done.notes.items()
    assert "another version of fuseplan and torch and used" in reason and count == 1


def test_what_noise_hides_is_no_hit_in_another_version_either(
    db: Path, kernels: ReferenceBackend, monkeypatch: Any
) -> None:
    x = torch.randn(4, 8)
    store_plans(swiglu, (x, x), db, ({},))
    with closing(Database(db)) as database:
        for plan in list(database.plans()):
            database.put_plan(replace(plan, undecided=True))
    monkeypatch.setattr(Versions, "current", lambda _: Versions("0.0.1", "0.0.1"))
    compiled(swiglu, db)(x, x)
    assert fuseplan.planner.stats().misses == 1


def test_a_plan_of_another_version_is_tuned_again(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    x = torch.randn(4, 8)
    store_plans(swiglu, (x, x), db, ({},))
    monkeypatch.setattr(Versions, "current", lambda _: Versions("0.0.1", "0.0.1"))
    planned = tuned_by_the_model(monkeypatch)
    compiled(swiglu, db, on_miss="tune")(x, x)
    assert len(planned) == 1 and fuseplan.planner.stats().misses == 1


@pytest.mark.parametrize(("tuned", "served"), [((8, 64), True), ((16, 32), True), ((8,), False), ((32, 64), False),
                                               ((2, 256), False)])
def test_a_size_between_two_tuned_ones_uses_the_nearer_plan(
    tuned: tuple[int, ...], served: bool, db: Path, kernels: ReferenceBackend
) -> None:
    x = torch.randn(24, 7)

    def rows_only(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)

    torch._dynamo.mark_dynamic(x, 0)
    store_plans(rows_only, (x, x), db, tuple({"s0": size} for size in tuned))
    result = torch.compile(rows_only, backend="fuseplan", options={"db": str(db), "on_miss": "unfused"})(x, x)
    torch.testing.assert_close(result, swiglu(x, x))
    done = fuseplan.planner.stats()
    assert (done.bucketed, done.from_database) == ((1, 1) if served else (0, 0))
    assert done.misses == 1  # the exact size was not tuned, and the next tune may want to know


def test_unfused_on_miss(db: Path, kernels: ReferenceBackend) -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(swiglu, db, on_miss="unfused")(x, x), swiglu(x, x))
    done = fuseplan.planner.stats()
    assert (done.groups_fused, done.misses, done.regions) == (0, 1, 1) and not kernels.calls


def test_tune_on_miss_stores_a_plan(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    planned = tuned_by_the_model(monkeypatch)
    x = torch.randn(3, 8)
    compiled(swiglu, db, on_miss="tune")(x, x)
    assert fuseplan.planner.stats().from_tuned == 1 and planned == ["closed"]
    torch._dynamo.reset()
    compiled(swiglu, db)(x, x)
    assert fuseplan.planner.stats().from_database == 1


def test_what_a_neighbouring_size_serves_is_not_tuned(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    def two_regions(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.rrelu(swiglu(x, y))) * 2.0

    inputs = torch.randn(5, 8), torch.randn(5, 8)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    store_plans(swiglu, inputs, db, ({"s0": 4}, {"s0": 8}))
    tuned: list[list[str]] = []
    by_measurement = Planner._decide

    def decide(planner: Planner, graph: Any, region: Any, table: Any) -> Any:
        tuned.append([graph.op(name).op for name in region.ops])
        monkeypatch.setattr(planner, "tuner", None)
        plan = by_measurement(planner, graph, region, table)()
        return lambda: replace(plan, source="tuned")

    monkeypatch.setattr("fuseplan.planner.tuning.session.Session.tuner", lambda self, budget: nullcontext())
    monkeypatch.setattr(Planner, "_decide", decide)
    torch.testing.assert_close(compiled(two_regions, db, on_miss="tune")(*inputs), two_regions(*inputs))
    assert tuned == [["aten.tanh.default", "aten.mul.Tensor"]]
    done = fuseplan.planner.stats()
    assert (done.bucketed, done.from_database, done.from_tuned) == (1, 1, 1)


def test_a_stored_do_not_fuse_is_obeyed(db: Path, kernels: ReferenceBackend) -> None:
    x = torch.randn(4, 8)
    store_plans(swiglu, (x, x), db, ({},))
    with Database(db) as database:
        (plan,) = database.plans()
        (group,) = plan.groups
        singles = tuple(replace(group, ops=(op,), implementation="aten", config={}) for op in group.ops)
        database.put_plan(replace(plan, groups=singles))
    compiled(swiglu, db)(x, x)
    done = fuseplan.planner.stats()
    assert (done.groups_fused, done.planned_unfused, done.misses, done.fallbacks) == (0, 1, 0, {})


# -- a fresh process --------------------------------------------------------------------------------------


CHILD = """
import sys, torch, fuseplan.planner
sys.path.insert(0, sys.argv[2])
import dispatch_samples
torch.manual_seed(0)
model = dispatch_samples.Block()
inputs = torch.randn(4, 33), torch.randn(4, 33)
with torch.no_grad():
    result = torch.compile(model, backend="fuseplan", options={"db": sys.argv[1], "on_miss": "unfused"})(*inputs)
    torch.testing.assert_close(result, model(*inputs))
done = fuseplan.planner.stats()
print(done.from_database, done.misses, dict(done.fallbacks))
"""


def test_a_fresh_process_hits_what_was_stored(db: Path) -> None:
    session = open_session("cpu", db)
    if session.backends[0].unavailable():
        pytest.skip("no C++ compiler")
    store_plans(Block(), (torch.randn(4, 33), torch.randn(4, 33)), db, ({},))
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(db), str(SUPPORT)], capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "2 0 {}", run.stderr[-2000:]
