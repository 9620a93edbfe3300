"""Plots of the HTML report: groups under the measured roofs, predicted against measured times, memory bandwidth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.costmodel.device_report import format_bytes
from fuseplan.planner.module_paths import located
from fuseplan.planner.reports.accuracy import measured_choices
from fuseplan.planner.reports.frames import ReportData
from fuseplan.planner.reports.log_plot import NAME_LETTERS, Curve, LogPlot, Point
from fuseplan.planner.reports.step_words import time_text
from fuseplan.search.errors import counted
from fuseplan.search.store.record import ATEN, RecordKey, TuningRecord

_KINDS = ("unfused", "fused")


def _workloads(data: ReportData) -> Mapping[RecordKey, str]:
    """The names of the workloads that each plan occurs in, and each group of one, by key."""
    found: defaultdict[RecordKey, dict[str, None]] = defaultdict(dict)
    for workload, region, plan in data.placed():
        groups = {*(one.workload for one in plan.groups), *(one.workload for one in plan.rejected)}
        own = {replace(plan.key, workload=group) for group in groups}
        for key in {plan.key, *workload.part_keys(region), *own}:
            found[key][data.name_of(workload)] = None
    return {key: ", ".join(names) for key, names in found.items()}


def bandwidth_plot(spec: DeviceSpec) -> LogPlot:
    """Measured bandwidth over the bytes a kernel touches."""
    points = spec.bandwidth.points
    peak = max(points, key=lambda point: point.gbps)
    words = (f"Memory bandwidth of {spec.identity.name}: up to {peak.gbps:.0f} GB/s at "
             f"{format_bytes(peak.footprint_bytes)}, {points[-1].gbps:.0f} GB/s at "
             f"{format_bytes(points[-1].footprint_bytes)}.")
    curves = [Curve([(one.footprint_bytes, one.gbps) for one in points], "typical", "roof"),
              Curve([(one.footprint_bytes, one.best_gbps) for one in points], "best seen", "second")]
    if cache := spec.identity.l2_bytes:
        rates = [rate for one in points for rate in (one.gbps, one.best_gbps)]
        curves.append(Curve([(cache, min(rates)), (cache, max(rates))], "last-level cache", "cache"))
    marks = [Point(one.footprint_bytes, one.gbps, "", f"{format_bytes(one.footprint_bytes)}: {one.gbps:,.0f} GB/s "
                   f"typical, {one.best_gbps:,.0f} best seen") for one in points]
    ticks = [one.footprint_bytes for one in points][:: max(1, -(-len(points) // 5))]
    return LogPlot(words, ("bytes touched by one kernel", "GB/s"), marks, curves,
                   texts=(format_bytes, "{:,g}".format), ticks=ticks)


def roofline_plot(spec: DeviceSpec, data: ReportData) -> LogPlot:
    """Each group, unfused and by its best kernel, under the measured roofs; those without arithmetic have no place."""
    places = _workloads(data)
    groups = [one for one in data.records.values() if one.work.total_flops > 0 and one.work.dram_bytes > 0]
    points = [point for one in groups for point in _of_group(one, places.get(one.key, ""))]
    # Matmuls have a unit of their own, so theirs is the highest roof where any group holds one.
    units = {unit for one in groups for unit in one.work.flops if "matmul" in unit and unit in spec.peaks}
    peaks = {unit: spec.peak(unit).per_s * 1e-9 for unit in (*sorted(units), "fp32") if unit in spec.peaks}
    curves = []
    if peaks and points:
        highest = max(peaks.values())
        fastest_gbps, slowest_gbps = max(point.gbps for point in spec.bandwidth.points), spec.bandwidth.memory_gbps
        left = min(*(point.x for point in points), highest / fastest_gbps) / 2
        right = max(*(point.x for point in points), highest / slowest_gbps) * 2
        curves = [
            Curve([(left, left * gbps), (highest / gbps, highest), (right, highest)], name, tone)
            for gbps, name, tone in ((slowest_gbps, "memory roof", "roof"), (fastest_gbps, "cache roof", "second"))
        ]
        if peaks.get("fp32", highest) < highest:
            curves.append(Curve([(peaks["fp32"] / fastest_gbps, peaks["fp32"]), (right, peaks["fp32"])],
                                "fp32 roof", "cache"))
    words = (f"Roofline of {spec.identity.name}: {counted(len(groups), 'group')} by operations per byte and operations "
             "per second, unfused and fused, under the measured bandwidth and peak.")
    return LogPlot(words, ("operations per byte", "Gop/s"), points, curves, _KINDS)


def _of_group(one: TuningRecord, workload: str) -> list[Point]:
    """A group's points: its ops unfused, and its best kernel where one works."""
    intensity = one.work.total_flops / one.work.dram_bytes
    timed = [("unfused", "unfused", one.unfused.median_us)]
    if one.fused is not None:
        timed.append(("fused", f"one {one.backend} kernel", one.fused.median_us))
    return [
        Point(intensity, one.work.total_flops / time_us * 1e-3, short_name(one.label),
              f"{located(one.label, workload)}: {time_text(time_us)}, {how}", tone,
              max(0.0, one.unfused.median_us - time_us))
        for tone, how, time_us in timed
    ]


def scatter_plot(data: ReportData) -> LogPlot:
    """Predicted over measured times, the band a factor of 1.25; the names are of what is off by most time."""
    places = _workloads(data)
    points = [
        Point(measured_us, predicted_us, short_name(one.label),
              f"{located(one.label, places.get(key, ''))}, {one.implementation}: {time_text(measured_us)} "
              f"measured, {time_text(predicted_us)} predicted",
              "unfused" if one.implementation == ATEN else "fused",
              abs(math.log(predicted_us / measured_us)) * measured_us)
        for key, one, predicted_us, measured_us in measured_choices(data.decided().values()) if measured_us > 0
    ]
    kernels = counted(len(points), "kernel")
    words = f"Predicted against measured time of {kernels}; the band is plus or minus 25 percent."
    return LogPlot(words, ("measured, us", "predicted, us"), points, kinds=_KINDS, band=1.25)


def short_name(label: str) -> str:
    """A label without what it says of types, its ops cut short where it is long: ``silu+mul 32x8192``."""
    ops, _, rest = label.partition(" ")
    shape = rest.split(" ")[0]
    room = NAME_LETTERS - len(shape) - 1
    return f"{ops if len(ops) <= room else ops[:max(room - 1, 4)] + '…'} {shape}".strip()
