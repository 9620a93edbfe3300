"""Regions: the parts of the graph whose borders no group can cross.

Two ops belong together when one reads the other's value (through views) or both read the same value from outside, and
no path between them runs through an opaque op or across a barrier: an ordering edge, or the way from one anchor to the
next with nothing but views between. A transformer's period, from one attention to the next, thus is one region.

The compute ops of a region form *islands* between its anchors. A generated kernel holds no anchor, so each island and
each anchor is a part that is decided by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from typing import Any
from weakref import WeakKeyDictionary

import networkx as nx
from networkx.utils import UnionFind

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.canonical import canonical_form
from fuseplan.planner.groups.compute_graph import LIBRARY_KINDS, ComputeGraph, compute_graph_of
from fuseplan.planner.groups.convex import Dependencies
from fuseplan.planner.ops.table import op_of, written_value

#: Readers of a value are compared with those on so many greater depths, and with so many on each of these (readers of
#: equal depth are never separated). All pairs would be millions; reaching a limit only makes regions smaller.
SIBLING_LEVELS, SIBLING_WINDOW = 2, 8
#: Compute ops in an island; larger ones are cut into runs of ops in capture order.
MAX_ISLAND = 256
#: Compute ops and anchors in a region with anchors; in a larger one every part is a region.
MAX_PERIOD = 160


@dataclass(frozen=True)
class Boundary:
    """Why two ops, one reading the other's value or both reading one value, are in different regions."""

    before: str
    after: str
    reason: str


def find_regions(graph: DataflowGraph) -> list[Region]:
    """The regions of ``graph``, ordered by their first op.

    Every live compute op and anchor is in exactly one region. A view op is in each region that reads through it; views
    that only opaque ops read are in none. They are remembered for as long as the graph lives.
    """
    return list(_found(graph).regions)


def region_parts(graph: DataflowGraph, region: Region) -> tuple[Region, ...]:
    """The islands and the single anchors of a region, ordered by their first op; itself where it has one part."""
    found = _found(graph)
    if region not in found.parts:
        finder = _Finder(graph, compute_graph_of(graph))
        members = found.members.get(region, ())
        found.parts[region] = tuple(map(finder.region, members)) if len(members) > 1 else (region,)
    return found.parts[region]


def split_common(graph: DataflowGraph, region: Region) -> tuple[Region, ...]:
    """A region in pieces: what makes common values, each by itself, and last the layer; itself where there are none.

    *Common* values come from no anchor, and several layers read them: embedded tokens, rotary tables, a mask. They lie
    in memory whatever is fused. Calls of one model differ in how they make them; what its layers do is the same.
    """
    found, flow = _found(graph), compute_graph_of(graph)
    if region not in found.pieces:
        members = found.members.get(region, [])
        made = [at for part in members for at in part if at in flow.common]
        layer = [kept for part in members if (kept := [at for at in part if at not in flow.common])]
        found.pieces[region] = (region,)
        if made and layer:
            joined: UnionFind[int] = UnionFind(made)
            finder = _Finder(graph, flow)
            for at in made:
                joined.union(at, *(pred for pred in flow.compute_preds(at) if pred in made))
            pieces = {finder.region(piece): [piece] for piece in sorted(map(sorted, joined.to_sets()))}
            pieces[finder.region(sorted(chain.from_iterable(layer)))] = layer
            found.members.update(pieces)
            found.pieces[region] = tuple(pieces)
    return found.pieces[region]


def parts_to_plan(graph: DataflowGraph, region: Region, known: Collection[str]) -> tuple[Region, ...]:
    """The region itself where its key is ``known``, else its parts that hold anything to decide."""
    parts = region_parts(graph, region)
    if region.key in known or len(parts) == 1:
        return (region,)
    flow = compute_graph_of(graph)
    return tuple(
        part for part in parts
        if any(flow.kinds[flow.position[name]] == "compute" for name in part.ops)
    )


def is_anchor(graph: DataflowGraph, part: Region) -> bool:
    """Whether a part of a region is a matmul, attention or a foreign op, with views at most beside it."""
    flow = compute_graph_of(graph)
    return any(flow.kinds[flow.position[name]] in LIBRARY_KINDS for name in part.ops)


