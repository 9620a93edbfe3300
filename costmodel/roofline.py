"""Time of a kernel on a measured device: a prediction, and a bound it cannot beat.

A node of a CUDA graph (whose t0 is shorter where its launch overlaps the kernel before) runs after its launch, so

    time = launches * t0 + max(bytes / BW(bytes), flops / peak)

On a CPU the two terms add: a core that loads and stores does not bring in cache lines meanwhile (the ECM model of
Treibig and Hager, https://arxiv.org/abs/0905.0792). What was measured as a whole, ATen's calls, is not taken apart.

An eager CUDA launch is queued by the host while the device still works, so there only the slower of the two shows
(the launch is counted once, on one side or the other):

    time = max(launches * t0_host, launches * t0_graph + max(bytes / BW(bytes), flops / peak))

What else a kernel waits for on CUDA is in :mod:`fuseplan.costmodel.terms`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuseplan.costmodel.device import Calibration, DeviceSpec, Mode
from fuseplan.costmodel.devices import ByDevice
from fuseplan.costmodel.terms import RooflineTerms, calibrated, transfer_us, with_gpu_terms
from fuseplan.costmodel.work import Work

_IDENTITY = Calibration()
#: Modes without a host in the loop.
_REPLAYED: tuple[Mode, ...] = ("graph", "overlapped", "early")
#: Bytes of a row that one multiprocessor keeps in registers between two passes.
_HELD_BYTES = 128 * 2**10
#: Uses of a weight between which other copies are used when a kernel is timed: all of them share the cache.
_ROTATION = 256


def predict(work: Work, spec: DeviceSpec, mode: Mode, *, backend: str | None = None) -> float:
    """Predicted microseconds of a kernel (or of a chain whose ``Work`` was summed), by the calibration of ``backend``.

    DeviceSpecError where the device has no such mode, or no measured peak for a unit the work needs.
    """
    factors = spec.calibrations.get(backend or "", _IDENTITY).factors(work.call)
    terms = calibrated(roofline_terms(work, spec, mode), factors)
    # A calibration fitted elsewhere must not promise more than the hardware has shown.
    return max(terms.time_us, lower_bound(work, spec, mode))


def lower_bound(work: Work, spec: DeviceSpec, mode: Mode, seen_gbps: float = 0.0) -> float:
    """Microseconds that no kernel doing ``work`` can beat, as far as measurements tell; ``seen_gbps``: memory was read
    at this speed later than ``spec`` was measured.

    Every term takes its ideal value: the shortest launch seen, the best bandwidth of any pattern at this footprint
    or a larger one, the highest rate of every unit with all units busy at once, and no byte read twice.
    """
    launch_us, host_us = _launch_us(work, spec, mode, best=True)
    memory_us = transfer_us(work.dram_bytes, max(spec.bandwidth.ideal_gbps(work.dram_bytes), seen_gbps))
    flops = dict(work.flops)
    if work.special and spec.identity.is_gpu:
        flops["sfu"] = work.special
    compute_us = max((count / spec.peak(unit).best_per_s * 1e6 for unit, count in flops.items()), default=0.0)
    return RooflineTerms(launch_us, host_us, memory_us, compute_us).time_us


def roofline_terms(work: Work, spec: DeviceSpec, mode: Mode) -> RooflineTerms:
    """The uncalibrated terms of :func:`predict`; same arguments and errors."""
    threads = min(work.threads or spec.identity.cores, spec.identity.cores)
    launch_us, host_us = _launch_us(work, spec, mode, best=False)
    on_gpu = spec.identity.is_gpu
    times = None if on_gpu or mode != "eager" else spec.call_times(work.call)
    if times is not None:
        launch_us = work.launches * times.call_us
    elif not on_gpu:
        launch_us += work.more_results * spec.latency(mode).us
    if mode == "eager":  # a view is a call on the host, where the device has nothing to do
        views_us = work.views * spec.view_us
        launch_us, host_us = (launch_us, host_us + views_us) if on_gpu else (launch_us + views_us, host_us)
    cached_bytes = min(work.dram_bytes, spec.identity.l2_bytes or work.dram_bytes)
    footprint_bytes = work.dram_bytes + (work.gathered_bytes if on_gpu else 0.0)
    cold_gbps = _gbps(spec, max(footprint_bytes, work.cold_bytes * _ROTATION), threads)
    hot_us = transfer_us(work.dram_bytes - work.cold_bytes, _gbps(spec, footprint_bytes, threads))
    memory_us = hot_us + transfer_us(work.cold_bytes, cold_gbps)
    # What is read again is in registers on a GPU, or among what else is counted on a CPU.
    if not (0 < work.row_bytes <= _HELD_BYTES if on_gpu else work.lanes or times is not None):
        memory_us += transfer_us(work.l2_bytes, _gbps(spec, cached_bytes, threads))
    # Units share issue slots, so their times add; only the lower bound lets them overlap.
    share = threads / spec.identity.cores if not spec.identity.is_gpu else 1.0
    if times is not None:
        compute_us = times.us(work.elements) - times.call_us
    else:
        flops = {"fp32": work.lanes} if work.lanes and not on_gpu else work.flops
        compute_us = sum(count / (spec.peak(unit).per_s * share) * 1e6 for unit, count in flops.items())
    terms = RooflineTerms(launch_us, host_us, memory_us, compute_us, overlap=on_gpu or times is not None)
    return with_gpu_terms(terms, work, spec, mode) if on_gpu else terms


def _launch_us(work: Work, spec: DeviceSpec, mode: Mode, *, best: bool) -> tuple[float, float]:
    """Launch latency in series with the device's work, and the part the host pays in parallel with it."""

    def of(mode: Mode) -> float:
        latency = spec.latency(mode)
        return work.launches * (latency.best_us if best else latency.us)

    if not spec.identity.is_gpu or mode in _REPLAYED:
        return of(mode), 0.0
    return of("graph"), of(mode)


