"""Rewriting a traced FX graph so that each fused group is one call, in an order that keeps every dependency."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import networkx as nx
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fuseplan.kernels.ir.ops import float32_bits
from fuseplan.planner.capture.normalise import MODE_SWITCHES, Traced
from fuseplan.planner.implementations.first_call import GroupCall
from fuseplan.planner.ops.table import kind_of, op_of, written_value
from fuseplan.planner.rewrites.trace_edit import fake_tensors, storage_of, value_of


def fused_graph(traced: Traced, groups: Sequence[GroupCall]) -> tuple[fx.Graph, list[tuple[GroupCall, str]]]:
    """A copy of the traced graph in which groups replace the ops whose results they produce.

    It keeps data dependencies, the ordering edges of mutations and the order of side effects. Its nodes have the name
    of the traced node that they stand for in ``meta["traced"]``. Beside it: groups that could not be placed, with
    reasons.
    """
    rewrite = _Rewrite(traced)
    refused = [(group, reason) for group in groups if (reason := rewrite.why_unplaceable(group)) is not None]
    usable = [group for group in groups if all(group is not one for one, _ in refused)]
    while True:
        order, stuck = rewrite.schedule(usable)
        if not stuck:
            return rewrite.emit(order), refused
        # Dropping the group with the most ops frees the most edges; the rest is tried again.
        worst = max(stuck, key=lambda group: (len(group.ops), group.ops))
        usable.remove(worst)
        refused.append((worst, "the group would have to run both before and after another op"))


#: Something the new graph runs: a node as it was, or a group.
_Unit: TypeAlias = fx.Node | GroupCall


class _Rewrite:
    def __init__(self, traced: Traced) -> None:
        self.source = traced.module.graph
        self.flow = traced.graph
        self.node_of = traced.node_of
        self.items = _item_nodes(traced)
        self.op_at = {self.node_of[op.name]: op for op in self.flow}
        self.rank = {node: rank for rank, node in enumerate(self.source.nodes)}
        self.symbols = _SymbolSources(traced)
        self.definer: dict[fx.Node, GroupCall] = {}
        self.writes = any(written_value(self.flow.op(name)) is not None for name in self.flow.graph)

    def why_unplaceable(self, group: GroupCall) -> str | None:
        if any(self.node_of[value].graph is not self.source for value in (*group.inputs, *group.outputs)):
            return "a value of the group lives in a nested graph"
        for name in group.symbols:
            if self.symbols.nodes(name) is None:
                return f"no argument shows the size {name} ({self.flow.symbols.get(name)} when compiled)"
        return None

    def _node(self, value: str) -> fx.Node:
        """The FX node whose result is the tensor ``value`` (an item of an op with several results)."""
        return self.items.get(value) or self.node_of[value]

    def schedule(self, groups: Sequence[GroupCall]) -> tuple[list[_Unit], list[GroupCall]]:
        """Live units in a topological order close to the trace's; or, where there is none, the groups in circles."""
        self.definer = {self._node(value): group for group in reversed(groups) for value in group.outputs}
        order: nx.DiGraph[_Unit] = nx.DiGraph()
        pending: list[_Unit] = [self.definer.get(node, node) for node in self.source.nodes if self._is_root(node)]
        order.add_nodes_from(pending)
        while pending:  # units that an output or an effect needs
            unit = pending.pop()
            if isinstance(unit, fx.Node):
                read = unit.all_input_nodes
            else:
                read = [node for name in unit.symbols for node in self.symbols.nodes(name) or ()]
                read += map(self._node, unit.inputs)
            needs = {self.definer.get(node, node) for node in read} - {unit}
            pending += [need for need in needs if need not in order]
            order.add_edges_from((need, unit) for need in needs)
        edges = self._ordering_edges(groups)
        order.add_edges_from((a, b) for a, b in edges if a in order and b in order and a is not b)
        circles = (one for one in nx.strongly_connected_components(order) if len(one) > 1)
        stuck = [unit for circle in circles for unit in circle if isinstance(unit, GroupCall)]
        return [] if stuck else list(nx.lexicographical_topological_sort(order, self._rank)), stuck

    def _rank(self, unit: _Unit) -> int:
        if isinstance(unit, fx.Node):
            return self.rank[unit]
        # Ranked by its last output, a group runs as late as the trace's order suggests: lifetimes stay short. One that
        # fails where an index is outside its table runs before what eager mode would not have written by then.
        found = [name for name in unit.ops if op_of(self.flow.op(name).op).family == "lookup"]
        lookups = [self.rank[self.node_of[name]] for name in found]
        if lookups and self.writes:
            return min(lookups)
        return max(self.rank[self._node(value)] for value in unit.outputs)

    def _is_root(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return True
        if node.op != "call_function" or node.target in MODE_SWITCHES:
            return False
        if node in self.op_at:
            # The normaliser keeps an opaque op only when a result or an effect of it is needed.
            op = self.op_at[node]
            return written_value(op) is not None or kind_of(op, self.flow.specs) == "opaque"
        # Run-time checks. What gives a tensor and is not in the graph is dead, though it wrote over its operand.
        return isinstance(node.target, torch._ops.OpOverload) and node.is_impure() and not fake_tensors(node)

    def _ordering_edges(self, groups: Sequence[GroupCall]) -> Iterator[tuple[_Unit, _Unit]]:
        """Ordering edges of the dataflow graph between the units that may run those ops."""
        runs: dict[str, list[_Unit]] = {name: [self.node_of[name]] for name in self.flow.graph}
        for group in groups:
            for name in group.ops:
                runs[name].append(group)
        carried: tuple[str, ...]
        for before, after, carried in self.flow.graph.edges(data="values"):
            if not carried:
                yield from product(runs[before], runs[after])

    def emit(self, order: Sequence[_Unit]) -> fx.Graph:
        """The new graph."""
        graph = fx.Graph()
        made = {node: graph.node_copy(node) for node in self.source.find_nodes(op="placeholder")}
        for unit in order:
            if isinstance(unit, fx.Node):
                if unit.op not in ("placeholder", "output"):
                    same = _operand_it_gives_back(unit)
                    made[unit] = graph.node_copy(unit, made.__getitem__) if same is None else made[same]
                continue
            args = [made[self._node(value)] for value in unit.inputs]
            args += [self.symbols.emit(name, graph, made) for name in unit.symbols]
            call = graph.call_function(unit, tuple(args))
            for number, value in enumerate(unit.outputs):
                result = call if len(unit.outputs) == 1 else graph.call_function(operator.getitem, (call, number))
                made.setdefault(self._node(value), result)
        graph.node_copy(self.source.output_node(), made.__getitem__)
        for node in graph.nodes:
            node.meta = {}  # the trace's fake tensors would live as long as the compiled graph
        for node, result in made.items():
            result.meta.setdefault("traced", node.name)
        return graph


def _operand_it_gives_back(node: fx.Node) -> fx.Node | None:
    """The operand that is a node's result, as of a cast to its own dtype; None if that is returned or written to."""
    users = [user.target for user in node.users]
    if not isinstance(node.target, torch._ops.OpOverload) or "output" in users or not node.args:
        return None
    if any(isinstance(one, torch._ops.OpOverload) and one._schema.is_mutable for one in (node.target, *users)):
        return None
    result, operand = value_of(node), value_of(node.args[0])
    if result is None or operand is None or storage_of(result) != storage_of(operand):
        return None
    return node.args[0] if _reads_as(result) == _reads_as(operand) else None  # type: ignore[return-value]


def _reads_as(value: torch.Tensor) -> tuple[object, ...]:
    """How the memory of a fake tensor is read. Comparing dynamic sizes adds no guard."""
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return (value.dtype, value.is_conj(), value.is_neg(), value.dim(),
            *(one.node.expr if isinstance(one, torch.SymInt) else one for one in numbers))


def _item_nodes(traced: Traced) -> dict[str, fx.Node]:
    """For each result of an op with several, the ``getitem`` node that takes it (made where the trace has none)."""
    source = traced.module.graph
    found: dict[str, fx.Node] = {}
    for op in traced.graph:
        node = traced.node_of[op.name]
        value = node.meta.get("val")
        if node.graph is not source or not isinstance(value, list | tuple):
            continue
        items = list(_takers(node, value))
        found.update(zip(op.outputs, items, strict=True) if items else ())  # unbind of nothing gives nothing
    return found


def _takers(node: fx.Node, value: Sequence[Any]) -> Iterator[fx.Node]:
    """The ``getitem`` nodes that take each tensor of a node's results, of lists among them too."""
    takers = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    for number, item in enumerate(value):
        if number not in takers and isinstance(item, torch.Tensor | list | tuple):
            with node.graph.inserting_after(node):
                takers[number] = node.graph.call_function(operator.getitem, (node, number))
            takers[number].meta["val"] = item
        if isinstance(item, torch.Tensor):
            yield takers[number]
        elif isinstance(item, list | tuple):
            yield from _takers(takers[number], item)


class _SymbolSources:
    """Where a symbol's value comes from in a call: an argument, a traced number, a tensor's size, or a definition."""

    def __init__(self, traced: Traced) -> None:
        source = traced.module.graph
        self._given = {name: node for name, node in traced.scalars.items() if node.graph is source}
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

    def nodes(self, name: str) -> list[fx.Node] | None:
        """The nodes that must exist before the value is known; None where nothing shows it."""
        if name in self._given:
            return [self._given[name]]
        if name in self._sized:
            return [self._sized[name][0]]
        if name not in self._derived or not _is_spelled(self._derived[name]):
            return None
        found = [self.nodes(free.name) for free in self._derived[name].free_symbols]
        return None if None in found else [node for nodes in found for node in nodes or ()]

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
                definition = self._derived[name]
                numbers = {free: self._number(free.name, graph, made) for free in definition.free_symbols}
                self._made[name] = _spell(definition, numbers, graph)
        return self._made[name]


def _at_run_time(function: Callable[..., Any], *numbers: Any) -> Any:
    """A call of ``function`` as a node of the graph that the first number belongs to."""
    return numbers[0].tracer.create_proxy("call_function", function, numbers, {})


#: Python's arithmetic, as ``torch.compile`` itself spells it, and what that leaves to sympy, which asks for numbers.
_ARITHMETIC = type("_Arithmetic", (PythonReferenceAnalysis,), {
    "int_truediv": staticmethod(operator.truediv),
    "round_decimal": staticmethod(partial(_at_run_time, round)),
    "trunc": staticmethod(lambda number: torch.sym_float(_at_run_time(math.trunc, number))),
    **{f"{name}_to_int": staticmethod(lambda number, _dtype, rounded=rounded: _at_run_time(rounded, number))
       for name, rounded in (("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil), ("round", round))},
    **{name: staticmethod(partial(_at_run_time, getattr(math, name)))
       for name in ("exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh")},
})


def _spell(definition: Any, numbers: Mapping[Any, fx.Node], graph: fx.Graph) -> fx.Node:
    """The node that computes a sympy expression of ``numbers``."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    node: fx.Node = sympy_interp(
        _ARITHMETIC, {free: fx.Proxy(node, tracer) for free, node in numbers.items()}, definition).node
    return node


def _is_spelled(definition: Any) -> bool:
    """Whether nodes can compute a sympy expression."""
    trial = fx.Graph()
    try:
        _spell(definition, {free: trial.placeholder(free.name) for free in definition.free_symbols}, trial)
    except (AssertionError, AttributeError, NotImplementedError, TypeError, fx.proxy.TraceError):
        return False
    return True
