"""From raw timings to the numbers of a :class:`DeviceSpec`. Pure arithmetic: what a test can check exactly."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fuseplan.costmodel.curve import BandwidthCurve, BandwidthPoint
from fuseplan.costmodel.device import LinearFit, Peak
from fuseplan.costmodel.probe.timing import Timing

#: Relative deviations beyond this count linearly in a fit: sizes near a cache boundary do not bend it.
_OUTLIER = 0.05
#: Where moving bytes takes less than this share of a call, it cannot be told from launching.
_MIN_TRANSFER_SHARE = 0.2
#: Sizes up to this fit every first-level cache pair and every GPU's idle time, so only launching varies.
_LAUNCH_BYTES = 64 * 2**10


@dataclass(frozen=True)
class StreamTiming:
    """One kernel over ``footprint_bytes`` distinct bytes; unless ``typical`` it counts for the ideal bandwidth only."""

    pattern: str
    footprint_bytes: int
    timing: Timing
    typical: bool = True


@dataclass(frozen=True)
class RateTiming:
    """One compute-bound call; unless ``typical``, its operations are cheap, and count for the ideal rate only."""

    unit: str
    flops: float
    timing: Timing
    typical: bool = True


def fit_linear(nbytes: Sequence[float], times_us: Sequence[float]) -> LinearFit:
    """Robust ``t0`` and bandwidth of ``t0 + bytes / bandwidth``, not negative; ValueError without positive times."""
    from scipy.optimize import least_squares  # slow to import, and only a probe fits

    if not nbytes or len(nbytes) != len(times_us) or min(times_us) <= 0:
        raise ValueError("fit_linear needs as many times as sizes, at least one, all positive")
    sizes, times = np.asarray(nbytes, dtype=np.float64), np.asarray(times_us, dtype=np.float64)
    # Scaled to one unit each, so that the solver sees two numbers of like magnitude.
    size_unit, time_unit = float(sizes.max()), float(times.min())

    def deviation(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray((x[0] + x[1] * sizes / size_unit) * time_unit / times - 1.0, dtype=np.float64)

    start = np.array([1.0, max(float(times[sizes.argmax()]) / time_unit - 1.0, 1e-3)])
    solution = least_squares(
        deviation, start, bounds=(0, np.inf), loss="soft_l1", f_scale=_OUTLIER, xtol=1e-12, ftol=1e-12, gtol=1e-12
    )
    slope_us = float(solution.x[1]) * time_unit / size_unit
    # Below 0.1 % of t0 across the whole range the slope is the solver's way of saying zero.
    rising = slope_us * size_unit > 1e-3 * float(solution.x[0]) * time_unit
    return LinearFit(
        t0_us=float(solution.x[0]) * time_unit,
        gbps=1e-3 / slope_us if rising else None,
        residual=float(np.median(np.abs(deviation(solution.x)))),
        points=len(sizes),
    )


def fit_launches(streams: Sequence[StreamTiming]) -> tuple[dict[str, LinearFit], dict[str, LinearFit]]:
    """Launch latency of each pattern from its small sizes: fits of the typical and of the best times."""
    typical, best = {}, {}
    for pattern in dict.fromkeys(stream.pattern for stream in streams):
        own = sorted((s for s in streams if s.pattern == pattern), key=lambda stream: stream.footprint_bytes)
        small = [stream for stream in own if stream.footprint_bytes <= _LAUNCH_BYTES] or own[:2]
        sizes = [stream.footprint_bytes for stream in small]
        typical[pattern] = fit_linear(sizes, [stream.timing.typical_us for stream in small])
        best[pattern] = fit_linear(sizes, [stream.timing.best_us for stream in small])
    return typical, best


def bandwidth_curve(streams: Sequence[StreamTiming]) -> BandwidthCurve:
    """Bandwidth without launches: median of typical patterns, best of all. ValueError where no size shows it."""
    typical, best = fit_launches(streams)
    points: list[BandwidthPoint] = []
    for footprint_bytes in sorted({stream.footprint_bytes for stream in streams}):
        usual, bests = [], []
        for stream in streams:
            if stream.footprint_bytes != footprint_bytes:
                continue
            typical_us = stream.timing.typical_us - typical[stream.pattern].t0_us
            if typical_us < _MIN_TRANSFER_SHARE * stream.timing.typical_us:
                continue
            floor_us = _MIN_TRANSFER_SHARE * stream.timing.best_us
            best_us = max(stream.timing.best_us - best[stream.pattern].t0_us, floor_us)
            bests.append(footprint_bytes / best_us * 1e-3)
            if stream.typical:
                usual.append(footprint_bytes / typical_us * 1e-3)
        if usual:
            gbps = statistics.median(usual)
            points.append(BandwidthPoint(footprint_bytes, gbps, max(gbps, *bests)))
    if not points:
        raise ValueError("every streaming size was launch-bound: probe larger sizes")
    return BandwidthCurve(tuple(points))


def peaks(rates: Sequence[RateTiming]) -> dict[str, Peak]:
    """Peak of every unit: the fastest typical call's usual time, and the fastest sample of any call."""
    found: dict[str, Peak] = {}
    for unit in dict.fromkeys(rate.unit for rate in rates):
        own = [rate for rate in rates if rate.unit == unit]
        best_per_s = max(rate.flops / rate.timing.best_us * 1e6 for rate in own)
        typical = [rate.flops / rate.timing.typical_us * 1e6 for rate in own if rate.typical]
        found[unit] = Peak(max(typical, default=best_per_s), best_per_s)
    return found
