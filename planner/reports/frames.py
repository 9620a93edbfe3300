"""Reports: pandas frames over what the database holds for one device and, if wanted, one model. Nothing is measured."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from fuseplan.planner.errors import Argument, Command, PlanError, meant
from fuseplan.planner.module_paths import joined_places
from fuseplan.planner.tuning import summary as summaries
from fuseplan.planner.tuning.miss_list import MISS_COLUMNS, Miss, logged_misses
from fuseplan.planner.tuning.summary import RegionSummary, WorkloadSummary
from fuseplan.planner.tuning.whole_step import StepTimes, steps_of_user, stored_steps
from fuseplan.search import policy
from fuseplan.search.errors import counted
from fuseplan.search.store.record import ATEN, INDUCTOR, Alternative, GroupChoice, PlanRecord, RecordKey, TuningRecord

if TYPE_CHECKING:
    from fuseplan.costmodel.device import DeviceSpec
    from fuseplan.search.store.database import Database
    from fuseplan.search.store.layered import LayeredDatabase

#: The answer of an op that a library's call runs: nothing is fused there.
LIBRARY_CALL = "library call"


@dataclass(frozen=True)
class ReportData:
    """What a report is made from.

    Attributes:
        model: The one that the report is limited to; empty for everything stored.
        workloads: What was tuned; empty for records that were imported.
        misses: Look-ups that found nothing, as the database counts them.
        shipped: Keys of plans that come with the package.
        steps: Measured whole steps, by :func:`~fuseplan.planner.tuning.whole_step.step_key`.
        timed_here: Keys of those in the user's database; the others come with the package, from another machine.
    """

    device: str
    model: str
    spec: DeviceSpec | None
    records: Mapping[RecordKey, TuningRecord]
    plans: Mapping[RecordKey, PlanRecord]
    workloads: tuple[WorkloadSummary, ...] = ()
    misses: tuple[Miss, ...] = ()
    shipped: frozenset[RecordKey] = frozenset()
    steps: Mapping[str, StepTimes] = field(default_factory=dict)
    timed_here: frozenset[str] = frozenset()

    def placed(self) -> Iterator[tuple[WorkloadSummary, RegionSummary, PlanRecord]]:
        """Every plan of a workload's regions."""
        for workload in self.workloads:
            for region in workload.regions:
                plan = self.plans.get(workload.plan_key(region))
                if plan is not None and region.has_plan(plan):
                    yield workload, region, plan

    def planned(self) -> Iterator[tuple[WorkloadSummary | None, RegionSummary | None, PlanRecord]]:
        """Every plan with its workload and region; without summaries every stored plan, and None for both."""
        yield from self.placed() if self.workloads else ((None, None, plan) for plan in self.plans.values())

    def decided(self) -> dict[RecordKey, PlanRecord]:
        """The plans of what was decided by itself: parts in the place of their regions."""
        joined = {
            one.plan_key(region) for one in self.workloads for region in one.regions
            if region.parts and one.part_keys(region) <= self.plans.keys()
        }
        return {key: plan for key, plan in self.plans.items() if key not in joined}

    def record_of(self, plan: PlanRecord, group: GroupChoice) -> TuningRecord | None:
        """The tuning record of a plan's group; None where it was not tuned."""
        return self.records.get(replace(plan.key, workload=group.workload)) if group.workload else None

    def name_of(self, workload: WorkloadSummary) -> str:
        """Name of a workload, with its model where the report spans several."""
        return workload.workload if self.model else f"{workload.model} {workload.workload}"


