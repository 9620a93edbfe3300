"""Time of a kernel on a measured device: a prediction, and a bound it cannot beat.

A CPU call and a node of a CUDA graph (whose t0 is shorter where its launch overlaps the kernel before) run one after
the other with their launch, so

    time = launches * t0 + max(bytes / BW(bytes), flops / peak)

An eager CUDA launch is queued by the host while the device still works, so there only the slower of the two shows
(the launch is counted once, on one side or the other):

    time = max(launches * t0_host, launches * t0_graph + max(bytes / BW(bytes), flops / peak))

On CUDA, six more things that a short kernel waits for are in a prediction (never in the bound), each in terms of what
the probe measured:

* the instructions that follow one another before the first result (``steps``), in units of a tenth of the time that an
  elementwise kernel takes beyond an empty one;
* the slowest of many ways to the cache: a kernel on every multiprocessor waits longer than one on a few;
* what it asks the cache for, operands that rows share again and again, at the best bandwidth of any size and pattern;
  where a kernel has parts whose blocks follow one another, in each part by itself: one that waits for the cache does
  not overlap with another that waits for memory;
* results, which are written no faster than memory takes them, even where a cache has room for them;
* a row too long to be held, which one multiprocessor has to move alone, at its share of the best bandwidth (what is
  held is loaded all at once: such rows take no longer the longer they are);
* instructions besides the arithmetic, at the measured fp32 rate. Special functions have a unit of their own, which
  works beside the others; issuing one takes an instruction's time.

A kernel that reads nothing does not wait for a load, which the measured launch latency contains.

Rows gathered from a table are hot on CUDA too (popular ones come back), but not at the next call: those of another call
take room in the cache meanwhile, and count in the footprint that the bandwidth is read at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fuseplan.costmodel.curve import BandwidthCurve
from fuseplan.costmodel.device import Calibration, DeviceSpec, Mode
from fuseplan.costmodel.work import Work

_IDENTITY = Calibration()
#: Modes without a host in the loop.
_REPLAYED: tuple[Mode, ...] = ("graph", "overlapped")
#: Dependent instructions in an elementwise kernel (two loads, an op, a store, and their addresses).
_ELEMENTWISE_STEPS = 10.0
#: What the first use of cold data adds, in the same unit: a walk through every cache to memory.
_COLD_STEPS = 10.0
#: Of an elementwise kernel's dependent instructions, those of waiting for what it loads.
_LOAD_STEPS = 4.0
#: What it adds, in the same unit, that a kernel keeps every multiprocessor busy, and the bytes for each from which on
#: it does: those of the smallest tiles.
_SPREAD_STEPS, _SPREAD_BYTES = 2.0, 1024.0
#: Bytes of a row that one multiprocessor keeps in registers between two passes.
_HELD_BYTES = 128 * 2**10
#: Uses of a weight between which other copies are used when a kernel is timed; so many fitting the cache are not cold.
_ROTATION = 256


@dataclass(frozen=True)
class Terms:
    """The terms of the roofline, before they are combined.

    Attributes:
        launch_us: Launch latency that nothing hides.
        host_us: Launch latency on the host, in parallel with the device.
        memory_us: Moving the bytes.
        compute_us: The arithmetic.
        latency_us: Dependent instructions that nothing hides.
        write_us: Writing the results, beside ``memory_us``.
        serial_us: Dependent instructions, beside ``memory_us`` and ``compute_us``.
    """

    launch_us: float
    host_us: float
    memory_us: float
    compute_us: float
    latency_us: float = 0.0
    write_us: float = 0.0
    serial_us: float = 0.0

    @property
    def busy_us(self) -> float:
        """The longest of what goes on at the same time."""
        return max(self.memory_us, self.compute_us, self.write_us, self.serial_us)

    @property
    def time_us(self) -> float:
        return max(self.host_us, self.launch_us + self.latency_us + self.busy_us)

    @property
    def bound_by(self) -> Literal["memory", "compute", "launch"]:
        """The largest term; waiting for instructions counts as launching."""
        started_us = self.launch_us + self.latency_us
        if started_us > self.busy_us or self.host_us > started_us + self.busy_us:
            return "launch"
        return "memory" if max(self.memory_us, self.write_us) >= self.compute_us else "compute"


@dataclass(frozen=True)
class Prediction:
    """Predicted time, what limits it, and the calibrated terms it is made of."""

    time_us: float
    bound_by: Literal["memory", "compute", "launch"]
    parts: Terms


def predict(
    work: Work,
    spec: DeviceSpec,
    mode: Mode,
    *,
    cold_bytes: float | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Prediction:
    """Predicted time of a kernel (or of a chain whose ``Work`` was summed) on the device ``spec`` describes.

    Args:
        work: What the kernel does.
        spec: The measured device.
        mode: How it is launched.
        cold_bytes: How many of ``work.dram_bytes`` come from memory because nothing touched them recently (weights);
            the rest moves at the bandwidth of a cache that holds the kernel's footprint, where there is one. None:
            ``work.cold_bytes`` on CUDA, unless copies of so few fit the cache; none on CPUs.
        threads: CPU threads, at most ``spec.identity.cores``; None for all of them.
        backend: Apply the calibration stored for this kernel back end, if any.

    Raises:
        DeviceSpecError: The device has no such mode, or no measured peak for a unit the work needs.
        ValueError: ``cold_bytes`` or ``threads`` out of range.
    """
    calibration = spec.calibrations.get(backend, _IDENTITY) if backend is not None else _IDENTITY
    terms = calibrated(roofline_terms(work, spec, mode, cold_bytes=cold_bytes, threads=threads), calibration)
    # A calibration fitted elsewhere must not promise more than the hardware has shown.
    floor_us = lower_bound(work, spec, mode, cold_bytes=cold_bytes or 0.0, threads=threads)
    return Prediction(max(terms.time_us, floor_us), terms.bound_by, terms)


def predict_sequence(
    works: Iterable[Work], spec: DeviceSpec, mode: Mode, *, backend: str | None = None
) -> Prediction:
    """Predicted time of kernels run one after the other (the unfused chain): the sum of their times.

    ``parts`` holds the summed terms and ``bound_by`` the limit that accounts for most of the time.
    """
    predictions = [predict(work, spec, mode, backend=backend) for work in works]
    share_us: dict[Literal["memory", "compute", "launch"], float] = {"memory": 0.0, "compute": 0.0, "launch": 0.0}
    for prediction in predictions:
        share_us[prediction.bound_by] += prediction.time_us
    parts = Terms(
        launch_us=sum(prediction.parts.launch_us for prediction in predictions),
        host_us=sum(prediction.parts.host_us for prediction in predictions),
        memory_us=sum(prediction.parts.memory_us for prediction in predictions),
        compute_us=sum(prediction.parts.compute_us for prediction in predictions),
        latency_us=sum(prediction.parts.latency_us for prediction in predictions),
        write_us=sum(prediction.parts.write_us for prediction in predictions),
        serial_us=sum(prediction.parts.serial_us for prediction in predictions),
    )
    total_us = sum(prediction.time_us for prediction in predictions)
    return Prediction(total_us, max(share_us, key=lambda limit: share_us[limit]), parts)


def lower_bound(
    work: Work, spec: DeviceSpec, mode: Mode, *, cold_bytes: float = 0.0, threads: int | None = None
) -> float:
    """Microseconds that no kernel doing ``work`` can beat, as far as measurements tell.

    Every term takes its ideal value: the shortest launch seen, the best bandwidth of any pattern at this footprint
    or a larger one, the highest rate of every unit with all units busy at once, and no byte read twice
    (``l2_bytes`` is left out: a better kernel would have kept it in registers).
    """
    _check(work, spec, cold_bytes, threads)
    launch_us, host_us = _launch_us(work, spec, mode, best=True)
    hot_bytes = work.dram_bytes - cold_bytes
    memory_us = _us(hot_bytes, spec.bandwidth.ideal_gbps(hot_bytes)) + _us(
        cold_bytes, spec.bandwidth.ideal_memory_gbps
    )
    compute_us = max((flops / spec.peak(unit).best_per_s * 1e6 for unit, flops in work.flops.items()), default=0.0)
    return Terms(launch_us, host_us, memory_us, compute_us).time_us


def roofline_terms(
    work: Work, spec: DeviceSpec, mode: Mode, *, cold_bytes: float | None = None, threads: int | None = None
) -> Terms:
    """The uncalibrated terms of :func:`predict`; same arguments and errors."""
    cold_bytes = _cold_bytes(work, spec) if cold_bytes is None else cold_bytes
    _check(work, spec, cold_bytes, threads)
    threads = threads or spec.identity.cores
    launch_us, host_us = _launch_us(work, spec, mode, best=False)
    cached_bytes = min(work.dram_bytes, spec.identity.l2_bytes or work.dram_bytes)
    on_gpu = spec.identity.device_type == "cuda"
    footprint_bytes = work.dram_bytes + (work.gathered_bytes if on_gpu else 0.0)
    memory_us = _us(work.dram_bytes - cold_bytes, _gbps(spec, footprint_bytes, threads)) + _us(
        cold_bytes, _gbps(spec, spec.bandwidth.points[-1].footprint_bytes, threads)
    )
    if not (on_gpu and 0 < work.row_bytes <= _HELD_BYTES):
        memory_us += _us(work.l2_bytes, _gbps(spec, cached_bytes, threads))
    # Units share issue slots, so their times add; only the lower bound lets them overlap.
    share = threads / spec.identity.cores if spec.identity.device_type == "cpu" else 1.0
    compute_us = sum(flops / (spec.peak(unit).per_s * share) * 1e6 for unit, flops in work.flops.items())
    terms = Terms(launch_us, host_us, memory_us, compute_us)
    return _with_gpu_terms(terms, work, spec, mode, cold_bytes) if on_gpu else terms


def _with_gpu_terms(terms: Terms, work: Work, spec: DeviceSpec, mode: Mode, cold_bytes: float) -> Terms:
    launch = spec.launch.get(mode if mode in _REPLAYED else "graph", spec.launch.get("graph"))
    step_us = (launch.us - launch.best_us) / _ELEMENTWISE_STEPS if launch is not None else 0.0
    share_gbps = max(point.gbps for point in spec.bandwidth.points) / spec.identity.cores
    cache_gbps = max(point.best_gbps for point in spec.bandwidth.points)
    row_us = _us(work.row_bytes, share_gbps) if work.row_bytes > _HELD_BYTES else 0.0
    # A fused multiply-add counts as two operations, and is one instruction.
    rate = spec.peaks["fp32"].per_s / 2 if "fp32" in spec.peaks else math.inf
    reads = work.dram_bytes > work.written_bytes or not work.written_bytes
    spread = min(1.0, work.dram_bytes / (spec.identity.cores * _SPREAD_BYTES))
    steps = work.steps + _SPREAD_STEPS * spread + (_COLD_STEPS if cold_bytes else 0.0)
    return replace(
        terms,
        launch_us=terms.launch_us - (0.0 if reads else _LOAD_STEPS * step_us * work.launches),
        memory_us=max(_traffic_us(work, terms.memory_us, cache_gbps), row_us),
        compute_us=_issued_us(work, spec, terms.compute_us, rate),
        latency_us=step_us * steps,
        write_us=_us(work.written_bytes, spec.bandwidth.memory_gbps),
        serial_us=step_us * work.serial_steps,
    )


def _issued_us(work: Work, spec: DeviceSpec, compute_us: float, rate: float) -> float:
    """The longer of the special functions and of issuing everything, those included; ``rate`` is per second."""
    special = work.flops.get("sfu", 0.0)
    special_us = special / spec.peak("sfu").per_s * 1e6 if special else 0.0
    return max(special_us, compute_us - special_us + (work.instructions + special) / rate * 1e6)


def _traffic_us(work: Work, memory_us: float, cache_gbps: float) -> float:
    """The longer of moving and requesting; where there are parts, of each with its share of ``memory_us``."""
    moved_bytes = sum(part.moved_bytes for part in work.traffic)
    us_per_byte = memory_us / max(work.dram_bytes, moved_bytes, 1.0)
    parts_us = sum(
        max(part.moved_bytes * us_per_byte, _us(part.requested_bytes, cache_gbps)) for part in work.traffic
    )
    rest_us = max(work.dram_bytes - moved_bytes, 0.0) * us_per_byte
    return max(parts_us + rest_us, _us(work.requested_bytes, cache_gbps))


def _cold_bytes(work: Work, spec: DeviceSpec) -> float:
    on_gpu = spec.identity.device_type == "cuda"
    return work.cold_bytes if on_gpu and work.cold_bytes * _ROTATION > spec.identity.l2_bytes else 0.0


def calibrated(terms: Terms, calibration: Calibration) -> Terms:
    """The terms multiplied by a calibration's factors."""
    return Terms(
        terms.launch_us * calibration.launch_scale,
        terms.host_us * calibration.launch_scale,
        terms.memory_us * calibration.memory_scale,
        terms.compute_us * calibration.compute_scale,
        terms.latency_us * calibration.latency_scale,
        terms.write_us * calibration.write_scale,
        terms.serial_us * calibration.latency_scale,
    )


