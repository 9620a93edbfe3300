"""Which operands nobody needs after a call: a result may then take their memory.

It is read off the graph that will run, with the aliases that the trace's fake tensors show. Graph inputs, constants,
results and whatever may share memory with one of these keep theirs; so does what an op without a schema touches.
"""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx

from fuseplan.kernels.ir.in_place import Reuse, choose_reuse
from fuseplan.planner.capture.normalise import MODE_SWITCHES, Traced
from fuseplan.planner.implementations.first_call import GroupCall
from fuseplan.planner.ops.table import kind_of, op_of
from fuseplan.planner.rewrites.trace_edit import fake_tensors

#: Calls that read no memory, besides ops with a schema.
HARMLESS = (operator.getitem, *MODE_SWITCHES)
#: glibc learns nothing from a larger block (32 MiB with what it adds); it takes these from the system each time.
_LARGEST_KEPT = (32 << 20) - (64 << 10)


def plan_reuse(graph: fx.Graph, memory: Memory) -> dict[GroupCall, Reuse]:
    """For each group's call that can, which of its outputs (by position) take the memory of which inputs."""
    found: dict[GroupCall, Reuse] = {}
    for node in graph.nodes:
        if isinstance(node.target, GroupCall):
            free = [number for number in range(len(node.args)) if memory.dies_in(node, number)]
            if chosen := choose_reuse(node.target.reuse_options, free):
                found[node.target] = chosen
    return found


def keep_freed(size: int) -> None:
    """Have glibc keep what a call of so many bytes frees, for the next call.

    It gives free memory back to the system where that is over twice the largest block it ever took, and the system
    clears it anew, page by page: 21 of 87 ms in a ConvNeXt-T. So it gets such a block, which nobody touches.
    """
    torch.empty(min(size, _LARGEST_KEPT), dtype=torch.uint8, device="cpu")


class Memory:
    """Who holds which storage until when. A storage is known by a number; a tensor and its views share one.

    ``graph`` has groups placed (:func:`fuseplan.planner.runtime.placement.fused_graph`) and was made of ``traced``.
    """

    def __init__(self, graph: fx.Graph, traced: Traced) -> None:
        self._traced = {node.name: node for node in traced.module.graph.nodes}
        self._flow = traced.graph
        #: Numbers of the storages that a node's result may be in.
        self.storages: dict[fx.Node, frozenset[int]] = {}
        #: Nodes whose result is a whole tensor in memory that was made for it.
        self.new = set[fx.Node]()
        self._first: dict[int, fx.Node] = {}
        self._last: dict[int, fx.Node] = {}
        self._bytes: dict[int, int] = {}
        self._pinned: set[int] = set()
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        touched = {one for source in node.all_input_nodes for one in self.storages[source]}
        self._last.update(dict.fromkeys(touched, node))
        is_known = node.op == "call_function" and (
            isinstance(node.target, torch._ops.OpOverload | GroupCall) or node.target in HARMLESS
        )
        if self._makes_new(node):
            self.new.add(node)
        self.storages[node] = self._storages_of(node)
        for one in self.storages[node]:
            self._first.setdefault(one, node)
        if not is_known:
            self._pinned |= touched | self.storages[node]

    def dies_in(self, call: fx.Node, number: int) -> bool:
        """Whether argument ``number`` of a call is memory of its own that nothing uses after the call."""
        value = call.args[number]
        if not isinstance(value, fx.Node) or value not in self.new or len(self.storages[value]) != 1:
            return False
        (storage,) = self.storages[value]
        given = (*call.args, *call.kwargs.values())
        sharing = [one for one in given if isinstance(one, fx.Node) and storage in self.storages[one]]
        is_whole = storage not in self._pinned and self._first[storage] is value
        return is_whole and self._last[storage] is call and len(sharing) == 1

    def peak_bytes(self, graph: fx.Graph) -> int:
        """The most bytes of static results that are alive at once."""
        begin, end = Counter[fx.Node](), Counter[fx.Node]()
        for one, node in self._first.items():
            if node.op == "call_function":
                begin[node] += self._bytes[one]
                end[self._last.get(one, node)] += self._bytes[one]
        alive = peak = 0
        for node in graph.nodes:
            alive += begin[node]
            peak = max(peak, alive)
            alive -= end[node]
        return peak

    def _makes_new(self, node: fx.Node) -> bool:
        """Whether a node's result is a whole tensor in memory that was made for it."""
        target = node.target
        if target is operator.getitem and isinstance(node.args[0], fx.Node):
            whole, number = node.args[0].target, node.args[1]
            return isinstance(whole, GroupCall) and isinstance(number, int) and whole.buffers[number].over is None
        if isinstance(target, GroupCall):
            return target.buffers[0].over is None
        if not isinstance(target, torch._ops.OpOverload):
            return False
        if any(one.alias_info is not None for one in target._schema.returns):
            return False  # it may return the memory of an operand
        name = str(node.meta.get("traced"))
        if op_of(str(target)).new_memory:
            return True
        return name in self._flow.graph and kind_of(self._flow.op(name), self._flow.specs) == "compute"

    def _storages_of(self, node: fx.Node) -> frozenset[int]:
        """Numbers of the storages behind a node's result; more than one where that is not certain."""
        traced = self._traced.get(node.meta.get("traced", ""))
        if traced is None:
            return frozenset()  # a group's call with several results: each is a getitem
        found = set[int]()
        for storage in (tensor.untyped_storage() for tensor in fake_tensors(traced)):
            found.add(storage._cdata)
            self._bytes[storage._cdata] = size if isinstance(size := storage.nbytes(), int) else 0
        if node.op == "call_function" and node not in self.new:
            for source in node.all_input_nodes:  # the trace may show two storages where a call uses one
                found |= self.storages[source]
        return frozenset(found)