def load_report(
    database: Database | LayeredDatabase, device: str, spec: DeviceSpec | None = None, model: str = "",
    regime: str | None = None,
) -> ReportData:
    """Everything known of ``device``, limited to ``model`` and ``regime`` where they are given.

    Without ``model`` it is the report of the only model that is known, or of all. PlanError where nothing is stored.
    """
    plans = {plan.key: plan for plan in database.plans() if plan.key.device == device}
    records = {record.key: record for record in database.records() if record.key.device == device}
    workloads = summaries.load_summaries(database, device, model or None)
    if model and not workloads:
        known = {workload.model for workload in summaries.load_summaries(database, device)}
        hint = meant(model, known, f"stored: {', '.join(sorted(known)) or 'none'}")
        known_here = "; {} without {} shows all that is known of this device" if plans else ""
        raise PlanError("nothing is stored for model {!r} on this device ({}); run {} for it first" + known_here,
                        model, hint, Command("tune"), Command("report"), Argument("model"))
    if not plans and not records:
        raise PlanError("the database has no record of device {}; run {} first", device, Command("tune"))
    if model:
        regions = [(workload, region) for workload in workloads for region in workload.regions]
        wanted = {key for one, region in regions for key in (one.plan_key(region), *one.part_keys(region))}
        plans = {key: plan for key, plan in plans.items() if key in wanted}
    misses = tuple(one for one in logged_misses(database, device) if regime in (None, one.key.regime))
    if regime is not None:
        if regime not in (stored := sorted({key.regime for key in plans or records})) and not misses:
            raise PlanError("{} {}: no such plan is stored {}; stored: {}", Argument("regime"), regime,
                            f"for model {model!r} on this device" if model else f"for device {device}",
                            ", ".join(stored) or "none")
        plans = {key: plan for key, plan in plans.items() if key.regime == regime}
        records = {key: record for key, record in records.items() if key.regime == regime}
        workloads = tuple(workload for workload in workloads if workload.regime == regime)
    shipped = frozenset(key for key, found in database.get_plans(plans).items() if found.shipped)
    models = {workload.model for workload in workloads}
    if not model and len(models) == 1:
        model = models.pop()
    found, own = stored_steps(database), steps_of_user(database)
    return ReportData(device, model, spec, records, plans, workloads, misses, shipped, found, own)


def group_frame(data: ReportData) -> pd.DataFrame:
    """One row per distinct group of the chosen partitions; none for a lone op of ATen's that no kernel was tuned for.

    ``answer`` is ``"fuse"``, ``"do not fuse"``, ``"undecided"``, or ``"library call"`` of an op that a library runs.

    ``times`` counts how often the group runs in one pass over each workload; ``unfused_us`` is of the run that decided
    it, or of a library's call the sum of its ops; ``speedup`` is unfused over what the plan runs, so it is 1 where the
    answer is not to fuse; ``doubt`` says that what runs is more than 5 % below ``lower_bound_us``.
    """
    rows: dict[Any, dict[str, Any]] = {}
    runs: defaultdict[Any, Counter[str]] = defaultdict(Counter)
    places: defaultdict[tuple[Any, str], list[tuple[int, list[str]]]] = defaultdict(list)
    shipped = {group.workload for key in data.shipped for group in data.plans[key].groups if group.workload}
    for workload, region, plan in data.planned():
        for group in plan.groups:
            named, record = replace(plan.key, workload=group.workload or group.label), data.record_of(plan, group)
            if record is None and group.is_plain:
                continue
            # A label does not tell how large the weights of a linear are; the same calls have the same times.
            key = (named,) if group.workload else (named, group.implementation, group.measured_us)
            source = "shipped" if plan.key in data.shipped or group.workload in shipped else "stored"
            row = _group_row(group, record, unfused_us(plan, group, region))
            rows.setdefault(key, row | {"source": source, "regime": named.regime, "key": named.workload})
            if workload is not None and region is not None:
                name = data.name_of(workload)
                runs[key][name] += region.occurrences
                places[key, name] += [one.part(group.ops) for one in region.places]
    for key, row in rows.items():
        where = "; ".join(filter(None, dict.fromkeys(joined_places(places[key, name]) for name in runs[key])))
        row |= {"workload": ", ".join(runs[key]), "times": runs[key].total() or None, "place": where}
    names = ["workload", "group", "place", "ops", "times", "answer", "backend", "config", "fused_us", "unfused_us",
             "speedup", "predicted_us", "lower_bound_us", "noise", "measured_configs", "enumerated_configs", "source",
             "doubt", "regime", "key"]
    whole = dict.fromkeys(("times", "measured_configs", "enumerated_configs"), "Int64")  # missing in some rows
    return pd.DataFrame(list(rows.values()), columns=names).astype(whole)


