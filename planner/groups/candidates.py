"""Candidates: the legal fusion groups of a region.

A group is a set of compute ops that is convex (nothing outside has to run in the middle of it) and connected,
through data flow or as siblings that read one value. Every connected convex set of n ops contains one of n - 1 ops
(take away a source or sink that does not disconnect it), so growing sets op by op finds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeAlias

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.canonical import CanonicalForm, canonical_form
from fuseplan.planner.groups.compute_graph import Classify, ComputeGraph, compute_graph_of
from fuseplan.planner.groups.connected_sets import ConnectedSets, connected_sets, parts
from fuseplan.planner.groups.convex import Dependencies, bits

#: The reason why a set of compute ops cannot be one kernel, None when it can.
Legal: TypeAlias = Callable[[Sequence[str]], str | None]
Tag: TypeAlias = Literal["vertical", "horizontal", "multi-output", "reduction"]

#: ATen ops (overload left off) that fold a dimension.
REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "std", "norm",
        "any", "all", "logsumexp", "cumsum", "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm",
        "native_layer_norm", "rms_norm", "group_norm", "adaptive_avg_pool2d", "linalg_vector_norm",
    )
)


@dataclass(frozen=True)
class CandidateLimits:
    """Bounds on the enumeration.

    Attributes:
        max_ops: Compute ops in one group.
        max_candidates: Groups enumerated before legality. Past it, the enumeration keeps every single op, groups
            joined by data flow (of each size those that cut the fewest edges), pairs of mirrored groups, and maximal
            groups; and says so. Each costs a lowering, a few milliseconds.
    """

    max_ops: int = 40
    max_candidates: int = 600


@dataclass(frozen=True)
class Candidate:
    """A fusion group.

    Attributes:
        ops: Compute ops, in the region's canonical order.
        inputs: Source values read (behind views), in first-use order.
        outputs: Values needed outside the group.
        tags: What kind of fusion it is.
    """

    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tags: frozenset[Tag] = frozenset()


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


def enumerate_candidates(
    graph: DataflowGraph,
    region: Region,
    limits: CandidateLimits = CandidateLimits(),
    legal: Legal | None = None,
    classify: Classify | None = None,
) -> Enumeration:
    """Enumerate the fusion groups of ``region``.

    Args:
        graph: The graph the region was found in.
        region: A region of it.
        limits: Bounds on the enumeration.
        legal: The reason why ops cannot be one kernel, None when they can. Default: whether they lower.
        classify: The classifier the region was found with. Default: the recipes' ``kind_of``.
    """
    flow = compute_graph_of(graph, classify)
    members = member_positions(flow, region)
    dependencies = Dependencies.of(flow, members)
    grown = connected_sets(dependencies, limits.max_ops, limits.max_candidates, [flow.nodes[at].op for at in members])
    refused = _reasons(flow, members, legal if legal is not None else partial(why_not_lowerable, graph, flow))
    masks = grown.masks
    if not grown.complete:  # what was kept may be illegal around some ops: legal groups cover them all
        everything = (1 << len(members)) - 1
        masks += tuple(parts(dependencies, everything, limits.max_ops, lambda mask: refused(mask) is None))
    candidates: list[Candidate] = []
    refusals = _separated_pairs(flow, dependencies)
    for mask in dict.fromkeys(masks):
        candidate = _candidate(flow, dependencies, mask)
        reason = refused(mask)
        if reason is None:
            candidates.append(candidate)
        else:
            refusals.append(Refusal(candidate.ops, reason))
    return Enumeration(tuple(candidates), tuple(refusals), _truncation(grown, limits))


def enumerate_parts(
    graph: DataflowGraph, region: Region, groups: Iterable[Sequence[str]], legal: Legal,
    classify: Classify | None = None,
) -> Enumeration:
    """Single ops of a region, its ``groups`` where they are legal, and legal parts that cover those that are not."""
    flow = compute_graph_of(graph, classify)
    members = member_positions(flow, region)
    dependencies = Dependencies.of(flow, members)
    bit_of = {flow.names[at]: bit for bit, at in enumerate(members)}
    refused = _reasons(flow, members, legal)
    masks = [1 << bit for bit in range(len(members))]
    for group in (sum(1 << bit_of[name] for name in ops) for ops in groups):
        if refused(group) is None:
            masks.append(group)
        else:
            masks += parts(dependencies, group, group.bit_count(), lambda mask: refused(mask) is None)
    found = (_candidate(flow, dependencies, mask) for mask in dict.fromkeys(masks) if refused(mask) is None)
    return Enumeration(tuple(found), ())


def _reasons(flow: ComputeGraph, members: Sequence[int], legal: Legal) -> Callable[[int], str | None]:
    """``legal`` of masks of members, asked once each."""

    @cache
    def refused(mask: int) -> str | None:
        return legal([flow.names[members[bit]] for bit in bits(mask)])

    return refused


def member_positions(flow: ComputeGraph, region: Region) -> list[int]:
    """Positions in the flow of the region's compute ops and anchors, in canonical order."""
    positions = (flow.position[name] for name in region.ops)
    return [at for at in positions if flow.is_member(at)]


