"""The HTML report: one file, no network, readable on a phone; every picture is inline and has words beside it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from fuseplan.planner.reports import frames
from fuseplan.planner.reports.accuracy import accuracy_pairs, accuracy_text
from fuseplan.planner.reports.against import against_lines, groups_against
from fuseplan.planner.reports.drawing import group_class, group_name, partition_svg, templates
from fuseplan.planner.reports.frames import ReportData
from fuseplan.planner.reports.plots import bandwidth_plot, roofline_plot, scatter_plot
from fuseplan.planner.reports.side_by_side import Planned, as_frame, side_by_side
from fuseplan.planner.reports.step_words import answers, bars, time_text
from fuseplan.planner.reports.steps import PARTS, steps
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import GroupChoice, PlanRecord, RecordKey, now

#: More drawings than this make a page nobody scrolls through; the most expensive regions are drawn.
_MAX_DRAWINGS = 24
#: Groups of a workload that are listed before the rest is folded away.
_MOST_SAVED = 6
#: Columns that a table of groups begins with.
_ANSWER = ["group", "answer", "fused_us", "unfused_us", "speedup", "times", "workload"]


def html_report(data: ReportData, other: ReportData | None = None) -> str:
    """The whole page; with another tune also what differs from that."""
    groups = frames.group_frame(data)
    coverage = frames.coverage_frame(data)
    others = groups.columns.difference([*_ANSWER, "key", "regime"], sort=False)
    layers = _layers(data)
    shown = {drawing["plan"].key for _, drawings in layers for drawing in drawings}
    title = f"Fusion report: {data.model or 'everything tuned'}"
    tuned = [plan.evidence for plan in data.plans.values()] or [one.evidence for one in data.records.values()]
    return templates().get_template("report.html.j2").render(
        title=title,
        device=data.spec.identity.name if data.spec is not None else data.device,
        created=now(),
        speedup=frames.geometric_mean(groups["speedup"].dropna()),
        steps=_steps(data),
        parts=PARTS,
        duration=time_text,
        answers=groups["answer"],
        totals=coverage.drop(columns="workload").sum() if len(coverage) else None,
        plans=data.decided().values(),
        plots=_plots(data),
        layers=layers,
        against=list(against_lines(data, other)) if other is not None else [],
        changes=table_html(groups_against(data, other).drop(columns=["regime"]), "Groups, here and there")
        if other is not None else "",
        drawings=_drawings(data, shown),
        side_by_side=_side_by_side(data),
        accuracy=accuracy_text(data),
        tables={
            "coverage": table_html(coverage, "Coverage by workload", percent=("coverage",)),
            "groups": table_html(groups[[*_ANSWER, *others]], "Every group of the chosen partitions"),
            "regions": table_html(
                frames.region_frame(data).drop(columns=["key", "regime"]), "Every region", percent=("gap",)
            ),
            "misses": table_html(frames.miss_frame(data).drop(columns=["key"]), "Look-ups without a plan"),
        },
        misses=len(data.misses),
        key=data.device,
        spec=data.spec,
        last=max(tuned, key=lambda evidence: evidence.created, default=None),
    )


def _steps(data: ReportData) -> list[dict[str, Any]]:
    """The workloads: what their steps take in words and as bars, and what each group saves on a scale for all."""
    found = steps(data)
    most_us = max((saved.saved_us for one in found for saved in one.saved), default=0.0)
    listed = []
    for one in found:
        unfused, planned = bars(one)
        floor_us = one.times.floor_us if one.times is not None else None
        longest_us = max(one.unfused_us, one.planned_us)
        rows = [
            {
                "group": saved.label, "place": saved.place, "uses": saved.uses, "saved": time_text(saved.saved_us),
                "share": max(0.0, 100 * saved.saved_us / most_us) if most_us > 0 else 0.0,
                "each": f"{time_text(saved.unfused_us)} → {time_text(saved.planned_us)}",
                "how": frames.how_it_runs(saved.group),
            }
            for saved in one.saved
        ]
        listed.append({
            "name": one.name, "answers": answers(one), "floor": time_text(floor_us) if floor_us else "",
            "floor_share": 100 * floor_us / longest_us if floor_us and longest_us else None,
            "sides": [("unfused", time_text(one.unfused_us), unfused), ("planned", time_text(one.planned_us), planned)],
            "saved": rows[:_MOST_SAVED], "more": rows[_MOST_SAVED:],
        })
    return listed


def _side_by_side(data: ReportData) -> list[Markup]:
    """A table for each model, regime and numerics: what runs with each matmul and attention at how many rows."""
    found: dict[tuple[str, str, str], list[Planned]] = {}
    for workload, region, plan in data.planned():
        if workload is not None and region is not None:
            of = workload.model, workload.regime, workload.numerics
            found.setdefault(of, []).append((workload.workload, region, plan))
    tables = {of: as_frame(side_by_side(planned)) for of, planned in found.items()}
    return [table_html(frame, f"{model}, {regime}, {numerics}")
            for (model, regime, numerics), frame in tables.items() if len(frame)]


def _plots(data: ReportData) -> list[tuple[str, str, Markup]]:
    """(title, caption, svg) of the plots that the data allows."""
    plots = []
    records = list(data.records.values())
    if data.spec is not None and any(record.work.total_flops > 0 for record in records):
        caption = "Every tuned group under the roofs measured on this device; an arrow up would be a faster kernel."
        plots.append(("Roofline", caption, Markup(roofline_plot(data.spec, records))))
    if pairs := accuracy_pairs(data):
        caption = "On the diagonal the model is right; the band is ±25 %."
        plots.append(("Predicted and measured", caption, Markup(scatter_plot(pairs))))
    if data.spec is not None:
        caption = f"Measured {data.spec.measured_at[:10]}; the steps are cache levels."
        plots.append(("Memory bandwidth", caption, Markup(bandwidth_plot(data.spec))))
    return plots


def _layers(data: ReportData) -> list[tuple[str, list[dict[str, Any]]]]:
    """By model, regime and numerics: of each workload the region that takes most of its time, a layer as a rule."""
    found: dict[str, dict[str, tuple[RegionSummary, PlanRecord]]] = {}
    for workload, region, plan in data.planned():
        if workload is not None and region is not None:
            known = found.setdefault(f"{workload.model}, {workload.regime}, {workload.numerics}", {})
            other = known.get(workload.workload)
            if other is None or other[0].occurrences * other[1].unfused_us < region.occurrences * plan.unfused_us:
                known[workload.workload] = region, plan
    return [
        (of, [_drawing(data, region, plan, f"{workload}, {region.occurrences} ×")
              for workload, (region, plan) in workloads.items()])
        for of, workloads in found.items()
    ]


def _drawings(data: ReportData, shown: Collection[RecordKey]) -> list[dict[str, Any]]:
    """One drawing per distinct region besides those ``shown``, the most expensive in a pass over its workload first."""
    first: dict[str, tuple[RegionSummary, PlanRecord, list[str]]] = {}
    for workload, region, plan in data.planned():
        if workload is not None and region is not None and plan.key not in shown:
            _, _, where = first.setdefault(plan.key.workload, (region, plan, []))
            where.append(f"{region.occurrences} × {data.name_of(workload)}")
    costly = sorted(first.values(), key=lambda found: -found[0].occurrences * found[1].unfused_us)
    return [_drawing(data, region, plan, ", ".join(where)) for region, plan, where in costly[:_MAX_DRAWINGS]]


def _drawing(data: ReportData, region: RegionSummary, plan: PlanRecord, where: str) -> dict[str, Any]:
    facts = [_facts(data, region, plan, group) for group in plan.groups]
    return {
        "plan": plan, "where": where, "svg": Markup(partition_svg(region, plan, facts)),
        "groups": [(group_name(at), group_class(plan, at), group, facts[at]) for at, group in enumerate(plan.groups)],
    }


def _facts(data: ReportData, region: RegionSummary, plan: PlanRecord, group: GroupChoice) -> str:
    """Where a group is and how it runs: times, bytes with the bandwidth that they come to, configuration."""
    how = frames.how_it_runs(group)
    words = [f"{how} ({frames.config_text(group.config)})" if group.config else how]
    if where := region.place_of(group.ops):
        words.insert(0, f"in {where}")
    words.append(f"{time_text(group.measured_us)} measured" if group.measured_us is not None else "not measured")
    words.append(f"{time_text(group.predicted_us)} predicted")
    record = data.records.get(replace(plan.key, workload=group.workload)) if group.workload else None
    if record is not None and record.work.dram_bytes and group.measured_us:
        nbytes = record.work.dram_bytes
        words.append(f"{nbytes / 1e6:.3g} MB, {nbytes / group.measured_us / 1e3:.3g} GB/s")
    return ", ".join(words)


def table_html(frame: pd.DataFrame, caption: str, percent: Sequence[str] = ()) -> Markup:
    """An HTML table: a caption, a header row, numbers to the right."""
    kinds = ["number" if pd.api.types.is_numeric_dtype(frame[name]) else "text" for name in frame.columns]
    return Markup(templates().get_template("table.html.j2").render(
        caption=caption, columns=[(str(name).replace("_", " "), kind) for name, kind in zip(frame, kinds, strict=True)],
        rows=[
            [_cell(value, name in percent) for name, value in zip(frame, row, strict=True)]
            for row in frame.itertuples(index=False)
        ],
    ))


def _cell(value: Any, as_percent: bool) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if as_percent:
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 100 else f"{value:,.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
