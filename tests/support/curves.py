"""Bandwidth curves of few points."""

from __future__ import annotations

from collections.abc import Iterable

from fuseplan.costmodel.curve import BandwidthCurve, BandwidthPoint


def curve_of(points: Iterable[tuple[float, float]]) -> BandwidthCurve:
    """A curve from ``(footprint_bytes, gbps)`` pairs whose typical and best bandwidths are the same."""
    return BandwidthCurve(tuple(BandwidthPoint(size, gbps, gbps) for size, gbps in sorted(points)))
