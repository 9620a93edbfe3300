"""The base class of implementations, each one class in one file: what is asked of them, and never which kind they are.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Backend, Config
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.dispatch_stats import Source, Tally
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.first_call import FirstCall
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.planner.module_paths import Paths, located, place
from fuseplan.search.store.record import TuningRecord
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Screening:
    """A short timing by itself, None where it failed, with the reason; ``backend`` names the calibration, if several
    could.
    """

    time_us: float | None
    reason: str = ""
    backend: str = ""


class Implementation(ABC):
    """A way to run groups on this device, in this regime.

    Attributes:
        name: Unique among the implementations of a session: ``"aten"``, ``"kernel"``, ``"sdpa.cudnn"``.
        backends: Whose configurations there are to search; () where there is one way to call it.
    """

    name: str
    mode: Mode
    backends: tuple[Backend, ...] = ()

    @abstractmethod
    def refuse(self, table: GroupTable, group: Candidate) -> str | None:
        """Why it cannot run the group here; None when it can."""

    def surpasses(self, table: GroupTable, group: Candidate) -> bool:
        """Whether it is known to be faster than ATen's op, of a group for which nothing was measured."""
        return False

    @abstractmethod
    def work(self, table: GroupTable, group: Candidate) -> Work:
        """What one call moves and computes."""

    @abstractmethod
    def calibration(self, table: GroupTable, group: Candidate) -> str:
        """Name of the calibration that predicts it."""

    @abstractmethod
    def screen(self, table: GroupTable, group: Candidate, tuner: Tuner) -> Screening:
        """Time it shortly, checked where it is not ATen itself."""

    def _beside(self, plain: TunableGroup, table: GroupTable, group: Candidate, tuner: Tuner) -> Screening:
        """A screening of it beside ATen's ops, which are what it is checked against."""
        found = tuner.contest_calls(plain, {self.name: self.subject(table, group)}, len(group.ops))()
        if found is None or self.name in found.failed:
            return Screening(None, "its run failed" if found is None else found.failed[self.name])
        return Screening(found.contest.time(self.name).median_us)

    def subject(self, table: GroupTable, group: Candidate) -> TunableGroup:
        """The group as the search sees it when this runs it."""
        return table.subject(group)

    def part(self, table: GroupTable, group: Candidate, backend: str, config: Config) -> Part:
        """The group as a part of a sequence; what searches runs it by this back end's kernel in this configuration."""
        subject = self.subject(table, group)
        return Part(subject, reads=subject.operands, makes=subject.outputs)

    def run_by(self, table: GroupTable, group: Candidate) -> str:
        """The name that a record gives it for a group that was not tuned."""
        return self.name

    # -- what a record says of it -----------------------------------------------------------------------------

    def recorded(self, table: GroupTable, group: Candidate, tuning: TuningRecord | None) -> tuple[str, Config, str]:
        """How a plan's record names it: who runs the group, in which configuration, and the tuning's workload key."""
        return self.name, {}, ""

    def refuse_record(self, table: GroupTable, group: Candidate, config: Config) -> str | None:
        """Why a record that names it for a group cannot have been written here; None when it can."""
        if config or len(group.ops) > 1:
            return "a library call has several ops, or a configuration"
        reason = self.refuse(table, group)
        return None if reason is None else f"{self.name} cannot run an op: {reason}"

    def reuse(self, table: GroupTable, group: Candidate, config: Config) -> Mapping[str, tuple[str, ...]]:
        """Which outputs may take which inputs' memory, by the names of values."""
        return {}

    # -- at run time ------------------------------------------------------------------------------------------

    def is_writable(self, table: GroupTable, ops: tuple[str, ...], config: Config) -> bool:
        """Whether it runs a group of a graph whose sizes may be dynamic, as its record says or nearly so."""
        return True

    def prepare(self, table: GroupTable, traced: Traced, group: PlannedGroup) -> FirstCall | None:
        """The call of a group of ``traced``, None to leave its ops as they are; what it raises says why not."""
        return None

    def count(self, group: PlannedGroup, tally: Tally) -> None:
        """Count a call of it that is in a compiled graph."""
        tally.count(f"from_{group.source}")

    def leave_out(self, group: PlannedGroup, tally: Tally, reason: str) -> None:
        """Count and log that there is no such call: ATen's ops run the group."""
        tally.fall_back(reason, paths=group.paths)
        logger.info("group %s runs unfused: %s", group.where, reason)

    def give_up(self, group: PlannedGroup, tally: Tally, reason: str) -> None:
        """Count and log that a call, which was counted, does not work."""
        tally.fall_back(reason, group.source, group.paths)
        logger.warning("group %s runs unfused from now on: %s", group.where, reason)


@dataclass(frozen=True)
class PlannedGroup:
    """A group of a plan, to run in a graph, with the paths of its modules.

    Attributes:
        ops: Names of its ops in the dataflow graph, views left out.
        implementation: What runs it, by its first back end; where sizes are dynamic and that one cannot, by another.
        source: Where the decision came from.
    """

    ops: tuple[str, ...]
    implementation: Implementation
    config: Config = field(default_factory=dict)
    source: Source = "model"
    label: str = ""
    paths: Paths = ()

    @property
    def where(self) -> str:
        """For people: the label, and the place in the model."""
        return located(self.label or self.ops[0], place([self.paths]))
