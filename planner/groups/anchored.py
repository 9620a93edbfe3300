"""Candidates with a matmul inside, with groups of the islands around it as its prologue and its epilogue.

A candidate is one matmul, or all that read one value, with at most one group before it that feeds nothing else and one
behind it that reads its result: those that leave the fewest bytes to pass between kernels. Groups that unpack stored
weights hang together only through the matmuls, so a candidate has all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice, product

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, Legal, candidate, region_dependencies
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.convex import Dependencies, bits, union
from fuseplan.planner.ops.table import op_of, written_value

#: Epilogues and prologues of one matmul, best first, that are looked at before it goes without, and that are kept.
_TRIES, _KEPT = 48, 2


def unpacks_weights(graph: DataflowGraph, region: Region) -> bool:
    """Whether a matmul of a region reads what the region makes out of at most two thirds of its bytes, such as weights.
    """
    flow = compute_graph_of(graph)
    maker = {value: name for name in region.ops for value in graph.op(name).outputs}

    @cache
    def least(value: str) -> float:
        """Bytes out of which the region can make a value."""
        own, name = float(graph.specs[value].nbytes()), maker.get(value)
        if name is None or flow.kinds[flow.position[name]] != "compute":
            return own
        return min(own, sum(map(least, flow.sources[flow.position[name]])))

    matmuls = (flow.position[name] for name in region.ops if op_of(graph.op(name).op).family in ("matmul", "product"))
    read = (value for at in matmuls for value in flow.sources[at])
    return any(0 < 1.5 * least(value) <= float(graph.specs[value].nbytes()) for value in read)


def anchored_candidates(
    graph: DataflowGraph, region: Region, islands: Iterable[Candidate], legal: Legal
) -> list[Candidate]:
    """Groups of ``region`` around its matmuls, of which ``islands`` are the groups without one."""
    dependencies = region_dependencies(graph, region)
    known = list(dict.fromkeys(dependencies.mask(one.ops) for one in islands))

    def is_legal(mask: int) -> bool:
        return dependencies.is_convex(mask) and legal(dependencies.names(mask)) is None

    @cache
    def passed(mask: int) -> tuple[int, int]:
        """Bytes that a group reads and writes, except what it writes in place, and fewer for more ops."""
        group = candidate(dependencies, mask)
        written = [graph.op(name) for name in group.ops if written_value(graph.op(name)) is not None]
        in_place = {value for node in written for value in (*node.outputs, written_value(node))}
        values = {*group.inputs, *group.outputs} - in_place
        return sum(int(graph.specs[value].nbytes()) for value in values), -mask.bit_count()

    def best(anchors: int, masks: Iterable[int]) -> list[int]:
        ranked = sorted(masks, key=lambda mask: passed(anchors | mask))[:_TRIES]
        return [0, *islice((mask for mask in ranked if is_legal(anchors | mask)), _KEPT)]

    def grown(anchors: int, masks: Sequence[int]) -> int:
        """What several projections are followed by may hang together only through them: set after set is added."""
        found = 0
        while True:
            now = anchors | found
            others = sorted((mask for mask in masks if not mask & found), key=lambda mask: passed(now | mask))
            better = (mask for mask in others[:_TRIES] if passed(now | mask) < passed(now))
            added = next((mask for mask in better if is_legal(now | mask)), 0)
            if not added:
                return found
            found |= added

    masks: dict[int, None] = {}
    for anchors in _anchors(dependencies):
        reads, made_for = union(dependencies.reads[bit] for bit in bits(anchors)), _readers(dependencies, anchors)
        before = [mask for mask in known if mask & reads and not _readers(dependencies, mask) & ~(mask | anchors)]
        after = [mask for mask in known if mask & made_for and not mask & reads]
        followers = dict.fromkeys((*best(anchors, after), grown(anchors, after)))
        # What makes weights of fewer bytes, for each matmul; the rest comes before the value that they read.
        weights = grown(anchors, before)
        others = best(anchors | weights, [mask for mask in before if not mask & weights])
        leaders = dict.fromkeys((*best(anchors, before), *(weights | mask for mask in others)))
        for one, other in product(followers, leaders):
            mask = anchors | one | other
            if mask.bit_count() > 1 and not one & other and is_legal(mask):
                masks[mask] = None
    return [candidate(dependencies, mask) for mask in masks]


def _anchors(dependencies: Dependencies) -> Iterator[int]:
    """Each matmul, and together those that read one value."""
    flow = dependencies.flow
    siblings: dict[Sequence[str], int] = {}
    for bit, at in enumerate(dependencies.members):
        node = flow.nodes[at]
        factors = op_of(node.op).factors
        if flow.kinds[at] == "anchor" and op_of(node.op).is_contraction and factors is not None:
            yield 1 << bit
            read = flow.sources_of(node.inputs[factors[0]])
            siblings[read] = siblings.get(read, 0) | 1 << bit
    yield from (mask for mask in siblings.values() if mask.bit_count() > 1)


def _readers(dependencies: Dependencies, mask: int) -> int:
    """Members that read what members of ``mask`` make."""
    return union(1 << bit for bit in range(len(dependencies)) if dependencies.reads[bit] & mask)
