"""A wrong plan of a worker costs its region: the tune says so, and stores nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fleet_here
import pytest
import report_samples as samples

from fuseplan.planner.api.request import TuneRequest
from fuseplan.planner.api.tune import Tuned, tune_request
from fuseplan.planner.fleet import worker_state
from fuseplan.planner.fleet.run import run_by
from fuseplan.planner.fleet.terms import RegionOutcome, RegionTask
from fuseplan.planner.fleet.worker_state import RegionTuner
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.tuning.plans import RegionPlan
from fuseplan.search.store.database import Database
from fuseplan.search.store.maintenance import verify_database
from fuseplan.search.store.record import PlanRecord, RecordKey

ESCAPE = "\x1b[31mred"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels: all tests tune the same group."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fleet_here.tune_quickly(monkeypatch)
    fleet_here.in_the_place_of_local(monkeypatch, 1)
    return samples.known_machine(tmp_path / "fleet.db")


def tune_swiglu(db: Path) -> Tuned:
    given = ModelArguments(pattern="swiglu", shape="3x8", dtype="float32")
    (found,) = tune_request(TuneRequest("cpu", given, db=db), runner=run_by("local"))
    assert isinstance(found, Tuned)
    return found


def without_its_ops(record: PlanRecord) -> PlanRecord:
    return replace(record, groups=record.groups[:-1] if len(record.groups) > 1 else (
        replace(record.groups[0], ops=record.groups[0].ops[:-1]),))


def with_a_config(record: PlanRecord, **config: Any) -> PlanRecord:
    return replace(record, groups=tuple(
        replace(one, implementation="cpp", config={**one.config, **config}) for one in record.groups))


WRONG: dict[str, Callable[[PlanRecord], PlanRecord]] = {
    "an op is left out": without_its_ops,
    "an op is there twice": lambda record: replace(record, groups=record.groups * 2),
    "positions are of another region": lambda record: replace(
        record, groups=tuple(replace(one, ops=tuple(at + 50 for at in one.ops)) for one in record.groups)),
    "a value outside its space": lambda record: with_a_config(record, threads=7777),
    "a text in a config": lambda record: with_a_config(record, threads="1); system(0"),
    "an unknown parameter": lambda record: with_a_config(record, nosuch=1),
    "an unknown implementation": lambda record: replace(
        record, groups=tuple(replace(one, implementation="nosuch") for one in record.groups)),
    "a label that a terminal obeys": lambda record: replace(record, label=ESCAPE),
    "a time that is none": lambda record: replace(record, planned_us=-1.0),
    "a size that nobody has": lambda record: replace(record, peak_bytes=2**70),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_plan_that_cannot_be_the_region_s_is_refused_and_deleted(
    how: str, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, keys = RegionTuner.measure, list[RecordKey]()

    def hostile(self: RegionTuner, task: RegionTask) -> RegionPlan | None:
        found = measure(self, task)
        assert found is not None
        keys.append(found.record.key)
        self.tuner.database.put_plan(WRONG[how](found.record))
        return found

    monkeypatch.setattr(RegionTuner, "measure", hostile)
    found = tune_swiglu(db)
    (told,) = found.warnings
    assert "refused" in told and "runs unfused" in told and told.isprintable() and "nosuch" not in told
    assert found.result is not None and not found.result.plans[0].plan.regions
    with Database(db) as database:
        (key,) = keys
        assert database.get_plans([key])[key].record is None and not list(database.plans())
        assert not database.captures("summary/") and not database.captures("step/")
        assert not verify_database(database)


def test_a_plan_that_is_not_there_costs_its_region(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_state, "measure", lambda *args: RegionOutcome(stored=True, tuned=True))
    found = tune_swiglu(db)
    (told,) = found.warnings
    assert "runs unfused" in told and told.isprintable()
    with Database(db) as database:
        assert not list(database.plans()) and not list(database.records())
