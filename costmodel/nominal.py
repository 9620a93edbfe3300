"""The cost of work on an imaginary device of round numbers, the same in every process and on every machine.

It prices no plan. It puts partitions in an order that owes nothing to a measurement, so that of partitions which
measurement cannot tell apart, two tunes of the same model choose the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fuseplan.costmodel.work import Work


@dataclass(frozen=True)
class NominalDevice:
    """Round numbers of the right magnitude: microseconds a launch, GB/s, and 1e9 operations a second by unit."""

    fused_launch_us: float
    unfused_launch_us: float
    gbps: float
    reread_gbps: float
    gops: Mapping[str, float]


_DEVICES: Mapping[str, NominalDevice] = {
    "cpu": NominalDevice(0.5, 2.0, 32.0, 64.0, {
        "fp32": 32.0, "sfu": 2.0, "fp64": 8.0, "fp32_matmul": 256.0, "fp16_matmul": 256.0, "bf16_matmul": 512.0,
    }),
    "cuda": NominalDevice(2.0, 4.0, 4e3, 8e3, {
        "fp32": 3.2e4, "sfu": 4e3, "fp64": 1.6e4, "fp32_matmul": 3.2e4, "fp16_matmul": 5e5, "bf16_matmul": 5e5,
        "fp8_matmul": 1e6,
    }),
}


def nominal_us(work: Work, device_type: str, fused: bool = True) -> float:
    """Microseconds of ``work`` on the imaginary device: launches, then the longer of bytes and arithmetic.

    ``fused`` is False for an ATen op by itself, whose launch costs more.
    """
    device = _DEVICES[device_type]
    memory_us = (work.dram_bytes / device.gbps + work.l2_bytes / device.reread_gbps) * 1e-3
    compute_us = sum(count / device.gops.get(unit, device.gops["fp32"]) for unit, count in work.flops.items()) * 1e-3
    launch_us = device.fused_launch_us if fused else device.unfused_launch_us
    return work.launches * launch_us + max(memory_us, compute_us)
