"""The dataflow graph as integer lists with the views resolved: what regions, candidates and covers are computed on.

A view op moves no data, so a compute op is said to read the *source* values behind its views: values that a graph
input or an op that is no view holds. Positions are capture order, which is a topological order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from weakref import WeakKeyDictionary

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.lowering.lower import Lowered, lower
from fuseplan.planner.ops.table import OpKind, kind_of, op_of, written_value

#: Members of regions that no island holds: each is a part by itself.
LIBRARY_KINDS: tuple[OpKind, ...] = ("anchor", "foreign")


class ComputeGraph:
    """Integer form of a :class:`DataflowGraph`; lists are indexed by the position of an op.

    Attributes:
        preds: Positions each op depends on, by data or by an ordering edge.
        barriers: Edges between ops that are not opaque and that no group may cross: ordering edges, those that carry a
            table to a lookup, and those from one anchor to another with nothing but views and copies between them.
        depth: Opaque ops and barriers on the longest path to the op; none is on a path between ops of equal depth.
        producer: Position of the op that makes a source value; a graph input has none.
        sources: Source values an op reads, in first-use order (for a view: those it is a view of).
        readers: For each source value, the live compute and opaque ops that read it, views looked through.
        escapes: Source values of which the graph returns the value or a view, and written operands.
        live: False for a compute or view op on which no opaque op, no write and no graph output depends.
    """

    def __init__(self, graph: DataflowGraph, cut_at_anchors: bool = False) -> None:
        self.nodes: list[OpNode] = list(graph)
        self.names: list[str] = [node.name for node in self.nodes]
        self.position: dict[str, int] = {name: at for at, name in enumerate(self.names)}
        self.kinds: list[OpKind] = [kind_of(node, graph.specs) for node in self.nodes]
        if cut_at_anchors:
            self.kinds = ["opaque" if kind in LIBRARY_KINDS else kind for kind in self.kinds]
        self.producer: dict[str, int] = {}
        self._view_of: dict[str, int] = {}
        self.sources: list[tuple[str, ...]] = []
        for at, node in enumerate(self.nodes):
            made = self._view_of if self.kinds[at] == "view" else self.producer
            made.update(dict.fromkeys(node.outputs, at))
            found = dict.fromkeys(source for value in node.inputs for source in self.sources_of(value))
            self.sources.append(tuple(found))
        self.preds: list[list[int]] = [[] for _ in self.nodes]
        self.barriers: set[tuple[int, int]] = set()
        self._read_edges(graph)
        self._part_anchors()
        self.depth: list[int] = self._depths()
        self.escapes: set[str] = {source for value in graph.outputs for source in self.sources_of(value)}
        # Somebody may see what a group writes to an operand, whether or not anything reads the result.
        self.escapes |= {node.name for node in self.nodes if written_value(node) is not None}
        self.live: list[bool] = self._liveness()
        self.readers: dict[str, list[int]] = {}
        for at, read in enumerate(self.sources):
            if self.live[at] and self.kinds[at] != "view":
                for source in read:
                    self.readers.setdefault(source, []).append(at)

    def _read_edges(self, graph: DataflowGraph) -> None:
        position, kinds = self.position, self.kinds
        values: tuple[str, ...]
        for before, after, values in graph.graph.edges(data="values"):
            start, end = position[before], position[after]
            if start >= end:
                raise ValueError(f"op {after} depends on {before}, which comes later in capture order")
            self.preds[end].append(start)
            if (not values and kinds[start] != "opaque" and kinds[end] != "opaque") or self._is_looked_up(end, values):
                self.barriers.add((start, end))

    def _part_anchors(self) -> None:
        """Bar the way from one anchor to the next where nothing but views and copies lies between."""
        bare = [kind == "anchor" for kind in self.kinds]
        for at, preds in enumerate(self.preds):
            if self.kinds[at] == "anchor":
                self.barriers.update((pred, at) for pred in preds if bare[pred])
            elif self.kinds[at] == "view" or op_of(self.nodes[at].op).may_copy:
                bare[at] = any(bare[pred] for pred in preds)

    def _is_looked_up(self, at: int, values: tuple[str, ...]) -> bool:
        """Whether one of ``values`` is a computed table in which op ``at`` looks elements up."""
        node = self.nodes[at]
        if op_of(node.op).family != "lookup" or self.kinds[at] != "compute" or node.inputs[0] not in values:
            return False
        makers = (self.producer.get(source) for source in self.sources_of(node.inputs[0]))
        return any(maker is not None and self.kinds[maker] == "compute" for maker in makers)

    def _depths(self) -> list[int]:
        depth = [0] * len(self.nodes)
        for at, preds in enumerate(self.preds):
            depth[at] = max(
                (depth[p] + (self.kinds[p] == "opaque" or (p, at) in self.barriers) for p in preds), default=0
            )
        return depth

    def _liveness(self) -> list[bool]:
        live = [kind == "opaque" for kind in self.kinds]
        needed = set(self.escapes)
        for at in reversed(range(len(self.nodes))):
            live[at] |= self.kinds[at] != "view" and not needed.isdisjoint(self.nodes[at].outputs)
            if live[at]:
                needed.update(self.sources[at])
        return live

    @cached_property
    def common(self) -> frozenset[int]:
        """Members of regions that no anchor leads to, and that make what members on several depths read."""
        anchored, found = [False] * len(self.nodes), set[int]()
        for at, kind in enumerate(self.kinds):
            anchored[at] = kind == "anchor" or any(anchored[pred] for pred in self.preds[at])
        for at in reversed(range(len(self.nodes))):
            read = [reader for value in self.nodes[at].outputs for reader in self.readers.get(value, ())]
            depths = {self.depth[reader] for reader in read if self.is_member(reader)}
            if not anchored[at] and self.is_member(at) and (len(depths) > 1 or not found.isdisjoint(read)):
                found.add(at)
        return frozenset(found)

    def is_member(self, at: int) -> bool:
        """Whether the op is in a region: a compute op, an anchor or a foreign op."""
        return self.kinds[at] in ("compute", *LIBRARY_KINDS)

    def sources_of(self, value: str) -> tuple[str, ...]:
        """The source values behind ``value``: itself unless a view op produces it."""
        view = self._view_of.get(value)
        return (value,) if view is None else self.sources[view]

    def compute_preds(self, at: int) -> Iterator[int]:
        """Compute ops and anchors whose values op ``at`` reads, views looked through; each once."""
        for producer in dict.fromkeys(map(self.producer.get, self.sources[at])):
            if producer is not None and self.is_member(producer):
                yield producer

    def views_behind(self, ops: Iterable[int]) -> list[int]:
        """View ops on the way from source values to ``ops``, in capture order."""
        found: set[int] = set()
        pending = [value for at in ops for value in self.nodes[at].inputs]
        while pending:
            view = self._view_of.get(pending.pop())
            if view is not None and view not in found:
                found.add(view)
                pending.extend(self.nodes[view].inputs)
        return sorted(found)

    def needed_outside(self, ops: Iterable[int]) -> list[str]:
        """Values that ``ops`` produce and that the graph returns or another op reads, views looked through."""
        members = set(ops)
        return [
            value
            for at in sorted(members)
            for value in self.nodes[at].outputs
            if value in self.escapes or any(reader not in members for reader in self.readers.get(value, ()))
        ]

    def outputs_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """The same for a group by the names of its ops."""
        return tuple(self.needed_outside(self.position[name] for name in names))

    def first_blocker(self, before: int, after: int) -> int | None:
        """Position of an op on a path ``before -> after`` that no group with both ends may contain: an opaque op, or
        the later op of a barrier. None without such a path.
        """
        if self.depth[before] >= self.depth[after]:
            return None
        seen: set[tuple[int, bool]] = set()
        pending: list[tuple[int, int | None]] = [(after, None)]
        floor = self.depth[before]
        while pending:
            at, blocker = pending.pop()
            for pred in self.preds[at]:
                if pred < before or self.depth[pred] < floor:
                    continue
                found = blocker
                if found is None and (pred, at) in self.barriers:
                    found = at
                if pred == before:
                    if found is not None:
                        return found
                    continue
                if found is None and self.kinds[pred] == "opaque":
                    found = pred
                state = (pred, found is not None)
                if state in seen or (pred, True) in seen:
                    continue
                seen.add(state)
                pending.append((pred, found))
        return None


_FLOWS: WeakKeyDictionary[DataflowGraph, dict[bool, ComputeGraph]] = WeakKeyDictionary()


def compute_graph_of(graph: DataflowGraph, cut_at_anchors: bool = False) -> ComputeGraph:
    """The graph's :class:`ComputeGraph`, remembered for as long as the graph lives.

    With ``cut_at_anchors`` anchors and foreign ops count as opaque; islands of compute ops are left between them.
    """
    made = _FLOWS.setdefault(graph, {})
    if cut_at_anchors not in made:
        made[cut_at_anchors] = ComputeGraph(graph, cut_at_anchors)
    return made[cut_at_anchors]


def lower_group(graph: DataflowGraph, ops: Iterable[str], numerics: str = "fp32") -> Lowered:
    """The kernel of a group, which stores what is needed outside; NotLowerable says why there is none."""
    ops = tuple(ops)
    return lower(graph, ops, numerics, compute_graph_of(graph).outputs_of(ops))
