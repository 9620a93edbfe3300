"""What a plan is made for, and the plan of a graph: a record for each occurrence of its regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.implementations.inductor import InductorAsked
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.store.record import GroupChoice, PlanRecord

PlanSource = Literal["database", "tuned", "model"]
#: Told about a region that cannot be planned.
OnFailure: TypeAlias = Callable[[Region, Exception], None]


@dataclass(frozen=True)
class PlanSettings:
    """The choices that a plan depends on besides its graph and its device.

    Attributes:
        numerics: ``"fp32"`` keeps intermediates of a group in fp32, except casts whose rounding the program can see;
            ``"eager"`` rounds where ATen rounds.
        regime: ``"eager"`` or ``"graph"``: how the plan will be launched.
        inductor: Which code TorchInductor is asked for, or ``"off"``: compiling it takes seconds.
    """

    numerics: str = "fp32"
    regime: str = "eager"
    inductor: InductorAsked = "default"


@dataclass(frozen=True)
class RegionPlan:
    """The plan of one occurrence of a region; whether it is ``shipped``; ``decided``, its parts' plans measured for it.
    """

    region: Region
    record: PlanRecord
    source: PlanSource
    shipped: bool = False
    decided: tuple[PlanRecord, ...] = ()

    def group_ops(self, choice: GroupChoice) -> tuple[str, ...]:
        """Names of the ops of one of the record's groups in this occurrence."""
        return tuple(self.region.ops[position] for position in choice.ops)


@dataclass(frozen=True)
class GraphPlan:
    """The plans of a graph's regions, in graph order, and how long the look-ups took."""

    regions: tuple[RegionPlan, ...]
    lookup_us: float = 0.0

    def unique(self) -> list[RegionPlan]:
        """The first occurrence of each distinct region."""
        return list({plan.region.key: plan for plan in reversed(self.regions)}.values())[::-1]


@contextmanager
def reporting(region: Region, on_failure: OnFailure | None) -> Iterator[None]:
    """Tells ``on_failure`` what is raised inside, if there is one."""
    try:
        yield
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        if on_failure is None:
            raise
        on_failure(region, error)
