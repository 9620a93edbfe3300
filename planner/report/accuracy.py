"""How far the cost model is from the measurements that are stored, and what trusting it alone would have cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from fuseplan.costmodel.accuracy import MeasuredPair, accuracy_frame, accuracy_summary
from fuseplan.costmodel.device import Calibration
from fuseplan.planner.report.frames import ReportData, geometric_mean
from fuseplan.planner.report.held_out import SPLITS, ranked_covers, regret_frame, sample_frame, verdict_frame
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import ATEN, Alternative, GroupChoice, PlanRecord

SUMMARY_COLUMNS = ("split", "value", "pairs", "median_error", "p90_error", "spearman")
REGRET_COLUMNS = ("region", "choices", "best_us", "model_us", "regret", "key")


@dataclass(frozen=True)
class _Choice:
    """A measured way to run some ops of a region."""

    ops: tuple[int, ...]
    kind: str
    label: str
    predicted_us: float
    measured_us: float
    delay_us: float


def _choices(plan: PlanRecord) -> Iterator[_Choice]:
    """Everything of a region that was both predicted and measured, chosen or not."""
    measured: list[GroupChoice | Alternative] = [*plan.groups, *plan.rejected]
    for one in measured:
        if one.measured_us is not None and one.predicted_us is not None and one.predicted_us > 0:
            yield _Choice(one.ops, one.implementation, one.label, one.predicted_us, one.measured_us, one.delay_us)


def accuracy_pairs(data: ReportData) -> list[MeasuredPair]:
    """Predicted and measured time of every kernel and op that a plan measured; one row for each in a distinct part."""
    return [
        MeasuredPair(key.workload, f"{choice.kind} {choice.label}", choice.predicted_us, choice.measured_us,
                     kind=choice.kind, regime=key.regime)
        for key, plan in data.decided().items()
        for choice in _choices(plan)
    ]


def accuracy_pairs_frame(data: ReportData) -> pd.DataFrame:
    """The pairs as a frame, with ``ratio`` and ``relative_error``."""
    return accuracy_frame(accuracy_pairs(data))


def accuracy_table(data: ReportData) -> pd.DataFrame:
    """Median and 90th percentile of the relative error, and rank correlation: over all, and by kind of kernel."""
    summary = accuracy_summary(accuracy_pairs_frame(data))
    return summary[list(SUMMARY_COLUMNS)]


def accuracy_points(data: ReportData) -> list[tuple[float, float, bool]]:
    """``(measured_us, predicted_us, fused)`` of every pair."""
    return [(pair.measured_us, pair.predicted_us, pair.kind != ATEN) for pair in accuracy_pairs(data)]


def regret_table(data: ReportData) -> pd.DataFrame:
    """For each region with a choice: the partition that the model alone would take, at its measured time.

    Only choices that were measured take part, so that every partition has a measured time, with what its kernels were
    held to cost each other in the cache. ``regret`` is how much slower the model's partition is than the best one.
    """
    shapes = {region.key: region for workload in data.workloads for region in workload.regions}
    rows = []
    parts = {key for workload in data.workloads for region in workload.regions for key in workload.part_keys(region)}
    for key, plan in data.plans.items():
        if key in parts and key.workload not in shapes:
            continue
        choices = list(_choices(plan))
        row = _regret(choices, shapes.get(key.workload))
        if row is not None:
            best_us, model_us = row
            regret = model_us / best_us - 1.0
            rows.append((plan.label, len(choices), best_us, model_us, regret, key.workload))
    return pd.DataFrame(rows, columns=list(REGRET_COLUMNS))


def _regret(choices: list[_Choice], region: RegionSummary | None) -> tuple[float, float] | None:
    """Measured time of the best partition and of the model's; None where there is nothing to choose."""
    ranked = ranked_covers([choice.ops for choice in choices], _compute_edges(region))
    if ranked is None:
        return None
    measured, predicted = (
        [getattr(choice, name) + choice.delay_us for choice in choices] for name in ("measured_us", "predicted_us")
    )
    (best,), (model,) = ranked(measured, 1), ranked(predicted, 1)
    return math.fsum(measured[at] for at in best), math.fsum(measured[at] for at in model)


