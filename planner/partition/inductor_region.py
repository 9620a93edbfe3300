"""TorchInductor's code for a region or a graph: where it is worth asking for, and what it should take if not timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

import networkx as nx

from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.anchored import unpacks_weights
from fuseplan.planner.groups.candidates import Candidate, convex_runs, single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import unique_regions
from fuseplan.planner.implementations.choices import Choice, Implementations, recorded_choices
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.ops.table import OpKind
from fuseplan.planner.partition.plan_record import PlanWriter
from fuseplan.search import policy
from fuseplan.search.store.record import PlanRecord


def _kind(table: GroupTable, group: Candidate) -> OpKind:
    """The kind of a group's first op: of its only one, where it is no kernel."""
    flow = compute_graph_of(table.graph)
    return flow.kinds[flow.position[group.ops[0]]]


def whole_by_inductor(
    table: GroupTable, region: Region, parts: Sequence[tuple[Region, PlanRecord]], ways: Implementations
) -> tuple[Choice, ...]:
    """TorchInductor's code for a region whose plan leaves ops that move memory to ATen; () where that is little: a
    foreign op, or two others, that take a share of its time.

    There are several choices where paths leave the region and come back; ATen runs what is alone between two of them.
    """
    left_us, count, foreign = 0.0, 0, False
    for part, record in parts:
        for choice, group in recorded_choices(table.graph, part, record, ways).items():
            kind = _kind(table, choice.group)
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
        if any(flow.kinds[flow.position[region.ops[place]]] == "anchor" for place in group.ops))
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


def predicted_by_inductor(
    record: PlanRecord, parts: Sequence[tuple[Region, PlanRecord]], writer: PlanWriter, prices: ModelPrices
) -> PlanRecord:
    """The record of a region by the cost model, ``parts`` together; or one in which TorchInductor runs it, where that
    should spare much of what ATen's ops would move.
    """
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
    table: GroupTable, regions: Iterable[Region], ways: Implementations, is_probed: bool = True
) -> list[Region]:
    """Those of which the cost model decides more than the islands: with matmuls that a library's call is known to be
    faster at and, on a device that is probed, with foreign ops or weights to be unpacked.
    """

    def counts(one: Candidate) -> bool:
        kind = _kind(table, one)
        if kind == "anchor":
            return any(library.surpasses(table, one) for library in ways.libraries)
        return kind == "foreign" and is_probed

    listed = list(regions)
    distinct = unique_regions(listed).items()
    chosen = {
        key for key, (first, *_) in distinct
        if (is_probed and unpacks_weights(table.graph, first))
        or any(map(counts, single_candidates(table.graph, first)))
    }
    return [region for region in listed if region.key in chosen]
