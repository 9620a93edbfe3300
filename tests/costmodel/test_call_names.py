"""Calls by name: times that a probe measured, and factors that shrink to those of all calls where samples are few."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
from costmodel_samples import CPU, GPU
from held_out import predict_left_out
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.costmodel.calibrate import Sample, calibrate
from fuseplan.costmodel.device import Calibration, CallTimes, DeviceSpec, FamilyScale, Peak
from fuseplan.costmodel.roofline import predict, roofline_terms
from fuseplan.costmodel.work import Work
from fuseplan.search.store.rows import device_spec

NAMES = ("aten.mul.Tensor.float32", "aten.mul.Tensor.bfloat16", "aten.add.Tensor.float32", "aten.neg.default.float32")
#: An op, its type, and how many times as long it takes as the roofline says.
ODD, SLOWER = "aten.mean.dim.float32", 3.0


def measured(call: str, count: int, slower: float, spec: DeviceSpec = CPU, seed: int = 0) -> list[Sample]:
    """Calls of one name that take ``slower`` times what the uncalibrated model says."""
    rng = random.Random(seed)
    mode = "eager" if spec is CPU else "graph"
    works = [Work(dram_bytes=rng.choice((1e3, 3e6)) * rng.uniform(1, 4), launches=1, call=call) for _ in range(count)]
    return [Sample(work, mode, slower * predict(work, spec, mode), family=call) for work in works]


def everything(odd: int, spec: DeviceSpec = CPU) -> list[Sample]:
    """Many calls that take twice as long as the model says, and some of one op that take :data:`SLOWER` times that."""
    rest = [one for number, name in enumerate(NAMES) for one in measured(name, 10, 2.0, spec, number)]
    return rest + measured(ODD, odd, 2.0 * SLOWER, spec, 9)


@pytest.mark.parametrize("spec", [CPU, GPU])
def test_a_name_with_many_samples_has_its_own_factors_and_leaves_the_others_alone(spec: DeviceSpec) -> None:
    known = spec.with_calibration("unfused", calibrate(everything(12, spec), spec))
    for sample in everything(12, spec):
        found = predict(sample.work, known, sample.mode, backend="unfused")
        assert found == pytest.approx(sample.measured_us, rel=0.1)


def test_few_samples_move_a_name_part_of_the_way_more_of_them_further() -> None:
    work = Work(dram_bytes=6e6, launches=1, call=ODD)
    plain = predict(work, CPU, "eager")
    ratios = []
    for count in (0, 1, 2, 4, 12):
        known = CPU.with_calibration("unfused", calibrate(everything(count), CPU))
        ratios.append(predict(work, known, "eager", backend="unfused") / plain)
    assert ratios[0] == pytest.approx(2.0, rel=0.02)  # that of all others
    assert ratios == sorted(ratios)
    assert 2.2 < ratios[1] < 0.95 * 2.0 * SLOWER
    assert ratios[-1] == pytest.approx(2.0 * SLOWER, rel=0.05)


def test_an_unseen_name_is_predicted_as_all_are() -> None:
    known = calibrate(everything(12), CPU)
    common = dataclasses.replace(known, families={})
    work = Work(dram_bytes=1e6, launches=1, call="aten.tanh.default.float32")
    both = [CPU.with_calibration("unfused", one) for one in (known, common)]
    first, second = (predict(work, spec, "eager", backend="unfused") for spec in both)
    assert first == second


def test_the_longest_beginning_that_is_known_decides() -> None:
    known = Calibration(2.0, 2.0, 2.0, families={
        "sdpa": FamilyScale(1.0, 3.0, 9), "sdpa.flash": FamilyScale(5.0, 7.0, 4), "linear": FamilyScale(11.0, 13.0, 1),
    })
    assert known.factors("sdpa.flash") == (10.0, 14.0, 14.0, 7.0, 7.0)
    assert known.factors("sdpa.flash.folded") == known.factors("sdpa.flash")
    assert known.factors("sdpa.cudnn") == (2.0, 6.0, 6.0, 3.0, 3.0)
    for other in ("", "sdp", "sdpaflash", "merged.one"):
        assert known.factors(other) == (2.0, 2.0, 2.0, 1.0, 1.0)


def test_names_that_begin_alike_help_each_other() -> None:
    """An unmeasured type of an op is predicted as its measured one."""
    known = CPU.with_calibration("unfused", calibrate(everything(12), CPU))
    work = Work(dram_bytes=6e6, launches=1, call="aten.mean.dim.bfloat16")
    found = predict(work, known, "eager", backend="unfused")
    assert found == pytest.approx(2.0 * SLOWER * predict(work, CPU, "eager"), rel=0.1)


def test_what_is_left_out_of_a_fit_does_not_teach_its_own_factors() -> None:
    samples = everything(12)
    by_name = predict_left_out(samples, CPU, [sample.work.call.rsplit(".", 1)[0] for sample in samples])
    odd = [at for at, sample in enumerate(samples) if sample.work.call == ODD]
    ratios = [by_name[at] / samples[at].measured_us for at in odd]
    assert np.median(ratios) == pytest.approx(1 / SLOWER, rel=0.05)
    by_half = predict_left_out(samples, CPU, [str(at % 2) for at in range(len(samples))])
    assert np.median([by_half[at] / samples[at].measured_us for at in odd]) == pytest.approx(1.0, rel=0.1)


POINTS = st.tuples(st.integers(1, 10**6), st.floats(0.1, 1e4))


@given(st.lists(POINTS, min_size=1, max_size=5, unique_by=lambda point: point[0]))
def test_times_are_read_off_the_measured_ones(points: list[tuple[int, float]]) -> None:
    known = sorted((float(size), time_us) for size, time_us in points)
    known = [(size, max(us for at, us in known if at <= size)) for size, us in known]  # more takes no less
    times = CallTimes(tuple(known))
    for size, time_us in known:
        assert times.us(size) == pytest.approx(time_us)
    assert times.us(0) == times.call_us == known[0][1]
    sizes, expected = zip(*known, strict=True)
    for size in range(0, int(sizes[-1]), max(1, int(sizes[-1]) // 7)):
        assert times.us(size) == pytest.approx(float(np.interp(size, sizes, expected)))
    assert times.us(2 * sizes[-1]) >= times.us(sizes[-1])


@pytest.mark.parametrize("points", [(), ((1.0, 1.0), (1.0, 2.0)), ((1.0, 0.0),), ((-1.0, 1.0),)])
def test_times_that_nobody_measured_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError):
        CallTimes(points)


TIMED = dataclasses.replace(
    CPU, view_us=0.25, calls={"aten.mean.dim.float32": CallTimes(((64.0, 5.0), (1000.0, 7.0), (2000.0, 9.5)))}
)


def test_a_call_that_was_timed_takes_what_it_took() -> None:
    work = Work({"fp32": 1e5}, dram_bytes=10.0, launches=1, call=ODD, elements=1500.0, l2_bytes=1e9, views=2)
    found = predict(work, TIMED, "eager")
    assert found == pytest.approx(7.0 + 2.5 / 2 + 2 * 0.25)
    assert roofline_terms(work, TIMED, "eager").launch_us == pytest.approx(5.5)
    # Another type than the one that was timed; another op is priced by its arithmetic.
    assert predict(dataclasses.replace(work, call="aten.mean.dim.int64"), TIMED, "eager") == found
    other = dataclasses.replace(work, call="aten.mean.default.float32", flops={"fp32": 1e5})
    assert predict(other, TIMED, "eager") == predict(dataclasses.replace(other, call=""), TIMED, "eager")


def test_what_exceeds_the_cache_is_bound_by_memory_whatever_the_call() -> None:
    work = Work(dram_bytes=4e8, launches=1, call=ODD, elements=1500.0)
    assert predict(work, TIMED, "eager") == pytest.approx(5.0 + 4e8 / 50e9 * 1e6)


def test_a_timed_call_costs_nothing_of_that_on_cuda() -> None:
    spec = dataclasses.replace(GPU, calls=TIMED.calls)
    work = Work({"fp32": 1e5}, dram_bytes=1e6, launches=1, call=ODD, elements=1500.0)
    assert predict(work, spec, "graph") == predict(work, GPU, "graph")


def test_lanes_and_threads_price_a_kernel_on_cpus() -> None:
    # 1e6 instructions at 1e11 a second are 10 us on four threads, and 40 us on one; 1e4 bytes at 200 GB/s, 80 for one.
    work = Work({"sfu": 1e5}, dram_bytes=1e4, l2_bytes=1e9, launches=1, lanes=1e6, threads=9)
    assert predict(work, CPU, "kernel") == pytest.approx(1.0 + 10.0 + 0.05)
    assert predict(dataclasses.replace(work, threads=0), CPU, "kernel") == predict(work, CPU, "kernel")
    one = dataclasses.replace(work, threads=1)
    assert predict(one, CPU, "kernel") == pytest.approx(1.0 + 40.0 + 0.125)


def test_json_has_calls_and_families_and_older_specs_have_none() -> None:
    fitted = Calibration(1.1, samples=9, families={"aten.mul": FamilyScale(1.2, 0.9, 4)})
    spec = dataclasses.replace(TIMED, peaks={"fp32": Peak(1e11, 2e11)}).with_calibration("unfused", fitted)
    assert device_spec(json.loads(spec.to_json())) == spec
    older = json.loads(spec.to_json())
    del older["calls"], older["calibrations"]["unfused"]["families"]
    read = device_spec(older)
    assert read.calls == {}
    assert read.calibrations["unfused"] == dataclasses.replace(fitted, families={})
