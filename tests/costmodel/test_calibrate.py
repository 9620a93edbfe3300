"""Calibration recovers planted factors, shrugs off outliers, and reports the error on kernels it did not see."""

from __future__ import annotations

import dataclasses
import random

import pytest
from costmodel_samples import CPU, GPU

from fuseplan.costmodel.calibrate import MIN_SAMPLES, Sample, calibrate
from fuseplan.costmodel.device import Calibration, DeviceSpec
from fuseplan.costmodel.roofline import calibrated, roofline_terms
from fuseplan.costmodel.work import Work

PLANTED = Calibration(launch_scale=1.5, memory_scale=1.3, compute_scale=2.0)


def samples(count: int, noise: float = 0.0, spec: DeviceSpec = CPU) -> list[Sample]:
    """Launch-, memory- and compute-bound kernels whose time is the planted model's, times ``1 +- noise``."""
    rng = random.Random(0)
    result = []
    for number in range(count):
        work = (
            Work(dram_bytes=rng.uniform(1e2, 1e4), launches=1),
            Work(dram_bytes=rng.uniform(1e6, 5e7), launches=1),
            Work({"fp32": rng.uniform(1e7, 1e9)}, dram_bytes=1e5, launches=1),
        )[number % 3]
        time_us = calibrated(roofline_terms(work, spec, "kernel"), PLANTED.factors("")).time_us
        result.append(Sample(work, "kernel", time_us * rng.uniform(1 - noise, 1 + noise)))
    return result


def factors(calibration: Calibration) -> tuple[float, float, float]:
    return calibration.launch_scale, calibration.memory_scale, calibration.compute_scale


@pytest.mark.parametrize("count", [6, 30])
def test_planted_factors_come_back(count: int) -> None:
    fitted = calibrate(samples(count), CPU)
    # The weak pull toward 1 costs a few tenths of a percent when samples are few.
    assert factors(fitted) == pytest.approx(factors(PLANTED), rel=0.01)
    assert fitted.samples == count
    assert fitted.error is not None and fitted.error < 0.01
    assert fitted.held_out_error is not None and fitted.held_out_error < 0.03


def test_outliers_do_not_bend_the_fit() -> None:
    clean = samples(30)
    for number in (3, 13, 22):  # three kernels of three kinds take ten times as long
        clean[number] = dataclasses.replace(clean[number], measured_us=clean[number].measured_us * 10)
    assert factors(calibrate(clean, CPU)) == pytest.approx(factors(PLANTED), rel=0.05)


def test_calibration_lowers_the_held_out_error() -> None:
    noisy = samples(30, noise=0.05)
    fitted = calibrate(noisy, CPU)
    # Uncalibrated, a third of the kernels is off by 1/1.5, a third by 1/1.3 and a third by 1/2.
    assert fitted.held_out_error is not None and 0.005 < fitted.held_out_error < 0.06


def test_held_out_error_shows_what_the_fit_hides() -> None:
    # Two launch-bound kernels, one memory-bound, one compute-bound. The fit sees all four; left out in turn, the two
    # loners are predicted with a factor of 1 instead of 1.3 and 2, so half of the held-out errors are near 1/4 and 1/2.
    fitted = calibrate(samples(4), CPU)
    assert fitted.error is not None and fitted.held_out_error is not None
    assert fitted.error < 0.01
    assert 0.05 < fitted.held_out_error < 0.25


def test_factors_that_no_sample_depends_on_stay_one() -> None:
    streaming = [
        Sample(Work(dram_bytes=size), "kernel", 2 * roofline_terms(Work(dram_bytes=size), CPU, "kernel").time_us)
        for size in (1e6, 2e6, 4e6, 8e6, 1.6e7)
    ]
    assert factors(calibrate(streaming, CPU)) == pytest.approx((1.0, 2.0, 1.0), rel=0.01)


@pytest.mark.parametrize("count", range(MIN_SAMPLES))
def test_too_few_samples_change_nothing(count: int) -> None:
    fitted = calibrate(samples(count), CPU)
    assert factors(fitted) == (1.0, 1.0, 1.0)
    assert fitted.held_out_error is None
    assert (fitted.error is None) == (count == 0)
    assert CPU.with_calibration("cpp", fitted).to_json()


def test_small_error_of_an_uncalibrated_sample_is_exact() -> None:
    work = Work(dram_bytes=1e6, launches=1)  # 1 + 1e6 / 200 GB/s = 6 us
    assert calibrate([Sample(work, "kernel", 8.0)], CPU).error == pytest.approx(0.25)


