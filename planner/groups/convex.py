"""Dependencies among the compute ops of a region as bit masks: what is convex or connected, and cycles among groups.

Bit ``i`` stands for the region's ``i``-th compute op in canonical order. A *detour* ``u -> v`` is a path on which
something outside the region runs between the two (an opaque op, an ordering edge): no group may hold both ends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import networkx as nx

from fuseplan.planner.groups.compute_graph import ComputeGraph


def bits(mask: int) -> Iterator[int]:
    """Numbers of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Iterable[int]) -> int:
    """Members that are in one of several sets."""
    return reduce(operator.or_, masks, 0)


@dataclass(frozen=True)
class Dependencies:
    """How the members of a region, ``members`` of ``flow``, depend on each other.

    For each member: the members whose values it ``reads`` (views looked through), those that reach it by a detour, and
    its ``siblings``, which read a source value that it reads.
    """

    flow: ComputeGraph
    members: tuple[int, ...]
    reads: tuple[int, ...]
    detours: tuple[int, ...]
    siblings: tuple[int, ...]

    @staticmethod
    def of(flow: ComputeGraph, members: Sequence[int]) -> Dependencies:
        reads, detours = _arrivals(flow, {at: bit for bit, at in enumerate(members)})
        readers: dict[str, int] = {}
        for bit, at in enumerate(members):
            for source in flow.sources[at]:
                readers[source] = readers.get(source, 0) | 1 << bit
        siblings = [
            union(readers[source] for source in flow.sources[at]) & ~(1 << bit) for bit, at in enumerate(members)
        ]
        return Dependencies(flow, tuple(members), tuple(reads), tuple(detours), tuple(siblings))

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def bit(self) -> dict[str, int]:
        """The number of each member by the name of its op."""
        return {self.flow.names[at]: bit for bit, at in enumerate(self.members)}

    def mask(self, names: Iterable[str]) -> int:
        return sum(1 << self.bit[name] for name in names)

    def names(self, mask: int) -> tuple[str, ...]:
        return tuple(self.flow.names[self.members[bit]] for bit in bits(mask))

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """For each member, those it is joined with by data flow (in either direction) or as a sibling."""
        return tuple(flow | sibling for flow, sibling in zip(self.dataflow, self.siblings, strict=True))

    @cached_property
    def dataflow(self) -> tuple[int, ...]:
        """For each member, the members that it reads or that read it."""
        return tuple(a | b for a, b in zip(self.reads, _transpose(self.reads), strict=True))

    @cached_property
    def detours_from(self) -> tuple[int, ...]:
        """For each member, the members it reaches by a detour."""
        return _transpose(self.detours)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each member, all members it depends on, detours included."""
        result = [0] * len(self)
        for bit in sorted(range(len(self)), key=lambda bit: self.members[bit]):
            for pred in bits(self.reads[bit] | self.detours[bit]):
                result[bit] |= result[pred] | 1 << pred
        return tuple(result)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        return _transpose(self.ancestors)

    def between(self, mask: int) -> int:
        """Members outside ``mask`` that lie on a path from one of its members to another."""
        above = below = 0
        for bit in bits(mask):
            above |= self.ancestors[bit]
            below |= self.descendants[bit]
        return above & below & ~mask

    def has_detour(self, mask: int) -> bool:
        return any(self.detours[bit] & mask for bit in bits(mask))

    def is_convex(self, mask: int) -> bool:
        """True when running the members of ``mask`` as one kernel leaves the graph acyclic."""
        return not self.between(mask) and not self.has_detour(mask)

    def edges(self) -> tuple[tuple[int, int], ...]:
        """All dependencies, detours included, as pairs of member numbers."""
        return tuple((pred, bit) for bit in range(len(self)) for pred in bits(self.reads[bit] | self.detours[bit]))

    def detour_pairs(self) -> list[tuple[str, str]]:
        """Names ``(before, after)`` of members that a path outside orders."""
        return [(before, name) for name, bit in self.bit.items() for before in self.names(self.detours[bit])]


def _transpose(rows: Iterable[int]) -> tuple[int, ...]:
    rows = tuple(rows)
    result = [0] * len(rows)
    for row, mask in enumerate(rows):
        for column in bits(mask):
            result[column] |= 1 << row
    return tuple(result)


def _arrivals(flow: ComputeGraph, number: dict[int, int]) -> tuple[list[int], list[int]]:
    """For each member, the members that reach it through views alone, and those that reach it by a detour."""
    reads = [0] * len(number)
    detours = [0] * len(number)
    #: What leaves an op: members that arrive through views alone, and by a detour.
    leaving: dict[int, tuple[int, int]] = {}
    for at in range(min(number), max(number) + 1):
        direct = detour = 0
        for pred in flow.preds[at]:
            near, far = leaving.get(pred, (0, 0))
            is_barred = (pred, at) in flow.barriers
            direct |= 0 if is_barred else near
            detour |= near | far if is_barred else far
        if at in number:
            reads[number[at]], detours[number[at]] = direct, detour
            leaving[at] = (1 << number[at], 0)
        elif direct | detour:
            leaving[at] = (direct, detour) if flow.kinds[at] == "view" else (0, direct | detour)
    return reads, detours


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