def region_dependencies(graph: DataflowGraph, region: Region, classify: Classify | None = None) -> Dependencies:
    """How the region's compute ops and anchors depend on each other (bit ``i``: the ``i``-th of them)."""
    flow = compute_graph_of(graph, classify)
    return Dependencies.of(flow, member_positions(flow, region))


def region_candidates(
    graph: DataflowGraph, region: Region, masks: Iterable[int], classify: Classify | None = None
) -> list[Candidate]:
    """The candidates that ``masks`` stand for, whether or not they are legal."""
    flow = compute_graph_of(graph, classify)
    dependencies = Dependencies.of(flow, member_positions(flow, region))
    return [_candidate(flow, dependencies, mask) for mask in masks]


def placed_candidates(graph: DataflowGraph, region: Region, places: Iterable[Iterable[int]]) -> list[Candidate]:
    """The candidates whose ops are at ``places`` of ``region.ops``, as records name them."""
    flow = compute_graph_of(graph)
    bit_of = {at: bit for bit, at in enumerate(region_dependencies(graph, region).members)}
    masks = (sum(1 << bit_of[flow.position[region.ops[place]]] for place in group) for group in places)
    return region_candidates(graph, region, masks)


def single_candidates(graph: DataflowGraph, region: Region, classify: Classify | None = None) -> list[Candidate]:
    """Every compute op and anchor of a region by itself, in canonical order."""
    count = len(region_dependencies(graph, region, classify))
    return region_candidates(graph, region, [1 << bit for bit in range(count)], classify)


def group_form(
    graph: DataflowGraph, ops: Iterable[str], outputs: Iterable[str], classify: Classify | None = None
) -> CanonicalForm:
    """Canonical form of a group: its compute ops, and the views it reads through."""
    flow = compute_graph_of(graph, classify)
    members = [flow.position[name] for name in ops]
    names = [flow.names[at] for at in (*members, *flow.views_behind(members))]
    return canonical_form(graph, names, outputs)


def transfer(graph: DataflowGraph, candidate: Candidate, planned: Region, other: Region) -> Candidate:
    """The candidate of region ``planned`` at the same place of ``other``, a region of the same key."""
    return _Transfer(graph, planned, other).candidate(candidate)


def transfer_all(graph: DataflowGraph, enumeration: Enumeration, planned: Region, other: Region) -> Enumeration:
    """The same for all that was enumerated: regions of one key have the same groups."""
    moved = _Transfer(graph, planned, other)
    return Enumeration(
        tuple(map(moved.candidate, enumeration.candidates)),
        tuple(Refusal(moved.ops(one.ops), one.reason) for one in enumeration.refusals),
        enumeration.truncated,
    )


