"""What a plan buys in a whole step: its time by part, and what each group saves. Answers are times, not ratios."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fuseplan.planner.module_paths import joined_places, located
from fuseplan.planner.report.frames import ReportData
from fuseplan.planner.tuning.summary import RegionSummary, WorkloadSummary
from fuseplan.planner.tuning.whole_step import StepTimes, step_key
from fuseplan.search.store.record import Alternative, GroupChoice, PlanRecord, RecordKey

STEP_COLUMNS = ("workload", "unfused_us", "planned_us", "speedup", "floor_us", "over_floor", "noise", "measured",
                "regime")
PART_COLUMNS = ("workload", "part", "unfused_us", "planned_us", "saved_us", "regime")
SAVED_COLUMNS = (
    "workload", "group", "place", "uses", "unfused_us", "planned_us", "saved_us", "share", "runs", "regime", "key",
)
#: Where a step's time goes.
MATMULS, ATTENTION, FUSED, UNFUSED, BETWEEN = (
    "matmuls", "attention", "fused groups", "unfused ops", "launches and gaps")
PARTS = (MATMULS, ATTENTION, FUSED, UNFUSED, BETWEEN)
#: Groups of a workload that are named.
_SHOWN = 3
#: Of what all groups save: less is not worth a line.
_LITTLE = 0.02


@dataclass(frozen=True)
class Saved:
    """What a group saves in a step: ``uses`` times the difference. Times are of one use, in microseconds."""

    group: GroupChoice
    label: str
    uses: int
    unfused_us: float
    planned_us: float
    place: str = ""

    @property
    def name(self) -> str:
        """Its label, and where in the model it is."""
        return located(self.label, self.place)

    @property
    def saved_us(self) -> float:
        return self.uses * (self.unfused_us - self.planned_us)


@dataclass(frozen=True)
class Step:
    """One workload: what was measured of its whole step, if anything was, and its groups.

    ``parts`` has for each part the microseconds of a step unfused and as planned, of what was measured by itself; what
    a whole step takes beyond these is between them.
    """

    workload: WorkloadSummary
    name: str
    times: StepTimes | None
    parts: Mapping[str, tuple[float, float]]
    saved: tuple[Saved, ...]

    @property
    def unfused_us(self) -> float:
        """Measured end to end, else the sum of its parts."""
        return self.times.unfused_us if self.times is not None else math.fsum(one for one, _ in self.parts.values())

    @property
    def planned_us(self) -> float:
        return self.times.planned_us if self.times is not None else math.fsum(one for _, one in self.parts.values())


def steps(data: ReportData) -> list[Step]:
    """The steps of workloads that are planned in every region."""
    planned: defaultdict[int, list[tuple[RegionSummary, PlanRecord]]] = defaultdict(list)
    for workload, region, plan in data.planned():
        if workload is not None and region is not None:
            planned[id(workload)].append((region, plan))
    return [
        _step(data, workload, planned[id(workload)]) for workload in data.workloads
        if planned[id(workload)] and len(planned[id(workload)]) == len(workload.regions)
    ]


def _step(data: ReportData, workload: WorkloadSummary, planned: list[tuple[RegionSummary, PlanRecord]]) -> Step:
    times = data.steps.get(step_key((region.occurrences, plan) for region, plan in planned))
    parts = {part: [0.0, 0.0] for part in PARTS[:-1]}
    saved: dict[str, Saved] = {}
    places: defaultdict[str, list[tuple[int, list[str]]]] = defaultdict(list)
    for region, plan in planned:
        alone = _alone_us(plan)
        for at, time_us in alone.items():
            parts[_part_of_op(region, at)][0] += region.occurrences * time_us
        for group in plan.groups:
            parts[_part(region, group)][1] += region.occurrences * time_of(group)
            if not group.is_plain and (one := _saved(data, region, plan, group, alone)) is not None:
                key = group.workload or f"{group.label} {group.implementation}"
                known = saved.get(key)
                places[key] += [of.part(group.ops) for of in region.places]
                saved[key] = one if known is None else replace(known, uses=known.uses + one.uses)
    placed = (replace(one, place=joined_places(places[key])) for key, one in saved.items())
    ordered = sorted(placed, key=lambda one: -one.saved_us)
    return Step(workload, data.name_of(workload), times, {part: (a, b) for part, (a, b) in parts.items()},
                tuple(ordered))


def _saved(
    data: ReportData, region: RegionSummary, plan: PlanRecord, group: GroupChoice, alone: Mapping[int, float]
) -> Saved | None:
    """What a group saves: by the run that decided it, else by the times of its ops."""
    key = RecordKey(group.workload, plan.key.device, plan.key.regime, plan.key.numerics)
    record = data.records.get(key) if group.workload else None
    if record is not None and record.fused is not None:
        fused_us, unfused_us = record.fused.median_us, record.unfused.median_us
        return Saved(group, record.label, region.occurrences, unfused_us, fused_us)
    own = [at for at in group.ops if region.kinds[at] != "view"]
    if not set(own) <= alone.keys():
        return None
    unfused_us = math.fsum(alone[at] for at in own)
    return Saved(group, group.label, region.occurrences, unfused_us, time_of(group))


def time_of(group: GroupChoice | Alternative) -> float:
    """Microseconds, measured or else predicted, with what a group was held to take longer in its region."""
    known = group.measured_us if group.measured_us is not None else group.predicted_us
    return (known or 0.0) + group.delay_us


def _alone_us(plan: PlanRecord) -> dict[int, float]:
    """What ATen takes for each op by itself, by position."""
    single: list[GroupChoice | Alternative] = [*plan.rejected, *plan.groups]
    return {one.ops[0]: time_of(one) for one in single if len(one.ops) == 1 and one.implementation == "aten"}


def _part_of_op(region: RegionSummary, at: int) -> str:
    if region.kinds[at] != "anchor":
        return UNFUSED
    return ATTENTION if "attention" in region.ops[at] else MATMULS


def _part(region: RegionSummary, group: GroupChoice) -> str:
    """A group with a matmul or attention in it counts as that, whatever else it holds."""
    anchors = [_part_of_op(region, at) for at in group.ops if region.kinds[at] == "anchor"]
    if anchors:
        return anchors[0]
    return UNFUSED if group.is_plain else FUSED


def step_frame(data: ReportData) -> pd.DataFrame:
    """One row per workload: a step unfused and as planned. ``measured`` says whether end to end, or by its parts."""
    rows = []
    for one in steps(data):
        floor = one.times.floor_us if one.times is not None else None
        rows.append({
            "workload": one.name, "unfused_us": one.unfused_us, "planned_us": one.planned_us,
            "speedup": _ratio(one.unfused_us, one.planned_us), "floor_us": floor,
            "over_floor": _ratio(one.planned_us, floor), "noise": one.times.noise if one.times is not None else None,
            "measured": "end to end" if one.times is not None else "by parts", "regime": one.workload.regime,
        })
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS))


def part_frame(data: ReportData) -> pd.DataFrame:
    """Rows of a step's time by part, of one use of each group by itself; what a whole step takes beyond (or, where data
    stay in a cache, below) their sum is launches and gaps.
    """
    rows = []
    for one in steps(data):
        parts = dict(one.parts)
        if one.times is not None:
            parts[BETWEEN] = (one.times.unfused_us - math.fsum(a for a, _ in one.parts.values()),
                              one.times.planned_us - math.fsum(b for _, b in one.parts.values()))
        rows += [
            {"workload": one.name, "part": part, "unfused_us": unfused, "planned_us": planned,
             "saved_us": unfused - planned, "regime": one.workload.regime}
            for part, (unfused, planned) in parts.items()
        ]
    return pd.DataFrame(rows, columns=list(PART_COLUMNS))


def saved_frame(data: ReportData) -> pd.DataFrame:
    """One row per group and workload, by what it saves in a step, most first. ``share`` is that of the unfused step."""
    rows: list[dict[str, Any]] = []
    for one in steps(data):
        rows += [
            {"workload": one.name, "group": saved.label, "place": saved.place, "uses": saved.uses,
             "unfused_us": saved.unfused_us, "planned_us": saved.planned_us, "saved_us": saved.saved_us,
             "share": _ratio(saved.saved_us, one.unfused_us), "runs": saved.group.implementation,
             "regime": one.workload.regime, "key": saved.group.workload}
            for saved in one.saved
        ]
    return pd.DataFrame(rows, columns=list(SAVED_COLUMNS))


def step_lines(data: ReportData, shown: int = _SHOWN) -> Iterator[str]:
    """In words: each workload's step, and the groups that save most of it."""
    for one in steps(data):
        yield step_words(one)
        total_us = math.fsum(saved.saved_us for saved in one.saved)
        worth = [saved for saved in one.saved if saved.saved_us > _LITTLE * total_us]
        for saved in worth[:shown]:
            each = f"{time_text(saved.unfused_us)} -> {time_text(saved.planned_us)}"
            yield f"    saves {time_text(saved.saved_us)}: {saved.name}, {saved.uses} x {each}"
        rest = [saved for saved in one.saved if saved not in worth[:shown]]
        if rest:
            rest_us = math.fsum(saved.saved_us for saved in rest)
            words = f"save {time_text(rest_us)}" if rest_us >= 0 else f"cost {time_text(-rest_us)}"
            yield f"    {len(rest)} other group{'s' * (len(rest) > 1)} together {words}"


