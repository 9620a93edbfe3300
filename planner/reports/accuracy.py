"""How far the cost model is from the measurements that are stored, and what trusting it alone would have cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import TypeAlias

import networkx as nx
import pandas as pd

from fuseplan.costmodel.accuracy import MeasuredPair, accuracy_frame, accuracy_summary
from fuseplan.costmodel.device import Calibration
from fuseplan.planner.partition.cover import CoverProblem, Option, best_covers
from fuseplan.planner.reports.frames import ReportData, geometric_mean
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import Alternative, GroupChoice, PlanRecord, RecordKey

#: Of times in microseconds and how many covers, the best ones.
Ranked: TypeAlias = Callable[[Sequence[float], int], list[tuple[int, ...]]]


def _measured(plan: PlanRecord) -> Iterator[tuple[GroupChoice | Alternative, float, float]]:
    """Everything of a region that was both predicted and measured, chosen or not, with both times."""
    choices: list[GroupChoice | Alternative] = [*plan.groups, *plan.rejected]
    for one in choices:
        if one.measured_us is not None and one.predicted_us is not None and one.predicted_us > 0:
            yield one, one.predicted_us, one.measured_us


def measured_choices(data: ReportData) -> Iterator[tuple[RecordKey, GroupChoice | Alternative, float, float]]:
    """Every kernel and op that a plan measured, one for each in a distinct part: the plan's key, what was measured, and
    its predicted and measured time in microseconds.
    """
    for key, plan in data.decided().items():
        for measured in _measured(plan):
            yield key, *measured


def accuracy_pairs(data: ReportData) -> list[MeasuredPair]:
    """Predicted and measured time of :func:`measured_choices`."""
    return [
        MeasuredPair(key.workload, f"{one.implementation} {one.label}", predicted_us, measured_us,
                     kind=one.implementation, regime=key.regime)
        for key, one, predicted_us, measured_us in measured_choices(data)
    ]


def accuracy_table(data: ReportData) -> pd.DataFrame:
    """Median and 90th percentile of the relative error, and rank correlation: over all, and by kind of kernel."""
    summary = accuracy_summary(accuracy_frame(accuracy_pairs(data)))
    return summary[["split", "value", "pairs", "median_error", "p90_error", "spearman"]]


def regret_table(data: ReportData) -> pd.DataFrame:
    """For each region with a choice: the partition that the model alone would take, at its measured time.

    Only choices that were measured take part, so that every partition has a measured time, with what its kernels were
    held to cost each other in the cache. ``regret`` is how much slower the model's partition is than the best one.
    """
    regions = [(workload, region) for workload in data.workloads for region in workload.regions]
    shapes = {region.key: region for _, region in regions}
    parts = {key for workload, region in regions for key in workload.part_keys(region)}
    rows = []
    for key, plan in data.plans.items():
        region = shapes.get(key.workload)
        if key in parts and region is None:
            continue
        choices = list(_measured(plan))
        ranked = ranked_covers([one.ops for one, _, _ in choices], compute_edges(region) if region else ())
        if ranked is None:
            continue
        predicted = [predicted_us + one.delay_us for one, predicted_us, _ in choices]
        measured = [measured_us + one.delay_us for one, _, measured_us in choices]
        best_us, model_us = (
            math.fsum(measured[at] for at in ranked(times_us, 1)[0]) for times_us in (measured, predicted)
        )
        rows.append((plan.label, len(choices), best_us, model_us, model_us / best_us - 1.0, key.workload))
    return pd.DataFrame(rows, columns=["region", "choices", "best_us", "model_us", "regret", "key"])


def ranked_covers(groups: Sequence[tuple[int, ...]], edges: Iterable[tuple[int, int]]) -> Ranked | None:
    """The covers of a region by measured groups of ops, best first by times in microseconds, as numbers of groups.

    None where there is nothing to choose, or an op that was not measured by itself.
    """
    number = {op: at for at, op in enumerate(sorted({op for group in groups for op in group}))}
    if len(groups) <= len(number) or len({group for group in groups if len(group) == 1}) < len(number):
        return None
    masks = [sum(1 << number[op] for op in group) for group in groups]
    among = tuple((number[a], number[b]) for a, b in edges if a in number and b in number)

    def ranked(times_us: Sequence[float], count: int) -> list[tuple[int, ...]]:
        options = tuple(Option(mask, time_us * 1e-6) for mask, time_us in zip(masks, times_us, strict=True))
        return list(islice(best_covers(CoverProblem(len(number), options, among), count), count))

    return ranked


def compute_edges(region: RegionSummary) -> Iterable[tuple[int, int]]:
    """Which compute op reads which, through views."""
    graph = nx.DiGraph(region.edges)
    for view in [op for op in graph if region.kinds[op] == "view"]:
        graph.add_edges_from(list(product(graph.predecessors(view), graph.successors(view))))
        graph.remove_node(view)
    edges: Iterable[tuple[int, int]] = graph.edges
    return edges


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
    fits = sorted(data.spec.calibrations.items()) if data.spec is not None else []
    return lines + [_held_out(backend, fit) for backend, fit in fits if fit.held_out_error is not None]


def _held_out(backend: str, fit: Calibration) -> str:
    p90 = "" if fit.held_out_p90 is None else f" (90th percentile {fit.held_out_p90:.0%})"
    rank = "" if fit.held_out_spearman is None else f"; rank correlation {fit.held_out_spearman:.2f}"
    return (
        f"Calibrated on {fit.samples} distinct measured choices ({backend}), the model is off by "
        f"{fit.held_out_error:.0%} in the median{p90} on kernels left out of the fit with all that compute the same"
        f"{rank}."
    )
