"""A tune by a fleet has the plans of a tune here, stores them as that does, and says what came of it."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import fleet_here
import pytest
import report_samples as samples
from distributed import Client
from model_samples import write_config

from fuseplan.planner.api import tune
from fuseplan.planner.api.many import TunedMany
from fuseplan.planner.api.request import TuneRequest, asked_for
from fuseplan.planner.api.tune import Tuned, run_here, tune_request
from fuseplan.planner.capture.trace import Graphs
from fuseplan.planner.cli import main
from fuseplan.planner.errors import CaptureError
from fuseplan.planner.fleet import cluster, worker_state
from fuseplan.planner.fleet.overview import fleet_status, wanted_by
from fuseplan.planner.fleet.run import run_by
from fuseplan.planner.fleet.worker_state import RegionTuner
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.summary import load_summaries
from fuseplan.planner.tuning.tune import Batch
from fuseplan.search.errors import SubjectError
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import PlanRecord, RecordKey

SWIGLU = ModelArguments(pattern="swiglu", shape="3x8", dtype="float32")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures and compiled kernels: several tests tune the same models."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    fleet_here.tune_quickly(monkeypatch)
    fleet_here.in_the_place_of_local(monkeypatch, 2)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return samples.known_machine(tmp_path / "fleet.db")


def llama(tmp_path: Path) -> ModelArguments:
    return ModelArguments(config=write_config(tmp_path, "llama"), layers=2, decode="1", kv_len=16, calls=False)


def by_fleet(db: Path, given: ModelArguments) -> list[Tuned]:
    return tune_request(TuneRequest("cpu", given, db=db), runner=run_by("local"))  # type: ignore[return-value]


def decided(db: Path) -> dict[RecordKey, list[tuple[Any, ...]]]:
    """What every stored plan says, times aside."""
    with Database(db) as database:
        return {plan.key: said(plan) for plan in database.plans()}


def said(plan: PlanRecord) -> list[tuple[Any, ...]]:
    return sorted((one.ops, one.implementation, tuple(sorted(one.config.items())), one.workload) for one in plan.groups)


def test_a_fleet_ends_with_the_plans_of_a_tune_here(tmp_path: Path, db: Path) -> None:
    alone = samples.known_machine(tmp_path / "alone.db")
    given = llama(tmp_path)
    (expected,) = tune_request(TuneRequest("cpu", given, db=alone))
    assert isinstance(expected, Tuned)
    (found,) = by_fleet(db, given)
    assert decided(db) == decided(alone) != {}
    assert expected.result is not None and found.result is not None
    assert [one.workload for one in found.result.plans] == [one.workload for one in expected.result.plans]
    assert found.result.measured == expected.result.measured > 0
    for mine, theirs in zip(found.result.plans, expected.result.plans, strict=True):
        assert [one.region for one in mine.plan.regions] == [one.region for one in theirs.plan.regions]
        assert [said(one.record) for one in mine.plan.regions] == [said(one.record) for one in theirs.plan.regions]
    assert set(found.groups["key"]) == set(expected.groups["key"])
    assert found.steps["workload"].tolist() == expected.steps["workload"].tolist() != []
    with Database(db) as mine, Database(alone) as theirs:
        assert {one.workload for one in load_summaries(mine)} == {one.workload for one in load_summaries(theirs)}


def test_graphs_are_tuned_as_workers_capture_them(
    tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where captures disturb no measurement. The first is there when all its regions are measured."""
    alone, given = samples.known_machine(tmp_path / "alone.db"), replace(llama(tmp_path), layers=1, decode="1,2")
    (expected,) = tune_request(TuneRequest("cpu", given, db=alone))
    first_done, capture, keep = threading.Event(), worker_state.cached_capture, Batch.keep_summary

    def later(source: ModelSource, workload: Workload, *rest: Any) -> Graphs:
        if workload.batch > 1 and not first_done.wait(60):
            raise CaptureError("nothing is tuned meanwhile")
        return capture(source, workload, *rest)

    def keeps(self: Batch, *args: Any) -> None:
        keep(self, *args)
        first_done.set()

    monkeypatch.setattr(worker_state, "cached_capture", later)
    monkeypatch.setattr(Batch, "keep_summary", keeps)
    monkeypatch.setattr(tune, "is_gpu", lambda kind: True)
    (found,) = by_fleet(db, given)
    assert decided(db) == decided(alone) != {} and isinstance(expected, Tuned)
    assert found.result is not None and expected.result is not None
    assert [one.workload for one in found.result.plans] == [one.workload for one in expected.result.plans]


