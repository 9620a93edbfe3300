"""ATen's own op as an implementation."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.group_book import GroupBook, Screening
from fuseplan.search.store.record import ATEN
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

#: Calibrations of ATen ops that a kernel could absorb, and of matmuls and attention by whatever call: attention is far
#: from the peak of matmuls. In each, calls differ by name (``Work.call``). Kernels go by the name of their back end.
UNFUSED, MATMUL, ATTENTION = "unfused", "matmul", "attention"


def anchor_calibration(book: GroupBook, group: Candidate) -> str:
    """Name of the calibration of a matmul or attention, whoever runs it."""
    return ATTENTION if any("attention" in book.graph.op(op).op for op in group.ops) else MATMUL


@dataclass(frozen=True)
class AtenOp:
    """ATen's own op, as eager runs it: what every other way to run an op is measured against."""

    mode: Mode = "eager"
    name: str = ATEN
    searches: bool = False

    def refuse(self, book: GroupBook, group: Candidate) -> str | None:
        return None if len(group.ops) == 1 else "ATen runs one op after another"

    def work(self, book: GroupBook, group: Candidate) -> Work:
        return book.unfused_work(group.ops[0])

    def calibration(self, book: GroupBook, group: Candidate) -> str:
        return anchor_calibration(book, group) if book.is_anchor(group) else UNFUSED

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        return Screening(tuner.time_unfused(book.subject(group)).median_us)

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        subject = book.subject(group)
        return Part(subject, reads=subject.operands, makes=subject.outputs)
