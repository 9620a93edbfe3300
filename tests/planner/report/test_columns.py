"""Every column of every frame is explained to its reader, and counts are whole numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from doc_columns import explained
from paths import ROOT

import fuseplan.planner
from fuseplan.costmodel.accuracy import accuracy_frame
from fuseplan.planner.api.report import Report
from fuseplan.planner.reports.accuracy import regret_table
from fuseplan.planner.reports.document import table_of

FRAMES = ("steps", "parts", "saved", "groups", "regions", "coverage", "misses", "accuracy", "step_changes",
          "group_changes")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    path = tmp_path / "tuning.db"
    samples.sample_database(path).close()
    return fuseplan.planner.report(db=path, device_key=samples.DEVICE, against=path)


def test_every_frame_of_a_report_is_asked_for() -> None:
    """Each is a property of it that gives a frame."""
    frames = {name for name, one in vars(Report).items()
              if isinstance(one, property) and one.fget is not None and "DataFrame" in str(one.fget.__annotations__)}
    assert frames == set(FRAMES)


@pytest.mark.parametrize("name", FRAMES)
def test_every_column_of_a_report_is_explained(report: Report, name: str) -> None:
    columns = set(getattr(report, name).columns)
    assert columns and not columns - explained(name)


def test_every_column_of_an_explanation_and_of_predictions_is_explained(report: Report, tmp_path: Path) -> None:
    db = samples.known_machine(tmp_path / "known.db")
    groups = fuseplan.planner.explain(pattern="swiglu", shape="3x8", device="cpu", db=db).groups
    assert len(groups) and not set(groups.columns) - explained("explain().groups")
    page = (ROOT / "docs" / "report.md").read_text()
    columns = [*regret_table(report.data).columns, *accuracy_frame([]).columns]
    assert not [one for one in columns if f"`{one}`" not in page]


def test_counts_are_whole_where_some_are_missing(report: Report) -> None:
    records = {key: one for key, one in report.data.records.items() if one != samples.NORM}
    some = replace(report, data=replace(report.data, records=records))
    table = table_of(some.groups, "groups")
    for name in ("measured_configs", "enumerated_configs"):
        at = table.columns.index(name)
        assert {type(row[at]) for row in table.rows} == {int, type(None)} and table.numeric(at)
    lines = [dict(zip(table.columns, line.split("\t"), strict=True)) for line in table.lines()[1:]]
    assert [(one["measured_configs"], one["times"]) for one in lines] == [("9", "32"), ("", "64"), ("9", "16")]
    assert '<td class="number">9</td>' in some.html() and ",9,24," in table.csv()
    assert [row["measured_configs"] for row in table.json()] == [9, None, 9]
    bare = replace(some, data=replace(some.data, workloads=()))
    assert bare.groups["times"].isna().all() and bare.regions["times"].isna().all()
