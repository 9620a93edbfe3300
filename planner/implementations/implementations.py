"""The ways to run a group: what each answers, and which there are.

An implementation is one class in one file. The partition, the prices, contests, records and dispatch ask it the
questions of :class:`Implementation`, and never which kind it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Backend, Config, Target
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.aten_op import AtenOp
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.group_book import GroupBook, Screening
from fuseplan.planner.implementations.library_op import LibraryOp
from fuseplan.planner.libraries.library_calls import LIBRARY_CALLS
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner


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