class _Transfer:
    """Names in one region by those at the same places of another."""

    def __init__(self, graph: DataflowGraph, planned: Region, other: Region) -> None:
        if planned.key != other.key:
            raise ValueError(f"regions differ: {planned.key[:12]} and {other.key[:12]}")
        self._names = dict(zip(planned.ops, other.ops, strict=True))
        self._values = dict(zip(planned.inputs, other.inputs, strict=True))
        for here, there in self._names.items():
            self._values.update(zip(graph.op(here).outputs, graph.op(there).outputs, strict=True))

    def ops(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(self._names[name] for name in names)

    def candidate(self, one: Candidate) -> Candidate:
        inputs, outputs = (tuple(self._values[value] for value in values) for values in (one.inputs, one.outputs))
        return Candidate(self.ops(one.ops), inputs, outputs, one.tags)


def why_not_lowerable(graph: DataflowGraph, flow: ComputeGraph, ops: Sequence[str]) -> str | None:
    """The default legality: the reason why the lowering refuses ``ops``, None when it lowers them."""
    from fuseplan.planner.lowering.lower import NotLowerable, lower

    try:
        lower(graph, ops, outputs=flow.needed_outside(flow.position[name] for name in ops))
    except NotLowerable as refused:
        return str(refused)
    return None


def _candidate(flow: ComputeGraph, dependencies: Dependencies, mask: int) -> Candidate:
    members = [dependencies.members[bit] for bit in bits(mask)]
    made = {value for at in members for value in flow.nodes[at].outputs}
    needed = set(flow.needed_outside(members))
    inputs = dict.fromkeys(source for at in members for source in flow.sources[at] if source not in made)
    outputs = tuple(value for at in members for value in flow.nodes[at].outputs if value in needed)
    tags: set[Tag] = set()
    if any(dependencies.reads[bit] & mask for bit in bits(mask)):
        tags.add("vertical")
    if not dependencies.is_connected(mask, dependencies.dataflow):
        tags.add("horizontal")
    if len(outputs) > 1:
        tags.add("multi-output")
    if any(flow.nodes[at].op.rsplit(".", 1)[0] in REDUCTIONS for at in members):
        tags.add("reduction")
    return Candidate(tuple(flow.names[at] for at in members), tuple(inputs), outputs, frozenset(tags))


def _separated_pairs(flow: ComputeGraph, dependencies: Dependencies) -> list[Refusal]:
    """The neighbouring ops that no group can hold alone, with what stands between them."""
    refusals = []
    for bit, near in enumerate(dependencies.neighbours):
        for other in bits(near >> (bit + 1) << (bit + 1)):
            pair = 1 << bit | 1 << other
            reason = _separation(flow, dependencies, pair, bit, other)
            if reason is not None:
                names = tuple(flow.names[dependencies.members[one]] for one in (bit, other))
                refusals.append(Refusal(names, reason))
    return refusals


def _separation(flow: ComputeGraph, dependencies: Dependencies, pair: int, bit: int, other: int) -> str | None:
    before, after = sorted((dependencies.members[bit], dependencies.members[other]))
    between = dependencies.between(pair)
    if dependencies.has_detour(pair | between):
        blocker = flow.first_blocker(before, after, budget=2 * len(flow.nodes))
        what = "another region" if blocker is None else f"{flow.nodes[blocker].op} ({flow.names[blocker]})"
        return f"path through {what}"
    if not between:
        return None
    node = flow.nodes[dependencies.members[next(bits(between))]]
    return f"path through {node.op} ({node.name}), which a group with both must hold too"


def _truncation(grown: ConnectedSets, limits: CandidateLimits) -> str | None:
    if not grown.complete:
        return (
            f"more than {limits.max_candidates} groups: kept single ops, {grown.vertical} groups joined by data flow, "
            f"{grown.mirrored} mirrored pairs and {grown.maximal} maximal groups"
        )
    if grown.masks and grown.masks[-1].bit_count() == limits.max_ops:
        return f"groups of more than {limits.max_ops} ops were not enumerated"
    return None