@dataclass(frozen=True)
class _Found:
    """Regions, the members of each part of these and of their pieces, and the parts and pieces that were asked for."""

    regions: tuple[Region, ...]
    members: dict[Region, list[list[int]]]
    parts: dict[Region, tuple[Region, ...]] = field(default_factory=dict)
    pieces: dict[Region, tuple[Region, ...]] = field(default_factory=dict)


_FOUND: WeakKeyDictionary[ComputeGraph, _Found] = WeakKeyDictionary()


def _found(graph: DataflowGraph) -> _Found:
    flow = compute_graph_of(graph)
    if flow not in _FOUND:
        found = sorted(_search(graph, flow), key=lambda item: min(flow.position[name] for name in item[0].ops))
        _FOUND[flow] = _Found(tuple(region for region, _ in found), dict(found))
    return _FOUND[flow]


def regions_to_json(graph: DataflowGraph) -> list[Any]:
    """What :func:`find_regions` found of a static graph, as data that JSON has."""
    found = _found(graph)
    return [[one.ops, one.inputs, one.outputs, one.key, found.members[one]] for one in found.regions]


def set_regions(graph: DataflowGraph, data: Iterable[Any]) -> None:
    """Have :func:`find_regions` give what :func:`regions_to_json` wrote of an equal graph."""
    members = {Region(tuple(ops), tuple(read), tuple(made), key): parts for ops, read, made, key, parts in data}
    _FOUND[compute_graph_of(graph)] = _Found(tuple(members), members)


def _search(graph: DataflowGraph, flow: ComputeGraph) -> Iterator[tuple[Region, list[list[int]]]]:
    """Regions with the members of each of their parts."""
    anchors = [[at] for at, kind in enumerate(flow.kinds) if kind in LIBRARY_KINDS and flow.live[at]]
    cut = compute_graph_of(graph, cut_at_anchors=True) if anchors else flow
    parts = [*_Finder(graph, cut).components(), *anchors]
    finder = _Finder(graph, flow)
    found = finder.joined(parts) if anchors else parts
    while (write := _circling_write(flow, found)) is not None:
        found, parts = ([*filter(None, ([at for at in one if at != write] for one in lists)), [write]]
                        for lists in (found, parts))
    home = {at: number for number, part in enumerate(parts) for at in part}
    for members in found:
        within = sorted({home[at] for at in members}, key=lambda number: parts[number][0])
        if len(within) == 1 or len(members) > MAX_PERIOD:
            yield from ((finder.region(parts[number]), [parts[number]]) for number in within)
        else:
            yield finder.region(members), [parts[number] for number in within]


def _circling_write(flow: ComputeGraph, regions: Sequence[Sequence[int]]) -> int | None:
    """A write that makes regions wait for each other in a circle: another one reads what it overwrites, and needs or
    overwrites something of its own region. None where regions can run one after another, as far as writes go.
    """
    home = {at: number for number, members in enumerate(regions) for at in members}
    writes = [at for at in home if written_value(flow.nodes[at]) is not None and len(regions[home[at]]) > 1]
    if not writes:
        return None
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(home.values())
    order.add_edges_from((home.get(pred, ~pred), home.get(at, ~at))  # what is in no region is by itself
                         for at, preds in enumerate(flow.preds) for pred in preds)
    circle = {one: number for number, ones in enumerate(nx.strongly_connected_components(order)) for one in ones}

    def circles(pred: int, at: int) -> bool:
        before, own, read = home.get(pred, ~pred), home[at], flow.nodes[at].inputs
        only_ordered = not any(value in flow.nodes[pred].outputs for value in read)
        return only_ordered and before != own and circle[before] == circle[own]

    return max((at for at in writes if any(circles(pred, at) for pred in flow.preds[at])), default=None)


def exact_form(graph: DataflowGraph, region: Region) -> Region:
    """The region with a key that its free constants are part of: earlier versions stored plans by those."""
    finder, position = _Finder(graph, flow := compute_graph_of(graph)), flow.position
    members = sorted(at for name in region.ops if flow.is_member(at := position[name]))
    return finder.region(members, free_constants=False)


