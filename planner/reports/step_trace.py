"""A step as a timeline: what each op takes as ATen runs it, and each group as planned, for ui.perfetto.dev."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

from fuseplan.planner.reports.frames import ReportData, aten_times, config_text, how_it_runs, time_of
from fuseplan.planner.reports.steps import Step
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import PlanRecord

#: Decimals of microseconds: more make the file large.
_DIGITS = 2
#: Threads of the trace: name by number, in the order in which they are shown.
_UNFUSED, _PLANNED = 1, 2
_TRACKS = {_UNFUSED: "unfused: each op timed by itself", _PLANNED: "as planned: each group timed by itself"}


def step_trace(data: ReportData, step: Step) -> dict[str, Any]:
    """A step in the Trace Event Format (Chrome, Perfetto): one complete event for each op and each planned group.

    An event lasts as long as its op or group took by itself, measured or else predicted; a track is their sum. What the
    whole step took is in ``otherData``. Regions come in the order of the model, as far as the tune stored it.
    """
    events = [_named("process_name", 0, step.name)]
    events += [_named("thread_name", track, name) for track, name in _TRACKS.items()]
    ends = dict.fromkeys(_TRACKS, 0.0)
    for number, (region, plan) in enumerate(_in_order(data, step)):
        for track, name, time_us, facts in (*_by_aten(region, plan), *_as_planned(region, plan)):
            ends[track] = round(ends[track] + time_us, _DIGITS)
            events.append({"ph": "X", "pid": 0, "tid": track, "name": name, "ts": round(ends[track] - time_us, _DIGITS),
                           "dur": round(time_us, _DIGITS), "args": {"region": number, **facts}})
    told = {"model": step.workload.model, "device": step.workload.device, "measured": step.measured,
            "unfused_us": step.unfused_us, "planned_us": step.planned_us}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def trace_link(data: ReportData, step: Step) -> tuple[str, str]:
    """Name of a file with the trace of a step, and the whole file as a URL."""
    packed = gzip.compress(json.dumps(step_trace(data, step)).encode(), mtime=0)
    kept = "".join(one if one.isalnum() else "-" for one in step.name)
    return f"{kept}.trace.json.gz", f"data:application/gzip;base64,{base64.b64encode(packed).decode()}"


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": track, "name": kind, "args": {"name": name}}


def _in_order(data: ReportData, step: Step) -> Iterator[tuple[RegionSummary, PlanRecord]]:
    """Every occurrence of a region, with its plan."""
    summary = step.workload
    order = summary.order or [at for at, one in enumerate(summary.regions) for _ in range(one.occurrences)]
    for at in order:
        region = summary.regions[at]
        yield region, data.plans[summary.plan_key(region)]


def _by_aten(region: RegionSummary, plan: PlanRecord) -> Iterator[tuple[int, str, float, dict[str, Any]]]:
    for at, time_us in sorted(aten_times(plan).items()):
        yield _UNFUSED, f"{region.ops[at]} {region.shapes[at]}", time_us, {"place": region.place_of([at])}


def _as_planned(region: RegionSummary, plan: PlanRecord) -> Iterator[tuple[int, str, float, dict[str, Any]]]:
    for group in sorted(plan.groups, key=lambda one: min(one.ops)):
        facts = {"place": region.place_of(group.ops), "runs": how_it_runs(group), "config": config_text(group.config)}
        yield _PLANNED, group.label, time_of(group), facts
