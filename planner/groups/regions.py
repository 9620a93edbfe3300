"""Regions: the parts of the graph whose borders no group can cross.

Two ops belong together when one reads the other's value (through views) or both read the same value from outside, and
no path between them runs through an opaque op or across a barrier: an ordering edge, or the way from one anchor to the
next with nothing but views between. A transformer's period, from one attention to the next, thus is one region.

The compute ops of a region form *islands* between its anchors. A generated kernel holds no anchor, so each island and
each anchor is a part that is decided by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias
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
        search_budget: Ops visited in looking for a path through an opaque op between two ops, in a graph of more than
            :data:`~fuseplan.planner.groups.compute_graph.MAX_MASKED` ops.
        sibling_levels: Greater depths whose readers of a value a reader of it is compared with (readers of
            equal depth are never separated).
        sibling_window: Readers compared on each of those levels.
        max_ops: Compute ops in an island; larger ones are cut into runs of ops in capture order.
        max_period: Compute ops and anchors in a region with anchors; in a larger one every part is a region.
    """

    search_budget: int = 4096
    sibling_levels: int = 2
    sibling_window: int = 8
    max_ops: int = 256
    max_period: int = 160


@dataclass(frozen=True)
class Boundary:
    """Why two ops, one reading the other's value or both reading one value, are in different regions."""

    before: str
    after: str
    reason: str


def find_regions(
    graph: DataflowGraph, classify: Classify | None = None, limits: RegionLimits = RegionLimits()
) -> list[Region]:
    """The regions of ``graph``, ordered by their first op.

    Every live compute op and anchor is in exactly one region. A view op is in each region that reads through it; views
    that only opaque ops read are in none. They are remembered for as long as the graph lives, for the latest arguments.
    """
    return list(_found(graph, classify, limits))


def region_parts(
    graph: DataflowGraph, region: Region, classify: Classify | None = None, limits: RegionLimits = RegionLimits()
) -> tuple[Region, ...]:
    """The islands and the single anchors of a region, ordered by their first op; itself where it has one part."""
    return _found(graph, classify, limits).get(region, (region,))


def _found(graph: DataflowGraph, classify: Classify | None, limits: RegionLimits) -> _Parts:
    flow = compute_graph_of(graph, classify)
    remembered = _FOUND.get(flow)
    if remembered is None or remembered[0] != limits:
        remembered = _FOUND[flow] = (limits, _search(graph, flow, classify, limits))
    return remembered[1]


#: Regions with their parts.
_Parts: TypeAlias = dict[Region, tuple[Region, ...]]
#: Regions by flow: a graph that grew, or is classified anew, has another flow.
_FOUND: WeakKeyDictionary[ComputeGraph, tuple[RegionLimits, _Parts]] = WeakKeyDictionary()


def _search(graph: DataflowGraph, flow: ComputeGraph, classify: Classify | None, limits: RegionLimits) -> _Parts:
    anchors = [[at] for at, kind in enumerate(flow.kinds) if kind == "anchor" and flow.live[at]]
    cut = compute_graph_of(graph, classify, cut_at_anchors=True) if anchors else flow
    parts = [*_Finder(graph, cut, limits).components(), *anchors]
    home = {at: number for number, part in enumerate(parts) for at in part}
    finder = _Finder(graph, flow, limits)
    found: dict[Region, tuple[Region, ...]] = {}
    for members in finder.joined(parts) if anchors else parts:
        within = sorted({home[at] for at in members}, key=lambda number: parts[number][0])
        if len(within) == 1 or len(members) > limits.max_period:
            found |= {region: (region,) for region in (finder.region(parts[number]) for number in within)}
        else:
            found[finder.region(members)] = tuple(finder.region(parts[number]) for number in within)
    return dict(sorted(found.items(), key=lambda item: min(flow.position[name] for name in item[0].ops)))


def find_boundaries(
    graph: DataflowGraph, classify: Classify | None = None, limits: RegionLimits = RegionLimits()
) -> list[Boundary]:
    """Every data-flow edge between compute ops and anchors that is in no region, with the reason."""
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

    def components(self) -> list[list[int]]:
        """Positions of the members of each region, each ascending, ordered by their first op; long ones are cut."""
        return sorted((run for component in self._components() for run in self._runs(component)), key=min)

    def joined(self, parts: Iterable[Sequence[int]]) -> list[list[int]]:
        """The same for regions that hold each of ``parts`` whole; none is cut."""
        for part in parts:
            for at in part[1:]:
                self._join(part[0], at)
        return self._components()

    def _components(self) -> list[list[int]]:
        flow = self.flow
        members = [at for at in range(len(flow.nodes)) if flow.is_member(at) and flow.live[at]]
        for at in members:
            for pred in flow.compute_preds(at):
                self._join_if_inseparable(pred, at, is_edge=True)
        for readers in flow.readers.values():
            self._join_siblings([at for at in readers if flow.is_member(at)])
        found: dict[int, list[int]] = {}
        for at in members:
            found.setdefault(self._root(at), []).append(at)
        return list(found.values())

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
                self._join(a, b)
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
        if flow.kinds[blocker] == "opaque":
            return f"a path runs through {node.op} ({node.name})"
        if flow.kinds[blocker] == "anchor":
            return f"nothing but views lies between another library call and {node.op} ({node.name})"
        if node.op in LOOKUPS:
            return f"{node.op} ({node.name}) looks up a table that has to exist before"
        return f"an ordering edge (a write to memory) leads to {node.op} ({node.name})"

    def _join(self, before: int, after: int) -> None:
        a, b = self._root(before), self._root(after)
        self.parent[max(a, b)] = min(a, b)

    def _root(self, at: int) -> int:
        parent = self.parent
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    def region(self, members: Sequence[int]) -> Region:
        """The region of some members, with the views among them."""
        flow = self.flow
        ops = [flow.names[at] for at in (*members, *flow.views_behind(members))]
        form = canonical_form(self.graph, ops, flow.needed_outside(members), self._detours(members))
        return Region(form.ops, form.inputs, form.outputs, form.key)

    def _detours(self, members: Sequence[int]) -> list[tuple[str, str]]:
        """Pairs ordered by a path outside the region: they limit the legal groups, so they are part of the key."""
        if len({self.flow.depth[at] for at in members}) == 1:
            return []
        names = [self.flow.names[at] for at in members]
        detours = Dependencies.of(self.flow, members).detours
        return [(names[pred], names[at]) for at in range(len(names)) for pred in bits(detours[at])]
