"""A library's call as an implementation."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.in_place import ReuseOptions
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.aten import anchor_calibration, run_ops
from fuseplan.planner.implementations.first_call import Calling, FirstCall
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import Implementation, PlannedGroup, Screening
from fuseplan.planner.implementations.tunable_group import TunableGroup, without_body
from fuseplan.planner.libraries.library_call import LibraryCall
from fuseplan.planner.work.group_work import hot_inputs
from fuseplan.planner.work.library_work import library_work
from fuseplan.search.tune.tuner import Tuner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LibraryOp(Implementation):
    """A library's call in the place of an anchor."""

    call: LibraryCall = field(compare=False, repr=False)
    name: str
    mode: Mode = "eager"

    def refuse(self, table: GroupTable, group: Candidate) -> str | None:
        node = table.graph.op(group.ops[0])
        if len(set(node.inputs)) < len(node.inputs):
            return "an operand is given twice"
        if table.numerics == "eager" and node.attrs.get("cap") is not None:
            return "it does not round where the ops that cap scores do"
        if not all(table.graph.specs[value].is_static for value in (*node.inputs, *node.outputs)):
            return "sizes are dynamic"
        return self.call.refuse(table.op_group(group))

    def surpasses(self, table: GroupTable, group: Candidate) -> bool:
        return self.refuse(table, group) is None and self.call.surpasses(table.op_group(group))

    def work(self, table: GroupTable, group: Candidate) -> Work:
        op = table.op_group(group)
        cold = [value for value, hot in zip(op.inputs, hot_inputs(table.graph, op.inputs), strict=True) if not hot]
        own, more = library_work(op.node, op.inputs, op.outputs, op.specs, self.name, cold), self.call.overhead(op)
        return replace(own, l2_bytes=own.l2_bytes + more.l2_bytes, launches=1 + more.launches)

    def calibration(self, table: GroupTable, group: Candidate) -> str:
        return anchor_calibration(table, group)

    def subject(self, table: GroupTable, group: Candidate) -> TunableGroup:
        return replace(table.subject(group), library=self.call)

    def screen(self, table: GroupTable, group: Candidate, tuner: Tuner) -> Screening:
        return self._beside(table.subject(group), table, group, tuner)

    def prepare(self, table: GroupTable, traced: Traced, group: PlannedGroup) -> FirstCall:
        candidate = Candidate(group.ops, (), compute_graph_of(table.graph).outputs_of(group.ops))
        if (reason := self.refuse(table, candidate)) is not None:
            raise RefusedError(reason)
        op = table.op_group(candidate)

        def build(in_place: bool) -> tuple[Calling, ReuseOptions]:
            call = self.call.build(op)
            return lambda reuse: call, {}

        return FirstCall(
            f"{self.name} {group.label}", group.ops, op.inputs, op.outputs,
            buffers=without_body(op.specs, op.inputs, op.outputs).outputs, build=build,
            unfused=partial(run_ops, [op.node], op.inputs, op.outputs, op.device_type), key=(self.name, group.ops),
        )

    def count(self, group: PlannedGroup, tally: Tally) -> None:
        tally.count("library_calls")

    def leave_out(self, group: PlannedGroup, tally: Tally, reason: str) -> None:
        tally.note(f"{self.name} is not called: {reason}", paths=group.paths)

    def give_up(self, group: PlannedGroup, tally: Tally, reason: str) -> None:
        tally.count("library_calls", -1)
        tally.note(f"{self.name}: {reason}", paths=group.paths)
        logger.warning("%s runs as ATen's op from now on: %s", group.where, f"{self.name}: {reason}")