def test_short_kernels_do_not_bend_the_bandwidth_of_gpus() -> None:
    """Twenty kernels of little but launching, each a tenth off, and one factor that only they could suggest."""
    rng = random.Random(1)
    works = [Work(dram_bytes=rng.uniform(1e3, 4e4), launches=1) for _ in range(20)]
    short = [
        Sample(work, "graph", (1.0 + 0.25 * roofline_terms(work, GPU, "graph").memory_us) * rng.uniform(0.9, 1.1))
        for work in works
    ]
    assert calibrate(short, GPU).memory_scale == pytest.approx(1.0, abs=0.2)


def test_cuda_graphs_and_cold_bytes() -> None:
    works = [Work(dram_bytes=4e6, cold_bytes=share * 4e6, launches=1) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    cold = [Sample(work, "graph", 2 * roofline_terms(work, GPU, "graph").memory_us + 1.0) for work in works]
    assert calibrate(cold, GPU).memory_scale == pytest.approx(2.0, rel=0.05)


def test_all_factors_of_a_gpu_come_back() -> None:
    rng = random.Random(1)
    planted = Calibration(1.5, 1.3, 2.0, latency_scale=0.7, write_scale=1.4)
    made = []
    for number in range(40):
        work = (
            Work(dram_bytes=rng.uniform(1e2, 1e4), launches=1),
            Work(dram_bytes=rng.uniform(1e6, 5e7), launches=1),
            Work({"fp32": rng.uniform(1e7, 1e9)}, dram_bytes=1e5, launches=1),
            Work(dram_bytes=1e4, launches=1, steps=rng.uniform(50.0, 500.0)),
            Work(dram_bytes=1e6, launches=1, written_bytes=rng.uniform(5e5, 1e6)),
        )[number % 5]
        time_us = calibrated(roofline_terms(work, GPU, "graph"), planted.factors("")).time_us
        made.append(Sample(work, "graph", time_us, family=f"family {number % 7}"))
    fitted = calibrate(made, GPU)
    # The bandwidth was measured, and weighs as much as two of the forty.
    assert factors(fitted) == pytest.approx(factors(planted), rel=0.03)
    assert (fitted.latency_scale, fitted.write_scale) == pytest.approx((0.7, 1.4), rel=0.02)
    assert fitted.held_out_error is not None and fitted.held_out_error < 0.03
    assert fitted.held_out_p90 is not None and fitted.held_out_error <= fitted.held_out_p90 < 0.1
    assert fitted.held_out_spearman is not None and fitted.held_out_spearman > 0.99


def test_a_few_kinds_of_kernels_do_not_bend_the_bandwidth_of_gpus_however_many_they_are() -> None:
    rng = random.Random(1)
    works = [Work(dram_bytes=rng.uniform(1e6, 5e7), launches=1) for _ in range(200)]

    def memory_scale(share: float, slower: float) -> float:
        """The factor, where so many of all kernels take longer than moving their bytes takes."""
        made = [
            Sample(work, "graph", (slower if number < share * len(works) else 1.0) * roofline_terms(
                work, GPU, "graph").time_us * rng.uniform(0.98, 1.02))
            for number, work in enumerate(works)
        ]
        return calibrate(made, GPU).memory_scale

    assert memory_scale(0.2, 1.4) == pytest.approx(1.0, abs=0.05)
    assert memory_scale(1.0, 1.4) == pytest.approx(1.4, rel=0.05)  # all of them are another matter


def test_a_family_is_left_out_as_a_whole() -> None:
    # One family takes three times as long. Held out kernel by kernel, its own siblings would tell; as a whole, not.
    works = [Work(dram_bytes=1e6 * (number + 1), launches=1) for number in range(20)]
    made = [
        Sample(work, "kernel", (3 if number % 4 == 0 else 1) * roofline_terms(work, CPU, "kernel").time_us,
               family="odd" if number % 4 == 0 else f"family {number % 4}")
        for number, work in enumerate(works)
    ]
    fitted = calibrate(made, CPU)
    assert fitted.held_out_p90 == pytest.approx(2 / 3, rel=0.1)
    same = calibrate([dataclasses.replace(sample, family="one") for sample in made], CPU)
    assert same.held_out_error == calibrate([dataclasses.replace(one, family="") for one in made], CPU).held_out_error


def test_times_must_be_positive() -> None:
    with pytest.raises(ValueError, match="measured_us > 0"):
        calibrate([Sample(Work(), "kernel", 0.0)], CPU)
