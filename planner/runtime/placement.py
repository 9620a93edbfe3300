"""Rewriting a traced FX graph so that each fused group is one call, in an order that keeps every dependency."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fuseplan.kernels.ir.ops import float32_bits
from fuseplan.planner.capture.normalise import MODE_SWITCHES
from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.lowering.recipes import kind_of, written_value
from fuseplan.planner.rewrites.trace_edit import fake_tensors


@dataclass(frozen=True)
class Placement:
    """A group to place.

    ``call`` is called with the inputs, then with the values of ``symbols``, the dynamic sizes that it takes. The rest
    are names of ops and values.
    """

    call: Callable[..., Any]
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    symbols: tuple[str, ...] = ()


def fused_graph(traced: Traced, placements: Sequence[Placement]) -> tuple[fx.Graph, list[tuple[Placement, str]]]:
    """A copy of the traced graph in which groups replace the ops whose results they produce.

    Returns:
        The new graph, whose nodes know the name of the traced node that they stand for (``meta["traced"]``), and the
        placements that could not be used, each with the reason.
    """
    refused: list[tuple[Placement, str]] = []
    usable: list[Placement] = []
    symbols = _SymbolSources(traced)
    for placement in placements:
        reason = _unplaceable(placement, traced, symbols)
        if reason is None:
            usable.append(placement)
        else:
            refused.append((placement, reason))
    while True:
        rewrite = _Rewrite(traced, usable)
        order, stuck = rewrite.schedule()
        if not stuck:
            return rewrite.emit(order), refused
        # Dropping the group with the most ops frees the most edges; the rest is tried again.
        worst = max(stuck, key=lambda placement: (len(placement.ops), placement.ops))
        usable.remove(worst)
        refused.append((worst, "the group would have to run both before and after another op"))


def _unplaceable(placement: Placement, traced: Traced, symbols: _SymbolSources) -> str | None:
    for value in (*placement.inputs, *placement.outputs):
        if traced.node_of[value].graph is not traced.module.graph:
            return "a value of the group lives in a nested graph"
    for name in placement.symbols:
        if name not in symbols:
            return f"no argument shows the size {name} ({traced.graph.symbols.get(name)} when compiled)"
    return None


@dataclass(eq=False)
class _Unit:
    """Something the new graph runs: an FX node as it was, or a group."""

    rank: int
    node: fx.Node | None = None
    placement: Placement | None = None
    needs: set[_Unit] = field(default_factory=set)


class _Rewrite:
    def __init__(self, traced: Traced, placements: Sequence[Placement]) -> None:
        self.source = traced.module.graph
        self.flow = traced.graph
        self.node_of = traced.node_of
        self.items = _item_nodes(traced)
        self.rank = {node: rank for rank, node in enumerate(self.source.nodes)}
        self.symbols = _SymbolSources(traced)
        self.plain = {node: _Unit(rank, node=node) for node, rank in self.rank.items()}
        self.groups = [self._group_unit(placement) for placement in placements]
        self.definer: dict[fx.Node, _Unit] = {}
        for unit in self.groups:
            assert unit.placement is not None
            for value in unit.placement.outputs:
                self.definer.setdefault(self._node(value), unit)

    def _group_unit(self, placement: Placement) -> _Unit:
        # Ranked by its last output, a group runs as late as the trace's order suggests: lifetimes stay short.
        return _Unit(max(self.rank[self._node(value)] for value in placement.outputs), placement=placement)

    def _node(self, value: str) -> fx.Node:
        """The FX node whose result is the tensor ``value`` (an item of an op with several results)."""
        return self.items.get(value) or self.node_of[value]

    # -- order --------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[_Unit], list[Placement]]:
        """Live units in a topological order close to the trace's; or, where there is none, the groups in circles."""
        units = self._live()
        order: nx.DiGraph[_Unit] = nx.DiGraph((need, unit) for unit in units for need in unit.needs)
        order.add_nodes_from(units)
        circles = (one for one in nx.strongly_connected_components(order) if len(one) > 1)
        stuck = [unit.placement for circle in circles for unit in circle if unit.placement is not None]
        return [] if stuck else list(nx.lexicographical_topological_sort(order, lambda unit: unit.rank)), stuck

    def _live(self) -> list[_Unit]:
        """Units that an output or an effect needs, by rank, with their dependencies filled in."""
        roots = [node for node in self.source.nodes if self._is_root(node)]
        pending = [self.definer.get(node, self.plain[node]) for node in roots]
        found: dict[_Unit, None] = dict.fromkeys(pending)
        while pending:
            unit = pending.pop()
            unit.needs = {self.definer.get(node, self.plain[node]) for node in self._reads(unit)} - {unit}
            for need in unit.needs - found.keys():
                found[need] = None
                pending.append(need)
        for before, after in self._ordering_edges():
            if after in found and before in found and before is not after:
                after.needs.add(before)
        return sorted(found, key=lambda unit: unit.rank)

    def _reads(self, unit: _Unit) -> list[fx.Node]:
        if unit.node is not None:
            return list(unit.node.all_input_nodes)
        assert unit.placement is not None
        sizes = [node for name in unit.placement.symbols for node in self.symbols.nodes(name)]
        return [self._node(value) for value in unit.placement.inputs] + sizes

    def _is_root(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return True
        if node.op != "call_function" or node.target in MODE_SWITCHES:
            return False
        for name in (node.name, f"{node.name}_out0"):
            if name in self.flow.graph:
                # The normaliser keeps an opaque op only when a result or an effect of it is needed.
                op = self.flow.op(name)
                return written_value(op) is not None or kind_of(op, self.flow.specs) == "opaque"
        # Run-time checks. What gives a tensor and is not in the graph is dead, though it wrote over its operand.
        return isinstance(node.target, torch._ops.OpOverload) and node.is_impure() and not fake_tensors(node)

    def _ordering_edges(self) -> Iterator[tuple[_Unit, _Unit]]:
        """Ordering edges of the dataflow graph between the units that now run those ops."""
        runs: dict[str, list[_Unit]] = {}
        for unit in self.groups:
            assert unit.placement is not None
            for name in unit.placement.ops:
                runs.setdefault(name, []).append(unit)

        def runners(name: str) -> list[_Unit]:
            plain = self.plain.get(self.node_of[name])
            return [*runs.get(name, ()), *([plain] if plain is not None else [])]

        carried: tuple[str, ...]
        for before, after, carried in self.flow.graph.edges(data="values"):
            if not carried:
                yield from product(runners(before), runners(after))

    # -- emission -----------------------------------------------------------------------------------------

    def emit(self, order: Sequence[_Unit]) -> fx.Graph:
        """The new graph."""
        graph = fx.Graph()
        made = {node: graph.node_copy(node) for node in self.source.nodes if node.op == "placeholder"}
        for unit in order:
            if unit.placement is not None:
                self._emit_group(graph, unit.placement, made)
            elif unit.node is not None and unit.node.op not in ("placeholder", "output"):
                made[unit.node] = graph.node_copy(unit.node, made.__getitem__)
        graph.node_copy(self.source.output_node(), made.__getitem__)
        for node in graph.nodes:
            node.meta = {}  # the trace's fake tensors would live as long as the compiled graph
        for node, result in made.items():
            result.meta["traced"] = node.name
        return graph

    def _emit_group(self, graph: fx.Graph, placement: Placement, made: dict[fx.Node, fx.Node]) -> None:
        args = [made[self._node(value)] for value in placement.inputs]
        args += [self.symbols.emit(name, graph, made) for name in placement.symbols]
        call = graph.call_function(placement.call, tuple(args))
        for number, value in enumerate(placement.outputs):
            result = call if len(placement.outputs) == 1 else graph.call_function(operator.getitem, (call, number))
            made.setdefault(self._node(value), result)


def _item_nodes(traced: Traced) -> dict[str, fx.Node]:
    """For each result of an op with several, the ``getitem`` node that takes it (made where the trace has none)."""
    source = traced.module.graph
    found: dict[str, fx.Node] = {}
    for op in traced.graph:
        node = traced.node_of[op.name]
        value = node.meta.get("val")
        if node.graph is not source or not isinstance(value, list | tuple):
            continue
        takers = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        numbers = [number for number, item in enumerate(value) if isinstance(item, torch.Tensor)]
        if not numbers:
            continue  # unbind of nothing
        for number, name in zip(numbers, op.outputs, strict=True):
            if number not in takers:
                with source.inserting_after(node):
                    takers[number] = source.call_function(operator.getitem, (node, number))
            found[name] = takers[number]
    return found


class _SymbolSources:
    """Where a symbol's value comes from at call time.

    An argument or a number that the trace computes; a tensor's size or stride; or, for a derived symbol that is
    neither, its definition.
    """

    def __init__(self, traced: Traced) -> None:
        source = traced.module.graph
        placeholders = [node for node in source.nodes if node.op == "placeholder"]
        self._given = {name: node for name, node in traced.scalars.items() if node.graph is source}
        self._given |= {name: placeholders[position] for name, position in traced.sizes.items()}
        self._hints, self._derived = traced.graph.symbols, traced.graph.derived
        #: A tensor, what to ask it for, and the dimension.
        self._sized: dict[str, tuple[fx.Node, Any, int]] = {}
        self._made: dict[str, fx.Node] = {}
        for value in traced.graph.inputs:
            node, spec = traced.node_of[value], traced.graph.specs[value]
            if node.graph is source:
                self._find(node, torch.ops.aten.sym_size.int, spec.shape)
                self._find(node, torch.ops.aten.sym_stride.int, spec.strides)

    def _find(self, node: fx.Node, question: Any, sizes: Sequence[Any]) -> None:
        for dim, size in enumerate(sizes):
            if getattr(size, "is_Symbol", False):
                self._sized.setdefault(size.name, (node, question, dim))

    def __contains__(self, name: str) -> bool:
        if name in self._given or name in self._sized:
            return True
        return name in self._derived and all(free.name in self for free in self._derived[name].free_symbols)

    def nodes(self, name: str) -> list[fx.Node]:
        """The nodes that must exist before the value is known."""
        if name in self._given:
            return [self._given[name]]
        if name in self._sized:
            return [self._sized[name][0]]
        return [node for free in self._derived[name].free_symbols for node in self.nodes(free.name)]

    def emit(self, name: str, graph: fx.Graph, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A kernel's argument in the new graph: an integer as it is, any other number as its float32 bits."""
        key = f"{name} as an argument"
        if not isinstance(self._hints.get(name), float):
            return self._number(name, graph, made)
        if key not in self._made:
            self._made[key] = graph.call_function(float32_bits, (self._number(name, graph, made),))
        return self._made[key]

    def _number(self, name: str, graph: fx.Graph, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        if name in self._given:
            return made[self._given[name]]
        if name not in self._made:
            if name in self._sized:
                node, question, dim = self._sized[name]
                self._made[name] = graph.call_function(question, (made[node], dim))
            else:
                self._made[name] = self._compute(self._derived[name], graph, made)
        return self._made[name]

    def _compute(self, definition: Any, graph: fx.Graph, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Python's arithmetic for a definition, as ``torch.compile`` itself spells it."""
        tracer = fx.proxy.GraphAppendingTracer(graph)
        operands = {free: fx.Proxy(self._number(free.name, graph, made), tracer) for free in definition.free_symbols}
        result = sympy_interp(PythonReferenceAnalysis, operands, definition)
        assert isinstance(result, fx.Proxy)
        return result.node
