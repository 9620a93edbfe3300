"""A library's call as an implementation."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.aten_op import anchor_calibration
from fuseplan.planner.implementations.group_book import GroupBook, Screening
from fuseplan.planner.libraries.library_call import LibraryCall
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner


@dataclass(frozen=True)
class LibraryOp:
    """A library's call in the place of an anchor."""

    call: LibraryCall = field(compare=False, repr=False)
    name: str
    mode: Mode = "eager"
    searches: bool = False

    def refuse(self, book: GroupBook, group: Candidate) -> str | None:
        operands = book.graph.op(group.ops[0]).inputs
        if len(set(operands)) < len(operands):
            return "an operand is given twice"
        if book.numerics == "eager" and book.graph.op(group.ops[0]).attrs.get("cap") is not None:
            return "it does not round where the ops that cap scores do"
        return self.call.refuse(book.op_group(group))

    def work(self, book: GroupBook, group: Candidate) -> Work:
        return book.call_work(group, self.name)

    def calibration(self, book: GroupBook, group: Candidate) -> str:
        return anchor_calibration(book, group)

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        found = tuner.contest_calls(book.subject(group), {self.name: book.call_subject(group, self.call)})()
        if found is None or self.name in found.failed:
            return Screening(None, "its run failed" if found is None else found.failed[self.name])
        return Screening(found.contest.time(self.name).median_us)

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        subject = book.call_subject(group, self.call)
        return Part(subject, reads=subject.operands, makes=subject.outputs)
