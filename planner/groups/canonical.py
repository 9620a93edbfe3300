"""Canonical, name-free identity of a set of ops: equal structures get equal keys, in any process and any order.

Ops and external input values are the vertices of a directed graph with tagged arcs ("operand 2"). Colours are refined
along and against the arcs until nothing more is told apart (Weisfeiler-Leman); ops are then numbered by Kahn's
algorithm, smallest colour first. Of equal colours the op that comes first in the program is told apart, and the colours
around it are refined again, so that a choice between symmetric parts (the q and the k half of RoPE) cannot show in the
result. Where refinement cannot tell different structures apart, their keys may depend on program order: that repeats a
tuning, and is never a wrong match, because the key hashes the full text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, Region, TensorSpec
from fuseplan.planner.groups.canonical_order import Colouring
from fuseplan.planner.ops.table import op_of

#: Version of the canonical text. Change it whenever the text of any graph changes.
SCHEMA = "fuseplan-canonical-1"
#: Constants that simplify what is computed, or are no number's place on a scale.
_SPECIAL = frozenset({0.0, 0.5, 1.0, 2.0, -0.5, -1.0, -2.0})


def canonical_form(
    graph: DataflowGraph, ops: Iterable[str], outputs: Iterable[str], order: Iterable[tuple[str, str]] = (), *,
    free_constants: bool = False,
) -> Region:
    """The ops ``ops`` of ``graph`` (in any order) with their key, a sha256: names and capture order play no part in it.

    ``graph`` is static; its ordering edges between two of the ops are part of the form, and so are those of ``order``,
    which hold outside (a path through other ops). ``outputs`` are the values used outside. With ``free_constants`` the
    value of a :func:`free_constant` plays no part either: right for a plan, wrong for code. KeyError where an op is not
    in the graph, TypeError where an attribute has a type without a canonical text, or a size is dynamic.
    """
    return _Builder(graph, ops, outputs, order, free_constants).form()


def free_constant(op: str, value: Any) -> bool:
    """Whether a scalar attribute of an op (an epsilon, a scale, a fill value, a soft cap) may have another value in the
    same plan: it changes neither what is legal nor, except for special values, the code that computes it.
    """
    is_usual = isinstance(value, float) and math.isfinite(value) and value not in _SPECIAL
    return is_usual and not op_of(op).by_constant


def has_free_constants(graph: DataflowGraph, ops: Iterable[str]) -> bool:
    """Whether the key of ``ops`` depends on ``free_constants``."""
    return any(attribute_text(node.attrs, node.op) != attribute_text(node.attrs) for node in map(graph.op, ops))


class _Builder:
    """One run of :func:`canonical_form`: vertices are external values, then ops in capture order."""

    def __init__(
        self, graph: DataflowGraph, ops: Iterable[str], outputs: Iterable[str], order: Iterable[tuple[str, str]],
        free_constants: bool,
    ) -> None:
        self.graph = graph
        self.free_constants = free_constants
        self.nodes: list[OpNode] = [graph.op(name) for name in sorted(set(ops), key=graph.position)]
        self.made: dict[str, tuple[int, int]] = {
            value: (at, slot) for at, node in enumerate(self.nodes) for slot, value in enumerate(node.outputs)
        }
        self.external: list[str] = list(
            dict.fromkeys(value for node in self.nodes for value in node.inputs if value not in self.made)
        )
        self.outputs = set(outputs)
        self.results: list[str] = [self._result(node) for node in self.nodes]
        at = {node.name: number for number, node in enumerate(self.nodes)}
        edges = (
            (before, name) for name in at for before, edge in graph.graph.pred[name].items()
            if before in at and not edge["values"]
        )
        self.order = sorted({(at[a], at[b]) for a, b in (*edges, *order)})

    def form(self) -> Region:
        numbering = self._colouring().topological_order(first=len(self.external))
        text, inputs = self._text(numbering)
        ops = [self.nodes[at] for at in numbering]
        outputs = tuple(value for node in ops for value in node.outputs if value in self.outputs)
        key = hashlib.sha256(text.encode()).hexdigest()
        return Region(tuple(node.name for node in ops), inputs, outputs, key)

    def _colouring(self) -> Colouring:
        values = [f"in:{spec_text(self.graph.specs[value])}" for value in self.external]
        ops = (f"{node.op}({len(node.inputs)}){made}" for node, made in zip(self.nodes, self.results, strict=True))
        colouring = Colouring([*values, *ops])
        first_op = len(self.external)
        vertex = {value: at for at, value in enumerate(self.external)}
        for at, node in enumerate(self.nodes):
            for slot, value in enumerate(node.inputs):
                made = self.made.get(value)
                source, out = (vertex[value], 0) if made is None else (first_op + made[0], made[1])
                colouring.arc(source, first_op + at, f"{slot}<{out}")
        for before, after in self.order:
            colouring.arc(first_op + before, first_op + after, "order")
        colouring.refine()
        return colouring

    def _result(self, node: OpNode) -> str:
        """Text of an op's attributes and results."""
        specs = (
            spec_text(self.graph.specs[value]) + "!" * (value in self.outputs) + "~" * (value in self.graph.rounds)
            for value in node.outputs
        )
        return f"{attribute_text(node.attrs, node.op if self.free_constants else '')}->{';'.join(specs)}"

    def _text(self, numbering: list[int]) -> tuple[str, tuple[str, ...]]:
        """The canonical text, and the inputs in first-use order."""
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
                    lines.append(f"in {spec_text(self.graph.specs[value])}")
                operands.append(f"i{inputs[value]}")
            lines.append(f"{node.op}({','.join(operands)}){self.results[at]}")
        lines += [f"order {a}<{b}" for a, b in sorted((number[a], number[b]) for a, b in self.order)]
        return "\n".join(lines), tuple(inputs)


# -- texts in which no name occurs ------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def spec_text(spec: TensorSpec) -> str:
    """Canonical text of a layout; TypeError where a size is dynamic."""
    if not spec.is_static:
        raise TypeError(f"{spec} has dynamic sizes; bind them before asking for a key")
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]@[{','.join(map(str, spec.strides))}]"


def attribute_text(value: Any, op: str = "") -> str:
    """Canonical text of an attribute value, TypeError where its type has none; an int and the equal float differ, a
    tuple and a list do not. With an ``op``, its free constants are alike.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{attribute_text(value[key], op)}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(attribute_text(item, op) for item in value) + "]"
    if op and free_constant(op, value):
        return "float"
    if value is None or isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "float nan" if math.isnan(value) else f"float {value!r}"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Ref):
        return f"&{value.position}"
    if isinstance(value, complex | torch.dtype | torch.layout | torch.memory_format):
        return f"{type(value).__name__} {value}"
    if isinstance(value, torch.device):
        # The device is part of the database identity; a plan tuned from a meta capture must be found on the GPU.
        return "device"
    kind = type(value).__name__
    raise TypeError(f"attribute {value!r} of type {kind} has no canonical text (planner/groups/canonical.py)")
