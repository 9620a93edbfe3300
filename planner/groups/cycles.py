"""Cycles among groups: two groups that are each convex may still wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    links: dict[int, dict[int, tuple[int, int]]] = {}
    for before, after in edges:
        start, end = group_of[before], group_of[after]
        if start != end:
            links.setdefault(start, {}).setdefault(end, (before, after))
    stuck = _stuck(links)
    cycles: list[list[Hop]] = []
    for start in sorted(stuck):
        if start in stuck:
            path = _shortest_cycle(links, start, stuck)
            if path:
                cycles.append(_hops(links, path))
                stuck.difference_update(path)
    return cycles


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


def _stuck(links: dict[int, dict[int, tuple[int, int]]]) -> set[int]:
    """Groups that neither a forward nor a backward topological sweep can take away."""
    left = set(links) | {end for ends in links.values() for end in ends}
    backward: dict[int, list[int]] = {}
    for start, ends in links.items():
        for end in ends:
            backward.setdefault(end, []).append(start)
    for incoming, outgoing in ((backward, links), (links, backward)):
        waiting = {group: sum(other in left for other in incoming.get(group, ())) for group in left}
        free = [group for group, count in waiting.items() if not count]
        while free:
            group = free.pop()
            left.discard(group)
            for other in outgoing.get(group, ()):
                if other in left:
                    waiting[other] -= 1
                    if not waiting[other]:
                        free.append(other)
    return left


def _shortest_cycle(links: dict[int, dict[int, tuple[int, int]]], start: int, within: set[int]) -> list[int]:
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        group = queue.popleft()
        for other in links.get(group, ()):
            if other == start:
                path = [group]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if other in within and other not in came_from:
                came_from[other] = group
                queue.append(other)
    return []


def _hops(links: dict[int, dict[int, tuple[int, int]]], path: Sequence[int]) -> list[Hop]:
    steps = [links[group][path[(at + 1) % len(path)]] for at, group in enumerate(path)]
    return [Hop(group, entry=steps[at - 1][1], leave=steps[at][0]) for at, group in enumerate(path)]
