"""Cycles among groups: two groups that are each convex may still wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    graph: nx.DiGraph[int] = nx.DiGraph()  # given edges, it would import pandas to see whether they are a frame
    graph.add_edges_from(links)
    cycles: list[list[Hop]] = []
    for component in nx.strongly_connected_components(graph):
        tangle = graph.subgraph(component).copy()
        for start in sorted(component):
            if start not in tangle:
                continue
            paths = nx.single_source_shortest_path(tangle, start)
            if back := [paths[group] for group in tangle.predecessors(start) if group in paths]:
                path = min(back, key=len)
                steps = [links[step] for step in zip(path, [*path[1:], start], strict=True)]
                cycles.append([Hop(group, steps[at - 1][1], steps[at][0]) for at, group in enumerate(path)])
                tangle.remove_nodes_from(path)
    return sorted(cycles, key=lambda cycle: cycle[0].group)
