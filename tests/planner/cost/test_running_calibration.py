"""Calibration during a tune: it follows the samples, only forwards in time, and never on too few."""

from __future__ import annotations

from dataclasses import replace

import pytest
from costmodel_samples import CPU

from fuseplan.costmodel.calibrate import Sample
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.implementations.aten import ATTENTION, UNFUSED


def samples(scale: float, count: int) -> list[Sample]:
    """Ops that take ``scale`` times what the uncalibrated model says."""
    works = [Work({"fp32": 1e4}, 1e4 * (number + 1), 0.0, 1) for number in range(count)]
    return [Sample(work, "eager", scale * predict(work, CPU, "eager")) for work in works]


def test_predictions_approach_what_was_measured() -> None:
    learner = RunningCalibration(CPU)
    for number, sample in enumerate(samples(3.0, 12)):
        learner.add(UNFUSED, str(number), sample)
    learner.update()
    assert learner.spec is not None
    probe = samples(3.0, 20)[-1]  # not one of the twelve
    before = predict(probe.work, CPU, "eager", backend=UNFUSED)
    after = predict(probe.work, learner.spec, "eager", backend=UNFUSED)
    assert before == pytest.approx(probe.measured_us / 3, rel=1e-6)
    assert after == pytest.approx(probe.measured_us, rel=0.1)


def test_too_few_samples_change_nothing() -> None:
    learner = RunningCalibration(CPU)
    for number, sample in enumerate(samples(3.0, 5)):
        learner.add(UNFUSED, str(number), sample)
    learner.update(final=True)
    assert learner.spec == CPU


def test_it_fits_again_when_the_samples_have_doubled() -> None:
    learner = RunningCalibration(CPU)

    def count() -> int:
        assert learner.spec is not None
        calibration = learner.spec.calibrations.get(UNFUSED)
        return calibration.samples if calibration is not None else 0

    counts = []
    for number, sample in enumerate(samples(2.0, 20)):
        learner.add(UNFUSED, str(number), sample)
        learner.add(UNFUSED, "0", samples(2.0, 1)[0])  # a choice that another region has, too
        learner.update()
        counts.append(count())
    assert sorted(set(counts)) == [0, 8, 16]
    learner.update(final=True)
    assert count() == 20


@pytest.mark.parametrize(("count", "scale"), [(11, 2.0), (12, 5.0), (24, 5.0)])
def test_a_small_tune_does_not_replace_what_a_larger_one_taught(count: int, scale: float) -> None:
    first = RunningCalibration(CPU)
    for number, sample in enumerate(samples(2.0, 12)):
        first.add(UNFUSED, str(number), sample)
    first.update(final=True)
    later = RunningCalibration(first.spec)
    for number, sample in enumerate(samples(5.0, count)):
        later.add(UNFUSED, str(number), sample)
    later.update(final=True)
    assert later.spec is not None
    probe = samples(scale, 30)[-1]
    found = predict(probe.work, later.spec, "eager", backend=UNFUSED)
    assert found == pytest.approx(probe.measured_us, rel=0.1)


def test_views_and_unprobed_devices_teach_nothing() -> None:
    learner = RunningCalibration(None)
    for number, sample in enumerate(samples(2.0, 10)):
        learner.add(UNFUSED, str(number), sample)
    learner.update(final=True)
    assert learner.spec is None
    learner = RunningCalibration(CPU)
    for number in range(10):
        learner.add(UNFUSED, str(number), Sample(Work(), "eager", 1.0))
    learner.update(final=True)
    assert learner.spec == CPU


def test_library_calls_of_one_name_have_factors_of_their_own() -> None:
    learner = RunningCalibration(CPU)
    for call, scale in (("sdpa.flash", 1.5), ("sdpa.math", 4.0), ("linear.cublaslt", 1.5)):
        for number, sample in enumerate(samples(1.0, 8)):
            work = replace(sample.work, call=call)
            learner.add(ATTENTION, f"{call} {number}", Sample(work, "eager", scale * sample.measured_us, family=call))
    learner.update(final=True)
    assert learner.spec is not None
    before = samples(1.0, 20)[-1]
    for call, scale in (("sdpa.flash", 1.5), ("sdpa.math", 4.0), ("linear.cublaslt", 1.5), ("merged.one", 1.5)):
        after = predict(replace(before.work, call=call), learner.spec, "eager", backend=ATTENTION)
        assert after == pytest.approx(scale * before.measured_us, rel=0.2)