def find_boundaries(graph: DataflowGraph) -> list[Boundary]:
    """Every data-flow edge between compute ops and anchors that is in no region, with the reason."""
    finder = _Finder(graph, compute_graph_of(graph))
    finder.components()
    return finder.boundaries()


def unique_regions(regions: Iterable[Region]) -> dict[str, list[Region]]:
    """Regions by key, in first-occurrence order; regions of one key are planned once."""
    groups: dict[str, list[Region]] = {}
    for region in regions:
        groups.setdefault(region.key, []).append(region)
    return groups


class _Finder:
    def __init__(self, graph: DataflowGraph, flow: ComputeGraph) -> None:
        self.graph = graph
        self.flow = flow
        self._separated: list[tuple[int, int, str]] = []
        self._joined: UnionFind[int] = UnionFind()

    def components(self) -> list[list[int]]:
        """Positions of the members of each region, each ascending, ordered by their first op; long ones are cut."""
        return sorted((run for component in self._components() for run in self._runs(component)), key=min)

    def joined(self, parts: Iterable[Sequence[int]]) -> list[list[int]]:
        """The same for regions that hold each of ``parts`` whole; none is cut."""
        for part in parts:
            self._joined.union(*part)
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
            found.setdefault(self._joined[at], []).append(at)
        return list(found.values())

    def _runs(self, component: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(component), MAX_ISLAND):
            if start:
                before, after = component[start - 1], component[start]
                self._separated.append((before, after, f"regions are cut every {MAX_ISLAND} compute ops"))
            yield component[start : start + MAX_ISLAND]

    def _join_siblings(self, readers: list[int]) -> None:
        levels: dict[int, list[int]] = {}
        for at in readers:
            levels.setdefault(self.flow.depth[at], []).append(at)
        ascending = [levels[depth] for depth in sorted(levels)]
        for number, level in enumerate(ascending):
            for at, other in pairwise(level):
                self._join_if_inseparable(at, other, is_edge=False)
            for deeper in ascending[number + 1 : number + 1 + SIBLING_LEVELS]:
                for at, other in product(level[:SIBLING_WINDOW], deeper[:SIBLING_WINDOW]):
                    self._join_if_inseparable(min(at, other), max(at, other), is_edge=False)

    def _join_if_inseparable(self, before: int, after: int, is_edge: bool) -> None:
        if self._joined[before] == self._joined[after]:
            return
        if self.flow.first_blocker(before, after) is None:
            self._joined.union(before, after)
        elif is_edge:
            self._separated.append((before, after, ""))

    def boundaries(self) -> list[Boundary]:
        """What was recorded, less the pairs that other ops joined after all."""
        names = self.flow.names
        return [
            Boundary(names[before], names[after], reason or self._blocker(before, after))
            for before, after, reason in self._separated
            if reason or self._joined[before] != self._joined[after]
        ]

    def _blocker(self, before: int, after: int) -> str:
        """What separates two ops, in words."""
        flow = self.flow
        blocker = flow.first_blocker(before, after)
        assert blocker is not None
        node = flow.nodes[blocker]
        if flow.kinds[blocker] == "opaque":
            return f"a path runs through {node.op} ({node.name})"
        if flow.kinds[blocker] == "anchor":
            return f"nothing but views lies between another library call and {node.op} ({node.name})"
        if op_of(node.op).family == "lookup":
            return f"{node.op} ({node.name}) looks up a table that has to exist before"
        return f"an ordering edge (a write to memory) leads to {node.op} ({node.name})"

    def region(self, members: Sequence[int], free_constants: bool = True) -> Region:
        """The region of some members, with the views among them."""
        flow = self.flow
        ops = [flow.names[at] for at in (*members, *flow.views_behind(members))]
        outputs, order = flow.needed_outside(members), self._detours(members)
        return canonical_form(self.graph, ops, outputs, order, free_constants=free_constants)

    def _detours(self, members: Sequence[int]) -> list[tuple[str, str]]:
        """Pairs ordered by a path outside the region: they limit the legal groups, so they are part of the key."""
        if len({self.flow.depth[at] for at in members}) == 1:
            return []
        return Dependencies.of(self.flow, members).detour_pairs()
