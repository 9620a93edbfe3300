"""Two tunes beside each other: which workloads and groups differ, in times that one can check by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import report_samples as samples

from fuseplan.planner.cli.main import run
from fuseplan.planner.reports.against import against_lines, groups_against, steps_against
from fuseplan.planner.reports.frames import ReportData, load_report
from fuseplan.planner.reports.html_page import html_report
from fuseplan.planner.reports.steps import saved_frame
from fuseplan.planner.tuning.whole_step import StepTimes, step_key
from fuseplan.search.store.record import TuningRecord

DECODE = [(16, samples.SWIGLU_PLAN), (32, samples.NORM_PLAN), (16, samples.ROPE_PLAN)]


@pytest.fixture
def here(tmp_path: Path) -> ReportData:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        database.put_capture(f"step/{step_key(DECODE)}", asdict(StepTimes(6000.0, 2600.0, 0.01)))
        return load_report(database, samples.DEVICE, samples.SPEC, "llama")


def slower(data: ReportData, record: TuningRecord, time_us: float) -> ReportData:
    """The same tune, with another time of one kernel."""
    assert record.fused is not None
    other = replace(record, fused=replace(record.fused, median_us=time_us))
    return replace(data, records={**data.records, record.key: other}, steps={})


def test_a_step_and_its_groups_are_compared(here: ReportData) -> None:
    there = slower(here, samples.SWIGLU, 70.0)
    row = steps_against(here, there).set_index("workload").loc["decode b1"]
    assert row["here_us"] == 2600.0 and row["here_measured"] == "end to end" and row["there_measured"] == "by regions"
    groups = groups_against(here, there)
    first = groups[groups["workload"] == "decode b1"].iloc[0]
    assert (first["group"], first["here_us"], first["there_us"], first["change_us"]) == (
        samples.SWIGLU.label, 16 * 40.0, 16 * 70.0, -16 * 30.0)
    lines = list(against_lines(here, there))
    assert any(samples.SWIGLU.label in line and "1.12 ms -> 640 us" in line for line in lines)
    assert not any(samples.NORM.label in line for line in lines)  # no different


def test_each_regime_is_compared_by_itself(here: ReportData) -> None:
    graph = {replace(key, regime="graph"): replace(plan, key=replace(key, regime="graph"))
             for key, plan in here.plans.items()}
    workloads = (*here.workloads, *(replace(one, regime="graph") for one in here.workloads))
    both = replace(here, plans={**here.plans, **graph}, workloads=workloads)
    lines = list(against_lines(both, slower(both, samples.SWIGLU, 70.0)))
    alone = list(against_lines(here, slower(here, samples.SWIGLU, 70.0)))
    assert len([line for line in lines if "a step takes" in line]) > len([line for line in alone if "a step" in line])
    assert sum(samples.SWIGLU.label in line for line in lines) == sum(samples.SWIGLU.label in line for line in alone)


def test_a_tune_equals_itself(here: ReportData) -> None:
    assert (groups_against(here, here)["change_us"].dropna() == 0).all()
    lines = list(against_lines(here, here))
    assert "2.60 ms here, 2.60 ms there, within the noise" in lines[0] and all("x)" not in line for line in lines)


def test_noise_hides_a_small_difference(here: ReportData) -> None:
    steps = {key: replace(one, planned_us=2610.0) for key, one in here.steps.items()}
    assert "within the noise" in next(against_lines(here, replace(here, steps=steps)))
    steps = {key: replace(one, planned_us=5200.0) for key, one in here.steps.items()}
    assert "(2.00x)" in next(against_lines(here, replace(here, steps=steps)))


def test_groups_that_one_plan_lacks_are_named_for_it(here: ReportData) -> None:
    plain = replace(samples.SWIGLU_PLAN, groups=tuple(
        replace(samples.SWIGLU_PLAN.groups[0], ops=(at,), implementation="aten", workload="") for at in (0, 1)))
    there = replace(here, plans={**here.plans, plain.key: plain})
    lines = list(against_lines(here, there))
    assert any("only here" in line and samples.SWIGLU.label in line for line in lines)
    assert any("only there" in line and samples.SWIGLU.label in line for line in against_lines(there, here))


def test_nothing_in_common_is_said(here: ReportData) -> None:
    other = replace(here, workloads=tuple(replace(one, model="qwen3") for one in here.workloads))
    assert list(against_lines(here, other)) == [
        "the two databases have no workload in common that is planned in both"]
    assert not len(steps_against(here, other))


def test_the_page_and_the_command_compare(here: ReportData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = slower(here, samples.SWIGLU, 70.0)
    page = html_report(here, there)
    assert 'id="against"' in page and "1.12 ms -&gt; 640 us" in page and 'id="against"' not in html_report(here)
    db = str(tmp_path / "tuning.db")
    command = ["report", "steps", "--device-key", samples.DEVICE, "--db", db, "--against", db]
    assert run(command) == 0
    assert "2.60 ms here, 2.60 ms there, within the noise" in capsys.readouterr().out
    assert run([*command[:1], *command[2:], "--format", "markdown"]) == 0
    assert "Groups against the other database" in capsys.readouterr().out
    assert run([*command[:-1], str(tmp_path / "none.db")]) == 2
    assert "none.db" in capsys.readouterr().err


def test_steps_as_csv_are_what_each_group_saves(here: ReportData, tmp_path: Path) -> None:
    db = str(tmp_path / "tuning.db")
    command = ["report", "steps", "--device-key", samples.DEVICE, "--db", db]
    assert run([*command, "--format", "csv", "--out", str(tmp_path / "saved.csv")]) == 0
    found = pd.read_csv(tmp_path / "saved.csv").fillna({"place": "", "doubt": ""})
    wanted = saved_frame(here).fillna({"doubt": ""})
    pd.testing.assert_frame_equal(found, wanted, check_dtype=False)
