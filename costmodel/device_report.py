"""A device spec for people: a table and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fuseplan.costmodel.device import DeviceSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCALES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_bytes(nbytes: float) -> str:
    """A size in the largest binary unit that it reaches.

    >>> format_bytes(3 * 2**19)
    '1.5 MiB'
    """
    for scale, unit in _SCALES:
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.4g} B"


def spec_table(spec: DeviceSpec) -> pd.DataFrame:
    """Every number of the spec: columns ``quantity``, ``typical``, ``best`` (NaN where there is none), ``unit``,
    ``detail``."""
    rows: list[tuple[str, float, float, str, str]] = [
        (f"launch, {mode}", latency.us, latency.best_us, "us", latency.source)
        for mode, latency in spec.launch.items()
    ]
    if spec.view_us:
        rows.append(("host, ATen view", spec.view_us, np.nan, "us", "aten.transpose"))
    if spec.calls:
        times_us = [times.call_us for times in spec.calls.values()]
        rows.append(("ATen op, few elements", float(np.median(times_us)), min(times_us), "us", f"{len(times_us)} ops"))
    curves = {"bandwidth": spec.bandwidth, "bandwidth of one thread": spec.thread_bandwidth}
    rows += [
        (f"{name} at {format_bytes(point.footprint_bytes)}", point.gbps, point.best_gbps, "GB/s", "")
        for name, curve in curves.items() if curve is not None for point in curve.points
    ]
    rows += [
        (f"peak {unit}", peak.per_s * 1e-9, peak.best_per_s * 1e-9, "Gop/s", "") for unit, peak in spec.peaks.items()
    ]
    for name, fit in spec.fits.items():
        rate = "flat" if fit.gbps is None else f"{fit.gbps:.4g} GB/s"
        detail = f"{rate}, residual {fit.residual:.1%}, {fit.points} sizes"
        rows.append((f"fit {name}", fit.t0_us, np.nan, "us", detail))
    rows.append(("A/A noise", spec.noise * 100, np.nan, "%", f"measured {spec.measured_at}"))
    return pd.DataFrame(rows, columns=["quantity", "typical", "best", "unit", "detail"])


def bandwidth_figure(spec: DeviceSpec) -> Figure:
    """Bandwidth against footprint, typical and ideal, with the last-level cache marked. Needs no display."""
    from matplotlib.figure import Figure  # slow to import, and only a report draws

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    sizes = np.array([point.footprint_bytes for point in spec.bandwidth.points])
    axes.plot(sizes, [point.gbps for point in spec.bandwidth.points], marker="o", label="typical")
    axes.plot(sizes, [spec.bandwidth.ideal_gbps(size) for size in sizes], linestyle="--", label="lower-bound ideal")
    if spec.thread_bandwidth is not None:
        points = spec.thread_bandwidth.points
        axes.plot([p.footprint_bytes for p in points], [p.gbps for p in points], marker=".", label="one thread")
    if spec.identity.l2_bytes:
        label = f"last-level cache, {format_bytes(spec.identity.l2_bytes)}"
        axes.axvline(spec.identity.l2_bytes, color="grey", linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sizes[:: max(1, len(sizes) // 8)]
    axes.set_xticks(ticks, [format_bytes(size) for size in ticks], rotation=30)
    axes.set_xlabel("bytes touched by one kernel")
    axes.set_ylabel("bandwidth, GB/s")
    axes.set_title(f"{spec.identity.name}, {spec.measured_at[:10]}")
    axes.legend()
    return figure
