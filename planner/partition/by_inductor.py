"""TorchInductor's code for a region or for a whole step: where it is worth asking for, and beside the plan.

Of a region that was not timed the cost model says what it should take. A step is what a user of plain ``torch.compile``
would get. Compiling all layers of a large model takes minutes, and they are alike: of regions that repeat, two take
part, as a group of their own that counts as often as they occur. What occurs once has another ratio.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import networkx as nx

from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.devices import is_gpu
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.anchored import unpacks_weights
from fuseplan.planner.groups.candidates import Candidate, convex_runs, single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import region_parts, unique_regions
from fuseplan.planner.implementations.choices import Choice, Implementations, Plans, recorded_choices
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.inductor import fails_otherwise, whole_candidate
from fuseplan.planner.partition.plan_record import PlanWriter
from fuseplan.planner.partition.whole_region import planned_parts, play_off, unmeasured_part
from fuseplan.search import policy
from fuseplan.search.store.record import INDUCTOR, PlanRecord
from fuseplan.search.timing.contest import Contest, sum_of_contests
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

_PLAN = "planned"
#: Of equal regions so many take part: what one hands to the next is in it.
_ALIKE = 2


def whole_by_inductor(table: GroupTable, region: Region, parts: Plans, ways: Implementations) -> tuple[Choice, ...]:
    """TorchInductor's code for a region whose plan leaves ops that move memory to ATen; () where that is little: a
    foreign op, or two others, that take a share of its time.

    There are several choices where paths leave the region and come back; ATen runs what is alone between two of them.
    """
    left_us, count, foreign = 0.0, 0, False
    for part, record in parts:
        for choice, group in recorded_choices(table.graph, part, record, ways).items():
            kind = table.kind(choice.group.ops[0])
            if group.is_plain and kind != "anchor":
                left_us += group.predicted_us if group.measured_us is None else group.measured_us
                foreign |= kind == "foreign"
                count += 1
    planned_us = math.fsum(record.planned_us for _, record in parts)
    if left_us <= policy.LEFT_TO_ATEN_SHARE * planned_us or not (foreign or count > 1):
        return ()
    runs = convex_runs(table.graph, region)
    choices = tuple(Choice(one, ways.inductor if len(one.ops) > 1 else ways.aten) for one in runs)
    compiled = [one for one in choices if one.implementation is ways.inductor]
    return () if not compiled or any(ways.inductor.refuse(table, one.group) for one in compiled) else choices


def predicted_whole_us(table: GroupTable, region: Region, record: PlanRecord, spec: DeviceSpec, mode: Mode) -> float:
    """What TorchInductor's code for a region should take: anchors as planned, and kernels that move each value once."""
    flow = compute_graph_of(table.graph)
    members = {flow.position[name] for name in region.ops if flow.is_member(flow.position[name])}
    anchors_us = math.fsum(
        group.predicted_us for group in record.groups
        if any(table.kind(region.ops[place]) == "anchor" for place in group.ops))
    return anchors_us + _islands_us(table, members, spec, mode)


def _islands_us(table: GroupTable, members: Set[int], spec: DeviceSpec, mode: Mode) -> float:
    """What kernels should take that hold all that lies together between some ops' matmuls and attention."""
    flow, total_us = compute_graph_of(table.graph), 0.0
    anchors = {at for at in members if flow.kinds[at] == "anchor"}
    islands: nx.Graph[int] = nx.Graph()
    islands.add_edges_from((at, pred) for at in members - anchors for pred in flow.compute_preds(at))
    islands.add_nodes_from(members - anchors)
    islands.remove_nodes_from([at for at in islands if at not in members - anchors])
    for island in nx.connected_components(islands):
        made = {value for at in island for value in flow.nodes[at].outputs}
        read = {value for at in island for value in flow.sources[at]} - made
        moved = sum(table.graph.specs[value].nbytes() for value in (*read, *flow.needed_outside(island)))
        launches = 1 + sum(flow.kinds[at] == "foreign" for at in island)
        total_us += predict(Work(dram_bytes=moved, launches=launches), spec, mode)
    return total_us


def predicted_by_inductor(record: PlanRecord, parts: Plans, writer: PlanWriter, prices: ModelPrices) -> PlanRecord:
    """The record by the cost model; TorchInductor's code instead where it should spare much of what ATen would move."""
    if prices.spec is None:
        return record
    table, region = writer.table, writer.region
    whole = whole_by_inductor(table, region, parts, writer.ways)
    if not whole:
        return record
    whole_us = predicted_whole_us(table, region, record, prices.spec, writer.ways.inductor.mode)
    gain = 1.0 - whole_us / record.planned_us
    if gain <= policy.PREDICTED_INDUCTOR_GAIN:
        return record
    reason = f"{record.evidence.reason}; TorchInductor's code should gain {gain:.0%} on what is left to ATen"
    return writer.whole(record, whole, gain, prices, 0.0, reason)


