"""What a plan buys in a whole step: its time by part, and what each group saves. Answers are times, not ratios."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from fuseplan.planner.module_paths import TOP, joined_places, located
from fuseplan.planner.reports.frames import ReportData, aten_times, floor_doubt, time_of, unfused_us
from fuseplan.planner.tuning.summary import RegionSummary, WorkloadSummary
from fuseplan.planner.tuning.whole_step import StepTimes, step_key
from fuseplan.search.store.record import GroupChoice, PlanRecord

#: Where a step's time goes.
MATMULS, ATTENTION, FUSED, UNFUSED, BETWEEN = (
    "matmuls", "attention", "fused groups", "unfused ops", "launches and gaps")
PARTS = (MATMULS, ATTENTION, FUSED, UNFUSED, BETWEEN)
#: What a whole step takes less than its parts, each of which was measured with its data in memory.
CACHE_REUSE = "cache reuse"


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
        """Where in the model it is, as far as that is known, and its label."""
        return located(self.place, self.label) if self.place not in ("", TOP) else self.label

    @property
    def saved_us(self) -> float:
        return self.uses * (self.unfused_us - self.planned_us)

    def doubt(self, step_us: float) -> str | None:
        """In words, that it saves more than the unfused step takes, since its times are of another run; else None."""
        too_much = self.saved_us > step_us
        return "more than the whole step takes: by itself it was slower than in the step" if too_much else None


@dataclass(frozen=True)
class Step:
    """One workload: what was measured of its whole step, if anything was, and its groups.

    Attributes:
        unfused_us, planned_us: Measured end to end, else the sum of its regions.
        parts: For each part microseconds unfused and as planned, of what was measured by itself.
        left_out: Ops that are in no time here: ATen alone can run them, and not on numbers of our choice.
    """

    workload: WorkloadSummary
    name: str
    times: StepTimes | None
    unfused_us: float
    planned_us: float
    parts: Mapping[str, tuple[float, float]]
    saved: tuple[Saved, ...]
    left_out: int = 0
    timed_here: bool = True

    @property
    def best_us(self) -> float:
        """What a step takes as dispatch runs it: by the plan, or by TorchInductor's code where that is faster."""
        return self.times.best_us if self.times is not None else self.planned_us

    @property
    def gains(self) -> tuple[float, float] | None:
        """The range of what the plan gained in its rounds; None where that is not known, or the plan does not run."""
        return self.times.gains if self.times is not None else None

    @property
    def floor_us(self) -> float | None:
        """Lower bound of the step by memory and arithmetic, in microseconds; None where no whole step was timed."""
        return self.times.floor_us if self.times is not None else None

    @property
    def measured(self) -> str:
        """How the step was measured: end to end, perhaps on another machine with such a device, or by its regions."""
        if self.times is None:
            return "by regions"
        return "end to end" if self.timed_here else "end to end, on another machine"

    @property
    def hidden(self) -> bool:
        """Whether the run's own noise could be the difference."""
        return self.times is not None and abs(self.unfused_us - self.planned_us) <= self.times.noise * self.planned_us

    @property
    def doubt(self) -> str | None:
        """In words, that the step was measured to take less than its floor; None where it was not."""
        return floor_doubt(min(self.unfused_us, self.planned_us), self.floor_us)


def steps(data: ReportData) -> list[Step]:
    """The steps of workloads that are planned in every region, those that were timed as a whole first."""
    planned: defaultdict[int, list[tuple[RegionSummary, PlanRecord]]] = defaultdict(list)
    for workload, region, plan in data.placed():
        planned[id(workload)].append((region, plan))
    found = [
        _step(data, workload, planned[id(workload)]) for workload in data.workloads
        if planned[id(workload)] and len(planned[id(workload)]) == len(workload.regions)
    ]
    return sorted(found, key=lambda one: one.times is None)


def _step(data: ReportData, workload: WorkloadSummary, planned: list[tuple[RegionSummary, PlanRecord]]) -> Step:
    whole = step_key((region.occurrences, plan) for region, plan in planned)
    times = data.steps.get(whole)
    parts = {part: [0.0, 0.0] for part in PARTS[:-1]}
    saved: dict[str, Saved] = {}
    places: defaultdict[str, list[tuple[int, list[str]]]] = defaultdict(list)
    for region, plan in planned:
        for at, time_us in aten_times(plan).items():
            parts[_part_of_op(region, at)][0] += region.occurrences * time_us
        for group in plan.groups:
            parts[_part(region, group)][1] += region.occurrences * time_of(group)
            if not group.is_plain and (one := _saved(data, region, plan, group)) is not None:
                # A label does not tell how large the weights of a linear are; the same calls have the same times.
                key = group.workload or f"{group.label} {group.implementation} {one.unfused_us} {one.planned_us}"
                known = saved.get(key)
                places[key] += [of.part(group.ops) for of in region.places]
                saved[key] = one if known is None else replace(known, uses=known.uses + one.uses)
    placed = (replace(one, place=joined_places(places[key])) for key, one in saved.items())
    ordered = sorted(placed, key=lambda one: -one.saved_us)
    if times is not None:
        before_us, planned_us = times.unfused_us, times.planned_us
    else:
        before_us = math.fsum(region.occurrences * plan.unfused_us for region, plan in planned)
        planned_us = math.fsum(region.occurrences * plan.planned_us for region, plan in planned)
    held = sum(region.occurrences * (len(region.kinds) - region.kinds.count("view")) for region, _ in planned)
    held += times.opaque if times is not None else 0
    return Step(
        workload, data.name_of(workload), times, before_us, planned_us,
        {part: (a, b) for part, (a, b) in parts.items()}, tuple(ordered), max(0, workload.ops - workload.views - held),
        whole in data.timed_here)