def test_models_of_a_manifest_share_regions_and_what_is_stored_is_not_measured(
    tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    measure = RegionTuner.measure

    def counting(self: RegionTuner, task: Any) -> Any:
        measured.append(task.key)
        return measure(self, task)

    monkeypatch.setattr(RegionTuner, "measure", counting)
    write_config(tmp_path, "llama")
    manifest = tmp_path / "models.toml"
    manifest.write_text("""
        [defaults]
        kv_len = 16
        decode = 1
        calls = false

        [[model]]
        config = "llama/config.json"
        name = "one layer"
        layers = 1

        [[model]]
        config = "llama/config.json"
        name = "two layers"
        layers = 2

        [[model]]
        config = "llama/config.json"
        name = "rounded as eager"
        layers = 1
        numerics = "eager"

        [[model]]
        config = "llama/config.json"
        name = "elsewhere"
        devices = ["cuda-of-nobody"]
    """)
    alone = samples.known_machine(tmp_path / "alone.db")
    (expected,), (found,) = (
        tune_request(TuneRequest("cpu", manifest=manifest, db=path), runner=runner)
        for path, runner in ((alone, run_here), (db, run_by("local"))))
    assert isinstance(expected, TunedMany) and isinstance(found, TunedMany)
    counts = ["model", "workloads", "regions", "shared", "stored", "measured", "failed", "step", "outcome"]
    assert found.models[counts].to_dict("records") == expected.models[counts].to_dict("records")
    assert found.regions["key"].tolist() == expected.regions["key"].tolist()
    assert found.models["shared"].sum() and decided(db) == decided(alone)
    assert sorted(measured) == sorted(found.regions["key"]) and not found.failure
    assert found.steps["workload"].tolist() == expected.steps["workload"].tolist() != []
    measured.clear()
    (again,) = tune_request(TuneRequest("cpu", manifest=manifest, db=db), runner=run_by("local"))
    assert isinstance(again, TunedMany)
    assert measured == [] and again.models["measured"].sum() == 0 and again.regions["stored"].all()
    assert main.run(f"tune --manifest {manifest} --db {db} --device cpu --workers local --again".split()) == 0
    assert sorted(measured) == sorted(found.regions["key"])
    assert missing(manifest, db, capsys) == []
    assert sorted(missing(manifest, tmp_path / "new.db", capsys)) == sorted(found.regions["key"])


def missing(manifest: Path, db: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `plan fleet status` says has no plan here, by key."""
    capsys.readouterr()
    assert main.run(f"fleet status --manifest {manifest} --db {db} --device cpu --format json".split()) == 0
    answer = json.loads(capsys.readouterr().out)
    return [str(row["key"]) for row in answer.get("missing", [])]


def test_a_region_that_fails_costs_only_itself(
    tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, measure = llama(tmp_path), RegionTuner.measure
    asked_for("cpu", given).graphs()  # kept on disk: workers capture in processes of their own, not in threads as here
    failing: dict[str, str] = {}

    def fails(self: RegionTuner, task: Any) -> Any:
        if failing.setdefault("first", task.key) == task.key:  # of two workers that ask at once one is told so
            raise SubjectError("its reference fails")
        return measure(self, task)

    monkeypatch.setattr(RegionTuner, "measure", fails)
    (found,) = by_fleet(db, given)
    assert found.result is not None and len(found.result.failures) == 1 and found.result.distinct()
    assert any("its reference fails" in one and "runs unfused" in one for one in found.warnings)
    monkeypatch.undo()
    missing = fleet_status(None, db, wanted_by(TuneRequest("cpu", given))).missing
    assert missing["key"].tolist() == [failing["first"]]


def test_who_measures_what_is_told(db: Path) -> None:
    (found,) = by_fleet(db, SWIGLU)
    assert found.result is not None
    (plan,) = found.result.decided()
    with Database(db) as database:
        holder = Leases(database)
        assert holder.take([plan.key, RecordKey("probe", plan.key.device)])
        table = fleet_status(None, db).leases
        holder.close()
    assert set(table["label"]) == {plan.label, "probe of the device"} and set(table["device"]) == {plan.key.device}
    assert table["owner"].nunique() == 1 and table["left_s"].between(0.0, 60.0).all()
    assert fleet_status(None, db).leases.empty


def test_workers_need_no_model_of_whoever_has_a_module(db: Path) -> None:
    (found,) = by_fleet(db, SWIGLU)
    assert found.result is not None and found.result.measured
    assert found.groups["group"].tolist() == ["silu+mul 3x8 float32"]


def test_the_command_answers_like_a_tune_here(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"tune --pattern swiglu --shape 3x8 --db {db} --device cpu --workers local"
    assert main.run(line.split()) == 0
    printed = capsys.readouterr()
    assert "silu+mul 3x8" in printed.out and "1 of 1 group is fused" in printed.out
    assert "tuning on 2 devices" not in printed.out
    assert main.run([*line.split(), "--misses"]) == 2
    assert "--workers" in capsys.readouterr().err
    assert main.run(["fleet", "status", "--db", str(db), "--pattern", "swiglu", "--shape", "3x9", "--device", "cpu",
                     "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "silu+mul 3x9" in json.dumps(answer)


@pytest.mark.parametrize(("line", "words"), [
    ("tune --workers tcp://127.0.0.1:9 --pattern swiglu --shape 3x8",
     ("--workers 'tcp://127.0.0.1:9'", "dask scheduler", "or give local")),
    ("fleet status tcp://127.0.0.1:9", ("URL 'tcp://127.0.0.1:9'", "dask scheduler`")),
    ("fleet worker foo", ("URL 'foo'", "dask scheduler`")),
    ("fleet status --manifest models.toml --pack-weights", ("--manifest", "leave out")),
    ("fleet status --manifest models.toml --pattern swiglu", ("--manifest", "leave out")),
    ("tune --workers local --pattern swiglu --shape 3x8 --device cpu --db sqlite://", ("memory", "--db")),
])
def test_mistakes_are_told_in_one_line(
    line: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    assert main.run(line.split()) == 2
    (told,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("plan: error")]
    assert all(word in told for word in words)
    assert ("--workers" in told) == ("--workers tcp" in line)


@pytest.mark.parametrize("line", [
    "tune --workers local --pattern swiglu --shape 3x8", "fleet worker tcp://127.0.0.1:9",
    "fleet status tcp://127.0.0.1:9",
])
def test_the_extra_is_named_where_it_is_missing(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main.run(line.split()) == 2
    assert "pip install 'fuseplan[fleet]'" in capsys.readouterr().err


def test_a_scheduler_needs_the_same_software(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def has_none(client: Client, function: object, *args: str) -> None:
        raise metadata.PackageNotFoundError(*args)

    monkeypatch.setattr(Client, "run_on_scheduler", has_none)
    assert main.run(f"tune --pattern swiglu --shape 3x8 --db {db} --device cpu --workers local".split()) == 2
    (told,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("plan: error")]
    assert "not installed where the scheduler runs" in told
