"""The yardstick on a scripted machine, and the nominal device."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fuseplan.costmodel.probe.timing import HostCallTimer
from fuseplan.costmodel.probe.yardstick import Yardstick, processor_yardstick
from fuseplan.costmodel.roofline import nominal_us
from fuseplan.costmodel.work import Work


class Machine:
    """Time passes as the job runs; ``factor`` says how much slower than at its best."""

    def __init__(self, jitter: float = 0.0) -> None:
        self.now = 0.0
        self.factor = 1.0
        self._jitter = jitter
        self._random = random.Random(0)

    def job(self) -> None:
        self.now += 10e-6 * self.factor * (1 + self._jitter * self._random.random())

    def yardstick(self) -> Yardstick:
        return Yardstick(self.job, lambda: self.now)


def test_a_slow_spell_shows_and_passes() -> None:
    machine = Machine(jitter=0.03)
    yardstick = machine.yardstick()
    assert all(yardstick.steady() for _ in range(50))
    machine.factor = 1.3
    assert not any(yardstick.steady() for _ in range(50))
    machine.factor = 1.0
    assert all(yardstick.steady() for _ in range(50))


def test_threads_that_wake_up_are_no_slow_spell() -> None:
    """After a rest the first jobs take half as long again."""
    machine = Machine()
    sleepy = 0

    def job() -> None:
        nonlocal sleepy
        machine.factor = 1.5 if sleepy else 1.0
        sleepy = max(0, sleepy - 1)
        machine.job()

    yardstick = Yardstick(job, lambda: machine.now)
    assert yardstick.steady()
    answers = []
    for jobs in (1, 3, 6, 9, 100):
        sleepy = jobs
        answers.append(yardstick.steady())
    assert answers == [True, True, True, False, False]


def test_a_first_slow_spell_is_corrected_when_it_ends() -> None:
    machine = Machine()
    machine.factor = 2.0
    yardstick = machine.yardstick()
    assert yardstick.steady()  # there is nothing better to compare with yet
    machine.factor = 1.0
    for _ in range(600):
        yardstick.steady()
    machine.factor = 2.0
    assert not yardstick.steady()


def test_a_machine_that_stays_slow_is_steady_in_the_end() -> None:
    machine = Machine()
    yardstick = machine.yardstick()
    yardstick.steady()
    machine.factor = 1.5
    assert not yardstick.steady()
    answers = [yardstick.steady() for _ in range(30_000)]
    assert not any(answers[:1000])
    assert all(answers[-1000:])


def test_one_freak_reading_does_not_become_the_reference() -> None:
    machine = Machine()
    yardstick = machine.yardstick()
    yardstick.steady()
    machine.factor = 0.5
    yardstick.steady()
    machine.factor = 1.0
    assert all(yardstick.steady() for _ in range(1000))


def test_it_answers_within_the_time_it_is_given() -> None:
    machine = Machine()
    machine.factor = 1000.0  # a reading takes 20 ms, and 10 more before it begins
    yardstick = machine.yardstick()
    assert not yardstick.steady(limit_s=0.1)  # it has nothing to compare with yet
    assert machine.now <= 0.1 * 1.5 + 0.03
    while not yardstick.steady(limit_s=0.1):  # but what it read counts the next time
        assert machine.now < 10.0
    machine.factor = 1500.0
    began = machine.now
    assert not yardstick.steady(limit_s=0.001)
    assert machine.now - began <= 0.045 + 1e-9  # one reading


def test_each_number_of_threads_has_its_own_yardstick() -> None:
    threads = torch.get_num_threads()
    ours = processor_yardstick()
    assert processor_yardstick() is ours
    try:
        torch.set_num_threads(threads + 1)
        assert processor_yardstick() is not ours
    finally:
        torch.set_num_threads(threads)
    assert isinstance(ours.steady(), bool)


def test_the_probe_leaves_unsteady_samples_out() -> None:
    answers = iter([True, True, False, False, True, True, True, True, True, True] + [True] * 100)
    times = iter([1.0, 1.0] + [1.0] * 3 + [7.0] * 1000)
    # Samples that long never run out of patience, however busy this machine is.
    timer = HostCallTimer(sample_us=1e9, repeats=3, max_calls=1, steady=lambda limit_us: next(answers))
    taken: list[float] = []
    object.__setattr__(timer, "_run", lambda call, calls: taken.append(next(times)) or taken[-1])
    assert len(timer._batch(lambda: None, 1, math.inf)) == 3
    assert len(taken) > 3
    never = HostCallTimer(sample_us=1.0, repeats=3, max_calls=1, steady=lambda limit_us: False)
    assert len(never.prepare(lambda: None)(math.inf)) >= 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nominal_costs_add_launches_to_the_longer_of_bytes_and_arithmetic(device: str) -> None:
    nothing = nominal_us(Work(launches=1), device)
    assert 0 < nothing < nominal_us(Work(launches=1), device, fused=False)
    assert nominal_us(Work(launches=3), device) == pytest.approx(3 * nothing)
    read = nominal_us(Work(dram_bytes=1e9, launches=1), device) - nothing
    assert nominal_us(Work(dram_bytes=2e9, launches=1), device) - nothing == pytest.approx(2 * read)
    assert nominal_us(Work({"fp32": 1.0}, dram_bytes=1e9, launches=1), device) == pytest.approx(read + nothing)
    assert nominal_us(Work({"sfu": 1e12}, launches=1), device) > nominal_us(Work({"fp32": 1e12}, launches=1), device)
    # 32 GB/s is 1e9 / 32e9 s on the CPU; 4 TB/s on the GPU.
    assert read == pytest.approx({"cpu": 1e6 / 32, "cuda": 1e6 / 4000}[device])
