"""The plan of a graph: a record for each occurrence of its regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fuseplan.planner.graph.dataflow import Region
from fuseplan.search.store.record import GroupChoice, PlanRecord

PlanSource = Literal["database", "tuned", "model"]


@dataclass(frozen=True)
class RegionPlan:
    """The plan of one occurrence of a region, and whether it comes with the package.

    ``decided`` are plans of the parts that were measured for it; other parts had plans already.
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
