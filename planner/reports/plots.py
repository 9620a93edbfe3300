"""Plots of the HTML report as inline SVG: the page's colours apply, so they follow its light or dark look."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from fuseplan.costmodel.accuracy import MeasuredPair
from fuseplan.costmodel.device import DeviceSpec
from fuseplan.costmodel.device_report import format_bytes
from fuseplan.search.store.record import ATEN, TuningRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

#: Stand-in colours that matplotlib draws with, and the page's CSS variables that replace them.
_COLOURS = {
    "ink": "#010a01", "muted": "#010a02", "line": "#010a03", "fused": "#010a04", "unfused": "#010a05",
    "accent": "#010a06", "paper": "#010a07",
}
_INK, _MUTED, _LINE, _FUSED, _UNFUSED, _ACCENT, _PAPER = _COLOURS.values()
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.size": 9.5, "font.family": "sans-serif", "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _MUTED, "ytick.color": _MUTED, "grid.color": _LINE,
    "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "legend.frameon": False, "axes.spines.top": False,
    "axes.spines.right": False, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "axes.grid": True, "grid.linewidth": 0.6, "legend.fontsize": 8.5,
}
_MARKS: dict[str, Any] = {"s": 26, "zorder": 3, "edgecolors": _PAPER, "linewidths": 0.6}
#: Inches; narrow, so that the text stays readable when a phone shrinks the drawing.
_SIZE = (4.8, 3.5)


def bandwidth_plot(spec: DeviceSpec) -> str:
    """Measured bandwidth over the bytes a kernel touches."""
    points = spec.bandwidth.points
    sizes = [point.footprint_bytes for point in points]

    def draw(axes: Axes) -> None:
        axes.plot(sizes, [point.gbps for point in points], color=_FUSED, marker="o", markersize=4, label="typical")
        axes.plot(sizes, [point.best_gbps for point in points], color=_UNFUSED, linestyle="--", label="best seen")
        if spec.identity.l2_bytes:
            axes.axvline(spec.identity.l2_bytes, color=_ACCENT, linestyle=":", label="last-level cache")
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="bytes touched by one kernel", ylabel="GB/s")
        ticks = sizes[:: max(1, -(-len(sizes) // 5))]
        axes.set_xticks(ticks, [format_bytes(size) for size in ticks])
        axes.set_xticks([], minor=True)
        _plain_ticks(axes.yaxis)
        axes.legend()

    peak = max(points, key=lambda point: point.gbps)
    words = (
        f"Memory bandwidth of {spec.identity.name}: "
        f"up to {peak.gbps:.0f} GB/s at {format_bytes(peak.footprint_bytes)}, "
        f"{points[-1].gbps:.0f} GB/s at {format_bytes(points[-1].footprint_bytes)}."
    )
    return _svg("bandwidth", words, draw)


def roofline_plot(spec: DeviceSpec, records: Iterable[TuningRecord]) -> str:
    """Each group's best kernel under the measured roofs; groups without arithmetic have no place on it."""
    groups = [one for one in records if one.work.total_flops > 0 and one.work.dram_bytes > 0]
    timed = {
        "unfused chain": [(one.work, one.unfused.median_us) for one in groups],
        "best fused kernel": [(one.work, one.fused.median_us) for one in groups if one.fused is not None],
    }
    intensity = [one.work.total_flops / one.work.dram_bytes for one in groups]

    def draw(axes: Axes) -> None:
        if "fp32" in spec.peaks:
            peak_gops = spec.peak("fp32").per_s * 1e-9
            fastest_gbps, slowest_gbps = max(point.gbps for point in spec.bandwidth.points), spec.bandwidth.memory_gbps
            left = min(*(intensity or [0.1]), peak_gops / fastest_gbps) / 3
            right = max(*(intensity or [10.0]), peak_gops / slowest_gbps) * 3
            x = np.geomspace(left, right, 100)
            cache, memory = (np.minimum(peak_gops, x * gbps) for gbps in (fastest_gbps, slowest_gbps))
            axes.plot(x, cache, color=_MUTED, linewidth=1, linestyle="--", label="cache roof")
            axes.plot(x, memory, color=_INK, linewidth=1.2, label="memory roof")
        for (label, found), marker, colour in zip(timed.items(), "oD", (_UNFUSED, _FUSED), strict=True):
            axes.scatter(
                [work.total_flops / work.dram_bytes for work, _ in found],
                [work.total_flops / time_us * 1e-3 for work, time_us in found],
                marker=marker, color=colour, label=label, **_MARKS,
            )
        axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="Gop/s")
        _plain_ticks(axes.xaxis, axes.yaxis)
        axes.legend(loc="lower right")

    words = (
        f"Roofline of {spec.identity.name}: {len(groups)} groups by operations per byte and operations per second, "
        f"unfused and fused, under the measured bandwidth and peak."
    )
    return _svg("roofline", words, draw)


def scatter_plot(pairs: Sequence[MeasuredPair]) -> str:
    """Predicted over measured times."""

    def draw(axes: Axes) -> None:
        times = [time_us for pair in pairs for time_us in (pair.measured_us, pair.predicted_us)]
        low, high = min(times) / 1.5, max(times) * 1.5
        axes.plot([low, high], [low, high], color=_MUTED, linewidth=1)
        axes.fill_between([low, high], [low / 1.25, high / 1.25], [low * 1.25, high * 1.25], color=_LINE, alpha=0.5)
        for is_fused, colour, marker, label in ((False, _UNFUSED, "o", "unfused op"), (True, _FUSED, "D", "fused")):
            chosen = [pair for pair in pairs if (pair.kind != ATEN) is is_fused]
            if chosen:
                x, y = [pair.measured_us for pair in chosen], [pair.predicted_us for pair in chosen]
                axes.scatter(x, y, color=colour, marker=marker, label=label, **_MARKS)
        axes.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us")
        _plain_ticks(axes.xaxis, axes.yaxis)
        axes.legend(loc="upper left")

    words = f"Predicted against measured time of {len(pairs)} kernels; the band is plus or minus 25 percent."
    return _svg("accuracy", words, draw)


def _plain_ticks(*axes: Axis) -> None:
    """``0.5``, ``20``, ``3,000`` instead of powers of ten, which SVG text cannot set in superscript."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())


def _svg(name: str, words: str, draw: Callable[[Axes], None]) -> str:
    """An ``<svg>`` element that ``draw`` filled; ``words`` is what a screen reader says."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=_SIZE, layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    # The page sets the fonts; a global style and repeated ids would leak into it.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.S)
    body = re.sub(r"font-family: [^;\"]+;? ?", "", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    for variable, colour in _COLOURS.items():
        body = body.replace(colour, f"var(--{variable})")
    width, height = (int(inches * 72) for inches in _SIZE)
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}"'
    return f'<svg class="plot" {box}><title>{escape(words)}</title>{body}'
