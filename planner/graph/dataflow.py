"""The dataflow graph of a model: a networkx DiGraph of ``OpNode`` with tensor specs; edges name what they carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import networkx as nx
import sympy

from fuseplan.kernels.ir.index import Size, evaluate, evaluate_all, is_static, number, product, row_major_strides
from fuseplan.kernels.ir.ir import ITEMSIZE


@dataclass(frozen=True)
class TensorSpec:
    """Layout of a value. Sizes and strides count elements; dynamic ones are sympy expressions."""

    shape: tuple[Size, ...]
    dtype: str
    strides: tuple[Size, ...]

    @staticmethod
    def contiguous(shape: Iterable[Size], dtype: str) -> TensorSpec:
        shape = tuple(shape)
        return TensorSpec(shape, dtype, row_major_strides(shape))

    @property
    def numel(self) -> Size:
        return product(self.shape)

    @property
    def is_static(self) -> bool:
        return is_static(*self.shape, *self.strides)

    def nbytes(self, symbols: Mapping[str, int | float] | None = None) -> int:
        return evaluate(self.numel, symbols or {}) * ITEMSIZE.get(self.dtype, 1)


@dataclass(frozen=True)
class Ref:
    """Inside ``OpNode.attrs``: stands for operand ``position`` of ``OpNode.inputs``."""

    position: int


@dataclass(frozen=True)
class OpNode:
    """One op. ``OpNode("aten.add.Tensor", ("x", "y"), ("z",))``.

    ``inputs`` are the names of the tensor operands in the order of the ATen schema. ``attrs`` holds every other
    argument by its schema name (``{"dim": (-1,), "keepdim": True}``), a number where a tensor may stand
    (``{"other": 2.0}``), ``None`` for an absent optional tensor, and :class:`Ref` inside nested lists such as
    ``{"indices": (None, Ref(1))}``. A tensor-list argument (``cat``) takes the remaining inputs.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Identity of the op in its graph: its first output."""
        return self.outputs[0]


class DataflowGraph:
    """Ops and values of one captured model.

    Attributes:
        graph: ``networkx.DiGraph`` over op names; edges have ``values``, () for pure order.
        specs: Tensor spec of every value, graph inputs included.
        inputs: Graph input values (activations and parameters), in call order.
        symbols: Dynamic sizes and numbers with their values at capture: a float for a symbol that is no integer.
        derived: Definitions of the symbols that depend on others, as sympy expressions.
        paths: Paths of the modules that each op is of, as the user spells them; no part of what a graph means.
        fresh: Graph inputs that stand for what another kernel has just produced (of a part of a model, cut out).
        shares: Of a part of a model: by the key of each part of a region, its share of the model's time.
        rounds: Values of half precision that are rounded wherever they are read, since the program can see it.
    """

    fresh: frozenset[str] = frozenset()
    shares: Mapping[str, float] = MappingProxyType({})
    rounds: frozenset[str] = frozenset()

    def __init__(
        self, nodes: Iterable[OpNode], specs: Mapping[str, TensorSpec], inputs: Iterable[str], outputs: Iterable[str],
        symbols: Mapping[str, int | float] | None = None, order: Iterable[tuple[str, str]] = (),
        derived: Mapping[str, Any] | None = None, paths: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.graph: nx.DiGraph[str] = nx.DiGraph()
        self.specs = dict(specs)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.symbols = dict(symbols or {})
        self.derived = dict(derived or {})
        self.paths = dict(paths or {})
        self._ops: dict[str, OpNode] = {}
        self._producer: dict[str, str] = {}
        self._position: dict[str, int] = {}
        for node in nodes:
            self._add(node)
        for before, after in order:
            if not self.graph.has_edge(before, after):
                self.graph.add_edge(before, after, values=())

    def _add(self, node: OpNode) -> None:
        name = node.name
        if name in self.graph:
            raise ValueError(f"value {name} is produced twice")
        self.graph.add_node(name)
        self._ops[name] = node
        self._position[name] = len(self._position)
        for value in node.outputs:
            self._producer[value] = name
        for value in dict.fromkeys(node.inputs):
            producer = self._producer.get(value)
            if producer is None:
                if value not in self.specs:
                    raise ValueError(f"op {name} ({node.op}) reads {value}, which nothing produces")
                continue
            carried = (*self.graph.get_edge_data(producer, name, {"values": ()})["values"], value)
            self.graph.add_edge(producer, name, values=carried)

    def __len__(self) -> int:
        return self.graph.number_of_nodes()

    def __iter__(self) -> Iterator[OpNode]:
        """Ops in capture order, which is a topological order."""
        for name in self.graph:
            yield self.op(name)

    def op(self, name: str) -> OpNode:
        return self._ops[name]

    def position(self, name: str) -> int:
        """Rank of an op in capture order."""
        return self._position[name]

    def orders(self) -> list[tuple[str, str]]:
        """Pairs of ops that are in this order though no value goes from one to the other."""
        return [(before, after) for before, after, data in self.graph.edges(data=True) if not data["values"]]

    def completed(self, sizes: Mapping[str, int | float]) -> dict[str, int | float]:
        """``sizes`` and the values of those derived symbols that they determine."""
        found = dict(sizes)
        for name, definition in self.derived.items():
            if all(free.name in sizes for free in definition.free_symbols):
                found[name] = type(self.symbols[name])(number(definition, sizes))
        return found

    def producer(self, value: str) -> str | None:
        """None for a graph input."""
        return self._producer.get(value)

    def maker(self, value: str) -> OpNode | None:
        """The op that produces ``value``; None for a graph input."""
        producer = self._producer.get(value)
        return None if producer is None else self.op(producer)


@dataclass(frozen=True)
class Region:
    """Ops between those no generated kernel may absorb; equal regions list equal ops and values at equal positions."""

    ops: tuple[str, ...]
    #: Values read from outside, in first-use order.
    inputs: tuple[str, ...]
    #: Values used outside, or graph outputs.
    outputs: tuple[str, ...]
    #: Canonical hash of structure, attributes, shapes, dtypes and strides; names play no part.
    key: str


def bind_graph(graph: DataflowGraph, sizes: Mapping[str, int] | None = None) -> DataflowGraph:
    """The graph with every symbol replaced by ``sizes`` (by default hints); names stay, so plans of it name its groups.
    """
    if not graph.symbols:
        return graph
    values = graph.completed({**graph.symbols, **(sizes or {})})
    specs = {
        name: TensorSpec(evaluate_all(spec.shape, values), spec.dtype, evaluate_all(spec.strides, values))
        for name, spec in graph.specs.items()
    }
    nodes = [
        replace(node, attrs={name: bind_value(value, values) for name, value in node.attrs.items()}) for node in graph
    ]
    made = DataflowGraph(nodes, specs, graph.inputs, graph.outputs, order=graph.orders(), paths=graph.paths)
    made.fresh, made.rounds = graph.fresh, graph.rounds
    return made


def bind_value(value: Any, values: Mapping[str, int | float]) -> Any:
    """An attribute with the sizes and numbers in it replaced, however nested."""
    if isinstance(value, sympy.Expr):
        return number(value, values)
    if isinstance(value, tuple | list):
        return tuple(bind_value(item, values) for item in value)
    return value
