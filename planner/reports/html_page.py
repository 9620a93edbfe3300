"""The HTML report: one file, no network, readable on a phone; every picture is inline and has words beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pandas as pd
from markupsafe import Markup

from fuseplan.planner.partition.plan_record import LOST
from fuseplan.planner.reports import frames
from fuseplan.planner.reports.accuracy import accuracy_text, rejected_groups
from fuseplan.planner.reports.against import against_lines, groups_against
from fuseplan.planner.reports.document import frame_rows, missing
from fuseplan.planner.reports.drawing import group_class, group_name, partition_svg, templates
from fuseplan.planner.reports.frames import ReportData
from fuseplan.planner.reports.log_plot import LogPlot
from fuseplan.planner.reports.plots import bandwidth_plot, roofline_plot, scatter_plot
from fuseplan.planner.reports.side_by_side import PlannedRegion, side_by_side
from fuseplan.planner.reports.step_trace import trace_link
from fuseplan.planner.reports.step_words import answers, bars, time_text
from fuseplan.planner.reports.steps import PARTS, Step, steps
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.errors import counted
from fuseplan.search.store.record import GroupChoice, PlanRecord, RecordKey, now

#: More drawings than this make a page nobody scrolls through: of layers, and of other regions, the most expensive ones.
_MAX_LAYERS, _MAX_DRAWINGS = 8, 16
#: Steps that are not folded away, and layers of a model: one of decode, one of prefill.
_STEPS, _LAYERS = 3, 2
#: Rejected groups whose covers are solved: of a region that is shown first, and of another.
_REJECTED, _FEW_REJECTED = 10, 2
#: Columns that a table of groups begins with.
_ANSWER = ["group", "answer", "fused_us", "unfused_us", "speedup", "times", "workload"]
_LAUNCHED = {"graph": "in a CUDA graph", "eager": "from Python"}
#: Without a model: how many regions are shown and how many groups named, and how labels of matmuls begin.
_SOME, _NAMED, _MATMULS = 5, 3, frozenset({"linear", "matmul", "bmm", "addmm"})


def html_report(data: ReportData, other: ReportData | None = None) -> str:
    """The whole page; with another tune also what differs from that."""
    groups = frames.group_frame(data)
    coverage = frames.coverage_frame(data)
    regions = frames.region_frame(data)
    others = groups.columns.difference([*_ANSWER, "key", "regime"], sort=False)
    found = steps(data)
    # Where whole steps were timed, those are what was asked for; what masks and generate() make of them comes after.
    told = [one for one in found if one.times is not None] or found
    asked = replace(data, workloads=tuple(one.workload for one in told) or data.workloads)
    layers_alone = _with_matmuls(data, regions)
    layers = _layers(asked)
    shown = {drawing["plan"].key for _, drawings in layers for drawing in drawings}
    tuned = [plan.evidence for plan in data.plans.values()] or [one.evidence for one in data.records.values()]
    device = data.spec.identity.name if data.spec is not None else data.device
    return templates().get_template("report.html.j2").render(
        data=data,
        title=f"Fusion report: {data.model or device}",
        device=device,
        created=now(),
        tuned=max((evidence.created for evidence in tuned), default=""),
        speedup=frames.geometric_mean(groups["speedup"]),
        steps=told,
        untimed=found[len(told):],
        shown_steps=_STEPS,
        shown_layers=_LAYERS,
        answers_of=answers,
        bars=bars,
        trace_of=lambda one: trace_link(data, one),
        parts=PARTS,
        duration=time_text,
        usual=LOST,
        words=None if found else list(_record_words(groups, layers_alone)),
        longest=[] if found else _longest(layers_alone),
        saved=_saved_rows(told, groups),
        answers=groups["answer"],
        library_call=frames.LIBRARY_CALL,
        totals=coverage.drop(columns="workload").sum() if len(coverage) else None,
        plots=_plots(data),
        layers=layers,
        against=list(against_lines(data, other)) if other is not None else [],
        changes=table_html(groups_against(data, other).drop(columns=["regime"]), "Groups, here and there")
        if other is not None else "",
        drawings=_drawings(data, shown),
        side_by_side=_side_by_side(asked),
        accuracy=accuracy_text(data),
        tables={
            "coverage": table_html(coverage, "Coverage by workload", percent=("coverage",)) if len(coverage) else "",
            "groups": table_html(groups[[*_ANSWER, *others]], "Every group of the chosen partitions"),
            "regions": table_html(regions.drop(columns=["key", "regime"]), "Every region", percent=("gap",)),
            "misses": table_html(frames.misses_frame(data.misses).drop(columns=["key"]), "Look-ups without a plan"),
        },
        last=max(tuned, key=lambda evidence: evidence.created, default=None),
    )


def _saved_rows(found: Sequence[Step], groups: pd.DataFrame) -> list[dict[str, Any]]:
    """What each group saves, most first: in a step of each workload; without any, every time that it runs."""
    rows: list[dict[str, Any]] = [
        {"workload": one.name, "group": saved.label, "place": saved.place, "uses": saved.uses,
         "saved_us": saved.saved_us, "each": (saved.unfused_us, saved.planned_us),
         "how": frames.how_it_runs(saved.group)}
        for one in found for saved in one.saved
    ]
    if not found:
        rows = [
            {"workload": _LAUNCHED[row["regime"]], "group": row["group"], "place": "", "uses": None,
             "saved_us": row["unfused_us"] - row["fused_us"], "each": (row["unfused_us"], row["fused_us"]),
             "how": f"{row['answer']} {row['backend']}" if row["answer"] == frames.LIBRARY_CALL
             else f"one {row['backend']} kernel"}
            for row in groups.dropna(subset=["fused_us", "unfused_us"]).to_dict("records")
        ]
    return sorted(rows, key=lambda row: -row["saved_us"])


def _with_matmuls(data: ReportData, regions: pd.DataFrame) -> pd.DataFrame:
    """The regions that hold a matmul and more, as a model's layers do; those in CUDA graphs where there are any."""
    held = {
        (key.workload, key.regime) for key, plan in data.plans.items()
        if len(plan.groups) > 1 and any(group.label.split(" ")[0] in _MATMULS for group in plan.groups)
    }
    pairs = pd.MultiIndex.from_frame(regions[["key", "regime"]])
    return _by_device(regions[pairs.isin(held)])


