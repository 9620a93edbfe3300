"""The cost model against its bars, on kernels and shapes that were left out of the fit.

Everything follows from what plans have measured, whose works follow from the model's graphs: factors are fitted again
without the kernels they are to predict, covers are solved with those predictions, and what they pick is paid for at
measured times. Kernels are predicted and measured by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from best_covers import best_covers

from fuseplan.costmodel.accuracy import spearman
from fuseplan.costmodel.calibrate import MIN_SAMPLES, FitTable, Sample
from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline import predict, roofline_terms
from fuseplan.costmodel.work import Work
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import candidate, region_dependencies
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.reports.accuracy import cover_problem, is_a_choice
from fuseplan.planner.reports.frames import ReportData, geometric_mean
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.record import ATEN, PlanRecord, RecordKey

#: What the model has to reach, on every device.
MIN_SPEARMAN, MAX_MEDIAN_ERROR, MAX_TOP_REGRET, MAX_TOP8_REGRET = 0.95, 0.10, 0.05, 0.01
_TOP = 8

SAMPLE_COLUMNS = (
    "region", "key", "regime", "phase", "ops", "kind", "implementation", "label", "family", "group", "mode",
    "measured_us", "predicted_us",
)
#: The left-out predictions of a sample frame, and what they leave out.
SPLITS: Mapping[str, str] = {"other_families_us": "kernels that compute the same", "other_phases_us": "shapes"}
#: Rows that agree in these are one choice, of which several regions may make use.
_CHOICE = ["group", "kind", "regime"]


@dataclass(frozen=True)
class ChoiceSample:
    """One measured way to run some ops of a region.

    Attributes:
        ops: Positions among the region's ops.
        implementation: Name of the way to run them.
        name: Calibration that predicts it: the kernel's back end, the library call, or ``"unfused"``.
        family: What it computes, whatever the shape.
        group: Workload key, and the name of a library call; equal ones are the same kernel.
    """

    ops: tuple[int, ...]
    implementation: str
    name: str
    label: str
    family: str
    group: str
    mode: Mode
    work: Work
    measured_us: float


@dataclass(frozen=True)
class RegionSamples:
    """What was measured of a plan's region, of ``enumerated`` choices that there are.

    ``edges`` are pairs of positions of ops, of which the first has to run before the second, by way of views too.
    """

    key: RecordKey
    label: str
    edges: tuple[tuple[int, int], ...]
    enumerated: int
    samples: tuple[ChoiceSample, ...]


def sample_frame(regions: Sequence[RegionSamples], spec: DeviceSpec, phases: Mapping[str, str]) -> pd.DataFrame:
    """Every sample with its predictions, its terms (``term_*``, in us, uncalibrated) and its work (``work_*``).

    ``predicted_us`` comes from the device's stored calibrations, ``other_families_us`` from a fit without all kernels
    that compute the same, and ``other_phases_us`` from one without the sample's phase. A kernel that several regions
    share counts once in every fit.

    ``phases`` has the phase of each region by workload key (``"decode"``). Where there is only one, shapes are told
    apart by size instead: ``"small"`` and ``"large"``, half of the samples each.
    """
    pairs = [(region, sample) for region in regions for sample in region.samples]
    frame = pd.DataFrame([_sample_row(region, sample, spec, phases) for region, sample in pairs],
                         columns=None if pairs else [*SAMPLE_COLUMNS, "work_dram_bytes"])
    if frame["phase"].nunique() <= 1:
        large = frame["work_dram_bytes"] > frame["work_dram_bytes"].median()
        frame["phase"] = large.map({True: "large", False: "small"})
    samples = [sample for _, sample in pairs]
    at = len(SAMPLE_COLUMNS)
    for column, part in (("other_phases_us", "phase"), ("other_families_us", "family")):
        frame.insert(at, column, _left_out(frame, samples, spec, part))
    return frame


def _sample_row(
    region: RegionSamples, sample: ChoiceSample, spec: DeviceSpec, phases: Mapping[str, str]
) -> dict[str, Any]:
    key, work = region.key, asdict(sample.work)
    flops = work.pop("flops")
    terms = asdict(roofline_terms(sample.work, spec, sample.mode))
    return {
        "region": region.label, "key": key.workload, "regime": key.regime, "phase": phases.get(key.workload, ""),
        "ops": " ".join(map(str, sample.ops)), "kind": sample.name, "implementation": sample.implementation,
        "label": sample.label, "family": sample.family, "group": sample.group, "mode": sample.mode,
        "measured_us": sample.measured_us,
        "predicted_us": predict(sample.work, spec, sample.mode, backend=sample.name),
        **{f"term_{name}": value for name, value in terms.items()},
        **{f"work_{name}": value for name, value in work.items()},
        "work_flops": " ".join(f"{unit}={count:g}" for unit, count in sorted(flops.items())),
    }


def _left_out(frame: pd.DataFrame, samples: Sequence[ChoiceSample], spec: DeviceSpec, part: str) -> pd.Series:
    """For each row the prediction of a fit without its part; rows of one kernel have one prediction."""
    found = pd.Series(math.nan, index=frame.index)
    for _, rows in frame.groupby(["kind", "regime"]):
        distinct = rows.drop_duplicates(["group", part])
        times = predict_left_out([_sample(samples[at]) for at in distinct.index], spec, list(distinct[part]))
        known = distinct[["group", part]].assign(time_us=list(times))
        found[rows.index] = rows[["group", part]].merge(known, how="left")["time_us"].to_numpy()
    return found


def predict_left_out(samples: Sequence[Sample], spec: DeviceSpec, parts: Sequence[str]) -> list[float]:
    """Predicted time in microseconds of each sample of one back end by a fit to those of all *other* parts.

    ``parts`` are what each sample belongs to: what it computes, or its phase. The calibrations of ``spec`` play no
    part. NaN where fewer than :data:`MIN_SAMPLES` others remain.
    """
    table, owner = FitTable.of(samples, spec), np.array(parts)
    found = np.full(len(samples), np.nan)
    for part in dict.fromkeys(parts):
        others = np.flatnonzero(owner != part)
        if len(others) >= MIN_SAMPLES:
            found[owner == part] = table.rows(np.flatnonzero(owner == part)).predict_from(table.rows(others))
    return [float(time_us) for time_us in found]


def _sample(one: ChoiceSample) -> Sample:
    """As a calibration takes it."""
    return Sample(one.work, one.mode, one.measured_us, family=one.family)


def stored_samples(planner: Planner, graphs: Iterable[DataflowGraph]) -> list[RegionSamples]:
    """What the stored plans of the parts of these graphs have measured, each plan once, by label."""
    found: dict[str, RegionSamples] = {}
    for graph in graphs:
        table = GroupTable(graph, planner.settings.numerics, planner.target.device_type)
        regions, _ = planner.look_up_regions(graph)
        parts = {part.key: part for region in regions for part in region_parts(graph, region)}
        for key, record in planner.look_up_all(graph, parts.values()).items():
            found.setdefault(key, _region_samples(planner, table, parts[key], record))
    return sorted(found.values(), key=lambda one: (one.label, one.key.workload))


def _region_samples(planner: Planner, table: GroupTable, part: Region, record: PlanRecord) -> RegionSamples:
    dependencies, samples = region_dependencies(table.graph, part), []
    position = {name: number for number, name in enumerate(part.ops)}
    places = [position[name] for name in dependencies.bit]
    for one in (*record.groups, *record.rejected):
        if one.measured_us is None:
            continue
        group = candidate(dependencies, dependencies.mask(part.ops[at] for at in one.ops))
        way, subject = planner.implementations.named(one.implementation), table.subject(group)
        name = one.implementation if way.backends else way.calibration(table, group)
        family = subject.label if table.is_anchor(group) else "+".join(
            sorted({table.graph.op(op).op for op in group.ops}))
        same = subject.key if way.backends or way.name == ATEN else f"{subject.key} {way.name}"
        implementation = "kernel" if way.backends else way.name
        ops = tuple(position[op] for op in group.ops)
        samples.append(ChoiceSample(ops, implementation, name, subject.label, family, same, way.mode,
                                    way.work(table, group), one.measured_us))
    edges = tuple(sorted((places[first], places[second]) for first, second in dependencies.edges()))
    return RegionSamples(record.key, record.label, edges, record.enumerated, tuple(samples))


def regret_frame(regions: Sequence[RegionSamples], frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """What following the predictions in ``column`` costs in each region that leaves a choice.

    ``regret`` is how much slower the cover is that the predictions like best than the best cover of all that was
    measured; ``top8_regret`` the same for the fastest of the eight that they like best. ``enumerated`` says how many
    choices there are: those that were not measured cannot be part of a better cover than the plan's gap allows.
    """
    by_key = dict(list(frame.groupby(["key", "regime"])))
    rows = []
    for region in regions:
        groups = [sample.ops for sample in region.samples]
        if not is_a_choice(groups) or (region.key.workload, region.key.regime) not in by_key:
            continue
        own = by_key[region.key.workload, region.key.regime].reset_index(drop=True)
        predicted, measured = list(own[column]), list(own["measured_us"])
        if any(map(math.isnan, predicted)):
            continue
        likes = list(best_covers(cover_problem(groups, predicted, region.edges), _TOP))
        (best,) = best_covers(cover_problem(groups, measured, region.edges), 1)
        best_us, *likes_us = (math.fsum(measured[at] for at in cover) for cover in (best, *likes))
        model_us = likes_us[0]
        why = _why(own, column, likes[0], best) if model_us > best_us else ""
        rows.append((
            region.label, own["phase"].iloc[0], len(predicted), region.enumerated, best_us, model_us,
            model_us / best_us - 1.0, max(0.0, min(likes_us) / best_us - 1.0), why, region.key.workload,
        ))
    columns = ["region", "phase", "choices", "enumerated", "best_us", "model_us", "regret", "top8_regret", "why", "key"]
    return pd.DataFrame(rows, columns=columns).sort_values("regret", ascending=False, kind="stable")


def _why(own: pd.DataFrame, column: str, model: tuple[int, ...], best: tuple[int, ...]) -> str:
    """The kernels in which two covers differ, each with its prediction and its time."""
    def told(cover: tuple[int, ...], other: tuple[int, ...]) -> str:
        rows = [own.loc[at] for at in cover if at not in other]
        return " + ".join(
            f"{row['label']}{'' if row['implementation'] == 'kernel' else ' by ' + row['implementation']} "
            f"({row[column]:.3g} us, is {row['measured_us']:.3g})" for row in rows
        )

    return f"takes {told(model, best)} instead of {told(best, model)}"


def verdict_frame(regions: Sequence[RegionSamples], frame: pd.DataFrame) -> pd.DataFrame:
    """Every figure of the bar with its verdict: of all, and of each kind or phase."""
    rows: list[tuple[object, ...]] = []
    for column, name in SPLITS.items():
        known = frame[frame[column].notna()]
        rows += _fit_rows(name, known, column)
        split, words = ("phase", "{}, from the others") if column == "other_phases_us" else ("kind", "{}")
        for part, own in known.groupby(split):
            rows += _fit_rows(f"{name}: {words.format(part)}", own, column)
        rows += _regret_rows(name, regret_frame(regions, frame, column))
    return pd.DataFrame(rows, columns=["left out of the fit", "figure", "over", "value", "bar", "verdict"])


def _fit_rows(name: str, rows: pd.DataFrame, column: str) -> list[tuple[object, ...]]:
    rows = rows.groupby(_CHOICE)[[column, "measured_us"]].median()
    over = f"{len(rows)} distinct choices"
    error = float((rows[column] / rows["measured_us"] - 1.0).abs().median()) if len(rows) else math.nan
    rank = spearman(list(rows[column]), list(rows["measured_us"]))
    return [
        (name, "rank correlation (Spearman)", over, rank, f"at least {MIN_SPEARMAN}", _met(rank >= MIN_SPEARMAN, rank)),
        (name, "median error", over, error, f"at most {MAX_MEDIAN_ERROR}", _met(error <= MAX_MEDIAN_ERROR, error)),
    ]


def _regret_rows(name: str, table: pd.DataFrame) -> list[tuple[object, ...]]:
    over = f"{len(table)} regions, {int((table['choices'] >= table['enumerated']).sum())} measured exhaustively"
    found: list[tuple[object, ...]] = []
    for column, bar, what in (
        ("regret", MAX_TOP_REGRET, "of the model's first choice"),
        ("top8_regret", MAX_TOP8_REGRET, f"of the best of its first {_TOP}"),
    ):
        figures = {"mean": geometric_mean(table[column] + 1.0) - 1.0, "worst": float(table[column].max())}
        for figure, value in figures.items():
            found.append((name, f"{figure} regret {what}", over, value, f"at most {bar}", _met(value <= bar, value)))
    return found


def _met(met: bool, value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return "met" if met else "MISSED"


def phases(data: ReportData) -> dict[str, str]:
    """Phase of each region by key: the first word of the workloads that it occurs in (``"decode"``)."""
    found: dict[str, set[str]] = {}
    for workload in data.workloads:
        for region in workload.regions:
            for key in (region.key, *region.parts):
                found.setdefault(key, set()).add(workload.workload.split(" ")[0])
    return {key: "+".join(sorted(words)) for key, words in found.items()}
