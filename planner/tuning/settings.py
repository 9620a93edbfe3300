"""What a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuseplan.planner.groups.candidates import CandidateLimits
from fuseplan.search import policy


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for, and how hard to look.

    Attributes:
        numerics: ``"fp32"`` keeps intermediates of a group in fp32, but for casts whose rounding the program can see;
            ``"eager"`` rounds where ATen rounds.
        regime: ``"eager"`` or ``"graph"``: how the plan will be launched.
        tolerance: Stop when the measured partition is within this of the lower bound.
        margin: What a partition has to gain on the nominal one to take its place, so that noise does not choose.
            None: :data:`~fuseplan.search.policy.PARTITION_MARGIN`.
        max_fused_measured: Fused groups measured per region at most. None:
            :data:`~fuseplan.search.policy.MEASURED_LIMIT`.
        limits: Bounds on the enumeration of candidates.
        alternatives: Rejected groups kept in a plan's record.
        minor: Share of a graph's time below which the kernels of a region's part are tuned with little effort.
    """

    numerics: str = "fp32"
    regime: str = "eager"
    tolerance: float = policy.GAP_TOLERANCE
    margin: float | None = None
    max_fused_measured: int | None = None
    limits: CandidateLimits = field(default_factory=CandidateLimits)
    alternatives: int = policy.ALTERNATIVES_LIMIT
    minor: float = policy.MINOR_SHARE

    def measured_on(self, device_type: str) -> int:
        """Fused groups measured per region at most on a device."""
        measured = self.max_fused_measured
        return measured if measured is not None else policy.MEASURED_LIMIT.on(device_type)

    def margin_on(self, device_type: str) -> float:
        """The margin in force on a device."""
        return self.margin if self.margin is not None else policy.PARTITION_MARGIN.on(device_type)
