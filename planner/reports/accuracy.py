"""How far the cost model is from the measurements that are stored, and what other covers would have cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import networkx as nx
import pandas as pd

from fuseplan.costmodel.accuracy import accuracy_frame, accuracy_summary
from fuseplan.costmodel.device import Calibration
from fuseplan.planner.partition.cover import CoverProblem, Option, best_cover_with, solve_cover
from fuseplan.planner.reports.frames import ReportData, geometric_mean, time_of
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.errors import counted
from fuseplan.search.store.record import ATEN, Alternative, GroupChoice, PlanRecord, RecordKey


def measured_choices(
    plans: Iterable[PlanRecord]
) -> Iterator[tuple[RecordKey, GroupChoice | Alternative, float, float]]:
    """Each kernel and op that has both times: its plan's key, itself, and its predicted and measured time (us)."""
    for plan in plans:
        choices: list[GroupChoice | Alternative] = [*plan.groups, *plan.rejected]
        for one in choices:
            if one.measured_us is not None and one.predicted_us is not None and one.predicted_us > 0:
                yield plan.key, one, one.predicted_us, one.measured_us


def accuracy_pairs(data: ReportData) -> list[tuple[str, str, str, str, float, float]]:
    """Predicted and measured time of what distinct parts measured, as :func:`accuracy_frame` takes them."""
    return [
        (key.workload, f"{one.implementation} {one.label}", one.implementation, key.regime, predicted_us, measured_us)
        for key, one, predicted_us, measured_us in measured_choices(data.decided().values())
    ]


def accuracy_table(data: ReportData) -> pd.DataFrame:
    """Median and 90th percentile of the relative error, and rank correlation: over all, and by kind of kernel."""
    summary = accuracy_summary(accuracy_frame(accuracy_pairs(data)))
    return summary[["split", "value", "pairs", "median_error", "p90_error", "spearman"]]


def regret_table(data: ReportData) -> pd.DataFrame:
    """For each region with a choice: the partition that the model alone would take, at its measured time.

    Only measured choices take part. ``regret`` is how much slower the model's partition is than the best one.
    """
    regions = [(workload, region) for workload in data.workloads for region in workload.regions]
    shapes = {region.key: region for _, region in regions}
    parts = {key for workload, region in regions for key in workload.part_keys(region)}
    rows = []
    for key, plan in data.plans.items():
        region = shapes.get(key.workload)
        if key in parts and region is None:
            continue
        choices = list(measured_choices([plan]))
        groups, edges = [one.ops for _, one, _, _ in choices], list(compute_edges(region)) if region else []
        if not is_a_choice(groups):
            continue
        predicted, measured = zip(*((predicted_us, measured_us) for _, _, predicted_us, measured_us in choices),
                                  strict=True)
        problems = (cover_problem(groups, times_us, edges) for times_us in (measured, predicted))
        best_us, model_us = (
            math.fsum(measured[at] for at in solve_cover(one, break_ties=False).chosen) for one in problems)
        rows.append((plan.label, len(choices), best_us, model_us, model_us / best_us - 1.0, key.workload))
    return pd.DataFrame(rows, columns=["region", "choices", "best_us", "model_us", "regret", "key"])


