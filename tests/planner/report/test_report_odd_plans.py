"""A stored plan that counts ops that its region does not have costs its own row of a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from report_samples import DEVICE, SWIGLU_PLAN, sample_database

from fuseplan.planner.reports.frames import load_report
from fuseplan.planner.reports.html_page import html_report


def test_a_plan_that_is_not_its_regions_is_left_out(tmp_path: Path) -> None:
    with sample_database(tmp_path / "tuning.db") as database:
        first, *rest = SWIGLU_PLAN.groups
        database.put_plan(replace(SWIGLU_PLAN, groups=(replace(first, ops=(10**6,)), *rest)))
        data = load_report(database, DEVICE)
        plans = {plan.key for _, _, plan in data.planned()}
        assert plans and SWIGLU_PLAN.key not in plans
        assert "<svg" in html_report(data)
