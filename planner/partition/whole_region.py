"""The last word on a region: its plan against plain ATen, matmuls and attention and all, in one interleaved run.

Parts are decided one by one, each by itself. What their plans cost together is only known when they run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.candidates import placed_candidates, region_dependencies, single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.choices import Choice, in_order
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementations import Implementations
from fuseplan.search import policy
from fuseplan.search.store.record import PlanRecord
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

_PLAIN, _PLAN = "plain", "plan"


@dataclass(frozen=True)
class Verdict:
    """Whether the region's parts keep their plans, and in words how the region did."""

    keeps: bool = True
    words: str = ""


def beats_plain(
    table: GroupTable, region: Region, parts: Sequence[tuple[Region, PlanRecord]], ways: Implementations, tuner: Tuner
) -> Callable[[], Verdict]:
    """Whether the parts' plans are as fast as plain ATen, or the region is faster without them.

    They are run when the measuring process has nothing else to do; what is returned waits for it.
    """
    plain_s = math.fsum(record.unfused_us for _, record in parts) * 1e-6
    if all(group.is_plain for _, record in parts for group in record.groups) or plain_s > policy.LONG_REGION_S:
        return Verdict
    run = _contest(table, region, parts, ways, tuner)
    return lambda: _verdict(run())


def _verdict(contest: Contest | None) -> Verdict:
    if contest is None:
        return Verdict(words="; the region's run beside plain ATen failed")
    gain = contest.gain(_PLAN, _PLAIN)
    if gain >= 0.0:
        return Verdict(words=f"; the whole region gains {gain:.1%} on plain ATen, with a noise of {contest.noise:.1%}")
    return Verdict(False, f"; the whole region loses {-gain:.1%} to plain ATen, which runs it")


def gain_on_parts(
    table: GroupTable, region: Region, record: PlanRecord, parts: Sequence[tuple[Region, PlanRecord]],
    ways: Implementations, tuner: Tuner
) -> float | None:
    """What a plan of the whole region gains on the plans of its parts, in one interleaved run; None where that fails,
    0 where it is no more than its noise.
    """
    sides = {_PLAIN: planned_parts(table, parts, ways), _PLAN: planned_parts(table, [(region, record)], ways)}
    contest = _run(table, region, sides, tuner)()
    if contest is None:
        return None
    return contest.gain(_PLAN, _PLAIN) if contest.accepts(_PLAN, _PLAIN) else 0.0


def _contest(
    table: GroupTable, region: Region, parts: Sequence[tuple[Region, PlanRecord]], ways: Implementations, tuner: Tuner
) -> Callable[[], Contest | None]:
    plain = {
        Choice(one, ways.aten): ways.aten.part(table, one, "", {})
        for part, _ in parts for one in single_candidates(table.graph, part)
    }
    return _run(table, region, {_PLAIN: plain, _PLAN: planned_parts(table, parts, ways)}, tuner)


def planned_parts(
    table: GroupTable, parts: Sequence[tuple[Region, PlanRecord]], ways: Implementations
) -> dict[Choice, Part]:
    """What the plans of regions, or of their parts, run."""
    chosen: dict[Choice, Part] = {}
    for part, record in parts:
        candidates = placed_candidates(table.graph, part, [group.ops for group in record.groups])
        for one, group in zip(candidates, record.groups, strict=True):
            way = ways.named(group.implementation)
            chosen[Choice(one, way)] = way.part(table, one, group.implementation, group.config)
    return chosen


def _run(
    table: GroupTable, region: Region, sides: Mapping[str, Mapping[Choice, Part]], tuner: Tuner
) -> Callable[[], Contest | None]:
    """The sides as sequences in one interleaved run, when the measuring process has nothing else to do."""
    flow = compute_graph_of(table.graph)
    parts = {choice: part for side in sides.values() for choice, part in side.items()}
    names = {choice: f"part {number}" for number, choice in enumerate(parts)}
    ordered = {side: [names[choice] for choice in in_order(table.graph, choices)] for side, choices in sides.items()}
    needed = flow.needed_outside(region_dependencies(table.graph, region).members)
    return tuner.play_off_later({names[choice]: part for choice, part in parts.items()}, ordered, needed)
