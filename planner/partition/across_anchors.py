"""A region with matmuls inside its groups: choices beside the plans of its parts.

What the plans chose, groups around matmuls, and what those leave of kernels that they cut are searched as one problem.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import TypeAlias
from weakref import WeakKeyDictionary

from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.anchored import anchored_candidates
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.groups.regions import is_anchor, region_parts
from fuseplan.planner.implementations.choices import (
    Choice,
    Implementations,
    Plans,
    RegionProblem,
    problem_of,
    recorded_choices,
    region_problem,
)
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.partition.by_measurement import MeasuredRegion
from fuseplan.planner.partition.guided_loop import predicted_partition
from fuseplan.planner.partition.plan_record import PlanWriter
from fuseplan.planner.partition.whole_region import gain_on_parts
from fuseplan.search.store.record import PlanRecord

#: The groups of a region's islands, and those around its matmuls.
_Around: TypeAlias = tuple[list[Candidate], list[Candidate]]


class JointProblems:
    """The problems of whole regions. Two threads may ask: the first one looks for the groups around a region's matmuls.
    """

    def __init__(self, ways: Implementations) -> None:
        self._ways = ways
        self._around: WeakKeyDictionary[GroupTable, dict[Region, Future[_Around]]] = WeakKeyDictionary()

    def planned(self, table: GroupTable, region: Region, plans: Plans) -> RegionProblem | None:
        """The choices of a region whose parts have plans; None where no kernel can hold a matmul."""
        chosen = (recorded_choices(table.graph, part, record, self._ways) for part, record in plans)
        return self._problem(table, region, list(chain.from_iterable(chosen)))

    def nominal(self, table: GroupTable, region: Region) -> RegionProblem | None:
        """The choices should the plans of its islands be their nominal covers, and ATen run the rest."""
        chosen: list[Choice] = []
        for part in (part for part in region_parts(table.graph, region) if not is_anchor(table.graph, part)):
            problem = region_problem(table, part, table.enumerated(part), self._ways)
            cover = predicted_partition(problem, ModelPrices(table, None).nominal_s)
            chosen += [one.choice for one in cover.chosen]
        return self._problem(table, region, chosen)

    def _problem(self, table: GroupTable, region: Region, chosen: Sequence[Choice]) -> RegionProblem | None:
        """``chosen`` are those of its parts' plans."""
        enumerated, anchored = self._groups_around(table, region)
        if not anchored:
            return None
        kernels = [one.group for one in chosen if one.implementation.backends]
        libraries = [one for one in chosen if not one.implementation.backends and not one.is_plain]
        wanted = dict.fromkeys((*kernels, *_left_over(kernels, anchored, enumerated), *anchored))
        by_size = sorted(wanted, key=lambda group: len(group.ops))
        return problem_of(table.graph, region, self._ways, libraries, by_size, won=True)

    def _groups_around(self, table: GroupTable, region: Region) -> _Around:
        mine: Future[_Around] = Future()
        found = self._around.setdefault(table, {}).setdefault(region, mine)
        if found is mine:
            try:
                mine.set_result(groups_around_anchors(table, region, self._ways))
            except BaseException as error:
                mine.set_exception(error)
        return found.result()


def groups_around_anchors(table: GroupTable, region: Region, ways: Implementations) -> _Around:
    """The groups of a region's islands, and those around its matmuls that can be kernels."""
    graph = table.graph
    islands = [part for part in region_parts(graph, region) if not is_anchor(graph, part)]
    enumerated = [one for part in islands for one in table.enumerated(part).candidates]
    anchored = anchored_candidates(graph, region, enumerated, table.legal)
    return enumerated, [one for one in anchored if ways.kernel.refuse(table, one) is None]


def plan_across_anchors(
    joint: MeasuredRegion, plans: Plans, ways: Implementations, writer: PlanWriter
) -> PlanRecord | None:
    """The plan of a joint problem, where it holds matmuls in its groups and is faster than the plans of the parts."""
    began, prices = time.monotonic(), joint.prices
    result = joint.decide()
    anchors = {one.group.ops[0] for one in joint.problem.plain if prices.table.is_anchor(one.group)}
    if all(len(one.choice.group.ops) == 1 or anchors.isdisjoint(one.choice.group.ops) for one in result.chosen):
        return None
    record = writer.record(prices, result, time.monotonic() - began)
    gain = gain_on_parts(prices.table, writer.region, record, plans, ways, prices.tuner)
    if gain is None or gain <= joint.margin:
        return None
    reason = f"{record.evidence.reason}; gains {gain:.1%} on the plans of its parts"
    return replace(record, evidence=replace(record.evidence, reason=reason))


def predicted_across_anchors(
    problem: RegionProblem, record: PlanRecord, writer: PlanWriter, prices: ModelPrices, margin: float
) -> PlanRecord:
    """The record by the cost model, with matmuls that unpack their weights where that spares half of the bound, or of
    the nominal time where the device was not probed.
    """
    table = prices.table
    alone = {one.group.ops[0]: one for one in problem.plain}

    def spares(one: Choice) -> bool:
        if len(one.group.ops) == 1 or not any(table.is_anchor(alone[name].group) for name in one.group.ops):
            return True
        least = prices.bound_us if prices.spec is not None else prices.nominal_s
        return 2.0 * least(one) <= sum(least(alone[name]) for name in one.group.ops)

    reason = f"{record.evidence.reason}; weights are unpacked inside of matmuls"
    chosen = replace(problem, choices=tuple(one for one in problem.choices if spares(one)))
    result = predicted_partition(chosen, prices.predict_s, margin, reason)
    groups = (one.choice.group for one in result.chosen if len(one.choice.group.ops) > 1)
    is_around = any(table.is_anchor(alone[name].group) for group in groups for name in group.ops)
    return writer.record(prices, result, 0.0) if is_around else record


def _left_over(
    kernels: Iterable[Candidate], anchored: Iterable[Candidate], enumerated: Sequence[Candidate]
) -> list[Candidate]:
    """What groups around matmuls leave of kernels, where that is a group."""
    known = {frozenset(one.ops): one for one in enumerated}
    taken = [frozenset(one.ops) for one in anchored]
    left = {frozenset(kernel.ops) - one for kernel in kernels for one in taken if not one.isdisjoint(kernel.ops)}
    return [one for ops, one in known.items() if ops in left]
