"""A step as a trace: its tracks are as long as the sums that one can make by hand, in the order of the model."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from fuseplan.planner.reports.frames import ReportData, load_report
from fuseplan.planner.reports.step_trace import step_trace, trace_link
from fuseplan.planner.reports.steps import Step, steps
from fuseplan.planner.tuning.summary import load_summaries, store_summary

#: Layers of two regions, as a model has them.
ORDER = (0, 1) * 16 + (1,) * 16


def loaded(path: Path, order: tuple[int, ...]) -> tuple[ReportData, Step]:
    with samples.sample_database(path / "tuning.db") as database:
        store_summary(database, replace(samples.workload("prefill 1x128", samples.REGIONS[:2]), order=order))
        data = load_report(database, samples.DEVICE, samples.SPEC, "llama")
    alone = {key: replace(plan, rejected=tuple(replace(one, implementation="aten") for one in plan.rejected))
             for key, plan in data.plans.items()}
    data = replace(data, plans=alone)
    return data, next(one for one in steps(data) if one.name == "prefill 1x128")


def events(trace: dict[str, Any], track: int) -> list[dict[str, Any]]:
    return [one for one in trace["traceEvents"] if one["ph"] == "X" and one["tid"] == track]


def test_planned_groups_follow_one_another(tmp_path: Path) -> None:
    data, step = loaded(tmp_path, ORDER)
    planned = events(step_trace(data, step), 2)
    assert [one["name"] for one in planned[:4]] == [samples.SWIGLU.label, samples.NORM.label] * 2
    assert sum(one["dur"] for one in planned) == pytest.approx(16 * 40.0 + 32 * 20.0)
    assert all(one["ts"] + one["dur"] == pytest.approx(after["ts"]) for one, after in pairwise(planned))
    assert planned[0]["args"]["runs"] == "one cpp kernel" and "threads=2" in planned[0]["args"]["config"]


def test_what_aten_takes_is_a_track_of_its_own(tmp_path: Path) -> None:
    data, step = loaded(tmp_path, ORDER)
    alone = events(step_trace(data, step), 1)
    assert {one["name"] for one in alone} == {"silu.default 32x8192 bfloat16", "add.Tensor 32x2048 bfloat16"}
    assert sum(one["dur"] for one in alone) == pytest.approx(48 * 35.0)


def test_a_summary_of_older_versions_has_its_regions_one_after_another(tmp_path: Path) -> None:
    planned = events(step_trace(*loaded(tmp_path, ())), 2)
    assert [one["name"] for one in planned] == [samples.SWIGLU.label] * 16 + [samples.NORM.label] * 32


@pytest.mark.parametrize("order", [(0,), (0, 2), (0, 1) * 24, (*ORDER, 1)])
def test_an_order_of_other_regions_is_no_summary(tmp_path: Path, order: tuple[int, ...]) -> None:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        store_summary(database, replace(samples.workload("prefill 1x128", samples.REGIONS[:2]), order=order))
        assert {one.workload for one in load_summaries(database)} == {"decode b1"}


def test_the_link_holds_the_whole_trace(tmp_path: Path) -> None:
    data, step = loaded(tmp_path, ORDER)
    name, url = trace_link(data, step)
    assert name == "prefill-1x128.trace.json.gz"
    found = json.loads(gzip.decompress(base64.b64decode(url.partition("base64,")[2])))
    assert found == step_trace(data, step)
    assert found["otherData"]["unfused_us"] == step.unfused_us