def decided_whole(
    table: GroupTable, regions: Iterable[Region], ways: Implementations, is_probed: bool, known: Collection[str]
) -> list[Region]:
    """Regions without a plan of which the cost model decides more than the islands, unless a plan of a part is
    ``known`` by its key: with weights to be unpacked, matmuls that a library's call is known to be faster at and, on a
    device that is probed, foreign ops.
    """
    if is_gpu(table.device_type) and not is_probed:
        return []

    def counts(one: Candidate) -> bool:
        kind = table.kind(one.ops[0])
        if kind == "anchor":
            return any(library.surpasses(table, one) for library in ways.libraries)
        return kind == "foreign" and is_probed

    listed = [one for one in regions if not any(part.key in known for part in region_parts(table.graph, one))]
    distinct = unique_regions(listed).items()
    chosen = {
        key for key, (first, *_) in distinct
        if unpacks_weights(table.graph, first)
        or any(map(counts, single_candidates(table.graph, first)))
    }
    return [region for region in listed if region.key in chosen]


# -- a whole step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InductorStep:
    """How TorchInductor's code compares with the plan of a step, or ``why`` it was not run.

    Attributes:
        ratio: Its time over the plan's; None where it was not run.
        more_us: How much longer than the plan it took.
        wins: Whether it is faster beyond doubt, or loses less where two conditions differ, and may run the whole graph.
        alone: As ``ratio``, on a GPU without the host that launches; None where that was not run.
    """

    ratio: float | None = None
    wins: bool = False
    alone: float | None = None
    why: str = ""
    more_us: float = 0.0

    def time_us(self, planned_us: float) -> float | None:
        """What it should take of a step that takes so long as planned; None where it was not run.

        A few layers, timed by themselves, have no gaps between launches, or a cache to themselves, and that helps one
        of both more. The whole step may keep their ratio or their difference: the estimate that flatters the plan less
        counts.
        """
        if self.ratio is None:
            return None
        return min(planned_us * self.ratio, planned_us + self.more_us) if self.ratio > 1 else planned_us * self.ratio


def compare_step(
    table: GroupTable, plans: Plans, opaque: Mapping[Choice, Part], ways: Implementations, tuner: Tuner
) -> InductorStep:
    """Time both, interleaved: by ``plans`` of all regions of a step, in order, and beside these its ``opaque`` ops."""
    try:
        groups = step_groups(table, [region for region, _ in plans], [choice.group.ops[0] for choice in opaque], ways)
    except RefusedError as error:
        return InductorStep(why=str(error))
    counts = Counter(region.key for region, _ in plans)
    contests, weights = list[Contest](), list[float]()
    for taken, group in groups:
        own = [plans[number] for number in taken]
        once = sum(record.planned_us for _, record in own)
        all_times = {region.key: counts[region.key] * record.planned_us for region, record in own}
        weights.append(sum(all_times.values()) / once if own else 1.0)
        code = Choice(group, ways.inductor)
        others = {choice: part for choice, part in opaque.items() if choice.group.ops[0] in group.ops}
        found = play_off(tuner.play_off, table, {
            _PLAN: {**planned_parts(table, own, ways), **others}, INDUCTOR: {code: unmeasured_part(table, code)}})
        if found is None:
            return InductorStep(why="its run failed")
        contests.append(found)
    contest = sum_of_contests(contests, weights)
    times = [(one.time(INDUCTOR).median_us, one.time(_PLAN).median_us) for one in contest.conditions or (contest,)]
    ratio, *rest = (inductor_us / planned_us for inductor_us, planned_us in times)
    alone = rest[0] if rest else None
    is_better = contest.accepts(INDUCTOR, _PLAN) or (len(contest.conditions) > 1 and contest.is_safer(INDUCTOR, _PLAN))
    wins = is_better and may_run_whole(table.graph, table.device_type)
    return InductorStep(ratio, wins, alone, more_us=times[0][0] - times[0][1])


def step_groups(
    table: GroupTable, regions: Sequence[Region], opaque: Sequence[str], ways: Implementations
) -> list[tuple[list[int], Candidate]]:
    """Groups of a step's ops, each with the numbers of its regions: all of them, or of a large step two of each region
    that repeats, and the others with the ``opaque`` ops. RefusedError where TorchInductor is not asked for its code.
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
    of_groups[-1][1].extend(opaque)
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
