"""The HTML report: one file, no network, readable on a phone; every picture is inline and has words beside it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from fuseplan.planner.report import frames
from fuseplan.planner.report.accuracy import accuracy_pairs, accuracy_text
from fuseplan.planner.report.drawing import group_class, group_name, partition_svg, templates
from fuseplan.planner.report.frames import ReportData
from fuseplan.planner.report.plots import bandwidth_plot, roofline_plot, scatter_plot
from fuseplan.planner.report.side_by_side import Planned, as_frame, side_by_side
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import PlanRecord, now

#: More drawings than this make a page nobody scrolls through; the most expensive regions are drawn.
_MAX_DRAWINGS = 24


def html_report(data: ReportData) -> str:
    """The whole page."""
    groups = frames.group_frame(data)
    coverage = frames.coverage_frame(data)
    title = f"Fusion report: {data.model or 'everything tuned'}"
    tuned = [plan.evidence for plan in data.plans.values()] or [one.evidence for one in data.records.values()]
    return templates().get_template("report.html.j2").render(
        title=title,
        device=data.spec.identity.name if data.spec is not None else data.device,
        created=now(),
        speedup=frames.geometric_mean(groups["speedup"].dropna()),
        answers=groups["answer"],
        totals=coverage.drop(columns="workload").sum() if len(coverage) else None,
        plans=data.decided().values(),
        bars=_bars(groups),
        plots=_plots(data),
        drawings=_drawings(data),
        side_by_side=_side_by_side(data),
        how_it_runs=frames.how_it_runs,
        config_text=frames.config_text,
        accuracy=accuracy_text(data),
        tables={
            "coverage": table_html(coverage, "Coverage by workload", percent=("coverage",)),
            "groups": table_html(groups.drop(columns=["key", "regime"]), "Every group of the chosen partitions"),
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


def _bars(groups: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Groups, those that fusing helps most first, with lengths of bars in percent of the longer of the two."""
    timed = groups[groups["unfused_us"].notna()].sort_values("speedup", ascending=False, kind="stable")
    shares = timed[["fused_us", "unfused_us"]].astype(float)
    shares = 100 * shares.div(shares.max(axis=1), axis=0)
    bars = timed.assign(fused_share=shares["fused_us"], unfused_share=shares["unfused_us"]).astype(object)
    return bars.where(bars.notna(), None).to_dict("records")


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


def _drawings(data: ReportData) -> list[dict[str, Any]]:
    """One drawing per distinct region, the most expensive in a pass over its workload first."""
    first: dict[str, tuple[RegionSummary, PlanRecord, list[str]]] = {}
    for workload, region, plan in data.planned():
        if workload is not None and region is not None:
            _, _, where = first.setdefault(plan.key.workload, (region, plan, []))
            where.append(f"{region.occurrences} × {data.name_of(workload)}")
    costly = sorted(first.values(), key=lambda found: -found[0].occurrences * found[1].unfused_us)
    return [
        {
            "plan": plan, "where": ", ".join(where), "svg": Markup(partition_svg(region, plan)),
            "groups": [
                (group_name(at), group_class(plan, at), group, region.place_of(group.ops))
                for at, group in enumerate(plan.groups)
            ],
        }
        for region, plan, where in costly[:_MAX_DRAWINGS]
    ]


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
