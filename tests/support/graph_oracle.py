"""What regions and legal fusion groups are, straight from their definitions, by brute force with networkx."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import networkx as nx

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.ops.table import kind_of


def make(
    *rows: tuple[str, str, tuple[str, ...]], outputs: tuple[str, ...], order: tuple[tuple[str, str], ...] = ()
) -> DataflowGraph:
    """A graph on 4 x 8 tensors; rows are (result, op, operands), operands without a row are inputs."""
    spec = TensorSpec.contiguous((4, 8), "float32")
    names = {name for name, _, _ in rows}
    inputs = tuple(dict.fromkeys(v for _, _, operands in rows for v in operands if v not in names))
    nodes = [OpNode(f"aten.{op}", operands, (name,)) for name, op, operands in rows]
    return DataflowGraph(nodes, dict.fromkeys((*inputs, *names), spec), inputs, outputs, order=order)


def anything(ops: Sequence[str]) -> str | None:
    """A legality that refuses nothing."""
    return None


class Oracle:
    """The graph without its views, ordering edges between compute ops spelled as a node of their own."""

    def __init__(self, graph: DataflowGraph) -> None:
        self.graph = graph
        self.dag: nx.DiGraph = nx.DiGraph()
        self.dag.add_nodes_from(name for name in graph.graph if self.kind(name) != "view")
        for name in list(self.dag):
            self._link(name, name, False, set())
        self.opaque = [node for node in self.dag if isinstance(node, tuple) or self.kind(node) == "opaque"]
        self.compute = self._live_compute()
        self.reads = {name: self.sources_of(name) for name in self.compute}

    def kind(self, name: str) -> str:
        return kind_of(self.graph.op(name), self.graph.specs)

    def _link(self, start: str, at: str, fenced: bool, seen: set[tuple[str, bool]]) -> None:
        """Connect ``start`` with all it reaches through views alone."""
        for end, edge in self.graph.graph.succ[at].items():
            ordering = not edge["values"] and "opaque" not in (self.kind(at), self.kind(end))
            crossed = fenced or ordering
            if self.kind(end) == "view":
                if (end, crossed) not in seen:
                    seen.add((end, crossed))
                    self._link(start, end, crossed, seen)
            elif crossed:
                nx.add_path(self.dag, [start, ("fence", start, end), end])
            else:
                self.dag.add_edge(start, end)

    def sources(self, value: str) -> set[str]:
        producer = self.graph.producer(value)
        if producer is None or self.kind(producer) != "view":
            return {value}
        return {s for read in self.graph.op(producer).inputs for s in self.sources(read)}

    def sources_of(self, name: str) -> set[str]:
        return {source for value in self.graph.op(name).inputs for source in self.sources(value)}

    def _live_compute(self) -> list[str]:
        needed = {name for name in self.graph.graph if self.kind(name) == "opaque"}
        needed |= {p for value in self.graph.outputs if (p := self.graph.producer(value)) is not None}
        data: nx.DiGraph = nx.DiGraph((a, b) for a, b, values in self.graph.graph.edges(data="values") if values)
        data.add_nodes_from(self.graph.graph)
        live = needed | {name for end in needed for name in nx.ancestors(data, end)}
        return [name for name in self.graph.graph if name in live and self.kind(name) == "compute"]

    def related(self, a: str, b: str) -> bool:
        """One reads the other's value, or both read one value."""
        made_a, made_b = set(self.graph.op(a).outputs), set(self.graph.op(b).outputs)
        return bool(made_a & self.reads[b] or made_b & self.reads[a] or self.reads[a] & self.reads[b])

    def separated(self, a: str, b: str) -> bool:
        """A path from one to the other runs through an opaque op or across an ordering edge."""
        return any(
            node in nx.descendants(self.dag, start) and end in nx.descendants(self.dag, node)
            for node in self.opaque
            for start, end in ((a, b), (b, a))
        )

    def regions(self) -> set[frozenset[str]]:
        joined: nx.Graph = nx.Graph()
        joined.add_nodes_from(self.compute)
        joined.add_edges_from(
            (a, b) for a, b in combinations(self.compute, 2) if self.related(a, b) and not self.separated(a, b)
        )
        return {frozenset(component) for component in nx.connected_components(joined)}

    def legal(self, group: Iterable[str]) -> bool:
        members = set(group)
        joined: nx.Graph = nx.Graph()
        joined.add_nodes_from(members)
        joined.add_edges_from((a, b) for a, b in combinations(sorted(members), 2) if self.related(a, b))
        return nx.is_connected(joined) and self.runnable([members])

    def runnable(self, groups: Iterable[set[str]]) -> bool:
        """Contracting every group leaves the graph acyclic."""
        group_of = {name: ("group", number) for number, members in enumerate(groups) for name in members}
        contracted: nx.DiGraph = nx.DiGraph(
            (group_of.get(a, a), group_of.get(b, b))
            for a, b in self.dag.edges
            if group_of.get(a, a) != group_of.get(b, b)
        )
        return nx.is_directed_acyclic_graph(contracted)

    def groups(self, region: Iterable[str], max_ops: int | None = None) -> set[frozenset[str]]:
        ops = [name for name in region if self.kind(name) == "compute"]
        sizes = range(1, min(len(ops), max_ops or len(ops)) + 1)
        return {frozenset(group) for size in sizes for group in combinations(ops, size) if self.legal(group)}

    def outputs(self, group: Iterable[str]) -> set[str]:
        """Values of the group that the graph returns, or that an op outside reads through views."""
        members = set(group)
        returned = {s for value in self.graph.outputs for s in self.sources(value)}
        outside = {name for name in (*self.compute, *self.opaque) if not isinstance(name, tuple)} - members
        read = {source for name in outside for source in self.sources_of(name)}
        return {value for name in members for value in self.graph.op(name).outputs} & (returned | read)
