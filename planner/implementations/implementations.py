"""The ways to run a group: ATen's op, a library's call, a generated kernel.

An implementation is one class. The partition, the prices, contests, records and dispatch ask it the questions of
:class:`Implementation`, and never which kind it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Backend, Config, Target
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.group_book import GroupBook, Screening
from fuseplan.planner.libraries.library_call import LibraryCall
from fuseplan.planner.libraries.library_calls import LIBRARY_CALLS
from fuseplan.search.store.record import ATEN
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

#: Calibrations of ATen ops that a kernel could absorb, and of matmuls and attention by whatever call: attention is far
#: from the peak of matmuls. In each, calls differ by name (``Work.call``). Kernels go by the name of their back end.
UNFUSED, MATMUL, ATTENTION = "unfused", "matmul", "attention"


class Implementation(Protocol):
    """A way to run groups of a graph on this device, in this regime."""

    @property
    def name(self) -> str:
        """Unique among the implementations of a session: ``"aten"``, ``"kernel"``, ``"sdpa.cudnn"``."""

    @property
    def searches(self) -> bool:
        """Whether there are configurations to search: the group is tuned before it is chosen."""

    @property
    def mode(self) -> Mode:
        """How its calls are launched."""

    def refuse(self, book: GroupBook, group: Candidate) -> str | None:
        """Why it cannot run the group here; None when it can."""

    def work(self, book: GroupBook, group: Candidate) -> Work:
        """What one call moves and computes."""

    def calibration(self, book: GroupBook, group: Candidate) -> str:
        """Name of the calibration that predicts it."""

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        """Time it shortly, checked where it is not ATen itself."""

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        """The group as a part of a sequence; what searches runs it by this back end's kernel in this configuration."""


def _anchor_calibration(book: GroupBook, group: Candidate) -> str:
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
        return _anchor_calibration(book, group) if book.is_anchor(group) else UNFUSED

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        return Screening(tuner.time_unfused(book.subject(group)).median_us)

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        subject = book.subject(group)
        return Part(subject, reads=subject.operands, makes=subject.outputs)


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
        return self.call.refuse(book.op_group(group))

    def work(self, book: GroupBook, group: Candidate) -> Work:
        return book.call_work(group, self.name)

    def calibration(self, book: GroupBook, group: Candidate) -> str:
        return _anchor_calibration(book, group)

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        trial = tuner.screen_call(book.subject(group), book.call_subject(group, self.call), self.name)
        return Screening(trial.median_us, trial.reason)

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        subject = book.call_subject(group, self.call)
        return Part(subject, reads=subject.operands, makes=subject.outputs)


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
        return None if self.backend_for(book, group) is not None else "no back end can express the group here"

    def work(self, book: GroupBook, group: Candidate) -> Work:
        return book.work(group)

    def calibration(self, book: GroupBook, group: Candidate) -> str:
        backend = self.backend_for(book, group)
        return backend.name if backend is not None else ""

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        trial = tuner.screen(book.subject(group))
        return Screening(trial.median_us, trial.reason, trial.backend)

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        subject = book.subject(group)
        maker = next(one for one in self.backends if one.name == backend)
        return Part(subject, maker, config, subject.operands, subject.outputs)


@dataclass(frozen=True)
class Implementations:
    """The ways to run groups on a device.

    ``aten`` runs every single op, ``kernel`` what lowers; ``libraries`` run the groups that they do not refuse.
    """

    aten: Implementation
    kernel: Implementation
    libraries: tuple[Implementation, ...] = ()

    def named(self, name: str) -> Implementation:
        """The way that a plan's record names: a back end's name stands for the kernel."""
        return next((one for one in (self.aten, *self.libraries) if one.name == name), self.kernel)


def implementations_for(regime: str, backends: Sequence[Backend], target: Target) -> Implementations:
    """The ways to run groups on a device."""
    mode: Mode = "graph" if regime == "graph" else "eager"
    return Implementations(
        AtenOp(mode),
        GeneratedKernel(tuple(backends), target, kernel_mode(regime)),
        tuple(LibraryOp(call, call.name, mode) for call in LIBRARY_CALLS),
    )


def kernel_mode(regime: str) -> Mode:
    """How generated kernels are launched in a regime; those of a CUDA graph overlap where the device can."""
    return "overlapped" if regime == "graph" else "kernel"