def _saved(data: ReportData, region: RegionSummary, plan: PlanRecord, group: GroupChoice) -> Saved | None:
    """What a group saves: by the run that decided it, else by the times of its ops."""
    record = data.record_of(plan, group)
    if record is not None and record.fused is not None:
        return Saved(group, record.label, region.occurrences, record.unfused.median_us, record.fused.median_us)
    before_us = unfused_us(plan, group, region)
    return None if before_us is None else Saved(group, group.label, region.occurrences, before_us, time_of(group))


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
    """One row per workload: a step unfused and as planned. ``measured`` says whether end to end, and where, or by its
    regions; ``speedup_low`` to ``speedup_high`` is the range over the rounds; ``inductor_us`` is what plain
    ``torch.compile`` takes, which runs it where ``by_inductor``; ``read_low_gbps`` to ``read_high_gbps`` is the speed
    at which a CPU read memory in these rounds.
    """
    rows = []
    for one in steps(data):
        times, (low, high) = one.times, one.gains or (None, None)
        rows.append({
            "workload": one.name, "unfused_us": one.unfused_us, "planned_us": one.planned_us,
            "speedup": ratio(one.unfused_us, one.best_us), "speedup_low": low, "speedup_high": high,
            "floor_us": one.floor_us, "over_floor": ratio(one.best_us, one.floor_us), "noise": times and times.noise,
            "measured": one.measured, "inductor_us": times and times.inductor_us,
            "by_inductor": bool(times and times.by_inductor), "left_out": one.left_out, "doubt": one.doubt,
            "regime": one.workload.regime, "read_low_gbps": times and times.read_low,
            "read_high_gbps": times and times.read_high,
        })
    names = ["workload", "unfused_us", "planned_us", "speedup", "speedup_low", "speedup_high", "floor_us", "over_floor",
             "noise", "measured", "inductor_us", "by_inductor", "left_out", "doubt", "regime", "read_low_gbps",
             "read_high_gbps"]
    return pd.DataFrame(rows, columns=names)


def part_frame(data: ReportData) -> pd.DataFrame:
    """Rows of a step's time by part, each measured by itself; the rest of a whole step is launches and gaps, or, where
    it takes less than their sum, cache reuse.
    """
    rows = []
    for one in steps(data):
        parts = dict(one.parts)
        if one.times is not None:
            unfused_us = one.times.unfused_us - math.fsum(a for a, _ in one.parts.values())
            planned_us = one.times.planned_us - math.fsum(b for _, b in one.parts.values())
            parts[BETWEEN] = max(0.0, unfused_us), max(0.0, planned_us)
            if min(unfused_us, planned_us) < 0:
                parts[CACHE_REUSE] = min(0.0, unfused_us), min(0.0, planned_us)
        rows += [(one.name, part, unfused, planned, unfused - planned, one.workload.regime)
                 for part, (unfused, planned) in parts.items()]
    return pd.DataFrame(rows, columns=["workload", "part", "unfused_us", "planned_us", "saved_us", "regime"])


def saved_frame(data: ReportData) -> pd.DataFrame:
    """One row per group and workload, by what it saves in a step, most first. ``share`` is that of the unfused step."""
    rows = [
        {"workload": one.name, "group": saved.label, "place": saved.place, "uses": saved.uses,
         "unfused_us": saved.unfused_us, "planned_us": saved.planned_us, "saved_us": saved.saved_us,
         "share": ratio(saved.saved_us, one.unfused_us), "runs": saved.group.implementation,
         "doubt": saved.doubt(one.unfused_us), "regime": one.workload.regime, "key": saved.group.workload}
        for one in steps(data) for saved in one.saved
    ]
    names = ["workload", "group", "place", "uses", "unfused_us", "planned_us", "saved_us", "share", "runs", "doubt",
             "regime", "key"]
    return pd.DataFrame(rows, columns=names)


def ratio(one: float, other: float | None) -> float | None:
    """None where there is nothing to compare with."""
    return one / other if other else None
