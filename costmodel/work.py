"""What a fusion group costs in machine terms, before any device is named.

The four fields are the four resources a kernel can wait for. They add: the work of a chain of kernels is
the sum of its parts. Only what a kernel *must* do is counted (each distinct byte read or written once, each
arithmetic operation once), so that the same numbers serve a prediction and a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Units that have a peak of their own. ``sfu`` counts special functions (exp, rsqrt, tanh, ...).
FLOP_UNITS = ("fp32", "fp64", "sfu", "bf16_matmul", "fp16_matmul", "fp32_matmul", "fp8_matmul")


@dataclass(frozen=True)
class Work:
    """Flops, bytes and launches of one kernel, or of a sequence of kernels.

    Attributes:
        flops: Arithmetic operations by unit (one of :data:`FLOP_UNITS`); a fused multiply-add counts as two.
        dram_bytes: Distinct bytes read plus bytes written, assuming nothing is in a cache.
        l2_bytes: Bytes re-read after a first pass over the same data (second pass of a reduction, a
            broadcast operand); served by the last-level cache when they fit.
        launches: Kernel launches.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    dram_bytes: float = 0.0
    l2_bytes: float = 0.0
    launches: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.flops) - set(FLOP_UNITS)
        if unknown:
            raise ValueError(f"Work.flops has unknown units {sorted(unknown)}; known: {FLOP_UNITS}")

    def __add__(self, other: Work) -> Work:
        units = {*self.flops, *other.flops}
        return Work(
            flops={unit: self.flops.get(unit, 0.0) + other.flops.get(unit, 0.0) for unit in sorted(units)},
            dram_bytes=self.dram_bytes + other.dram_bytes,
            l2_bytes=self.l2_bytes + other.l2_bytes,
            launches=self.launches + other.launches,
        )

    @property
    def total_flops(self) -> float:
        """All operations, whatever unit runs them."""
        return float(sum(self.flops.values()))
