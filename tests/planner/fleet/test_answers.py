"""A wrong or hostile answer of a worker costs its region: the tune says so, and stores nothing of it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fleet_here
import pytest
import report_samples as samples

from fuseplan.costmodel.probe.probe import MachineLoad
from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.api.request import TuneRequest
from fuseplan.planner.api.tune import Tuned, tune_request
from fuseplan.planner.errors import CaptureError, ConfigError
from fuseplan.planner.fleet import terms, worker_state
from fuseplan.planner.fleet.run import WorkerCapture, run_by
from fuseplan.planner.fleet.terms import RegionOutcome, RegionTask, WorkerDevice
from fuseplan.planner.fleet.worker_state import RegionTuner
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.graph_stream import GraphStream
from fuseplan.planner.tuning.plans import RegionPlan
from fuseplan.search.store.database import Database
from fuseplan.search.store.maintenance import verify_database
from fuseplan.search.store.record import PlanRecord, RecordKey, Versions

ESCAPE = "\x1b[31mred"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


ODD: dict[str, object] = {
    "nothing": None, "a text": ESCAPE, "a plan that is not there": RegionOutcome(stored=True, tuned=True),
    "flags that are texts": RegionOutcome(stored="yes"),  # type: ignore[arg-type]
    "a failure that is none": RegionOutcome(failure=ESCAPE),  # type: ignore[arg-type]
    "a time that is none": RegionOutcome(stored=True, elapsed_s=float("nan")),
    "rankings that are none": RegionOutcome(stored=True, rankings=ESCAPE),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("how", ODD)
def test_an_answer_of_another_form_costs_its_region(how: str, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_state, "measure", lambda *args: ODD[how])
    found = tune_swiglu(db)
    (told,) = found.warnings
    assert "runs unfused" in told and told.isprintable()
    with Database(db) as database:
        assert not list(database.plans()) and not list(database.records())


HERE = WorkerDevice("cpu-a-1", Target("cpu", "native", 2), Versions("1", "2"), "host", MachineLoad(0.0, 2), True)


@pytest.mark.parametrize("host", ["host", platform.node()])
def test_a_device_is_taken_as_it_was_offered(host: str) -> None:
    assert terms.device_of_worker(replace(HERE, host=host), "cpu", "cpu-a-1") == replace(HERE, host=host)


@pytest.mark.parametrize("found", [
    None, "cpu-a-1", replace(HERE, device="cpu-b-1"), replace(HERE, device="../../cpu-a-1"),
    replace(HERE, target=Target("cuda", "sm_90", 2)), replace(HERE, versions=Versions("1", ESCAPE)),
    replace(HERE, load=MachineLoad("much", 2)), replace(HERE, target=Target("cpu", "native", "2")),  # type: ignore[arg-type]
    replace(HERE, sees_database="yes"), replace(HERE, host=ESCAPE),  # type: ignore[arg-type]
])
def test_another_description_of_a_device_is_refused(found: object) -> None:
    with pytest.raises(ConfigError) as refused:
        terms.device_of_worker(found, "cpu", "cpu-a-1")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("found", [None, ESCAPE, 7, ("no graph",), [], ValueError(ESCAPE)])
def test_a_capture_of_another_form_costs_its_workload(found: object) -> None:
    told: list[str] = []
    asked = Workload("prefill", 1, 16)
    for workload in (asked, replace(asked, given="masked")):
        answer = WorkerCapture(lambda done: None)
        answer.captured(found)
        there = partial(lambda found, *asked: found, answer)
        with GraphStream(find_source(), [workload], "cpu", note=told.append, elsewhere=there) as stream:
            if workload.derived:
                assert stream.take() == [] and not stream.waiting
            else:
                with pytest.raises(CaptureError):
                    stream.take()
    assert len(told) == 1 and "prefill 1x16" in told[0] and told[0].isprintable()


@pytest.mark.parametrize("found", [None, ESCAPE, ("", -1.0), ("", float("nan")), (7, 1.0), ("", 1.0, 2.0)])
def test_another_answer_of_a_step_leaves_it_untimed(found: object) -> None:
    problem, elapsed_s = terms.checked_step("prefill 1x16", found)
    assert problem.startswith("prefill 1x16") and problem.isprintable() and elapsed_s == 0.0
    assert terms.checked_step("prefill 1x16", ("", 2.0)) == ("", 2.0)
    assert terms.checked_step("prefill 1x16", (ESCAPE, 2.0))[0].isprintable()
