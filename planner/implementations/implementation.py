"""What every way to run a group answers: ATen's op, a library's call, or a generated kernel.

An implementation is one class in one file. The partition, the prices, contests, records and dispatch ask it these
questions, and never which kind it is.
"""

from __future__ import annotations

from typing import Protocol

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.group_book import GroupBook, Screening
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

    def refuse(self, book: GroupBook, group: Candidate) -> str | None:
        """Why it cannot run the group here; None when it can."""

    def work(self, book: GroupBook, group: Candidate) -> Work:
        """What one call moves and computes."""

    @property
    def mode(self) -> Mode:
        """How its calls are launched."""

    def calibration(self, book: GroupBook, group: Candidate) -> str:
        """Name of the calibration that predicts it."""

    def screen(self, book: GroupBook, group: Candidate, tuner: Tuner) -> Screening:
        """Time it shortly, checked where it is not ATen itself."""

    def part(self, book: GroupBook, group: Candidate, backend: str, config: Config) -> Part:
        """The group as a part of a sequence; what searches runs it by this back end's kernel in this configuration."""