def is_a_choice(groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether there is more than one way to cover the ops, each of which is a group by itself, too."""
    ops = {op for group in groups for op in group}
    return len(groups) > len(ops) == len({group for group in groups if len(group) == 1})


def cover_problem(
    groups: Sequence[tuple[int, ...]], times_us: Sequence[float], edges: Iterable[tuple[int, int]]
) -> CoverProblem:
    """How to cover the ops of some groups by these groups, at these times in microseconds."""
    number = {op: at for at, op in enumerate(sorted({op for group in groups for op in group}))}
    options = (Option(sum(1 << number[op] for op in group), time_us * 1e-6)
               for group, time_us in zip(groups, times_us, strict=True))
    among = ((number[a], number[b]) for a, b in edges if a in number and b in number)
    return CoverProblem(len(number), tuple(options), tuple(among))


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
    rank = "" if math.isnan(overall["spearman"]) else f"; rank correlation {overall['spearman']:.2f} (Spearman)"
    pairs = counted(int(overall["pairs"]), "measured kernel or op", "measured kernels and ops")
    lines = [f"Over {pairs} of all regions the prediction is off by {overall['median_error']:.0%} in "
             f"the median (90th percentile {overall['p90_error']:.0%}){rank}."]
    ratios = regret_table(data)["regret"] + 1.0
    if len(ratios):
        regions = counted(len(ratios), "region")
        lines.append(
            f"Trusting the model alone to choose among what was measured would take {geometric_mean(ratios):.3g} times "
            f"as long on average (geometric mean of {regions}) and {ratios.max():.3g} times at worst.")
    fits = sorted(data.spec.calibrations.items()) if data.spec is not None else []
    return lines + [_held_out(backend, fit) for backend, fit in fits if fit.held_out_error is not None]


def _held_out(backend: str, fit: Calibration) -> str:
    p90 = "" if fit.held_out_p90 is None else f" (90th percentile {fit.held_out_p90:.0%})"
    rank = "" if fit.held_out_spearman is None else f"; rank correlation {fit.held_out_spearman:.2f}"
    choices = counted(fit.samples, "distinct measured choice")
    return (f"Calibrated on {choices} ({backend}), the model is off by {fit.held_out_error:.0%} in the median{p90} on "
            f"held-out kernels{rank}.")


@dataclass(frozen=True)
class Rejected:
    """A rejected group and the best cover that uses it, by the stored times of groups, each by itself.

    Attributes:
        cover_us, chosen_us: Times of that cover (None where there is none), and of the chosen one.
        beside: What that cover runs besides, as far as the chosen one does not.
        predicted: Groups of that cover whose time is the model's; the others are measured.
        places: How many places of the region it could take at the same cost.
    """

    group: Alternative
    chosen_us: float
    cover_us: float | None = None
    beside: tuple[GroupChoice | Alternative, ...] = ()
    predicted: int = 0
    places: int = 1

    @property
    def more_us(self) -> float:
        """What that cover takes beyond the chosen one."""
        return math.inf if self.cover_us is None else self.cover_us - self.chosen_us


def rejected_groups(plan: PlanRecord, region: RegionSummary, most: int) -> list[Rejected]:
    """The rejected groups of a plan except ATen's single ops, those first whose cover comes nearest to the chosen one.

    Covers are solved of the ``most`` timed ones that cost least beyond their share of the chosen cover.
    """
    # What does not work is stored with a prediction alone.
    timed = [one for one in plan.rejected if one.measured_us is not None]
    ops = {op for one in plan.groups for op in one.ops}
    usable: list[GroupChoice | Alternative] = [*plan.groups, *(one for one in timed if ops.issuperset(one.ops))]
    problem = cover_problem([one.ops for one in usable], list(map(time_of, usable)), compute_edges(region))
    chosen_us = math.fsum(map(time_of, plan.groups))
    share_us = {op: time_of(group) / len(group.ops) for group in plan.groups for op in group.ops}

    def extra_us(one: Alternative) -> float:
        return time_of(one) - math.fsum(share_us.get(op, 0.0) for op in one.ops)

    rejected = [one for one in plan.rejected if one.implementation != ATEN]
    solved = {id(one) for one in sorted((one for one in rejected if one.measured_us is not None), key=extra_us)[:most]}
    position = {id(one): at for at, one in enumerate(usable) if id(one) in solved}
    found = []
    for one in rejected:
        at = position.get(id(one))
        cover = best_cover_with(problem, at) if at is not None else None
        if cover is None:
            found.append(Rejected(one, chosen_us))
            continue
        beside = tuple(usable[other] for other in cover.chosen if other >= len(plan.groups) and other != at)
        predicted = sum(usable[other].measured_us is None for other in cover.chosen)
        found.append(Rejected(one, chosen_us, cover.cost_s * 1e6, beside, predicted))
    alike: defaultdict[tuple[object, ...], list[Rejected]] = defaultdict(list)
    for each in sorted(found, key=lambda each: each.more_us):
        group, cover_us = each.group, each.cover_us
        about = None if cover_us is None else round(cover_us, 3)
        alike[group.label, group.implementation, group.reason, about].append(each)
    return [replace(same[0], places=len(same)) for same in alike.values()]
