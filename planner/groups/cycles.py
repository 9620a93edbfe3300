"""Cycles among groups: two groups that are each convex may still wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True)
class Hop:
    """A group on a cycle, entered at op ``entry`` and left from op ``leave`` (op numbers)."""

    group: int
    entry: int
    leave: int


def short_cycles(group_of: Sequence[int], edges: Iterable[tuple[int, int]]) -> list[list[Hop]]:
    """Some cycles of the graph whose vertices are groups, disjoint and each shortest through its first group.

    There are none exactly when the groups can be run one after the other. ``group_of`` has the group number of each
    op, ``edges`` are dependencies between ops, ``(before, after)``.
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


def _shortest_cycle(graph: nx.DiGraph[int], start: int) -> list[int]:
    """Groups of a shortest cycle, ``start`` first; [] where none leads through it."""
    paths = nx.single_source_shortest_path(graph, start)
    return min((paths[group] for group in graph.predecessors(start) if group in paths), key=len, default=[])


def _hops(links: Mapping[tuple[int, int], tuple[int, int]], path: Sequence[int]) -> list[Hop]:
    steps = [links[group, path[(at + 1) % len(path)]] for at, group in enumerate(path)]
    return [Hop(group, entry=steps[at - 1][1], leave=steps[at][0]) for at, group in enumerate(path)]