def _group_row(group: GroupChoice, record: TuningRecord | None, by_ops_us: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "group": group.label, "ops": len(group.ops), "answer": _answer(group),
        "backend": "" if group.is_plain else group.implementation, "config": config_text(group.config),
        "predicted_us": group.predicted_us, "lower_bound_us": group.lower_bound_us,
        "fused_us": None if group.is_plain else group.measured_us, "unfused_us": by_ops_us,
    }
    if record is not None:
        row |= {
            "group": record.label, "backend": record.backend, "config": config_text(record.config),
            "answer": "undecided" if record.undecided else row["answer"],
            "fused_us": record.fused.median_us if record.fused is not None else None,
            "unfused_us": record.unfused.median_us, "noise": record.unfused.noise,
            "measured_configs": record.measured, "enumerated_configs": record.enumerated,
        }
    chosen_us = row["unfused_us"] if group.is_plain else row["fused_us"]
    speedup = row["unfused_us"] / chosen_us if row["unfused_us"] is not None and chosen_us else None
    doubt = floor_doubt(chosen_us, group.lower_bound_us, policy.FLOOR_TOLERANCE)
    if chosen_us is not None and doubt is None:  # the fastest that is known bounds the floor, too
        row["lower_bound_us"] = min(group.lower_bound_us, chosen_us)
    return row | {"speedup": speedup, "doubt": doubt}


def _answer(group: GroupChoice) -> str:
    if group.is_plain:
        return "do not fuse"
    return "fuse" if group.is_kernel or group.implementation == INDUCTOR else LIBRARY_CALL


def floor_doubt(time_us: float | None, floor_us: float | None, tolerance: float = 0.0) -> str | None:
    """In words, that a time is below its floor, which the probe's best rates give; None where it is not."""
    if time_us is None or floor_us is None or time_us >= floor_us * (1 - tolerance):
        return None
    share = 1 - time_us / floor_us
    return f"{share:.1%} below its floor: the device was slower when it was probed, or the time is wrong"


def time_of(group: GroupChoice | Alternative) -> float:
    """Microseconds, measured or else predicted."""
    return (group.measured_us if group.measured_us is not None else group.predicted_us) or 0.0


def aten_times(plan: PlanRecord) -> dict[int, float]:
    """What ATen takes for each op of a region by itself, in microseconds, by position."""
    single: list[GroupChoice | Alternative] = [*plan.rejected, *plan.groups]
    return {one.ops[0]: time_of(one) for one in single if len(one.ops) == 1 and one.implementation == ATEN}


def unfused_us(plan: PlanRecord, group: GroupChoice, region: RegionSummary | None) -> float | None:
    """What ATen takes for the ops of a group, each by itself; None where that is not known of one."""
    alone = aten_times(plan)
    own = [at for at in group.ops if region is None or region.kinds[at] != "view"]
    return math.fsum(alone[at] for at in own) if set(own) <= alone.keys() else None


def how_it_runs(group: GroupChoice) -> str:
    """A group's implementation in words."""
    if group.is_plain:
        return "ATen's op"
    return f"one {group.implementation} kernel" if group.is_kernel else f"library call {group.implementation}"