def _by_device(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of CUDA graphs, whose times are the device's alone; all where there is no such row."""
    graphs = frame[frame["regime"] == "graph"]
    return graphs if len(graphs) else frame


def _record_words(groups: pd.DataFrame, regions: pd.DataFrame) -> Iterator[str]:
    """The three answers as far as records without a model have them."""
    ratios = regions["speedup"].dropna()
    faster = (f" {int((ratios > 1).sum())} of {counted(len(ratios), 'region')} with matmuls, such as a layer, run "
              f"faster than unfused, half of all at least {ratios.median():.2f}x as fast." if len(ratios) else "")
    yield ("No whole step was timed here: these records tell regions of models, not how often each runs; "
           f"to tune a model on such a device times its steps.{faster}")
    timed = groups.assign(saved_us=groups["unfused_us"] - groups["fused_us"]).dropna(subset=["saved_us"])
    best = _by_device(timed).sort_values("saved_us", ascending=False).drop_duplicates("group").head(_NAMED)
    names = "; ".join(f"{time_text(saved_us)} by {name}"
                      for name, saved_us in zip(best["group"], best["saved_us"], strict=True))
    yield (f"Most is saved by these, each time that they run: {names}." if names
           else "No group was measured fused and unfused.")
    bounded = _by_device(groups[(groups["lower_bound_us"] > 0) & groups["fused_us"].notna() & groups["doubt"].isna()])
    over = (bounded["fused_us"] / bounded["lower_bound_us"]).median()
    yield (f"Half of the kernels take less than {over:.2f} times what memory and arithmetic alone take."
           if len(bounded) else "No kernel has a floor to compare with.")


def _longest(regions: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Some of the regions from the shortest to the longest, unfused and planned."""
    large = regions.sort_values("planned_us").drop_duplicates(["region", "regime"])
    if len(large):
        large = large.iloc[sorted({round(at * (len(large) - 1) / (_SOME - 1)) for at in range(_SOME)})]
    picked = large[large["planned_us"] > 0]
    return picked.assign(launched=picked["regime"].map(_LAUNCHED)).to_dict("records")


def _side_by_side(data: ReportData) -> list[Markup]:
    """A table for each model, regime and numerics: what runs with each matmul and attention at how many rows."""
    found = defaultdict[str, list[PlannedRegion]](list)
    for workload, region, plan in data.placed():
        of = f"{workload.model}, {workload.regime}, {workload.numerics}"
        found[of].append((workload.workload, region, plan))
    return [table_html(pd.DataFrame(rows), of) for of, planned in found.items() if (rows := side_by_side(planned))]


def _plots(data: ReportData) -> list[tuple[str, str, LogPlot]]:
    """Title, caption and picture of the plots that the data allows."""
    found: list[tuple[str, str, LogPlot]] = []
    if data.spec is not None and (roofs := roofline_plot(data.spec, data)).points:
        caption = "Every tuned group under the roofs measured on this device. The named ones save most time each run."
        found.append(("Roofline", caption, roofs))
    if (pairs := scatter_plot(data)).points:
        caption = "On the diagonal the model is right; the band is ±25 %. The named ones are off by most time."
        found.append(("Predicted and measured", caption, pairs))
    if data.spec is not None:
        caption = f"Measured {data.spec.measured_at[:10]}; the steps are cache levels."
        found.append(("Memory bandwidth", caption, bandwidth_plot(data.spec)))
    return found


def _layers(data: ReportData) -> list[tuple[str, list[dict[str, Any]]]]:
    """By model, regime and numerics: of each workload the region that is most of a layer."""
    found: dict[str, dict[str, tuple[RegionSummary, PlanRecord]]] = {}
    for workload, region, plan in replace(data, workloads=data.workloads[:_MAX_LAYERS]).placed():
        known = found.setdefault(f"{workload.model}, {workload.regime}, {workload.numerics}", {})
        so_far = known.get(workload.workload, (region, plan))
        known[workload.workload] = max(so_far, (region, plan), key=lambda pair: _like_a_layer(pair[0]))
    return [
        (of, [_drawing(data, *workloads[name], f"{name}, {workloads[name][0].occurrences} ×")
              for name in _in_turn(workloads)])
        for of, workloads in found.items()
    ]


def _in_turn(names: Iterable[str]) -> list[str]:
    """One name of each kind (decode, prefill) after another, so that the kinds lie side by side."""
    kinds = defaultdict[str, list[str]](list)
    for name in names:
        kinds[name.split(" ")[0]].append(name)
    return [name for together in zip_longest(*kinds.values()) for name in together if name is not None]


def _like_a_layer(region: RegionSummary) -> int:
    """A layer occurs often, and holds many ops, several matmuls among them."""
    return region.occurrences * len(region.ops) * (1 + region.kinds.count("anchor"))


def _drawings(data: ReportData, shown: Collection[RecordKey]) -> list[dict[str, Any]]:
    """One drawing per distinct region besides those ``shown``, the most expensive in a pass over its workload first."""
    first: dict[str, tuple[RegionSummary, PlanRecord, list[str]]] = {}
    for workload, region, plan in data.placed():
        if plan.key not in shown:
            _, _, where = first.setdefault(plan.key.workload, (region, plan, []))
            where.append(f"{region.occurrences} × {data.name_of(workload)}")
    costly = sorted(first.values(), key=lambda found: -found[0].occurrences * found[1].unfused_us)
    return [_drawing(data, region, plan, ", ".join(where), _FEW_REJECTED)
            for region, plan, where in costly[:_MAX_DRAWINGS]]


def _drawing(
    data: ReportData, region: RegionSummary, plan: PlanRecord, where: str, most: int = _REJECTED
) -> dict[str, Any]:
    facts = [_facts(data, region, plan, group) for group in plan.groups]
    return {
        "plan": plan, "where": where, "svg": Markup(partition_svg(region, plan, facts)),
        "rejected": rejected_groups(plan, region, most),
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
    record = data.record_of(plan, group)
    if record is not None and record.work.dram_bytes and group.measured_us:
        nbytes = record.work.dram_bytes
        words.append(f"{nbytes / 1e6:.3g} MB, {nbytes / group.measured_us / 1e3:.3g} GB/s")
    return ", ".join(words)


def table_html(frame: pd.DataFrame, caption: str, percent: Sequence[str] = ()) -> Markup:
    """An HTML table: a caption, a header row, numbers to the right."""
    kinds = ["number" if pd.api.types.is_numeric_dtype(frame[name]) else "text" for name in frame.columns]
    return Markup(templates().get_template("table.html.j2").render(
        caption=caption, columns=[(str(name).replace("_", " "), kind) for name, kind in zip(frame, kinds, strict=True)],
        rows=[[_cell(value, name in percent) for name, value in zip(frame, row, strict=True)]
              for row in frame_rows(frame)]))


def _cell(value: Any, as_percent: bool) -> str:
    if missing(value):
        return ""
    if as_percent:
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
