"""A whole step by TorchInductor beside the plan: what a user of plain ``torch.compile`` would get.

Compiling all layers of a large model takes minutes, and they are alike: of regions that repeat, two take part, as a
group of their own that counts as often as they occur. What occurs once, such as the last linear, has another ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.choices import Choice, Implementations
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.inductor import fails_otherwise, whole_candidate
from fuseplan.planner.partition.whole_region import planned_parts, play_off, unmeasured_part
from fuseplan.search import policy
from fuseplan.search.store.record import INDUCTOR, PlanRecord
from fuseplan.search.timing.contest import Contest, sum_of_contests
from fuseplan.search.tune.tuner import Tuner

_PLAN = "planned"
#: Of equal regions so many take part: what one hands to the next is in it.
_ALIKE = 2


@dataclass(frozen=True)
class InductorStep:
    """How TorchInductor's code compares with the plan of a step, or ``why`` it was not run.

    Attributes:
        ratio: Its time over the plan's; None where it was not run.
        wins: Whether it is faster beyond doubt, or loses less where two conditions differ, and may run the whole graph.
        alone: As ``ratio``, on a GPU without the host that launches; None where that was not run.
    """

    ratio: float | None = None
    wins: bool = False
    alone: float | None = None
    why: str = ""


def compare_step(
    table: GroupTable, plans: Sequence[tuple[Region, PlanRecord]], ways: Implementations, tuner: Tuner
) -> InductorStep:
    """Time both, interleaved. ``plans`` are those of all regions of a step, in order."""
    try:
        groups = step_groups(table, [region for region, _ in plans], ways)
    except RefusedError as error:
        return InductorStep(why=str(error))
    counts = Counter(region.key for region, _ in plans)
    contests, weights = list[Contest](), list[float]()
    for taken, group in groups:
        own = [plans[number] for number in taken]
        once = sum(record.planned_us for _, record in own)
        all_times = {region.key: counts[region.key] * record.planned_us for region, record in own}
        weights.append(sum(all_times.values()) / once)
        code = Choice(group, ways.inductor)
        found = play_off(tuner.play_off, table, {
            _PLAN: planned_parts(table, own, ways), INDUCTOR: {code: unmeasured_part(table, code)}})
        if found is None:
            return InductorStep(why="its run failed")
        contests.append(found)
    contest = sum_of_contests(contests, weights)
    ratio, *rest = (
        one.time(INDUCTOR).median_us / one.time(_PLAN).median_us for one in contest.conditions or (contest,))
    alone = rest[0] if rest else None
    is_better = contest.accepts(INDUCTOR, _PLAN) or (len(contest.conditions) > 1 and contest.is_safer(INDUCTOR, _PLAN))
    wins = is_better and may_run_whole(table.graph, table.device_type)
    return InductorStep(ratio, wins, alone)


def step_groups(
    table: GroupTable, regions: Sequence[Region], ways: Implementations
) -> list[tuple[list[int], Candidate]]:
    """Groups of a step's ops, each with the numbers of its regions: all of them, or of a large step two of each region
    that repeats, and the others. RefusedError where TorchInductor is not asked for its code.
    """
    flow, seen = compute_graph_of(table.graph), Counter[str]()
    numbers = range(len(regions))
    counts = Counter(region.key for region in regions)
    is_large = sum(len(region.ops) for region in regions) > policy.OPS_OF_ALL_LAYERS
    repeated = {number for number in numbers if is_large and counts[regions[number].key] > _ALIKE}
    taken = list[int]()
    for number in sorted(repeated):
        seen[regions[number].key] += 1
        taken += [number] if seen[regions[number].key] <= _ALIKE else []
    of_groups = [
        (chosen, [name for number in chosen for name in regions[number].ops if flow.is_member(flow.position[name])])
        for chosen in (taken, [number for number in numbers if number not in repeated])
    ]
    count = sum(len(ops) for _, ops in of_groups)
    if count > policy.MOST_OPS_OF_A_STEP:
        raise RefusedError(f"it has {count} ops, and TorchInductor is asked about {policy.MOST_OPS_OF_A_STEP}")
    for _, ops in of_groups:
        if (reason := ways.inductor.refuse_step(table, ops)) is not None:
            raise RefusedError(reason)
    return [(chosen, whole_candidate(table.graph, ops)) for chosen, ops in of_groups if ops]


def may_run_whole(graph: DataflowGraph, device_type: str) -> bool:
    """Whether TorchInductor's code of the whole graph does what eager mode does, errors and roundings included."""
    return not graph.rounds and not any(fails_otherwise(graph, node, device_type) for node in graph)
