"""What a kernel waits for on CUDA besides: in a prediction, never in the bound, in terms of what the probe measured.

* the instructions that follow one another before the first result (``steps``), in units of a tenth of the time that an
  elementwise kernel takes beyond an empty one;
* the slowest of many ways to the cache: a kernel on every multiprocessor waits longer than one on a few;
* what it asks the cache for, operands that rows share again and again, at the best bandwidth of any size and pattern;
* results, which are written no faster than memory takes them, even where a cache has room for them;
* where a kernel has parts whose blocks follow one another, these in each part by itself: one that waits for the cache
  does not overlap with another that waits for memory;
* a row, which one multiprocessor has to load alone, at its share of the best bandwidth, and to compute: nothing
  overlaps with that where there are few rows;
* instructions besides the arithmetic, at the measured fp32 rate. Special functions have a unit of their own, which
  works beside the others; issuing one takes an instruction's time.

Rows gathered from a table are hot on CUDA too (popular ones come back), but not at the next call: those of another call
take room in the cache meanwhile, and count in the footprint that the bandwidth is read at.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline_terms import Terms, transfer_us
from fuseplan.costmodel.work import Work

#: Dependent instructions in an elementwise kernel (two loads, an op, a store, and their addresses).
_ELEMENTWISE_STEPS = 10.0
#: What it adds, in the same unit, that a kernel keeps every multiprocessor busy, and the bytes for each from which on
#: it does: those of the smallest tiles.
_SPREAD_STEPS, _SPREAD_BYTES = 2.0, 1024.0


def with_gpu_terms(terms: Terms, work: Work, spec: DeviceSpec, mode: Mode) -> Terms:
    """The terms of any device, and those of a CUDA device beside them."""
    launch = spec.launch.get("overlapped" if mode == "early" else mode if mode == "overlapped" else "graph")
    launch = launch or spec.launch.get("graph")
    step_us = (launch.us - launch.best_us) / _ELEMENTWISE_STEPS if launch is not None else 0.0
    cache_gbps = max(point.best_gbps for point in spec.bandwidth.points)
    # A fused multiply-add counts as two operations, and is one instruction.
    rate = spec.peaks["fp32"].per_s / 2 if "fp32" in spec.peaks else math.inf
    spread = min(1.0, work.dram_bytes / (spec.identity.cores * _SPREAD_BYTES))
    steps = work.steps + _SPREAD_STEPS * spread
    row_us = spec.identity.cores * (transfer_us(work.row_loaded_bytes, cache_gbps) + work.row_instructions / rate * 1e6)
    parts = _parts(work, terms.memory_us, cache_gbps, spec.bandwidth.memory_gbps)
    moved_us = sum(memory_us for memory_us, _ in parts) if parts else terms.memory_us
    return replace(
        terms,
        memory_us=max(moved_us, transfer_us(work.requested_bytes, cache_gbps)),
        compute_us=_issued_us(work, spec, terms.compute_us, rate),
        latency_us=step_us * steps,
        write_us=transfer_us(work.written_bytes, spec.bandwidth.memory_gbps),
        serial_us=step_us * work.serial_steps + row_us,
        parts=parts if any(write_us for _, write_us in parts) or not work.written_bytes else (),
    )


def _issued_us(work: Work, spec: DeviceSpec, compute_us: float, rate: float) -> float:
    """The longer of the special functions and of issuing everything, those included; ``rate`` is per second."""
    counted = work.flops.get("sfu", 0.0)
    special = work.special or counted
    us = 1e6 / spec.peak("sfu").per_s if special else 0.0
    return max(special * us, compute_us - counted * us + (work.instructions + special) / rate * 1e6)


def _parts(work: Work, memory_us: float, cache_gbps: float, memory_gbps: float) -> tuple[tuple[float, float], ...]:
    """``Terms.parts``: of each the longer of moving and requesting, and writing.

    Each moves at the pace of ``memory_us`` for all bytes; what no part accounts for is one more.
    """
    if not work.traffic:
        return ()
    moved_bytes = sum(part.moved_bytes for part in work.traffic)
    us_per_byte = memory_us / max(work.dram_bytes, moved_bytes, 1.0)
    found = [
        (
            max(part.moved_bytes * us_per_byte, transfer_us(part.requested_bytes, cache_gbps)),
            transfer_us(part.written_bytes, memory_gbps),
        )
        for part in work.traffic
    ]
    rest_us = max(work.dram_bytes - moved_bytes, 0.0) * us_per_byte
    return (*found, (rest_us, 0.0))
