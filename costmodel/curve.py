"""Memory bandwidth as a function of how many bytes a kernel touches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class BandwidthPoint:
    """Measured bandwidth, launch latency removed, at one footprint: distinct bytes read plus written by one kernel, run
    repeatedly (so caches are warm). ``best_gbps`` is that of the fastest repetition of the fastest access pattern.
    """

    footprint_bytes: float
    gbps: float
    best_gbps: float

    def __post_init__(self) -> None:
        if not (0 < self.footprint_bytes < math.inf and 0 < self.gbps <= self.best_gbps < math.inf):
            raise ValueError(f"{self}: footprint_bytes > 0 and 0 < gbps <= best_gbps < inf are required")


@dataclass(frozen=True)
class BandwidthCurve:
    """Bandwidth points in order of footprint; the steps are the cache levels.

    Between points the logarithm of bandwidth is linear in that of the footprint. Outside the measured range the nearest
    point's value holds: below it a kernel is launch-bound anyway, above it the memory is the last level.
    """

    points: tuple[BandwidthPoint, ...]

    def __post_init__(self) -> None:
        sizes = [point.footprint_bytes for point in self.points]
        if not sizes or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError("a bandwidth curve needs at least one point, with footprint_bytes strictly increasing")

    @cached_property
    def _logs(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Logarithms of sizes, of typical and best bandwidths, and of the best of each point and every larger one."""
        rows = [(point.footprint_bytes, point.gbps, point.best_gbps) for point in self.points]
        sizes, gbps, best = ([math.log(value) for value in column] for column in zip(*rows, strict=True))
        return sizes, gbps, best, [*accumulate([-math.inf, *reversed(best)], max)][::-1]

    def gbps(self, footprint_bytes: float) -> float:
        """Typical bandwidth for a kernel that touches ``footprint_bytes``."""
        return math.exp(self._interpolate(self._logs[1], footprint_bytes))

    def ideal_gbps(self, footprint_bytes: float) -> float:
        """The best bandwidth seen at this footprint or at any larger one, whose caches data this small fit too.

        A smaller footprint's faster cache may be out of a kernel's reach.
        """
        sizes, _, best, best_from = self._logs
        here = self._interpolate(best, footprint_bytes)
        return math.exp(max(here, best_from[bisect_right(sizes, _log(footprint_bytes))]))

    def at_least(self, other: BandwidthCurve) -> BandwidthCurve:
        """This curve, raised to ``other`` where that is faster."""
        raised = []
        for point in self.points:
            gbps = max(point.gbps, other.gbps(point.footprint_bytes))
            best = max(point.best_gbps, gbps, math.exp(other._interpolate(other._logs[2], point.footprint_bytes)))
            raised.append(BandwidthPoint(point.footprint_bytes, gbps, best))
        return BandwidthCurve(tuple(raised))

    @property
    def memory_gbps(self) -> float:
        """Typical bandwidth of the last level: that of the largest footprint."""
        return self.points[-1].gbps

    def _interpolate(self, values: Sequence[float], footprint_bytes: float) -> float:
        x, sizes = _log(footprint_bytes), self._logs[0]
        right = bisect_right(sizes, x)
        if right == 0:
            return values[0]
        if right == len(sizes):
            return values[-1]
        left = right - 1
        weight = (x - sizes[left]) / (sizes[right] - sizes[left])
        return values[left] + weight * (values[right] - values[left])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
