"""Regions: the parts of the graph between the ops that no generated kernel may absorb.

Two compute ops belong together when one reads the other's value (through views) or both read the same value from
outside, and no path between them runs through an extern op or across an ordering edge. The residual stream thus
does not glue layers together: from one residual add to the next there is always a path through a matmul.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from weakref import WeakKeyDictionary

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.canonical import canonical_form
from fuseplan.planner.groups.compute_graph import Classify, ComputeGraph, compute_graph_of
from fuseplan.planner.groups.convex import Dependencies, bits
from fuseplan.planner.lowering.recipes_index import LOOKUPS

_CUT = "regions are cut every"


@dataclass(frozen=True)
class RegionLimits:
    """Bounds that keep the search for regions near linear; reaching one only makes regions smaller.

    Attributes:
        search_budget: Ops visited in looking for a path through an extern op between two ops, in a graph of more than
            :data:`~fuseplan.planner.groups.compute_graph.MAX_MASKED` ops.
        sibling_levels: Greater extern depths whose readers of a value a reader of it is compared with (readers of
            equal depth are never separated).
        sibling_window: Readers compared on each of those levels.
        max_ops: Compute ops in a region; larger ones are cut into runs of ops in capture order.
    """

    search_budget: int = 4096
    sibling_levels: int = 2
    sibling_window: int = 8
    max_ops: int = 256


@dataclass(frozen=True)
class Boundary:
    """Why two compute ops, one reading the other's value or both reading one value, are in different regions."""

    before: str
    after: str
    reason: str


def find_regions(
    graph: DataflowGraph, classify: Classify | None = None, limits: RegionLimits = RegionLimits()
) -> list[Region]:
    """The regions of ``graph``, ordered by their first op.

    Every live compute op is in exactly one region. A view op is in each region that reads through it; views that
    only extern ops read are in none. They are remembered for as long as the graph lives, for the latest arguments.
    """
    flow = compute_graph_of(graph, classify)
    remembered = _FOUND.get(flow)
    if remembered is None or remembered[0] != limits:
        remembered = _FOUND[flow] = (limits, tuple(_Finder(graph, flow, limits).regions()))
    return list(remembered[1])


#: Regions by flow: a graph that grew, or is classified anew, has another flow.
_FOUND: WeakKeyDictionary[ComputeGraph, tuple[RegionLimits, tuple[Region, ...]]] = WeakKeyDictionary()


def find_boundaries(
    graph: DataflowGraph, classify: Classify | None = None, limits: RegionLimits = RegionLimits()
) -> list[Boundary]:
    """Every data-flow edge between compute ops that no group may hold, with the reason (for ``plan explain``)."""
    finder = _Finder(graph, compute_graph_of(graph, classify), limits)
    finder.components()
    return finder.boundaries()


def unique_regions(regions: Iterable[Region]) -> dict[str, list[Region]]:
    """Regions by key, in first-occurrence order; regions of one key are planned once."""
    groups: dict[str, list[Region]] = {}
    for region in regions:
        groups.setdefault(region.key, []).append(region)
    return groups


class _Finder:
    def __init__(self, graph: DataflowGraph, flow: ComputeGraph, limits: RegionLimits) -> None:
        self.graph = graph
        self.flow = flow
        self.limits = limits
        self._separated: list[tuple[int, int, str]] = []
        self.parent = list(range(len(flow.nodes)))

    def regions(self) -> list[Region]:
        return [self._region(component) for component in self.components()]

    def components(self) -> list[list[int]]:
        """Positions of the compute ops of each region, each ascending, ordered by their first op."""
        flow = self.flow
        members = [at for at, kind in enumerate(flow.kinds) if kind == "compute" and flow.live[at]]
        for at in members:
            for pred in flow.compute_preds(at):
                self._join_if_inseparable(pred, at, is_edge=True)
        for readers in flow.readers.values():
            self._join_siblings([at for at in readers if flow.kinds[at] == "compute"])
        found: dict[int, list[int]] = {}
        for at in members:
            found.setdefault(self._root(at), []).append(at)
        return sorted((run for component in found.values() for run in self._runs(component)), key=lambda run: run[0])

    def _runs(self, component: list[int]) -> Iterator[list[int]]:
        limit = self.limits.max_ops
        for start in range(0, len(component), limit):
            if start:
                before, after = component[start - 1], component[start]
                self._record(before, after, f"{_CUT} {limit} compute ops")
            yield component[start : start + limit]

    def _join_siblings(self, readers: list[int]) -> None:
        levels: dict[int, list[int]] = {}
        for at in readers:
            levels.setdefault(self.flow.depth[at], []).append(at)
        ascending = [levels[depth] for depth in sorted(levels)]
        window = self.limits.sibling_window
        for number, level in enumerate(ascending):
            for at, other in pairwise(level):
                self._join_if_inseparable(at, other, is_edge=False)
            for deeper in ascending[number + 1 : number + 1 + self.limits.sibling_levels]:
                for at, other in product(level[:window], deeper[:window]):
                    self._join_if_inseparable(min(at, other), max(at, other), is_edge=False)

    def _join_if_inseparable(self, before: int, after: int, is_edge: bool) -> None:
        a, b = self._root(before), self._root(after)
        if a == b:
            return
        try:
            if not self.flow.separated(before, after, self.limits.search_budget):
                self.parent[max(a, b)] = min(a, b)
            elif is_edge:
                self._record(before, after)
        except TimeoutError as stopped:
            self._record(before, after, f"search for a separating path gave up: {stopped}")

    def _record(self, before: int, after: int, reason: str = "") -> None:
        self._separated.append((before, after, reason))

    def boundaries(self) -> list[Boundary]:
        """What was recorded, less the pairs that other ops joined after all."""
        names = self.flow.names
        return [
            Boundary(names[before], names[after], reason or self._blocker(before, after))
            for before, after, reason in self._separated
            if self._root(before) != self._root(after) or reason.startswith(_CUT)
        ]

    def _blocker(self, before: int, after: int) -> str:
        """What separates two ops, in words."""
        flow = self.flow
        # Each op is visited at most twice.
        blocker = flow.first_blocker(before, after, budget=2 * len(flow.nodes))
        assert blocker is not None
        node = flow.nodes[blocker]
        if flow.kinds[blocker] == "extern":
            return f"a path runs through {node.op} ({node.name})"
        if node.op in LOOKUPS:
            return f"{node.op} ({node.name}) looks up a table that has to exist before"
        return f"an ordering edge (a write to memory) leads to {node.op} ({node.name})"

    def _root(self, at: int) -> int:
        parent = self.parent
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    def _region(self, members: list[int]) -> Region:
        flow = self.flow
        ops = [flow.names[at] for at in (*members, *flow.views_behind(members))]
        form = canonical_form(self.graph, ops, flow.needed_outside(members), self._detours(members))
        return Region(form.ops, form.inputs, form.outputs, form.key)

    def _detours(self, members: list[int]) -> list[tuple[str, str]]:
        """Pairs ordered by a path outside the region: they limit the legal groups, so they are part of the key."""
        if len({self.flow.depth[at] for at in members}) == 1:
            return []
        names = [self.flow.names[at] for at in members]
        detours = Dependencies.of(self.flow, members).detours
        return [(names[pred], names[at]) for at in range(len(names)) for pred in bits(detours[at])]