def config_text(config: Mapping[str, int | str]) -> str:
    """A configuration for people: ``block=1024 warps=4``."""
    return " ".join(f"{name}={value}" for name, value in sorted(config.items()))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Geometric mean of the positive, finite ratios; NaN when there are none."""
    known = [ratio for ratio in ratios if ratio is not None and 0 < ratio < math.inf]
    return statistics.geometric_mean(known) if known else math.nan


def headline(groups: pd.DataFrame) -> str:
    """The groups in one sentence; ops that a library's call runs are counted apart."""
    if not len(groups):
        return "no group has been tuned"
    calls = int((groups["answer"] == LIBRARY_CALL).sum())
    tuned, fused = len(groups) - calls, int((groups["answer"] == "fuse").sum())
    said = f"{fused} of {counted(tuned, 'group')} {'is' if tuned == 1 else 'are'} fused" if tuned else ""
    called = f"{counted(calls, 'op')} by a library's call" if calls else ""
    noise = groups["noise"].fillna(groups["noise"].max())  # a library's call has none of its own
    slower = int((groups["speedup"] < 1 - noise.fillna(0.0)).sum())
    below = int(groups["doubt"].notna().sum())
    words = f"; {below} measured below their floors, so the probe of these floors or a time is wrong" if below else ""
    return f"{'; '.join(filter(None, (said, called)))}; {slower} slower than unfused beyond noise{words}"


def region_frame(data: ReportData) -> pd.DataFrame:
    """One row per distinct region and workload: the partition against running everything unfused."""
    rows = [
        {
            "workload": data.name_of(workload) if workload else "", "region": plan.label,
            "times": region.occurrences if region else None,
            "ops": len({op for group in plan.groups for op in group.ops}), "kernels": len(plan.groups),
            "planned_us": plan.planned_us, "unfused_us": plan.unfused_us,
            "speedup": plan.unfused_us / plan.planned_us if plan.planned_us > 0 else None,
            "predicted_us": plan.predicted_us, "candidates": plan.enumerated, "measured_candidates": plan.measured,
            "gap": max(0.0, plan.gap), "peak_bytes": plan.peak_bytes, "unfused_peak_bytes": plan.unfused_peak_bytes,
            "regime": plan.key.regime, "key": plan.key.workload,
        }
        for workload, region, plan in data.planned()
    ]
    names = ["workload", "region", "times", "ops", "kernels", "planned_us", "unfused_us", "speedup", "predicted_us",
             "candidates", "measured_candidates", "gap", "peak_bytes", "unfused_peak_bytes", "regime", "key"]
    return pd.DataFrame(rows, columns=names).astype({"times": "Int64"})


def coverage_frame(data: ReportData) -> pd.DataFrame:
    """One row per workload: how many of its fusable ops the plan fuses, and what that leaves to launch.

    ``fusable`` ops are no matmuls, attention or views. ``launches`` leaves library calls out. Times are those of whole
    regions, matmuls and attention included, None where a region has no plan.
    """
    names = ["workload", "ops", "views", "library_calls", "fusable", "fused", "coverage", "launches_unfused",
             "launches", "planned_us", "unfused_us"]
    return pd.DataFrame([_coverage_row(data, one) for one in data.workloads], columns=names)


def _coverage_row(data: ReportData, workload: WorkloadSummary) -> dict[str, Any]:
    fused = launches = unfused_launches = 0
    planned_us = unfused_us = 0.0
    for region in workload.regions:
        plan, times = data.plans.get(workload.plan_key(region)), region.occurrences
        unfused_launches += times * region.kinds.count("compute")
        if plan is None or not region.has_plan(plan):
            launches += times * region.kinds.count("compute")
            planned_us = unfused_us = math.nan
            continue
        for group in plan.groups:
            kinds = [region.kinds[at] for at in group.ops]
            own = kinds.count("compute")
            fused += times * own if group.is_kernel else 0
            if "anchor" not in kinds:
                launches += times * (min(own, 1) if group.is_kernel else own)
        planned_us += times * plan.planned_us
        unfused_us += times * plan.unfused_us
    fusable = workload.computes
    return {
        "workload": data.name_of(workload), "ops": workload.ops, "views": workload.views,
        "library_calls": workload.externs, "fusable": fusable, "fused": fused,
        "coverage": fused / fusable if fusable else None, "launches_unfused": unfused_launches, "launches": launches,
        "planned_us": planned_us, "unfused_us": unfused_us,
    }


def misses_frame(misses: Iterable[Miss]) -> pd.DataFrame:
    """Look-ups at run time that found no plan, most frequent first. ``tunable`` is yes, or the reason why not."""
    return pd.DataFrame([one.row() for one in misses], columns=list(MISS_COLUMNS))
