"""A generated kernel as an implementation; the search picks its back end."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Backend, Config, Target
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.group_book import GroupBook, Screening
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

#: Calibration of kernels with a matmul inside: theirs are bytes of weights, and tiles of tensor cores.
CONTRACTION = "contraction"


def _contracts(book: GroupBook, group: Candidate) -> bool:
    return any(segment.products for segment in book.lowered(group).ir.segments)


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel for what lowers, compiled for ``target`` by one of ``backends``, in order of preference."""

    backends: tuple[Backend, ...] = field(default=(), compare=False, repr=False)
    target: Target | None = field(default=None, compare=False, repr=False)
    mode: Mode = "kernel"
    name: str = "kernel"
    searches: bool = True

    def backend_for(self, book: GroupBook, group: Candidate) -> Backend | None:
        """The first back end that is here and can express the group."""
        assert self.target is not None
        return book.backend_for(group, self.backends, self.target)

    def refuse(self, book: GroupBook, group: Candidate) -> str | None:
        if is_cpu(book.device_type) and len(group.ops) == 1 and not group.inputs:
            return "it only fills memory: on CPUs that takes as long as the memory lets it, whoever does it"
        return None if self.backend_for(book, group) is not None else "no back end can express the group here"

    def work(self, book: GroupBook, group: Candidate) -> Work:
        return book.work(group)

    def calibration(self, book: GroupBook, group: Candidate) -> str:
        backend = self.backend_for(book, group)
        if backend is None:
            return ""
        return CONTRACTION if _contracts(book, group) else backend.name

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        trial = tuner.screen(book.subject(group))
        return Screening(trial.median_us, trial.reason, CONTRACTION if _contracts(book, group) else trial.backend)

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        subject = book.subject(group)
        maker = next(one for one in self.backends if one.name == backend)
        return Part(subject, maker, config, subject.operands, subject.outputs)
