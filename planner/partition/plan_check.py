"""Whether a stored plan can be a region's: asked before anything of it runs.

A database may be shared, edited, or damaged in a way that its checksums do not show. A plan is taken only where a
planner could have written it for this very region: groups that cover its ops, are convex, lower and can run in some
order, with configurations and library calls that are possible. The reasons repeat no stored text, for they reach logs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.candidates import candidate, region_dependencies
from fuseplan.planner.groups.convex import short_cycles
from fuseplan.planner.implementations.choices import Implementations
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import group_label
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.search.store.record import GroupChoice, PlanRecord


class RefusedPlanError(Exception):
    """A stored plan that is none of its region; the message says why."""


def accepted_plan(table: GroupTable, ways: Implementations, region: Region, record: PlanRecord) -> PlanRecord:
    """The plan with labels of its own and possible alternatives; RefusedPlanError says why it cannot be the region's.
    """
    graph, dependencies = table.graph, region_dependencies(table.graph, region)
    members = {at: dependencies.bit[name] for at, name in enumerate(region.ops) if name in dependencies.bit}
    _refuse_no_cover(record.groups, members.keys())
    masks = [sum(1 << members[position] for position in choice.ops) for choice in record.groups]
    if not all(map(dependencies.is_convex, masks)):
        raise RefusedPlanError("another op would have to run in the middle of one of its groups")
    group_of = {members[position]: at for at, choice in enumerate(record.groups) for position in choice.ops}
    if short_cycles([group_of[member] for member in range(len(dependencies))], dependencies.edges()):
        raise RefusedPlanError("its groups wait for each other")
    groups = []
    for choice, mask in zip(record.groups, masks, strict=True):
        group = candidate(dependencies, mask)
        try:
            way = ways.named(choice.implementation)
        except KeyError:
            raise RefusedPlanError(f"it names an implementation that is none for {table.device_type}") from None
        if reason := way.refuse_record(table, group, choice.config):
            raise RefusedPlanError(reason)
        groups.append(replace(choice, label=group_label(graph, group.ops, group.outputs)))
    rejected = tuple(one for one in record.rejected if all(0 <= at < len(region.ops) for at in one.ops))
    return replace(record, label=region_label(graph, region), groups=tuple(groups), rejected=rejected)


def _refuse_no_cover(groups: Sequence[GroupChoice], members: Set[int]) -> None:
    """Raise RefusedPlanError where groups do not cover ``members``, positions in the region, each once."""
    counts = Counter(position for choice in groups for position in choice.ops)
    if any(not choice.ops or (choice.is_plain and len(choice.ops) > 1) for choice in groups):
        raise RefusedPlanError("a group has no ops, or several without a kernel")
    if not counts.keys() <= members:
        raise RefusedPlanError("a group has an op that the region does not have")
    if counts.total() > len(counts):
        raise RefusedPlanError("an op is in two groups")
    if left := len(members) - len(counts):
        raise RefusedPlanError(f"{left} of {len(members)} ops are in no group")
