"""Candidates: the legal fusion groups of a region.

A group is convex (nothing outside has to run in the middle of it) and connected, through data flow or as siblings that
read one value. Every such set of n ops contains one of n - 1, so growing sets op by op finds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.canonical import canonical_form
from fuseplan.planner.groups.compute_graph import ComputeGraph, compute_graph_of
from fuseplan.planner.groups.connected_sets import connected_sets, parts
from fuseplan.planner.groups.convex import Dependencies, bits

#: The reason why a set of compute ops cannot be one kernel, None when it can.
Legal: TypeAlias = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Candidate:
    """A group: its ops in the region's canonical order, source values that it reads by first use, and what others need.
    """

    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """A set of ops that is no candidate, and why."""

    ops: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Enumeration:
    """All candidates of a region, smallest first; ``truncated`` says why some may be missing."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    truncated: str | None = None

    def moved(self, graph: DataflowGraph, planned: Region, other: Region) -> Enumeration:
        """What was enumerated of region ``planned`` at the same places of ``other``, a region of the same key."""
        if planned.key != other.key:
            raise ValueError(f"regions differ: {planned.key[:12]} and {other.key[:12]}")
        values = same_values(graph, planned, other)

        def at(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(values[name] for name in names)

        found = [Candidate(at(one.ops), at(one.inputs), at(one.outputs)) for one in self.candidates]
        refusals = [Refusal(at(one.ops), one.reason) for one in self.refusals]
        return Enumeration(tuple(found), tuple(refusals), self.truncated)


def same_values(graph: DataflowGraph, first: Region, other: Region) -> dict[str, str]:
    """By the name of a value of ``first``, which is made or read there: that of the same value of an equal region."""
    pairs = zip(first.ops, other.ops, strict=True)
    made = ((a, b) for one, same in pairs for a, b in zip(graph.op(one).outputs, graph.op(same).outputs, strict=True))
    return {**dict(zip(first.inputs, other.inputs, strict=True)), **dict(made)}


def enumerate_candidates(
    graph: DataflowGraph, region: Region, legal: Legal, max_ops: int = 40, max_candidates: int = 600
) -> Enumeration:
    """The fusion groups of a region, each of ``max_ops`` ops at most.

    Each has to be lowered, which takes time: of more than ``max_candidates``, :func:`connected_sets` keeps a part.
    """
    dependencies = region_dependencies(graph, region)
    grown = connected_sets(dependencies, max_ops, max_candidates)
    refused = cache(lambda mask: legal(dependencies.names(mask)))
    masks = grown.masks
    if not grown.complete:  # what was kept may be illegal around some ops: legal groups cover them all
        everything = (1 << len(dependencies)) - 1
        masks += tuple(parts(dependencies, everything, max_ops, lambda mask: refused(mask) is None))
    candidates: list[Candidate] = []
    refusals = _separated_pairs(dependencies)
    for mask in dict.fromkeys(masks):
        if (reason := refused(mask)) is None:
            candidates.append(candidate(dependencies, mask))
        else:
            refusals.append(Refusal(dependencies.names(mask), reason))
    return Enumeration(tuple(candidates), tuple(refusals), grown.truncated)


def enumerate_parts(graph: DataflowGraph, region: Region, groups: Iterable[Sequence[str]], legal: Legal) -> Enumeration:
    """Single ops of a region, its ``groups`` where they are legal, and legal parts that cover those that are not."""
    dependencies = region_dependencies(graph, region)
    refused = cache(lambda mask: legal(dependencies.names(mask)))
    masks = [1 << bit for bit in range(len(dependencies))]
    for group in map(dependencies.mask, groups):
        if refused(group) is None:
            masks.append(group)
        else:
            masks += parts(dependencies, group, group.bit_count(), lambda mask: refused(mask) is None)
    found = (candidate(dependencies, mask) for mask in dict.fromkeys(masks) if refused(mask) is None)
    return Enumeration(tuple(found), ())


def region_dependencies(graph: DataflowGraph, region: Region) -> Dependencies:
    """How the region's compute ops and anchors depend on each other (bit ``i``: the ``i``-th in canonical order)."""
    flow = compute_graph_of(graph)
    positions = (flow.position[name] for name in region.ops)
    return Dependencies.of(flow, [at for at in positions if flow.is_member(at)])


def convex_runs(graph: DataflowGraph, region: Region) -> list[Candidate]:
    """A region in few parts that run one after the other, none of which has to wait in its middle for what is outside:
    one, unless a path leaves the region and comes back. Each is a run of the region's ops in capture order.
    """
    dependencies, runs = region_dependencies(graph, region), [0]
    for bit in sorted(range(len(dependencies)), key=dependencies.members.__getitem__):
        if dependencies.detours[bit] & runs[-1]:
            runs.append(0)
        runs[-1] |= 1 << bit
    return [candidate(dependencies, mask) for mask in runs]


def single_candidates(graph: DataflowGraph, region: Region) -> list[Candidate]:
    """Every compute op and anchor of a region by itself, in canonical order."""
    dependencies = region_dependencies(graph, region)
    return [candidate(dependencies, 1 << bit) for bit in range(len(dependencies))]


def group_key(graph: DataflowGraph, ops: Iterable[str], outputs: Iterable[str]) -> str:
    """Canonical hash of a group: its compute ops, and the views it reads through."""
    flow = compute_graph_of(graph)
    members = [flow.position[name] for name in ops]
    names = [flow.names[at] for at in (*members, *flow.views_behind(members))]
    return canonical_form(graph, names, outputs).key


def candidate(dependencies: Dependencies, mask: int) -> Candidate:
    """The candidate that a set of members stands for, whether or not it is legal."""
    return candidate_at(dependencies.flow, [dependencies.members[bit] for bit in bits(mask)])


def candidate_at(flow: ComputeGraph, members: Sequence[int]) -> Candidate:
    """The ops at some positions of a graph as one group."""
    made = {value for at in members for value in flow.nodes[at].outputs}
    needed = set(flow.needed_outside(members))
    inputs = dict.fromkeys(source for at in members for source in flow.sources[at] if source not in made)
    outputs = tuple(value for at in members for value in flow.nodes[at].outputs if value in needed)
    return Candidate(tuple(flow.names[at] for at in members), tuple(inputs), outputs)


def _separated_pairs(dependencies: Dependencies) -> list[Refusal]:
    """The neighbouring ops that no group can hold alone, with what stands between them."""
    flow, refusals = dependencies.flow, []
    for bit, near in enumerate(dependencies.neighbours):
        for other in bits(near >> (bit + 1) << (bit + 1)):
            one, two = dependencies.members[bit], dependencies.members[other]
            pair = 1 << bit | 1 << other
            between = dependencies.between(pair)
            if dependencies.has_detour(pair | between):
                blocker = flow.first_blocker(min(one, two), max(one, two))
                what = "another region" if blocker is None else f"{flow.nodes[blocker].op} ({flow.names[blocker]})"
            elif between:
                node = flow.nodes[dependencies.members[next(bits(between))]]
                what = f"{node.op} ({node.name}), which a group with both must hold too"
            else:
                continue
            refusals.append(Refusal((flow.names[one], flow.names[two]), f"path through {what}"))
    return refusals
