"""The terms of the roofline, how they make a time, and how a calibration scales them.

On CUDA a kernel waits for more: in a prediction, never in the bound, in terms of what the probe measured.

* the instructions that follow one another before the first result (``steps``), in units of a tenth of the time that an
  elementwise kernel takes beyond an empty one;
* the slowest of many ways to the cache: a kernel on every multiprocessor waits longer than one on a few;
* results, which are written no faster than memory takes them, even where a cache has room for them;
* a row, which one multiprocessor has to load alone, at its share of the best bandwidth;
* special functions, which have a unit of their own that works beside the others; issuing one takes an instruction's
  time, at the measured fp32 rate.

Rows gathered from a table are hot on CUDA too, but not at the next call: those of another call take room in the cache
meanwhile, and count in the footprint that the bandwidth is read at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.work import Work

#: Dependent instructions in an elementwise kernel (two loads, an op, a store, and their addresses).
_ELEMENTWISE_STEPS = 10.0
#: What it adds, in the same unit, that a kernel keeps every multiprocessor busy, and the bytes for each from which on
#: it does: those of the smallest tiles.
_SPREAD_STEPS, _SPREAD_BYTES = 2.0, 1024.0


@dataclass(frozen=True)
class RooflineTerms:
    """The terms of the roofline, before they are combined.

    Attributes:
        launch_us: Launch latency that nothing hides; ``host_us``: on the host, in parallel with the device.
        latency_us: Dependent instructions that nothing hides; ``serial_us``: beside moving and arithmetic.
        write_us: Writing the results, beside ``memory_us``.
        overlap: Whether moving and arithmetic go on at the same time.
    """

    launch_us: float
    host_us: float
    memory_us: float
    compute_us: float
    latency_us: float = 0.0
    write_us: float = 0.0
    serial_us: float = 0.0
    overlap: bool = True

    @property
    def busy_us(self) -> float:
        """The longest of what goes on at the same time."""
        moving_us = max(self.memory_us, self.write_us)
        return max(moving_us, self.compute_us, self.serial_us) if self.overlap else moving_us + self.compute_us

    @property
    def time_us(self) -> float:
        return max(self.host_us, self.launch_us + self.latency_us + self.busy_us)


def calibrated(terms: RooflineTerms, factors: Sequence[float]) -> RooflineTerms:
    """The terms multiplied by the factors of a :class:`~fuseplan.costmodel.device.Calibration`."""
    launch, memory, compute, latency, write = factors
    return RooflineTerms(
        terms.launch_us * launch, terms.host_us * launch, terms.memory_us * memory, terms.compute_us * compute,
        terms.latency_us * latency, terms.write_us * write, terms.serial_us * latency,
        terms.overlap,
    )


def transfer_us(nbytes: float, gbps: float) -> float:
    """Microseconds of moving so many bytes."""
    return nbytes / gbps * 1e-3


def with_gpu_terms(terms: RooflineTerms, work: Work, spec: DeviceSpec, mode: Mode) -> RooflineTerms:
    """The terms of any device, and those of a CUDA device beside them."""
    graph = spec.launch.get("graph")
    launch = spec.launch.get("overlapped", graph) if mode in ("overlapped", "early") else graph
    step_us = (launch.us - launch.best_us) / _ELEMENTWISE_STEPS if launch is not None else 0.0
    cache_gbps = max(point.best_gbps for point in spec.bandwidth.points)
    # A fused multiply-add counts as two operations, and is one instruction.
    rate = spec.peaks["fp32"].per_s / 2 if "fp32" in spec.peaks else math.inf
    spread = min(1.0, work.dram_bytes / (spec.identity.cores * _SPREAD_BYTES))
    steps = work.steps + _SPREAD_STEPS * spread
    row_us = spec.identity.cores * transfer_us(work.row_loaded_bytes, cache_gbps)
    # Special functions, or issuing them beside the arithmetic.
    counted = work.flops.get("sfu", 0.0)
    special = work.special or counted
    special_us = 1e6 / spec.peak("sfu").per_s if special else 0.0
    other_us = terms.compute_us - counted * special_us
    return replace(
        terms,
        compute_us=max(special * special_us, other_us + special / rate * 1e6),
        latency_us=step_us * steps,
        write_us=transfer_us(work.written_bytes, spec.bandwidth.memory_gbps),
        serial_us=step_us * work.serial_steps + row_us,
    )
