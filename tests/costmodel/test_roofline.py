"""Roofline predictions and bounds, by hand and by property."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
from costmodel_samples import CPU, GPU, OVERLAPPING
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.costmodel.curve import BandwidthCurve, BandwidthPoint
from fuseplan.costmodel.device import Calibration, DeviceSpec, DeviceSpecError, Latency, Peak
from fuseplan.costmodel.identity import DeviceIdentity
from fuseplan.costmodel.roofline import lower_bound, predict, roofline_terms
from fuseplan.costmodel.work import FLOP_UNITS, Work

#: What a kernel on every multiprocessor of ``GPU`` (100, a kilobyte each) waits beyond one on a few: two of an
#: elementwise kernel's ten steps, which take 1 - 0.75 us.
SPREAD_US = 0.05


def test_an_overlapped_launch_is_shorter_where_it_was_measured() -> None:
    work = Work(dram_bytes=1e6, launches=1, steps=10.0)
    # 1e6 bytes / 200 GB/s = 5 us; ten steps take what an elementwise kernel does beyond an empty one.
    assert predict(work, OVERLAPPING, "graph") == pytest.approx(1.0 + 0.25 + 5.0 + SPREAD_US)
    assert predict(work, OVERLAPPING, "overlapped") == pytest.approx(0.7 + 1.2 * 0.2 + 5.0)
    assert lower_bound(work, OVERLAPPING, "overlapped") == pytest.approx(0.5 + 4.0)
    # Where each kernel lets the next start at once, launching takes what it took the empty kernels that did.
    assert predict(work, OVERLAPPING, "early") == pytest.approx(0.5 + 1.2 * 0.2 + 5.0)
    assert lower_bound(work, OVERLAPPING, "early") == lower_bound(work, OVERLAPPING, "overlapped")
    # Without the measurement it is a node like any other, and CPUs have none.
    for mode in ("overlapped", "early"):
        assert predict(work, GPU, mode) == predict(work, GPU, "graph")
        with pytest.raises(DeviceSpecError, match="graph"):
            predict(work, CPU, mode)


def test_memory_bound() -> None:
    work = Work({"fp32": 1e5}, dram_bytes=1e6, launches=1)
    # launch 1 us; 1e6 bytes / 200 GB/s = 5 us; 1e5 flops / 1e11 = 1 us; a CPU does one after the other.
    assert predict(work, CPU, "kernel") == pytest.approx(7.0)
    terms = roofline_terms(work, CPU, "kernel")
    assert (terms.launch_us, terms.host_us) == (1.0, 0.0)
    assert terms.memory_us == pytest.approx(5.0)
    assert terms.compute_us == pytest.approx(1.0)


def test_compute_bound_adds_the_units() -> None:
    result = predict(Work({"fp32": 1e6, "sfu": 1e5}, dram_bytes=1e6, launches=1), CPU, "kernel")
    # 1e6 / 1e11 = 10 us, and 1e5 / 1e10 = 10 us, besides 5 us of memory; 1 + 20 + 5 = 26.
    assert result == pytest.approx(26.0)


def test_launch_bound_counts_every_launch_once() -> None:
    result = predict(Work(dram_bytes=200.0, launches=3), CPU, "eager")
    # 3 * 2 us + 200 bytes / 200 GB/s = 6.001 us.
    assert result == pytest.approx(6.001)


def test_nothing_to_do_takes_no_time() -> None:
    assert predict(Work(), CPU, "eager") == 0.0
    assert lower_bound(Work(), CPU, "eager") == 0.0


def test_large_footprints_move_at_memory_bandwidth() -> None:
    # 8e6 bytes are past the curve: 50 GB/s, 160 us; + 1 us launch.
    assert predict(Work(dram_bytes=8e6, launches=1), CPU, "kernel") == pytest.approx(161.0)
    # 2e6 bytes: half way between the points on a log axis, sqrt(200 * 50) = 100 GB/s, 20 us.
    assert predict(Work(dram_bytes=2e6, launches=1), CPU, "kernel") == pytest.approx(21.0)


def test_cold_bytes_come_from_memory() -> None:
    work = Work(dram_bytes=1e6, cold_bytes=5e5, launches=1)
    # 5e5 hot at 200 GB/s = 2.5 us, 5e5 cold at 50 GB/s = 10 us; + 1 us launch.
    assert predict(work, CPU, "kernel") == pytest.approx(13.5)
    # 256 copies of 1e3 bytes fit the cache of 1e6, and 256 of 2e6 / 256 share it: sqrt(200 * 50) GB/s.
    assert predict(dataclasses.replace(work, cold_bytes=1e3), CPU, "kernel") == pytest.approx(6.0)
    some = dataclasses.replace(work, cold_bytes=2e6 / 256)
    hot_us, cold_us = (1e6 - 2e6 / 256) / 200e3, 2e6 / 256 / 100e3
    assert predict(some, CPU, "kernel") == pytest.approx(1 + hot_us + cold_us)


def test_each_result_after_the_first_costs_what_a_launch_does() -> None:
    work = Work(dram_bytes=200.0, launches=1)
    three = dataclasses.replace(work, more_results=2)
    assert predict(three, CPU, "kernel") == pytest.approx(3 * 1.0 + 0.001)
    # A chain makes what its kernels make; GPUs make tensors while they compute, and a bound knows no better way.
    assert predict(three + work, CPU, "kernel") == pytest.approx(4.002)
    assert predict(three, GPU, "kernel") == predict(work, GPU, "kernel")
    assert lower_bound(three, CPU, "kernel") == lower_bound(work, CPU, "kernel")


def test_reread_bytes_come_from_the_cache_when_they_fit() -> None:
    fits = predict(Work(dram_bytes=5e5, l2_bytes=2e5, launches=1), CPU, "kernel")
    # 5e5 / 200 = 2.5 us, re-read 2e5 / 200 = 1 us, + 1 us launch.
    assert fits == pytest.approx(4.5)
    large = predict(Work(dram_bytes=8e6, l2_bytes=2e6, launches=1), CPU, "kernel")
    # 8e6 / 50 = 160 us; the cache holds 1e6 bytes: 2e6 / 200 = 10 us; + 1.
    assert large == pytest.approx(171.0)


def test_fewer_threads_have_less_of_everything() -> None:
    def time_us(work: Work, threads: int) -> float:
        return predict(dataclasses.replace(work, threads=threads), CPU, "kernel")

    streaming = Work(dram_bytes=1e6, launches=1)
    # One thread: 80 GB/s, 12.5 us; a quarter of 1e11 flops/s, 40 us; + 1.
    assert time_us(dataclasses.replace(streaming, flops={"fp32": 1e6}), 1) == pytest.approx(53.5)
    assert time_us(streaming, 1) == pytest.approx(13.5)
    # Two: each streams 5e5 bytes at 80 GB/s, together 160 < 200: 6.25 us; + 1.
    assert time_us(streaming, 2) == pytest.approx(7.25)
    # Three would give 240, but the whole device does 200: 5 us; + 1.
    assert time_us(streaming, 3) == pytest.approx(6.0)
    assert time_us(streaming, 4) == time_us(streaming, 0) == time_us(streaming, 9)


def test_lower_bound_takes_ideal_values() -> None:
    work = Work({"fp32": 1e6, "sfu": 1e5}, dram_bytes=1e6, l2_bytes=1e9, launches=1)
    # launch 0.5; memory 1e6 / 250 = 4 us, nothing re-read; max(1e6 / 2e11, 1e5 / 4e10) = max(5, 2.5) = 5 us.
    assert lower_bound(work, CPU, "kernel") == pytest.approx(5.5)


def test_views_cost_the_host_a_call_each() -> None:
    work = Work(dram_bytes=200.0, launches=1, views=3)
    cpu, gpu = replace(CPU, view_us=1.5), replace(GPU, view_us=1.5)
    # On a CPU they come on top of 2 us + 0.001; a kernel of our own has none, and no bound counts them.
    assert predict(work, cpu, "eager") == pytest.approx(2.001 + 4.5)
    assert predict(work, cpu, "kernel") == predict(work, CPU, "kernel")
    assert lower_bound(work, cpu, "eager") == lower_bound(work, CPU, "eager")
    assert predict(work, CPU, "eager") == pytest.approx(2.001)  # not measured
    # A GPU works meanwhile: 6 us of the host's and 4.5 vanish in 161, and not in 1.001.
    assert predict(work, gpu, "eager") == pytest.approx(6.0 + 4.5)
    large = Work(dram_bytes=8e6, launches=1, views=3)
    assert predict(large, gpu, "eager") == predict(large, GPU, "eager")
    assert predict(work, gpu, "graph") == predict(work, GPU, "graph")


def test_queued_cuda_launches_hide_behind_the_device() -> None:
    small = Work(dram_bytes=200.0, launches=1)
    # The host needs 6 us for each call, the device 1 + 0.001.
    assert predict(small, GPU, "eager") == pytest.approx(6.0)
    large = Work(dram_bytes=8e6, launches=1)
    # The device needs 1 + 160 us, in which the host's 6 us vanish.
    assert predict(large, GPU, "eager") == pytest.approx(161.0 + SPREAD_US)
    assert predict(large, GPU, "kernel") == predict(large, GPU, "graph")
    # Lower bound: max(5, 0.75 + 8e6 / 60 GB/s).
    assert lower_bound(large, GPU, "eager") == pytest.approx(0.75 + 8e3 / 60)


def test_what_short_cuda_kernels_wait_for() -> None:
    plain = Work(dram_bytes=1e6, launches=1)  # 1 + 1e6 / 200 GB/s = 6 us, and spreading it

    def time_us(**more: float) -> float:
        return predict(dataclasses.replace(plain, **more), GPU, "graph") - SPREAD_US

    # An elementwise kernel's ten steps take what it takes beyond an empty kernel, 1 - 0.75 us.
    assert time_us(steps=20.0) == pytest.approx(6.5)
    assert time_us(serial_steps=400.0) == pytest.approx(1 + 10)  # beside the 5 us of memory
    # Results go to memory at 50 GB/s, though the cache would take them faster.
    assert time_us(written_bytes=1e6, dram_bytes=1.1e6) == pytest.approx(1 + 20)
    assert time_us(written_bytes=1e5) == pytest.approx(6)
    # One of 100 multiprocessors loads a row at 250 GB/s / 100.
    assert time_us(row_loaded_bytes=1e3) == pytest.approx(6)
    assert time_us(row_loaded_bytes=1e5) == pytest.approx(1 + 40)
    # A row in registers is not read again; one that is too long for them is, at 200 GB/s.
    assert time_us(row_bytes=1e3, l2_bytes=1e6) == pytest.approx(6)
    assert time_us(row_bytes=2e5, l2_bytes=1e6, dram_bytes=8e7) == pytest.approx(1 + 8e4 / 50 + 5)


def test_a_kernel_writes_no_faster_than_memory() -> None:
    """1e6 bytes in 5 us, of which 4e5 are written at 50 GB/s."""
    work = Work(dram_bytes=1e6, launches=1, written_bytes=4e5)
    assert predict(work, GPU, "graph") - SPREAD_US == pytest.approx(1 + 8)
    # Moving three times as slow, writing half as slow again.
    spec = GPU.with_calibration("triton", Calibration(memory_scale=3.0, write_scale=1.5))
    assert predict(work, spec, "graph", backend="triton") - SPREAD_US == pytest.approx(1 + max(15, 12))


def test_rows_gathered_before_take_room_in_the_cache() -> None:
    work = Work(dram_bytes=2e6, launches=1)
    gathered = dataclasses.replace(work, gathered_bytes=2e6)
    # Between 1e6 bytes at 200 GB/s and 4e6 at 50.
    assert predict(work, GPU, "graph") == pytest.approx(1 + 20 + SPREAD_US)
    assert predict(gathered, GPU, "graph") == pytest.approx(1 + 40 + SPREAD_US)


def test_cold_weights_wait_for_memory() -> None:
    work = Work(dram_bytes=1e6, cold_bytes=1e5, launches=1)
    # 9e5 / 200 GB/s + 1e5 / 50 GB/s.
    assert predict(work, GPU, "graph") == pytest.approx(1 + 4.5 + 2 + SPREAD_US)
    # 256 copies of 1000 bytes fit the cache of 1e6.
    assert predict(dataclasses.replace(work, cold_bytes=1e3), GPU, "graph") == pytest.approx(6 + SPREAD_US)


def test_a_kernel_on_many_multiprocessors_waits_for_the_slowest() -> None:
    def latency_us(dram_bytes: float) -> float:
        return roofline_terms(Work(dram_bytes=dram_bytes, launches=1), GPU, "graph").latency_us

    assert latency_us(1024 * 100) == latency_us(1e7) == pytest.approx(SPREAD_US)
    assert latency_us(1024 * 25) == pytest.approx(SPREAD_US / 4)
    assert latency_us(0.0) == 0.0


def test_special_functions_have_a_unit_of_their_own_on_gpus() -> None:
    def compute_us(fp32: float, sfu: float) -> float:
        work = Work({"sfu": sfu, "fp32": fp32}, dram_bytes=1e3, launches=1)
        return roofline_terms(work, GPU, "graph").compute_us

    # 1e5 of them at 1e10 a second, beside 2e5 or 2e6 operations at 1e11; issuing them takes 5e10 a second.
    assert compute_us(2e5, 1e5) == pytest.approx(10)
    assert compute_us(2e6, 1e5) == pytest.approx(2e6 / 1e11 * 1e6 + 1e5 / 5e10 * 1e6)


def test_gpus_need_their_own_number_of_special_functions() -> None:
    work = Work({"sfu": 8e5, "fp32": 1e5}, dram_bytes=1e3, launches=1)
    fewer = dataclasses.replace(work, special=1e5)
    # Eight on other devices, one at 1e10 a second here, and no more than 4e10 whatever happens.
    assert roofline_terms(work, GPU, "graph").compute_us == pytest.approx(80)
    assert roofline_terms(fewer, GPU, "graph").compute_us == pytest.approx(10)
    assert lower_bound(work, GPU, "graph") - lower_bound(fewer, GPU, "graph") == pytest.approx(20 - 2.5)
    assert predict(fewer, CPU, "kernel") == predict(work, CPU, "kernel")
    assert lower_bound(fewer, CPU, "kernel") == lower_bound(work, CPU, "kernel")


def test_what_only_predicts_changes_no_bound_and_no_cpu() -> None:
    plain = Work({"fp32": 1e5}, dram_bytes=1e6, launches=1)
    more = dataclasses.replace(
        plain, written_bytes=5e5, cold_bytes=5e5, row_bytes=1e5, steps=50.0, serial_steps=500.0, gathered_bytes=5e5,
        row_loaded_bytes=1e5,
    )
    assert lower_bound(more, GPU, "graph") == lower_bound(plain, GPU, "graph")
    assert predict(more, GPU, "graph") > predict(plain, GPU, "graph")
    on_cpus = dataclasses.replace(more, cold_bytes=0.0)  # weights are as cold there
    assert predict(on_cpus, CPU, "kernel") == predict(plain, CPU, "kernel")


def test_calibration_applies_to_its_backend_only() -> None:
    spec = CPU.with_calibration("cpp", Calibration(launch_scale=2.0, memory_scale=1.5, compute_scale=3.0))
    work = Work({"fp32": 1e5}, dram_bytes=1e6, launches=1)
    # 1 * 2 + 5 * 1.5 + 1 * 3 = 12.5; without: 7.
    assert predict(work, spec, "kernel", backend="cpp") == pytest.approx(12.5)
    assert predict(work, spec, "kernel", backend="triton") == pytest.approx(7.0)
    assert predict(work, spec, "kernel") == pytest.approx(7.0)


def test_no_calibration_promises_more_than_the_hardware() -> None:
    spec = CPU.with_calibration("cpp", Calibration(memory_scale=0.01, launch_scale=0.01))
    work = Work(dram_bytes=1e6, launches=1)
    # Lower bound: 0.5 + 1e6 / 250 GB/s = 4.5 us.
    assert predict(work, spec, "kernel", backend="cpp") == pytest.approx(4.5)


def test_errors_name_the_value() -> None:
    work = Work({"fp8_matmul": 1.0}, dram_bytes=10.0, launches=1)
    with pytest.raises(DeviceSpecError, match="fp8_matmul"):
        predict(work, CPU, "kernel")
    with pytest.raises(DeviceSpecError, match="graph"):
        predict(Work(launches=1), CPU, "graph")


positive = st.floats(1e-3, 1e6)
pairs = st.tuples(positive, st.floats(1.0, 3.0))


@st.composite
def specs(draw: st.DrawFn) -> DeviceSpec:
    device_type = draw(st.sampled_from(["cpu", "cuda"]))

    def curve() -> BandwidthCurve:
        sizes = draw(st.lists(st.floats(1e2, 1e9), min_size=1, max_size=5, unique=True))
        points = [draw(pairs) for _ in sizes]
        return BandwidthCurve(
            tuple(BandwidthPoint(size, low, low * up) for size, (low, up) in zip(sorted(sizes), points, strict=True))
        )

    modes = ("eager", "kernel", "graph") if device_type == "cuda" else ("eager", "kernel")
    launches = {mode: draw(pairs) for mode in modes}
    peaks = {unit: draw(pairs) for unit in FLOP_UNITS}
    return DeviceSpec(
        identity=DeviceIdentity(device_type, "random", draw(st.integers(1, 64)), draw(st.integers(0, 10**8)), 0),
        bandwidth=curve(),
        launch={mode: Latency(best * up, best, "") for mode, (best, up) in launches.items()},
        peaks={unit: Peak(low * 1e9, low * up * 1e9) for unit, (low, up) in peaks.items()},
        noise=0.0,
        measured_at="",
        versions={},
        thread_bandwidth=curve() if device_type == "cpu" and draw(st.booleans()) else None,
        calibrations={"x": Calibration(
            *(draw(st.floats(0.05, 20.0)) for _ in range(3)),
            latency_scale=draw(st.floats(0.05, 20.0)), write_scale=draw(st.floats(0.05, 20.0)),
        )},
    )


works = st.builds(
    Work,
    flops=st.dictionaries(st.sampled_from(FLOP_UNITS), st.floats(0.0, 1e12)),
    dram_bytes=st.floats(0.0, 1e10),
    l2_bytes=st.floats(0.0, 1e10),
    launches=st.integers(0, 100),
    written_bytes=st.floats(0.0, 1e10),
    row_bytes=st.floats(0.0, 1e8),
    steps=st.floats(0.0, 1e3),
    serial_steps=st.floats(0.0, 1e5),
    gathered_bytes=st.floats(0.0, 1e10),
    special=st.floats(0.0, 1e12),
    row_loaded_bytes=st.floats(0.0, 1e8),
)


@given(specs(), works, st.floats(0.0, 1.0), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_lower_bound_never_exceeds_the_prediction(
    spec: DeviceSpec, work: Work, cold_share: float, one_thread: bool, is_calibrated: bool
) -> None:
    work = dataclasses.replace(work, cold_bytes=cold_share * work.dram_bytes, threads=int(one_thread))
    for mode in spec.launch:
        bound_us = lower_bound(work, spec, mode)
        assert 0.0 <= bound_us <= predict(work, spec, mode, backend="x" if is_calibrated else None) < math.inf
        # Without a calibration the terms alone respect the bound (up to rounding); nothing needs to be clipped.
        if not is_calibrated:
            assert roofline_terms(work, spec, mode).time_us >= bound_us * (1 - 1e-9)


@given(specs(), works, works)
@settings(max_examples=50, deadline=None)
def test_fusing_two_kernels_lowers_the_bound(spec: DeviceSpec, a: Work, b: Work) -> None:
    fused = dataclasses.replace(a + b, launches=min(a.launches, 1))
    # Fusion may move the sum to a slower cache level, so there is memory alone.
    spec = dataclasses.replace(spec, bandwidth=BandwidthCurve(spec.bandwidth.points[-1:]))
    apart_us = lower_bound(a, spec, "kernel") + lower_bound(b, spec, "kernel")
    if a.launches:
        assert lower_bound(fused, spec, "kernel") <= apart_us * (1 + 1e-9)
