"""The groups of one static graph, each lowered and described once: legality, work, keys and subjects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.work import Work
from fuseplan.kernels.gpu.backend import unspelled
from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, Enumeration, enumerate_candidates, group_key
from fuseplan.planner.groups.compute_graph import LIBRARY_KINDS, compute_graph_of, lower_group
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject, op_group, op_subject
from fuseplan.planner.libraries.library_call import OpGroup
from fuseplan.planner.lowering.lower import Lowered, NotLowerable
from fuseplan.planner.ops.table import OpKind, op_of
from fuseplan.planner.work.group_work import hot_inputs, kernel_work, op_work
from fuseplan.search import policy


class GroupTable:
    """What is known of a graph's groups.

    ``dynamic`` is the same graph with dynamic sizes, where a legal group has to be a kernel, too.
    """

    def __init__(
        self, graph: DataflowGraph, numerics: str, device_type: str, dynamic: DataflowGraph | None = None
    ) -> None:
        self.graph = graph
        self.numerics = numerics
        self.device_type = device_type
        self.dynamic = dynamic
        #: Work of one ATen op by itself.
        self.unfused_work: Callable[[str], Work] = cache(partial(op_work, graph))
        self._lowered: dict[tuple[str, ...], Lowered] = {}
        self._works: dict[tuple[str, ...], Work] = {}
        self._subjects: dict[tuple[str, ...], TunableGroup] = {}
        self._backends: dict[tuple[str, ...], Backend | None] = {}
        self._enumerated: dict[str, tuple[Region, Enumeration]] = {}

    def enumerated(self, part: Region) -> Enumeration:
        """The groups of a region's part that can be kernels; equal parts are enumerated once."""
        if part.key not in self._enumerated:
            self._enumerated[part.key] = part, enumerate_candidates(self.graph, part, self.legal)
        first, found = self._enumerated[part.key]
        return found.moved(self.graph, first, part)

    def lowered(self, group: Candidate) -> Lowered:
        """The group's kernel; NotLowerable says why there is none."""
        if group.ops not in self._lowered:
            self._lowered[group.ops] = self._lower(group.ops)
        return self._lowered[group.ops]

    def _lower(self, ops: tuple[str, ...]) -> Lowered:
        lowered = lower_group(self.graph, ops, self.numerics)
        if not is_cpu(self.device_type) and (op := unspelled(lowered.ir)):
            raise NotLowerable(f"only kernels for CPUs have {op}")
        return lowered

    def kernel(self, group: Candidate) -> Lowered | None:
        """The group's kernel; None for what only ATen can run: a matmul, or an op that writes to what it reads."""
        try:
            return self.lowered(group)
        except NotLowerable:
            return None

    def legal(self, ops: Sequence[str]) -> str | None:
        """Why ``ops`` cannot be one kernel, None when they can (the legality of the enumeration)."""
        names = tuple(ops)
        if self.is_anchor(Candidate(names, (), ())):
            return f"{self.graph.op(names[0]).op} by itself is a library's"
        try:
            self._lowered[names] = self._lower(names)
            if self.dynamic is not None:
                lower_group(self.dynamic, names, self.numerics)
        except Exception as error:  # whatever a group fails at, others of its region can be kernels
            return failure_reason(error)
        return None

    def work(self, group: Candidate) -> Work:
        """Work of the group as one kernel."""
        if group.ops not in self._works:
            lowered = self.lowered(group)
            hot = hot_inputs(self.graph, lowered.inputs)
            self._works[group.ops] = kernel_work(lowered.ir, hot, self.device_type)
        return self._works[group.ops]

    def backend_for(self, group: Candidate, backends: Sequence[Backend], target: Target) -> Backend | None:
        """The first of ``backends`` (always the same ones) that is here and can express the group."""
        if group.ops not in self._backends:
            ir = self.lowered(group).ir
            willing = (b for b in backends if b.unavailable() is None and b.refuse(ir, target) is None)
            self._backends[group.ops] = next(willing, None)
        return self._backends[group.ops]

    def is_anchor(self, group: Candidate) -> bool:
        """Whether the group is a matmul, attention or a foreign op by itself: only library calls run it."""
        return len(group.ops) == 1 and self.kind(group.ops[0]) in LIBRARY_KINDS

    def cpu_factor(self, group: Candidate) -> float:
        """How many times longer than kernels ATen takes on a CPU for what the group computes, at least; 1 where it
        computes so little that no kernel is worth its compilation.
        """
        nodes, specs = [self.graph.op(name) for name in group.ops], self.graph.specs
        touched = [specs[value] for node in nodes for value in (*node.inputs, *node.outputs)]
        if all(one.is_static and one.numel < policy.LEAST_SLOW_ELEMENTS for one in touched):
            return 1.0
        return max(op_of(node.op).cpu_factor(node, specs) for node in nodes)

    def kind(self, op: str) -> OpKind:
        """What an op of the graph is."""
        flow = compute_graph_of(self.graph)
        return flow.kinds[flow.position[op]]

    def subject(self, group: Candidate) -> TunableGroup:
        """The group as the search sees it."""
        if group.ops not in self._subjects:
            key = group_key(self.graph, group.ops, group.outputs)
            if self.is_anchor(group) or (len(group.ops) == 1 and self.kernel(group) is None):
                made = op_subject(self.graph, self.op_group(group), key)
            else:
                made = group_subject(self.graph, group.ops, key, self.numerics, self.device_type, group.outputs)
            self._subjects[group.ops] = made
        return self._subjects[group.ops]

    def op_group(self, group: Candidate) -> OpGroup:
        """The group as library calls see it."""
        return op_group(self.graph, group.ops, group.outputs, self.device_type)