def step_words(one: Step) -> str:
    """``decode 1 @ 1024: 1.52 -> 0.91 ms a step (1.67x); floor 0.66 ms``."""
    unit = _unit(max(one.unfused_us, one.planned_us))
    times = f"{_in(one.unfused_us, unit)} -> {_in(one.planned_us, unit)} {unit} a step"
    ratio = _ratio(one.unfused_us, one.planned_us)
    words = f"{one.name}: {times} ({ratio:.2f}x)" if ratio is not None else f"{one.name}: {times}"
    if one.times is None:
        return f"{words}; the sum of its parts, a whole step was not timed"
    floor = f"; floor {_in(one.times.floor_us, unit)} {unit}" if one.times.floor_us is not None else ""
    doubt = abs(one.unfused_us - one.planned_us) <= one.times.noise * one.planned_us
    return f"{words}{floor}{f'; within the noise of {one.times.noise:.0%}' if doubt else ''}"


@dataclass(frozen=True)
class Segment:
    """A part of a step's bar: ``share`` is in percent of the longer of a workload's two bars."""

    part: str
    share: float
    time_us: float


def bars(one: Step) -> tuple[list[Segment], list[Segment]]:
    """A step as two bars, unfused and as planned, on one scale.

    Where a whole step takes less than its parts by themselves, whose data were not in a cache, these are drawn shorter.
    """
    longest = max(one.unfused_us, one.planned_us)
    found = []
    for side, whole_us in ((0, one.unfused_us), (1, one.planned_us)):
        times = {part: pair[side] for part, pair in one.parts.items()}
        total_us = math.fsum(times.values())
        scale = min(1.0, whole_us / total_us) if total_us > 0 else 1.0
        drawn = {part: time_us * scale for part, time_us in times.items()} | {BETWEEN: whole_us - total_us * scale}
        found.append([
            Segment(part, 100 * drawn_us / longest, times.get(part, drawn_us))
            for part, drawn_us in drawn.items() if longest > 0 and drawn_us > 0.002 * longest
        ])
    return found[0], found[1]


