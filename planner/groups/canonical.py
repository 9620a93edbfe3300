"""Canonical, name-free identity of a set of ops: equal structures get equal keys, in any process and any order.

Ops, external input values and dynamic sizes are the vertices of a directed graph with tagged arcs ("operand 2",
"third dimension of output 0"). Colours are refined along and against the arcs until nothing more is told apart
(Weisfeiler-Leman); ops are then numbered by Kahn's algorithm, smallest colour first. Where colours tie, the op that
comes first in the program is taken and told apart from its twins, and the colours around it are refined again, so
that a choice between symmetric parts (the q and the k half of RoPE) cannot show in the result.
Structures that refinement cannot tell apart although they differ may get different keys for different program
orders: that costs a repeated tuning, never a wrong match, because the key hashes the full text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import sympy

from fuseplan.kernels.ir.index import Size, symbol
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.canonical_text import attribute_text, spec_text, static_spec_text
from fuseplan.planner.groups.colouring import Colouring

#: Version of the canonical text. Change it whenever the text of any graph changes.
SCHEMA = "fuseplan-canonical-1"


@dataclass(frozen=True)
class CanonicalForm:
    """Identity and canonical numbering of a set of ops.

    Attributes:
        key: sha256 of the canonical text; names and capture order play no part.
        ops: Op names, topological; equal forms list corresponding ops at equal positions.
        inputs: Values read from outside, in first-use order.
        outputs: Values used outside, in op order.
        symbols: Dynamic sizes that occur, in first-use order.
    """

    key: str
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    symbols: tuple[str, ...] = ()


def canonical_form(
    graph: DataflowGraph,
    ops: Iterable[str],
    outputs: Iterable[str] | None = None,
    order: Iterable[tuple[str, str]] = (),
) -> CanonicalForm:
    """Canonical form of the ops ``ops`` of ``graph`` (in any order).

    Args:
        graph: The graph; ordering edges between two of the ops are part of the form.
        ops: Names of the ops.
        outputs: Values used outside. Default: those that the graph returns or an op outside ``ops`` reads.
        order: Further orderings between ops that hold outside the set (a path through other ops).

    Raises:
        KeyError: An op is not in the graph.
        TypeError: An attribute has a type without a canonical text.
    """
    return _Builder(graph, ops, outputs, order).form()


class _Builder:
    """One run of :func:`canonical_form`: vertices are symbols, then external values, then ops in capture order."""

    def __init__(
        self,
        graph: DataflowGraph,
        ops: Iterable[str],
        outputs: Iterable[str] | None,
        order: Iterable[tuple[str, str]],
    ) -> None:
        self.graph = graph
        members = set(ops)
        self.nodes: list[OpNode] = [graph.op(name) for name in _in_capture_order(graph, members)]
        self.made: dict[str, tuple[int, int]] = {
            value: (at, slot) for at, node in enumerate(self.nodes) for slot, value in enumerate(node.outputs)
        }
        self.external: list[str] = list(
            dict.fromkeys(value for node in self.nodes for value in node.inputs if value not in self.made)
        )
        self.outputs = set(_used_outside(graph, self.nodes, members) if outputs is None else outputs)
        at = {node.name: number for number, node in enumerate(self.nodes)}
        self.order = sorted({(at[a], at[b]) for a, b in (*_ordering_edges(graph, members), *order)})
        self.symbols: list[str] = []

    def form(self) -> CanonicalForm:
        structure = self._structure()
        known = _NUMBERINGS.get(structure)
        if known is None:
            if len(_NUMBERINGS) >= _MAX_NUMBERINGS:
                _NUMBERINGS.clear()
            known = _NUMBERINGS[structure] = self._numbering()
        names = tuple(self.nodes[at].name for at in known.ops)
        outputs = tuple(v for at in known.ops for v in self.nodes[at].outputs if v in self.outputs)
        return CanonicalForm(known.key, names, tuple(self.external[at] for at in known.inputs), outputs, known.symbols)

    def _structure(self) -> Hashable:
        """All that the numbering depends on, with the ops in capture order: equal for the same op of every layer."""
        specs, made, outputs = self.graph.specs, self.made, self.outputs
        vertex: dict[str, Hashable] = {value: at for at, value in enumerate(self.external)}
        ops = [
            (
                node.op,
                # The text of an attribute, unlike its value, tells 1 from 1.0 and from True.
                repr(node.attrs),
                tuple([made.get(value) or vertex[value] for value in node.inputs]),
                tuple([(specs[value], value in outputs) for value in node.outputs]),
            )
            for node in self.nodes
        ]
        return tuple(ops), tuple([specs[value] for value in self.external]), tuple(self.order)

    def _numbering(self) -> _Numbering:
        colouring = self._colouring()
        numbering = colouring.topological_order(first=len(self.symbols) + len(self.external))
        text, inputs, symbols = self._text(numbering, colouring)
        position = {value: at for at, value in enumerate(self.external)}
        key = hashlib.sha256(text.encode()).hexdigest()
        return _Numbering(key, tuple(numbering), tuple(position[value] for value in inputs), symbols)

    def _colouring(self) -> Colouring:
        found = _SymbolArcs()
        values = [f"in:{found.spec(self.graph.specs[value], value)}" for value in self.external]
        bodies = [self._op_text(node, found) for node in self.nodes]
        self.symbols = found.names
        colouring = Colouring(["symbol"] * len(self.symbols) + values + bodies)
        first_value = len(self.symbols)
        first_op = first_value + len(self.external)
        vertex = {value: first_value + at for at, value in enumerate(self.external)}
        symbol_vertex = {name: at for at, name in enumerate(self.symbols)}
        for value in self.external:
            for name, tag in found.arcs.get(value, ()):
                colouring.arc(symbol_vertex[name], vertex[value], tag)
        for at, node in enumerate(self.nodes):
            for name, tag in found.arcs.get(node.name, ()):
                colouring.arc(symbol_vertex[name], first_op + at, tag)
            for slot, value in enumerate(node.inputs):
                made = self.made.get(value)
                source, out = (vertex[value], 0) if made is None else (first_op + made[0], made[1])
                colouring.arc(source, first_op + at, f"{slot}<{out}")
        for before, after in self.order:
            colouring.arc(first_op + before, first_op + after, "order")
        colouring.refine()
        return colouring

    def _op_text(self, node: OpNode, found: _SymbolArcs) -> str:
        attrs = attribute_text(node.attrs, lambda size: found.size(size, node.name, "attr"))
        specs = ";".join(
            found.spec(self.graph.specs[value], node.name) + ("!" if value in self.outputs else "")
            for value in node.outputs
        )
        return f"{node.op}({len(node.inputs)}){attrs}->{specs}"

    def _text(self, numbering: list[int], colouring: Colouring) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """The canonical text, the inputs in first-use order and the symbols in first-use order."""
        rename = _SymbolNames({name: colouring.colour[at] for at, name in enumerate(self.symbols)})
        number = {at: canonical for canonical, at in enumerate(numbering)}
        inputs: dict[str, int] = {}
        lines = [SCHEMA]
        for at in numbering:
            node = self.nodes[at]
            operands = []
            for value in node.inputs:
                made = self.made.get(value)
                if made is not None:
                    operands.append(f"{number[made[0]]}.{made[1]}")
                    continue
                if value not in inputs:
                    inputs[value] = len(inputs)
                    lines.append(f"in {spec_text(self.graph.specs[value], rename)}")
                operands.append(f"i{inputs[value]}")
            specs = ";".join(
                spec_text(self.graph.specs[v], rename) + ("!" if v in self.outputs else "") for v in node.outputs
            )
            lines.append(f"{node.op}({','.join(operands)}){attribute_text(node.attrs, rename)}->{specs}")
        lines += [f"order {a}<{b}" for a, b in sorted((number[a], number[b]) for a, b in self.order)]
        return "\n".join(lines), tuple(inputs), tuple(rename.names)


@dataclass(frozen=True)
class _Numbering:
    """A canonical form without names: positions in the capture order of the ops, and in their external values."""

    key: str
    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    symbols: tuple[str, ...]


#: What was numbered before: the layers of a model, and the workloads it is captured for, repeat their structures.
_NUMBERINGS: dict[Hashable, _Numbering] = {}
_MAX_NUMBERINGS = 4096


def _in_capture_order(graph: DataflowGraph, members: set[str]) -> list[str]:
    missing = [name for name in members if name not in graph.graph]
    if missing:
        raise KeyError(f"no op named {min(missing)} in the graph")
    return sorted(members, key=graph.position)


def _ordering_edges(graph: DataflowGraph, members: set[str]) -> list[tuple[str, str]]:
    return [
        (before, name)
        for name in members
        for before, edge in graph.graph.pred[name].items()
        if before in members and not edge["values"]
    ]


def _used_outside(graph: DataflowGraph, nodes: list[OpNode], members: set[str]) -> list[str]:
    return [
        value
        for node in nodes
        for value in node.outputs
        if graph.is_returned(value) or any(consumer not in members for consumer in graph.consumers(value))
    ]


class _SymbolArcs:
    """Collects which vertex mentions which dynamic size where, and spells sizes without naming any."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.arcs: dict[str, list[tuple[str, str]]] = {}

    def spec(self, spec: TensorSpec, owner: str) -> str:
        text = static_spec_text(spec)
        return spec_text(spec, lambda size: self.size(size, owner, spec.dtype)) if text is None else text

    def size(self, size: Size, owner: str, where: str) -> str:
        if isinstance(size, int):
            return str(size)
        arcs = self.arcs.setdefault(owner, [])
        at = len(arcs)
        free = sorted(size.free_symbols, key=lambda sym: sym.name)
        for sym in free:
            if sym.name not in self.names:
                self.names.append(sym.name)
            spelled = size.xreplace({other: symbol("this" if other is sym else "other") for other in free})
            arcs.append((sym.name, f"{where}:{at}:{spelled}"))
        anonymous = symbol("n")
        return str(size.xreplace(dict.fromkeys(free, anonymous)))


class _SymbolNames:
    """Spells sizes with canonical names ``s0, s1, ...`` in first-use order (colour breaks ties within one size)."""

    def __init__(self, colours: Mapping[str, bytes]) -> None:
        self.colours = colours
        self.names: dict[str, sympy.Symbol] = {}

    def __call__(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        free = sorted(size.free_symbols, key=lambda sym: (self.colours[sym.name], sym.name))
        for sym in free:
            self.names.setdefault(sym.name, symbol(f"s{len(self.names)}"))
        return str(size.xreplace({sym: self.names[sym.name] for sym in free}))