def _check(work: Work, spec: DeviceSpec, cold_bytes: float, threads: int | None) -> None:
    if not 0 <= cold_bytes <= work.dram_bytes:
        raise ValueError(f"cold_bytes {cold_bytes} is not between 0 and dram_bytes {work.dram_bytes}")
    if threads is not None and not 1 <= threads <= spec.identity.cores:
        raise ValueError(f"threads {threads} is not between 1 and the device's {spec.identity.cores}")


def _launch_us(work: Work, spec: DeviceSpec, mode: Mode, *, best: bool) -> tuple[float, float]:
    """Launch latency in series with the device's work, and the part the host pays in parallel with it."""

    def of(mode: Mode) -> float:
        latency = spec.latency(mode)
        return work.launches * (latency.best_us if best else latency.us)

    if spec.identity.device_type == "cpu" or mode in _REPLAYED:
        return of(mode), 0.0
    return of("graph"), of(mode)


def _gbps(spec: DeviceSpec, footprint_bytes: float, threads: int) -> float:
    gbps = spec.bandwidth.gbps(footprint_bytes)
    if spec.thread_bandwidth is None or threads == spec.identity.cores:
        return gbps
    return min(gbps, threads * _single(spec.thread_bandwidth, footprint_bytes, threads))


def _single(curve: BandwidthCurve, footprint_bytes: float, threads: int) -> float:
    """Bandwidth of one of ``threads`` threads that share a footprint evenly."""
    return curve.gbps(footprint_bytes / threads)


def _us(nbytes: float, gbps: float) -> float:
    return nbytes / gbps * 1e-3
