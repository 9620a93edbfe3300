"""What a rejected group would have cost: the best whole cover of its region that uses it, beside the chosen one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuseplan.planner.partition.cover import CoverProblem, Option, best_cover_with
from fuseplan.planner.reports.accuracy import compute_edges
from fuseplan.planner.reports.frames import time_of
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import ATEN, Alternative, GroupChoice, PlanRecord


@dataclass(frozen=True)
class Rejected:
    """A rejected group and the best cover that uses it, by the stored times of groups, each by itself.

    Attributes:
        cover_us: Of that cover; None where the stored times make up none with it.
        chosen_us: Of the chosen cover, by the same times.
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
    """The rejected groups of a plan but for ATen's single ops, those first whose cover comes nearest to the chosen one.

    Of those with a time, the covers are solved of the ``most`` that cost least beyond their share of the chosen cover.
    """
    timed: list[GroupChoice | Alternative] = [*plan.groups, *(one for one in plan.rejected if _has_time(one))]
    number = {op: at for at, op in enumerate(sorted({op for one in plan.groups for op in one.ops}))}
    usable = [one for one in timed if set(one.ops) <= number.keys()]
    edges = tuple((number[a], number[b]) for a, b in compute_edges(region) if a in number and b in number)
    options = tuple(Option(sum(1 << number[op] for op in one.ops), time_of(one) * 1e-6) for one in usable)
    problem = CoverProblem(len(number), options, edges)
    chosen_us = math.fsum(map(time_of, plan.groups))
    asked = [one for one in plan.rejected if one.implementation != ATEN]
    share_us = {op: time_of(group) / len(group.ops) for group in plan.groups for op in group.ops}

    def extra_us(one: Alternative) -> float:
        return time_of(one) - math.fsum(share_us.get(op, 0.0) for op in one.ops)

    solved = {id(one) for one in sorted(filter(_has_time, asked), key=extra_us)[:most]}
    found = [_with(problem, usable, one, chosen_us, len(plan.groups)) if id(one) in solved
             else Rejected(one, chosen_us) for one in asked]
    alike: defaultdict[tuple[object, ...], list[Rejected]] = defaultdict(list)
    for one in sorted(found, key=lambda one: one.more_us):
        group, cover_us = one.group, one.cover_us
        about = None if cover_us is None else round(cover_us, 3)
        alike[group.label, group.implementation, group.reason, about].append(one)
    return [replace(same[0], places=len(same)) for same in alike.values()]


def _with(
    problem: CoverProblem, usable: Sequence[GroupChoice | Alternative], wanted: Alternative, chosen_us: float,
    chosen: int
) -> Rejected:
    at = next((at for at, one in enumerate(usable) if one is wanted), None)
    cover = best_cover_with(problem, at) if at is not None else None
    if cover is None:
        return Rejected(wanted, chosen_us)
    cost_s, numbers = cover
    beside = tuple(usable[one] for one in numbers if one >= chosen and one != at)
    predicted = sum(usable[one].measured_us is None for one in numbers)
    return Rejected(wanted, chosen_us, cost_s * 1e6, beside, predicted)


def _has_time(one: Alternative) -> bool:
    """Whether it works; what does not is stored with a prediction alone."""
    return one.measured_us is not None
