"""After an upgrade: plans of other versions are timed again, and searched only where they no longer stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from reference_backend import ReferenceBackend
from scripted_sessions import graph_of
from scripted_tuner import TARGET, ScriptedTuner, compute_nodes

from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.record import Trial, TuningRecord, Versions
from fuseplan.search.store.transfer import export
from fuseplan.search.timing.contest import Contest

OLD, NEW = Versions("0.1.0", "2.11.0"), Versions("0.1.0", "2.13.0")
GRAPH = graph_of((("exp", "tanh", "neg"), ("sin", "cos")))
REGIONS = {region.key for region in find_regions(GRAPH)}


@dataclass
class Upgraded(ScriptedTuner):
    """Kernels that are timed again take ``factor`` times as long as they did; None: they fail."""

    factor: float | None = 1.0
    versions: Versions = NEW
    timed: int = 0
    fails_together: bool = False

    def play_off(self, *args: Any) -> Contest | None:
        return None if self.fails_together else super().play_off(*args)

    def time_again(self, kernels: Sequence[tuple[TunableGroup, TuningRecord]]) -> list[Trial]:
        self.timed += len(kernels)
        assert {record.evidence.versions for _, record in kernels} <= {OLD}
        assert [subject.key for subject, _ in kernels] == [record.key.workload for _, record in kernels]
        times = (self.factor and self.factor * record.best_us for _, record in kernels)
        return [Trial(record.key, record.backend, record.config, time, "" if time else "wrong result")
                for time, (_, record) in zip(times, kernels, strict=True)]


def fused_us(subject: TunableGroup) -> float:
    return 4.0 + len(compute_nodes(subject))


def planned(store: Database | LayeredDatabase, tuner: ScriptedTuner, graph: DataflowGraph = GRAPH) -> Planner:
    planner = Planner(store, None, "dev", TARGET, (ReferenceBackend(),), tuner=tuner)  # type: ignore[arg-type]
    planner.plan_graph(graph)
    return planner


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that was filled with other versions."""
    monkeypatch.setattr(Versions, "current", staticmethod(lambda device_type: OLD))
    database = Database(tmp_path / "t.db", "write", OLD)
    assert not planned(database, ScriptedTuner(database, fused_us)).renewal.renewed
    database.close()
    monkeypatch.setattr(Versions, "current", staticmethod(lambda device_type: NEW))
    return tmp_path / "t.db"


def test_a_plan_that_holds_is_not_searched_again(tuned: Path) -> None:
    database = Database(tuned, "write", NEW)
    before = {plan.key: plan for plan in database.plans()}
    tuner = Upgraded(database, fused_us)
    planner = planned(database, tuner)
    assert not tuner.tuned and not tuner.screened and tuner.timed == 2 and len(tuner.play_offs) == 1
    (plan,) = planner.renewal.renewed.values()
    assert plan.groups == before[plan.key].groups and plan.evidence.versions == NEW
    assert "timed again with another version of torch" in plan.evidence.reason
    assert database.get_plans([plan.key])[plan.key].hit == plan
    assert {record.evidence.versions for record in database.records()} == {NEW}
    again = Upgraded(database, fused_us)
    assert not planned(database, again).renewal.renewed and not again.timed  # it is one of this version now


@pytest.mark.parametrize("change", [
    {"factor": 1.5}, {"factor": None}, {"together_us": lambda kernels: 1e3 * kernels}, {"unfused_us": 0.1},
    {"fails_together": True},
], ids=["slower", "wrong", "slower together", "ATen is faster now", "fails together"])
def test_a_plan_that_no_longer_stands_is_searched_again(tuned: Path, change: dict[str, Any]) -> None:
    database = Database(tuned, "write", NEW)
    tuner = Upgraded(database, fused_us, **change)
    assert not planned(database, tuner).renewal.renewed and (tuner.tuned or tuner.screened)
    assert {plan.evidence.versions for plan in database.plans() if plan.key.workload in REGIONS} == {NEW}


def test_what_noise_hid_is_searched_again(tuned: Path) -> None:
    database = Database(tuned, "write", NEW)
    for plan in list(database.plans()):
        database.put_plan(replace(plan, undecided=True))
    tuner = Upgraded(database, fused_us)
    assert not planned(database, tuner).renewal.renewed and not tuner.timed and tuner.tuned


def test_records_that_ship_are_renewed_in_the_database_of_the_user(tuned: Path, tmp_path: Path) -> None:
    exported = tmp_path / "shipped.jsonl"
    export(Database(tuned, "read"), exported)
    user = Database(tmp_path / "mine.db", "write", NEW)
    tuner = Upgraded(user, fused_us)
    renewed = planned(LayeredDatabase(user, [exported]), tuner).renewal.renewed
    assert not tuner.tuned and tuner.timed == 2 and {plan.key for plan in user.plans()} == {
        plan.key for plan in renewed.values()}
