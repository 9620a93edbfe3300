"""Which inputs of a fused call nobody needs after it: an output may then take their memory.

Read off the graph that will run, in its order, with the aliases that the trace's fake tensors show. Whatever is in
doubt keeps its memory: graph inputs, parameters and constants; results of the graph; everything that shares a storage
with one of these; and what an op without a schema touches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fuseplan.kernels.ir.in_place import Reuse, ReuseOptions, choose_reuse
from fuseplan.planner.capture.normalise import MODE_SWITCHES
from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.lowering.recipes import kind_of
from fuseplan.planner.rewrites.trace_edit import fake_tensors

#: Library calls whose result is always new memory. (Their schemas alone do not say so: ``dropout``'s promises a new
#: tensor, and gives its operand back in inference.)
_MAKES_NEW = frozenset({
    "aten.linear.default", "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default",
    "aten.matmul.default", "aten.scaled_dot_product_attention.default", "aten.embedding.default",
    "aten.convolution.default", "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
    "fuseplan.merged_linear.default",
})
#: Calls that read no memory, besides ops with a schema.
_HARMLESS = (operator.getitem, *MODE_SWITCHES)


def plan_reuse(
    graph: fx.Graph, traced: Traced, options: Mapping[Callable[..., Any], ReuseOptions],
    donated: Collection[int] = (), overwritten: Mapping[Any, Reuse] = MappingProxyType({}),
) -> dict[Callable[..., Any], Reuse]:
    """For each fused call that can, which of its outputs take the memory of which inputs.

    ``graph`` has groups placed (:func:`fuseplan.planner.runtime.placement.fused_graph`) and was made of ``traced``.
    ``options`` say what the kernel of a fused call allows; ``donated`` are positions of graph inputs that the caller
    gives away: nobody else sees their memory, or needs it. ``overwritten`` says which outputs of a call are inputs that
    it writes to.

    Returns:
        By target, positions of outputs and of the inputs they take; targets that reuse nothing are left out.
    """
    memory = _Memory(graph, traced, frozenset(options), donated, overwritten)
    found: dict[Callable[..., Any], Reuse] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in options:
            free = [number for number in range(len(node.args)) if memory.dies_in(node, number)]
            if chosen := choose_reuse(options[node.target], free):
                found[node.target] = chosen
    return found


class _Memory:
    """Who holds which storage until when. A storage is known by a number; a tensor and its views share one."""

    def __init__(
        self, graph: fx.Graph, traced: Traced, calls: Collection[Callable[..., Any]], donated: Collection[int],
        overwritten: Mapping[Any, Reuse],
    ) -> None:
        self._traced = {node.name: node for node in traced.module.graph.nodes}
        self._flow = traced.graph
        self._calls = calls
        self._overwritten = overwritten
        self._position = {node: at for at, node in enumerate(graph.nodes)}
        self._storages: dict[fx.Node, frozenset[int]] = {}
        for node in graph.nodes:
            self._storages[node] = self._storages_of(node)
        self._first: dict[int, fx.Node] = {}
        self._last: dict[int, int] = {}
        self._pinned: set[int] = set()
        given = {node for at, node in enumerate(graph.find_nodes(op="placeholder")) if at in donated}
        for node in graph.nodes:
            self._visit(node, node in given)
        self._new = {node for node in graph.nodes if node in given or self._makes_new(node)}

    def _visit(self, node: fx.Node, donated: bool) -> None:
        touched = {one for source in node.all_input_nodes for one in self._storages[source]}
        for one in touched:
            self._last[one] = self._position[node]
        for one in self._storages[node]:
            self._first.setdefault(one, node)
        opaque = node.op != "call_function" or not (
            isinstance(node.target, torch._ops.OpOverload) or node.target in self._calls or node.target in _HARMLESS
        )
        if opaque and not donated:
            self._pinned |= touched | self._storages[node]

    def dies_in(self, call: fx.Node, number: int) -> bool:
        """Whether argument ``number`` of a fused call is memory of its own that nothing uses after the call."""
        value = call.args[number]
        if not isinstance(value, fx.Node) or value not in self._new or len(self._storages[value]) != 1:
            return False
        (storage,) = self._storages[value]
        sharing = [one for one in call.args if isinstance(one, fx.Node) and storage in self._storages[one]]
        return (
            storage not in self._pinned
            and self._first[storage] is value
            and self._last[storage] == self._position[call]
            and len(sharing) == 1
        )

    def _makes_new(self, node: fx.Node) -> bool:
        """Whether a node's result is a whole tensor in memory that was made for it."""
        if node.op != "call_function":
            return False
        if node.target in self._calls:
            return 0 not in self._overwritten.get(node.target, ())
        if node.target is operator.getitem:
            source, number = node.args
            if not isinstance(source, fx.Node) or source.op != "call_function" or source.target not in self._calls:
                return False
            return number not in self._overwritten.get(source.target, ())
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        if any(one.alias_info is not None for one in node.target._schema.returns):
            return False  # it may return the memory of an operand
        name = str(node.meta.get("traced"))
        if str(node.target) in _MAKES_NEW:
            return True
        return name in self._flow.graph and kind_of(self._flow.op(name), self._flow.specs) == "compute"

    def _storages_of(self, node: fx.Node) -> frozenset[int]:
        """Numbers of the storages behind a node's result; more than one where that is not certain."""
        traced = self._traced.get(node.meta.get("traced", ""))
        if traced is None:
            return frozenset()  # a fused call with several results: each is a getitem
        found = {tensor.untyped_storage()._cdata for tensor in fake_tensors(traced)}
        if node.op == "call_function" and not self._makes_new(node):
            for source in node.all_input_nodes:  # the trace may show two storages where a call uses one
                found |= self._storages[source]
        return frozenset(found)
