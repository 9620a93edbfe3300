"""What a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuseplan.planner.groups.candidates import CandidateLimits


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for, and how hard to look.

    Attributes:
        numerics: ``"fp32"`` keeps intermediates of a group in fp32, but for casts whose rounding the program can see;
            ``"eager"`` rounds where ATen rounds.
        regime: ``"eager"`` or ``"graph"``: how the plan will be launched.
        tolerance: Stop when the measured partition is within this of the lower bound.
        margin: What a partition has to gain on the nominal one to take its place, so that noise does not choose.
            None: 5 % on CPUs, 1 % on CUDA, where noise is smaller.
        max_fused_measured: Fused groups measured per region at most. None: 16 on CPUs, where a kernel compiles in a
            fraction of a second, 8 on CUDA.
        limits: Bounds on the enumeration of candidates.
        alternatives: Rejected groups kept in a plan's record.
        minor: Share of a graph's time below which the kernels of a region's part are tuned with little effort.
    """

    numerics: str = "fp32"
    regime: str = "eager"
    tolerance: float = 0.01
    margin: float | None = None
    max_fused_measured: int | None = None
    limits: CandidateLimits = field(default_factory=CandidateLimits)
    alternatives: int = 24
    minor: float = 0.005

    def measured_on(self, device_type: str) -> int:
        """Fused groups measured per region at most on a device."""
        if self.max_fused_measured is not None:
            return self.max_fused_measured
        return 16 if device_type == "cpu" else 8

    def margin_on(self, device_type: str) -> float:
        """The margin in force on a device."""
        if self.margin is not None:
            return self.margin
        return 0.05 if device_type == "cpu" else 0.01