def _gbps(spec: DeviceSpec, footprint_bytes: float, threads: int) -> float:
    gbps = spec.bandwidth.gbps(footprint_bytes)
    if spec.thread_bandwidth is None or threads == spec.identity.cores:
        return gbps
    # Threads share the footprint evenly.
    return min(gbps, threads * spec.thread_bandwidth.gbps(footprint_bytes / threads))


#: Round numbers of the right magnitude: microseconds of a launch, fused and not, GB/s from memory and read again, 1e9
#: operations a second by unit.
_NOMINAL: ByDevice[tuple[float, float, float, float, Mapping[str, float]]] = ByDevice(
    cpu=(0.5, 2.0, 32.0, 64.0, {
        "fp32": 32.0, "sfu": 2.0, "fp64": 8.0, "fp32_matmul": 256.0, "fp16_matmul": 256.0, "bf16_matmul": 512.0,
    }),
    gpu=(2.0, 4.0, 4e3, 8e3, {
        "fp32": 3.2e4, "sfu": 4e3, "fp64": 1.6e4, "fp32_matmul": 3.2e4, "fp16_matmul": 5e5, "bf16_matmul": 5e5,
        "fp8_matmul": 1e6,
    }),
)


def nominal_us(work: Work, device_type: str, fused: bool = True) -> float:
    """Microseconds on an imaginary device: launches, dearer unless ``fused``, then the longer of bytes and arithmetic.

    It prices no plan, but orders partitions that measurement cannot tell apart: two tunes then choose the same one.
    """
    fused_us, unfused_us, gbps, reread_gbps, gops = _NOMINAL.on(device_type)
    memory_us = (work.dram_bytes / gbps + work.l2_bytes / reread_gbps) * 1e-3
    compute_us = sum(count / gops.get(unit, gops["fp32"]) for unit, count in work.flops.items()) * 1e-3
    return work.launches * (fused_us if fused else unfused_us) + max(memory_us, compute_us)