def answers(one: Step) -> list[str]:
    """Three sentences: how much faster a step is, which groups made it, and what is left to gain."""
    ratio = _ratio(one.unfused_us, one.planned_us) or 1.0
    how = "measured end to end" if one.times is not None else "the sum of its parts; a whole step was not timed"
    found = [
        f"A step takes {time_text(one.planned_us)}, unfused {time_text(one.unfused_us)}: {ratio:.2f}x ({how})."
    ]
    best = [saved for saved in one.saved if saved.saved_us > 0][:_SHOWN]
    if best:
        names = "; ".join(f"{saved.place or saved.label} ({time_text(saved.saved_us)})" for saved in best)
        found.append(f"Most is saved by {names}.")
    most = max(bars(one)[1], key=lambda piece: piece.share, default=None)
    left = ""
    if most is not None:
        share = most.share * max(one.unfused_us, one.planned_us) / (100 * one.planned_us)
        left = f"What is left is mostly {most.part} ({share:.0%})"
    if one.times is not None and one.times.floor_us:
        over = one.planned_us / one.times.floor_us
        floor = f"memory and arithmetic alone take {time_text(one.times.floor_us)}, at best {over:.2f} times less"
        left = f"{left}; {floor}" if left else floor.capitalize()
    return [*found, f"{left}."] if left else found


def time_text(time_us: float) -> str:
    """``912 us``, ``1.52 ms``, ``2.1 s``: three digits."""
    unit = _unit(time_us)
    return f"{_in(time_us, unit)} {unit}"


_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}


def _unit(time_us: float) -> str:
    size = abs(time_us)
    return "us" if size < 999.5 else "ms" if size < 999.5e3 else "s"


def _in(time_us: float, unit: str) -> str:
    value = time_us / _UNITS[unit]
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


def _ratio(one: float, other: float | None) -> float | None:
    return one / other if other else None