def _compute_edges(region: RegionSummary | None) -> Iterator[tuple[int, int]]:
    """Which compute op reads which, through views."""
    if region is None:
        return
    readers: dict[int, list[int]] = {}
    for before, after in region.edges:
        readers.setdefault(before, []).append(after)
    for op, kind in enumerate(region.kinds):
        waiting = list(readers.get(op, ())) if kind != "view" else []
        while waiting:
            reader = waiting.pop()
            if region.kinds[reader] == "view":
                waiting += readers.get(reader, ())
            else:
                yield op, reader


def accuracy_samples(data: ReportData) -> pd.DataFrame:
    """Everything measured, one row each: :func:`~fuseplan.planner.report.held_out.sample_frame`.

    Where no samples were kept, the pairs of :func:`accuracy_pairs_frame`.
    """
    if not data.samples or data.spec is None:
        return accuracy_pairs_frame(data)
    return sample_frame(data.samples, data.spec, phases(data))


def accuracy_tables(data: ReportData) -> list[tuple[str, pd.DataFrame]]:
    """Tables and their titles: the bars with verdicts, and what following the model costs in each region."""
    if not data.samples or data.spec is None:
        return [("Trusting the model alone", regret_table(data))]
    frame = accuracy_samples(data)
    regrets = [
        (f"Following the model, {what} left out of the fit", regret_frame(data.samples, frame, column))
        for column, what in SPLITS.items()
    ]
    title = "The cost model against its bars, each distinct choice once, with its median time"
    return [(title, verdict_frame(data.samples, frame)), *regrets]


def phases(data: ReportData) -> dict[str, str]:
    """Phase of each region by key: the first word of the workloads that it occurs in (``"decode"``)."""
    found: dict[str, set[str]] = {}
    for workload in data.workloads:
        for region in workload.regions:
            for key in (region.key, *region.parts):
                found.setdefault(key, set()).add(workload.workload.split(" ")[0])
    return {key: "+".join(sorted(words)) for key, words in found.items()}


def accuracy_text(data: ReportData) -> list[str]:
    """The accuracy in sentences."""
    overall = accuracy_table(data).iloc[0]
    if not overall["pairs"]:
        return ["No prediction has been measured yet."]
    lines = [
        f"Over {overall['pairs']} measured kernels and ops of all regions the prediction is off by "
        f"{overall['median_error']:.0%} in the median (90th percentile {overall['p90_error']:.0%})"
        + ("." if math.isnan(overall["spearman"]) else f"; rank correlation {overall['spearman']:.2f} (Spearman).")
    ]
    ratios = regret_table(data)["regret"] + 1.0
    if len(ratios):
        lines.append(
            f"Trusting the model alone to choose among what was measured would take {geometric_mean(ratios):.3g} times "
            f"as long on average (geometric mean of {len(ratios)} regions) and {ratios.max():.3g} times at worst."
        )
    for backend, fit in sorted(data.spec.calibrations.items() if data.spec is not None else ()):
        if fit.held_out_error is not None:
            lines.append(_held_out(backend, fit))
    return lines


def _held_out(backend: str, fit: Calibration) -> str:
    text = (
        f"Calibrated on {fit.samples} distinct measured choices ({backend}), the model is off by "
        f"{fit.held_out_error:.0%} in the median"
    )
    if fit.held_out_p90 is not None:
        text += f" (90th percentile {fit.held_out_p90:.0%})"
    text += " on kernels left out of the fit with all that compute the same"
    if fit.held_out_spearman is not None:
        text += f"; rank correlation {fit.held_out_spearman:.2f}"
    return text + "."
