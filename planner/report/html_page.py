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
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import GroupChoice, PlanRecord, now

#: More drawings than this make a page nobody scrolls through; the most expensive regions are drawn.
_MAX_DRAWINGS = 24


def html_report(data: ReportData) -> str:
    """The whole page."""
    groups = frames.group_frame(data)
    coverage = frames.coverage_frame(data)
    title = f"Fusion report: {data.model or 'everything tuned'}"
    return templates().get_template("report.html.j2").render(
        title=title,
        device=data.spec.identity.name if data.spec is not None else data.device,
        created=now(),
        cards=_cards(data, groups, coverage),
        bars=_bars(groups),
        plots=_plots(data),
        drawings=_drawings(data),
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
        facts=_facts(data),
    )


def _cards(data: ReportData, groups: pd.DataFrame, coverage: pd.DataFrame) -> list[tuple[str, str]]:
    """Headline numbers: (number, what it is)."""
    plans = data.decided().values()
    fused = int((groups["answer"] == "fuse").sum())
    speedup = frames.geometric_mean(groups["speedup"].dropna())
    cards = [
        ("–" if math.isnan(speedup) else f"{speedup:.2f}×", "geometric mean over unfused, all groups"),
        (f"{fused} of {len(groups)}", "distinct groups where fusing pays"),
    ]
    if len(coverage):
        sums = coverage[["fused", "fusable", "launches_unfused", "launches"]].sum()
        cards += [
            (f"{sums['fused'] / max(1, sums['fusable']):.0%}", "of the fusable ops run fused"),
            (f"{sums['launches_unfused']:,} → {sums['launches']:,}", "kernel launches besides library calls"),
        ]
    measured, enumerated = sum(plan.measured for plan in plans), sum(plan.enumerated for plan in plans)
    return [*cards, (f"{measured:,} of {enumerated:,}", "candidate groups measured")]


def _bars(groups: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Groups, those that fusing helps most first, with lengths of bars in percent of the longer of the two."""
    timed = groups[groups["unfused_us"].notna()].sort_values("speedup", ascending=False, kind="stable")
    shares = timed[["fused_us", "unfused_us"]].astype(float)
    shares = 100 * shares.div(shares.max(axis=1), axis=0)
    bars = timed.assign(fused_share=shares["fused_us"], unfused_share=shares["unfused_us"]).astype(object)
    return bars.where(bars.notna(), None).to_dict("records")


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
    return [_drawing(region, plan, ", ".join(where)) for region, plan, where in costly[:_MAX_DRAWINGS]]


def _drawing(region: RegionSummary, plan: PlanRecord, where: str) -> dict[str, Any]:
    """One region: its picture and what stands beside it."""
    proof = "optimal over the candidates" if plan.gap == 0 else f"a better partition could save {plan.gap:.0%} at most"
    ratio = plan.unfused_us / plan.planned_us if plan.planned_us > 0 else 1.0
    saved = f" ({ratio:.3g}×)" if ratio > 1.005 else ""
    return {
        "title": plan.label,
        "where": where,
        "svg": Markup(partition_svg(region, plan)),
        "groups": [
            {"name": group_name(number), "class": group_class(plan, number), "text": _group_text(group)}
            for number, group in enumerate(plan.groups)
        ],
        "rejected": [
            {"label": one.label, "reason": one.reason, "time": _time_text(one.predicted_us, one.measured_us)}
            for one in plan.rejected
        ],
        "outcome": (
            f"{plan.planned_us:,.1f} us, unfused {plan.unfused_us:,.1f} us{saved}; {proof}; "
            f"{plan.measured} of {plan.enumerated} candidates measured"
        ),
    }


def _group_text(group: GroupChoice) -> str:
    """A group in a few words: how it runs, and how long that takes."""
    config = f" ({frames.config_text(group.config)})" if group.is_kernel else ""
    time = _time_text(None, group.measured_us) or "not measured"
    return f"{group.label}: {frames.how_it_runs(group)}{config}, {time}, {group.predicted_us:.2f} us predicted"


def _time_text(predicted_us: float | None, measured_us: float | None) -> str:
    if measured_us is not None:
        return f"{measured_us:.2f} us measured"
    return f"{predicted_us:.2f} us predicted" if predicted_us is not None else ""


def _facts(data: ReportData) -> list[tuple[str, str]]:
    """Device and versions behind the numbers."""
    facts = [("device key", data.device)]
    if data.spec is not None:
        spec = data.spec
        facts += [("device", spec.identity.name), ("cores or SMs", str(spec.identity.cores))]
        facts += [(f"launch, {mode}", f"{latency.us:.2f} us") for mode, latency in spec.launch.items()]
        facts += [(f"peak {unit}", f"{peak.per_s * 1e-9:,.0f} Gop/s") for unit, peak in spec.peaks.items()]
        facts.append(("A/A noise", f"{spec.noise:.1%}"))
        facts += sorted(spec.versions.items())
    tuned = [plan.evidence for plan in data.plans.values()] or [one.evidence for one in data.records.values()]
    if tuned:
        last = max(tuned, key=lambda evidence: evidence.created)
        facts.append(("last tuned", last.created))
        facts += [(f"tuned with {name}", text) for name, text in vars(last.versions).items() if text]
        facts += [(f"clock, {name}", f"{mhz:,.0f} MHz") for name, mhz in last.clocks_mhz.items()]
    return facts


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
