"""Cycles among groups: two groups that are each convex may still wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.groups.compute_graph import Classify, ComputeGraph, compute_graph_of


@dataclass(frozen=True)
class Hop:
    """A group on a cycle, entered at op ``entry`` and left from op ``leave`` (op numbers)."""

    group: int
    entry: int
    leave: int


def short_cycles(group_of: Sequence[int], edges: Iterable[tuple[int, int]]) -> list[list[Hop]]:
    """Some cycles of the graph whose vertices are groups, disjoint and each shortest through its first group.

    Args:
        group_of: Group number of each op.
        edges: Dependencies between ops, ``(before, after)``.

    Returns:
        An empty list exactly when the groups can be run one after the other.
    """
    links: dict[tuple[int, int], tuple[int, int]] = {}
    for before, after in edges:
        start, end = group_of[before], group_of[after]
        if start != end:
            links.setdefault((start, end), (before, after))
    graph = nx.DiGraph(links.keys())
    cycles: list[list[Hop]] = []
    for component in nx.strongly_connected_components(graph):
        tangle = graph.subgraph(component).copy()
        for start in sorted(component):
            if start in tangle and (path := _shortest_cycle(tangle, start)):
                cycles.append(_hops(links, path))
                tangle.remove_nodes_from(path)
    return sorted(cycles, key=lambda cycle: cycle[0].group)


def break_cycles(
    graph: DataflowGraph, groups: Sequence[Candidate], classify: Classify | None = None
) -> tuple[list[Candidate], list[Candidate]]:
    """Drop groups (their ops run unfused) until those left can run in some order.

    Regions are covered one by one; this is the check across all of them.

    Returns:
        The groups kept, in the order given, and those dropped: of each cycle the group of fewest ops.
    """
    flow = compute_graph_of(graph, classify)
    kept = list(groups)
    dropped: list[Candidate] = []
    while True:
        group_of, edges = _contraction(flow, kept)
        cycles = short_cycles(group_of, edges)
        if not cycles:
            return kept, dropped
        for cycle in cycles:
            fused = [hop.group for hop in cycle if hop.group < len(kept)]
            victim = min(fused, key=lambda number: (len(kept[number].ops), -number))
            dropped.append(kept[victim])
        gone = {group.ops for group in dropped}
        kept = [group for group in kept if group.ops not in gone]


def _contraction(flow: ComputeGraph, groups: Sequence[Candidate]) -> tuple[list[int], list[tuple[int, int]]]:
    """Group number of every op, and the dependencies between ops that are not views."""
    group_of = [len(groups) + at for at in range(len(flow.nodes))]
    for number, group in enumerate(groups):
        for name in group.ops:
            group_of[flow.position[name]] = number
    edges = [
        (pred, at) for at, kind in enumerate(flow.kinds) if kind != "view" for pred in flow.preds_behind_views[at]
    ]
    return group_of, edges


def _shortest_cycle(graph: nx.DiGraph[int], start: int) -> list[int]:
    """Groups of a shortest cycle, ``start`` first; [] where none leads through it."""
    paths = nx.single_source_shortest_path(graph, start)
    return min((paths[group] for group in graph.predecessors(start) if group in paths), key=len, default=[])


def _hops(links: Mapping[tuple[int, int], tuple[int, int]], path: Sequence[int]) -> list[Hop]:
    steps = [links[group, path[(at + 1) % len(path)]] for at, group in enumerate(path)]
    return [Hop(group, entry=steps[at - 1][1], leave=steps[at][0]) for at, group in enumerate(path)]
