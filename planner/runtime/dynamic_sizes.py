"""Plans for dynamic sizes: those tuned for the sizes on both sides of one, and configurations taken from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fuseplan.planner.graph.dataflow import DataflowGraph, Region, bind_graph
from fuseplan.planner.groups.regions import find_regions, region_parts, split_common
from fuseplan.planner.tuning.planner import Planner, RegionPlan
from fuseplan.search import policy
from fuseplan.search.store.record import GroupChoice


def neighbouring_plans(planner: Planner, graph: DataflowGraph, regions: Sequence[Region]) -> dict[Region, RegionPlan]:
    """Plans tuned for the same regions of ``graph`` with another value of one dynamic size.

    The size at hand must lie between two tuned ones, neither over ``policy.MAX_SIZE_RATIO`` away: the nearer serves.
    """
    for name, hint in graph.symbols.items() if regions else ():
        if name in graph.derived or not isinstance(hint, int):
            continue
        powers = [2**power for power in range(1, hint.bit_length() + 3)]
        smaller = [size for size in reversed(powers) if size < hint <= size * policy.MAX_SIZE_RATIO]
        larger = [size for size in powers if hint < size <= hint * policy.MAX_SIZE_RATIO]
        below = _tuned(planner, graph, name, smaller, regions)
        above = _tuned(planner, graph, name, larger, regions) if below else {}
        if both := below.keys() & above.keys():
            nearer = {ops: below[ops] if hint / below[ops][0] <= above[ops][0] / hint else above[ops]
                      for ops in both}
            return {one: nearer[ops][1] for one in regions if (ops := frozenset(one.ops)) in both}
    return {}


def _tuned(
    planner: Planner, graph: DataflowGraph, name: str, sizes: Iterable[int], regions: Iterable[Region]
) -> dict[frozenset[str], tuple[int, RegionPlan]]:
    """For the ops of each region: the first of ``sizes`` that a plan was tuned for, and that plan."""
    wanted = {frozenset(region.ops) for region in regions}
    found: dict[frozenset[str], tuple[int, RegionPlan]] = {}
    for size in sizes:
        if wanted <= found.keys():
            break
        try:
            bound = bind_graph(graph, {name: size})
            whole = [one for region in find_regions(bound) for one in {region, *split_common(bound, region)}]
            there = [one for region in whole for one in {region, *region_parts(bound, region)}]
        except (ArithmeticError, ValueError):
            continue  # the graph is for no such size, as where that is cut into windows of 4 and too small for one
        asked = [region for region in there if (ops := frozenset(region.ops)) in wanted and ops not in found]
        stored = planner.look_up_all(bound, asked)
        for region in asked:
            if region.key in stored:
                found[frozenset(region.ops)] = (size, RegionPlan(region, stored[region.key], "database"))
    return found


def with_configs(plan: RegionPlan, tuned: RegionPlan) -> RegionPlan:
    """The plan, with the configurations of another for groups that are in both."""
    known = {frozenset(tuned.group_ops(choice)): choice for choice in tuned.record.groups}

    def configured(choice: GroupChoice) -> GroupChoice:
        same = known.get(frozenset(plan.group_ops(choice)))
        if same is None or same.is_plain != choice.is_plain:
            return choice
        return replace(choice, implementation=same.implementation, config=same.config)

    return replace(plan, record=replace(plan.record, groups=tuple(map(configured, plan.record.groups))))
