"""Device specs with round numbers, so that a test can do the arithmetic in its head."""

from __future__ import annotations

import dataclasses

from curves import curve_of

from fuseplan.costmodel.curve import BandwidthCurve, BandwidthPoint
from fuseplan.costmodel.device import DeviceSpec, Latency, Peak
from fuseplan.costmodel.identity import DeviceIdentity

CPU = DeviceSpec(
    identity=DeviceIdentity("cpu", "test", 4, 1_000_000, 0),
    # 200 GB/s while 1 MB of cache holds the data, 50 GB/s from memory.
    bandwidth=BandwidthCurve((BandwidthPoint(1e6, 200.0, 250.0), BandwidthPoint(4e6, 50.0, 60.0))),
    launch={"eager": Latency(2.0, 1.5, ""), "kernel": Latency(1.0, 0.5, "")},
    peaks={"fp32": Peak(1e11, 2e11), "sfu": Peak(1e10, 4e10)},
    noise=0.0,
    measured_at="",
    versions={},
    thread_bandwidth=curve_of([(1e6, 80.0), (4e6, 30.0)]),
)
GPU = dataclasses.replace(
    CPU,
    identity=DeviceIdentity("cuda", "test", 100, 1_000_000, 0),
    launch={"eager": Latency(6.0, 5.0, ""), "kernel": Latency(4.0, 3.0, ""), "graph": Latency(1.0, 0.75, "")},
    thread_bandwidth=None,
)
#: A GPU whose launches can overlap.
OVERLAPPING = dataclasses.replace(GPU, launch={**GPU.launch, "overlapped": Latency(0.7, 0.5, "")})
