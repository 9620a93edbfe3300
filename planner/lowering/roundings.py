"""Roundings to half precision that a program can see: kernels make them under ``numerics="fp32"`` too.

Where the program asks what a cast dropped (``x - x.to(bfloat16).float()``), an unrounded value would give zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import TypeAlias

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.ops.op import HALVES
from fuseplan.planner.ops.positions import Specs
from fuseplan.planner.ops.table import is_address_map, kind_of, op_of

#: What each half holds exactly.
_EXACT = frozenset({"bool", "uint8", "int8", "float8_e4m3fn"})
#: What a value was copied and converted from, with the halves to which it was rounded on the way.
_Origins: TypeAlias = frozenset[tuple[str, frozenset[str]]]


def is_rounding_cast(graph: DataflowGraph, value: str) -> bool:
    """Whether ``value`` is a conversion to half precision of numbers that it need not hold."""
    node = graph.maker(value)
    if node is None or not _converts(node, graph.specs):
        return False
    source = graph.specs[node.inputs[0]].dtype
    return graph.specs[value].dtype in HALVES and source not in _EXACT


class Roundings:
    """Values of half precision that kernels round before they compute with them.

    A cast is one where it is returned, or read beside wider numbers, or what it was made from is used unrounded as
    well. So is a sum ``a + b`` from which ``a`` or ``b`` is taken away again: what is left is what its rounding
    dropped.
    """

    def __init__(self, graph: DataflowGraph) -> None:
        self.graph = graph
        #: The casts whose result each value is, rearranged.
        self.casts: dict[str, frozenset[str]] = {value: frozenset() for value in graph.inputs}
        self.origins: dict[str, _Origins] = {value: frozenset({(value, frozenset())}) for value in graph.inputs}
        #: Of each value that is no copy, the ways in which it is used: the halves to which it is rounded before.
        self.uses: dict[str, set[frozenset[str]]] = {}
        #: Casts that a kernel could read unrounded, and those that it must not.
        self.read: set[str] = set()
        self.found: set[str] = set()

    def seen(self) -> frozenset[str]:
        graph, dropped = self.graph, set[str]()
        for node in graph:
            self._follow(node)
            dropped.update(self._sums_taken_apart(node))
        for value in graph.outputs:
            self.found |= self.casts[value]
            self._use(value)
        for cast in self.read - self.found:
            ways = (way for origin, _ in self.origins[cast] for way in self.uses.get(origin, ()))
            if any(graph.specs[cast].dtype not in way for way in ways):
                self.found.add(cast)
        return frozenset((self.found & self.read) | dropped)

    def _follow(self, node: OpNode) -> None:
        specs = self.graph.specs
        is_copy, converts = _rearranges(node, specs), _converts(node, specs)
        casts = frozenset[str]().union(*(self.casts[value] for value in node.inputs))
        origins: _Origins = frozenset().union(*(self.origins[value] for value in node.inputs))
        if casts and not is_copy and kind_of(node, specs) == "compute":
            self.read |= casts
            self.found |= {cast for cast in casts if specs[cast].dtype != specs[node.name].dtype}
        if not is_copy and not converts:
            for value in node.inputs:
                self._use(value)
        for value in node.outputs:
            self.casts[value] = casts if is_copy else frozenset()
            self.origins[value] = origins if is_copy or converts else frozenset({(value, frozenset())})
        if is_rounding_cast(self.graph, node.name):
            self.casts[node.name] = frozenset({node.name})
            half = specs[node.name].dtype
            self.origins[node.name] = frozenset((origin, way | {half}) for origin, way in origins)

    def _use(self, value: str) -> None:
        for origin, way in self.origins[value]:
            self.uses.setdefault(origin, set()).add(way)

    def _sums_taken_apart(self, node: OpNode) -> Iterator[str]:
        """The sums of half precision from which a difference takes one of their terms."""
        if op_of(node.op).adds >= 0 or len(node.inputs) != 2:
            return
        for one, other in permutations(node.inputs):
            for value, _ in self.origins[one]:
                made = self.graph.maker(value)
                if made is not None and op_of(made.op).adds and self.graph.specs[value].dtype in HALVES and (
                    self._numbers(made.inputs) & self._numbers((other,))
                ):
                    yield value

    def _numbers(self, values: Iterable[str]) -> set[str]:
        return {origin for value in values for origin, _ in self.origins[value]}


def _converts(node: OpNode, specs: Specs) -> bool:
    """Whether the op gives its operand's elements in another dtype."""
    return op_of(node.op).family == "conversion" and specs[node.inputs[0]].dtype != specs[node.name].dtype


def _rearranges(node: OpNode, specs: Specs) -> bool:
    if op_of(node.op).rearranges or is_address_map(node, specs):
        return True
    return op_of(node.op).family == "conversion" and specs[node.inputs[0]].dtype == specs[node.name].dtype
