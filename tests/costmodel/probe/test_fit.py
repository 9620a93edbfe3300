"""The fits that turn timings into a device spec, on timings made from known numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.costmodel.identity import DeviceIdentity
from fuseplan.costmodel.probe.fit import (
    RateTiming,
    StreamTiming,
    bandwidth_curve,
    fit_launches,
    fit_linear,
    peaks,
)
from fuseplan.costmodel.probe.measurements import Measurements
from fuseplan.costmodel.probe.probe import assemble
from fuseplan.costmodel.probe.timing import Timing

KIB, MIB = 2**10, 2**20
SIZES = [4 * KIB * 2**power for power in range(15)]  # 4 KiB to 64 MiB


def exact(time_us: float, best_share: float = 1.0, noise: float = 0.0) -> Timing:
    return Timing(time_us, time_us * best_share, noise)


def stream(pattern: str, size: int, t0_us: float, gbps: float, typical: bool = True) -> StreamTiming:
    return StreamTiming(pattern, size, exact(t0_us + size / gbps * 1e-3), typical)


@given(st.floats(0.05, 100.0), st.floats(1.0, 5000.0))
@settings(max_examples=40, deadline=None)
def test_linear_fit_recovers_t0_and_bandwidth(t0_us: float, gbps: float) -> None:
    # Sizes around t0 * gbps, where both terms matter: 1/16 to 16 times as much transfer as launch.
    sizes = [t0_us * gbps * 1e3 * 4.0**power for power in range(-2, 3)]
    fit = fit_linear(sizes, [t0_us + size / gbps * 1e-3 for size in sizes])
    assert fit.t0_us == pytest.approx(t0_us, rel=1e-3)
    assert fit.gbps == pytest.approx(gbps, rel=1e-3)
    assert fit.residual < 1e-3
    assert fit.points == 5


def test_linear_fit_ignores_an_outlier() -> None:
    sizes = [1e3, 2e3, 4e3, 8e3, 1.6e4, 3.2e4, 6.4e4]
    times = [1.0 + size * 1e-4 for size in sizes]  # 1 us + 10 GB/s
    times[3] *= 5.0
    fit = fit_linear(sizes, times)
    assert fit.t0_us == pytest.approx(1.0, rel=0.02)
    assert fit.gbps == pytest.approx(10.0, rel=0.02)


def test_flat_times_have_no_bandwidth() -> None:
    fit = fit_linear([256.0, 1024.0, 4096.0], [5.0, 5.0, 5.0])
    assert fit.gbps is None
    assert fit.t0_us == pytest.approx(5.0, rel=1e-3)


def test_falling_times_do_not_give_a_negative_bandwidth() -> None:
    fit = fit_linear([256.0, 1024.0, 4096.0], [5.2, 5.1, 5.0])
    assert fit.gbps is None
    assert 5.0 <= fit.t0_us <= 5.2
    assert 0 < fit.residual < 0.04


def test_residual_is_the_median_relative_deviation() -> None:
    rng = random.Random(1)
    sizes = [1e4 * 1.5**number for number in range(40)]
    times = [(10.0 + size * 1e-4) * rng.choice([0.98, 1.02]) for size in sizes]
    assert fit_linear(sizes, times).residual == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize(("sizes", "times"), [([], []), ([1.0], [0.0]), ([1.0, 2.0], [1.0])])
def test_linear_fit_rejects_nonsense(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="fit_linear"):
        fit_linear(sizes, times)


def test_each_pattern_has_its_own_launch_latency() -> None:
    streams = [stream("neg", size, 1.0, 100.0) for size in SIZES] + [stream("add", size, 3.0, 100.0) for size in SIZES]
    typical, best = fit_launches(streams)
    assert typical["neg"].t0_us == pytest.approx(1.0, rel=1e-3)
    assert typical["add"].t0_us == pytest.approx(3.0, rel=1e-3)
    assert best["add"].t0_us == pytest.approx(3.0, rel=1e-3)
    assert typical["neg"].points == 5  # 4, 8, 16, 32, 64 KiB


def test_curve_removes_the_launch_and_drops_launch_bound_sizes() -> None:
    curve = bandwidth_curve([stream("neg", size, 1.0, 100.0) for size in SIZES])
    # Transfer is a fifth of the time from 0.25 us = 25,000 bytes on: 32 KiB is the first size that is kept.
    assert curve.points[0].footprint_bytes == 32 * KIB
    for point in curve.points:
        assert point.gbps == pytest.approx(100.0, rel=1e-2)
        assert point.best_gbps == pytest.approx(point.gbps)


def test_curve_takes_the_median_of_typical_patterns_and_the_best_of_all() -> None:
    streams = [
        one
        for size in SIZES
        for one in (
            stream("neg", size, 1.0, 90.0), stream("add", size, 1.0, 110.0), stream("read", size, 1.0, 300.0, False)
        )
    ]
    last = bandwidth_curve(streams).points[-1]
    assert last.gbps == pytest.approx(100.0, rel=1e-3)
    assert last.best_gbps == pytest.approx(300.0, rel=1e-3)


def test_best_samples_raise_the_ideal_only() -> None:
    streams = [StreamTiming("neg", size, exact(1.0 + size * 1e-5, best_share=0.8)) for size in SIZES]  # 100 GB/s
    last = bandwidth_curve(streams).points[-1]
    assert last.gbps == pytest.approx(100.0, rel=1e-3)
    assert last.best_gbps == pytest.approx(125.0, rel=1e-3)  # 100 / 0.8


def test_curve_of_launches_only_is_refused() -> None:
    with pytest.raises(ValueError, match="launch-bound"):
        bandwidth_curve([StreamTiming("neg", size, exact(5.0)) for size in SIZES[:3]])


def test_peaks_keep_cheap_operations_out_of_the_typical_rate() -> None:
    found = peaks(
        [
            RateTiming("sfu", 1e6, Timing(10.0, 8.0, 0.0)),  # 1e11 / s, at best 1.25e11
            RateTiming("sfu", 1e6, Timing(2.0, 1.0, 0.0), typical=False),  # at best 1e12
            RateTiming("fp32", 4e6, Timing(2.0, 2.0, 0.0)),
        ]
    )
    assert found["sfu"].per_s == pytest.approx(1e11)
    assert found["sfu"].best_per_s == pytest.approx(1e12)
    assert found["fp32"].per_s == found["fp32"].best_per_s == pytest.approx(2e12)


CPU_ID = DeviceIdentity("cpu", "test", 2, 4 * MIB, 0)
GPU_ID = DeviceIdentity("cuda", "test", 132, 4 * MIB, 0)
STREAMS = [stream("neg", size, 1.0, 100.0) for size in SIZES]
EAGER = {size: Timing(2.0 + size * 1e-5, 1.8 + size * 1e-5, 0.0) for size in (256, 4096, 16384)}
RATES = [RateTiming("fp32", 1e6, exact(1.0))]


def test_assembled_cpu_spec_without_a_launcher() -> None:
    spec = assemble(CPU_ID, Measurements(STREAMS, EAGER, RATES))
    assert spec.launch["eager"].us == pytest.approx(2.0, rel=1e-2)
    assert spec.latency("eager").best_us == pytest.approx(1.80256)  # the quickest call, not an extrapolation
    assert spec.launch["kernel"].us == spec.launch["eager"].us
    assert spec.latency("kernel").best_us == 0.0  # no claim about a launcher that was not measured
    assert "graph" not in spec.launch
    assert spec.thread_bandwidth is None
    assert set(spec.fits) == {"launch:neg", "eager"}


def test_noise_is_the_median_over_everything() -> None:
    eager = {size: Timing(2.0, 2.0, noise) for size, noise in zip((256, 4096, 16384), (0.1, 0.4, 0.3), strict=True)}
    rates = [RateTiming("fp32", 1e6, exact(1.0, noise=noise)) for noise in (0.2, 0.5)]
    streams = [stream("neg", size, 1.0, 100.0) for size in SIZES[-2:]]
    assert assemble(CPU_ID, Measurements(streams, eager, rates)).noise == pytest.approx(0.2)


def test_assembled_cuda_spec_with_a_launcher() -> None:
    spec = assemble(GPU_ID, Measurements(STREAMS, EAGER, RATES, kernel=Timing(0.5, 0.4, 0.0), graph_node=exact(0.6)))
    assert (spec.launch["kernel"].us, spec.latency("kernel").best_us) == (0.5, 0.4)
    assert spec.launch["graph"].us == pytest.approx(1.0, rel=1e-2)  # a streaming kernel's t0
    assert spec.latency("graph").best_us == 0.6  # an empty kernel's


def test_assembled_spec_keeps_one_threads_curve() -> None:
    single = [stream("neg", size, 1.0, 20.0) for size in SIZES]
    spec = assemble(CPU_ID, Measurements(STREAMS, EAGER, RATES, thread_streams=single))
    assert spec.thread_bandwidth is not None
    assert spec.thread_bandwidth.memory_gbps == pytest.approx(20.0, rel=1e-2)
    assert spec.bandwidth.memory_gbps == pytest.approx(100.0, rel=1e-2)
    assert spec.problems == ()


def test_threads_slower_than_one_are_a_problem_and_do_not_lower_the_curve() -> None:
    single = [stream("neg", size, 1.0, 200.0) for size in SIZES]
    spec = assemble(CPU_ID, Measurements(STREAMS, EAGER, RATES, thread_streams=single))
    assert spec.bandwidth.memory_gbps == pytest.approx(200.0, rel=1e-2)
    (problem,) = spec.problems
    assert problem.startswith("2 threads streamed at 0.50 times the bandwidth of one: other processes")
