"""Timing on a virtual clock: calibration, rotation, disturbed samples."""

from __future__ import annotations

import statistics

import pytest
import torch
from search_fakes import CLOCK, OPERANDS, VirtualTimer, disturbed_every, taking

from fuseplan.search.timing.contest import (
    contest,
    measurement_of,
    screen,
)
from fuseplan.search.timing.operands import cache_bytes, copy_with_layout, rotating_operands
from fuseplan.search.timing.timers import CpuTimer, CudaEagerTimer, CudaGraphTimer, HostTimer, timer_for


@pytest.mark.parametrize("us", [0.7, 12.0, 950.0, 40_000.0])
def test_screening_finds_the_time_of_one_call(us: float) -> None:
    found = screen(VirtualTimer(), taking(us), OPERANDS, seconds=1.0)
    assert found.median_us == pytest.approx(us, rel=1e-6)
    assert found.spread_us == pytest.approx(0, abs=1e-6 * us)
    assert found.regime == "eager"
    assert found.rounds == 0


def test_screening_stops_when_its_time_is_up() -> None:
    found = screen(VirtualTimer(), taking(200_000.0), OPERANDS, seconds=0.5)
    assert found.samples == 3


def test_batches_are_calibrated_and_operands_rotate() -> None:
    calls: list[tuple[torch.Tensor, ...]] = []
    sample = VirtualTimer().prepare(taking(100.0, calls=calls), OPERANDS)
    calls.clear()
    assert sample() == pytest.approx(100.0)
    # 10 timed calls of 100 us make the 1 ms batch, after one untimed call on the set before.
    assert len(calls) == 11
    values = [int(inputs[0]) for inputs in calls]
    assert values[1:] == [n % 3 for n in range(10)]
    assert values[0] == 2
    calls.clear()
    sample()
    assert int(calls[1][0]) == 10 % 3


def test_long_calls_are_timed_one_by_one() -> None:
    calls: list[tuple[torch.Tensor, ...]] = []
    sample = VirtualTimer().prepare(taking(5000.0, calls=calls), OPERANDS)
    calls.clear()
    for number in range(2):
        sample()
        assert [int(inputs[0]) for inputs in calls] == [*range(number + 1)]


@pytest.mark.parametrize(("us", "count"), [(700.0, 4), (3000.0, 2), (9000.0, 1)])
def test_a_gpu_that_waits_for_its_host_is_timed_over_several_calls(us: float, count: int) -> None:
    class Launched(VirtualTimer):
        least_calls = CudaEagerTimer.least_calls

    calls: list[tuple[torch.Tensor, ...]] = []
    sample = Launched().prepare(taking(us, calls=calls), OPERANDS)
    calls.clear()
    assert sample() == pytest.approx(us)
    assert len(calls) == count + (count > 1)  # and one before them, to have its code in the host's caches


def test_what_one_contestant_has_just_read_is_not_what_the_next_one_reads() -> None:
    calls: list[tuple[torch.Tensor, ...]] = []
    timer = VirtualTimer()
    samples = [timer.prepare(taking(5000.0, calls=calls), OPERANDS) for _ in range(2)]
    calls.clear()
    for number in range(2 * len(OPERANDS)):
        samples[number % 2]()
    assert [int(inputs[0]) for inputs in calls] == [*range(len(OPERANDS)), *range(len(OPERANDS))]


def test_summary_is_median_and_interquartile_range() -> None:
    samples = [5.0, 1.0, 9.0, 3.0, 7.0]
    found = measurement_of(samples, "eager", rounds=5, noise=0.02)
    assert found.median_us == statistics.median(samples)
    assert found.spread_us == 7.0 - 3.0
    assert (found.samples, found.rounds, found.noise) == (5, 5, 0.02)
    assert measurement_of([4.0], "graph").spread_us == 0.0


@pytest.mark.parametrize("period", [2, 3, 10])
def test_disturbed_samples_are_left_out(period: int) -> None:
    found = screen(VirtualTimer(), disturbed_every(2000.0, period), OPERANDS, seconds=0.05)
    assert found.median_us == pytest.approx(2000.0)
    assert found.spread_us == pytest.approx(0.0, abs=1e-6)


def test_calibration_survives_a_stall() -> None:
    # The second timed call is undisturbed: a batch of ten, not of one.
    sample = VirtualTimer().prepare(disturbed_every(100.0, 3), OPERANDS)
    before = CLOCK.now
    sample()
    assert CLOCK.now - before > 10 * 100e-6


def test_without_one_undisturbed_sample_the_faster_half_counts() -> None:
    times = iter([900.0] * 3 + [5000.0, 1000.0] * 1000)

    def run(*inputs: torch.Tensor) -> None:
        CLOCK.disturbances += 1
        CLOCK.advance(next(times))

    found = screen(VirtualTimer(), run, OPERANDS, seconds=0.02)
    assert found.median_us <= 1000.0 + 1e-6


def test_the_host_timer_counts_lost_processors() -> None:
    timer = HostTimer()
    before = timer.disturbances()
    assert timer.disturbances() >= before >= 0
    assert CudaGraphTimer().disturbances() == 0


def test_cold_operands_rotate_and_hot_ones_are_shared() -> None:
    hot, cold = torch.randn(1, 127), torch.randn(127, 3).t()
    sets = rotating_operands([hot, cold], [True, False], llc_bytes=10_000, limit_bytes=10**9)
    # 3 x 10,000 bytes over 1,524 bytes a set, and one more so that the first is cold again.
    assert len(sets) == 21
    assert len({id(s[0]) for s in sets}) == 1
    assert len({s[1].data_ptr() for s in sets}) == 21
    for _, copy in sets:
        assert copy.stride() == cold.stride()
        assert torch.equal(copy, cold)


def test_rotation_respects_memory_and_needs_cold_operands() -> None:
    big = torch.zeros(1000)
    assert len(rotating_operands([big], [False], 10**6, limit_bytes=10_000)) == 2
    assert len(rotating_operands([big], [False], 10**6, limit_bytes=10)) == 1
    assert len(rotating_operands([big], [True], 10**6, limit_bytes=10**9)) == 1
    assert len(rotating_operands([torch.zeros(1)], [False], 10**6, limit_bytes=10**9)) == 256
    assert len(rotating_operands([torch.zeros(0)], [False], 10**6, limit_bytes=10**9)) == 1


def test_copies_keep_broadcast_and_sliced_layouts() -> None:
    for tensor in (torch.arange(4.0).expand(3, 4), torch.arange(24.0).view(4, 6)[:, 1:3], torch.tensor(3)):
        copy = copy_with_layout(tensor)
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr()


def test_cache_size_prefers_the_target() -> None:
    assert cache_bytes(123) == 123
    assert cache_bytes(0) > 0


def test_each_device_and_regime_has_its_timer() -> None:
    assert type(timer_for("cpu", "eager")) is CpuTimer
    assert type(timer_for("cuda", "eager")) is CudaEagerTimer
    assert type(timer_for("cuda", "graph")) is CudaGraphTimer
    with pytest.raises(ValueError, match="regime 'graph' on cpu"):
        timer_for("cpu", "graph")


def test_the_host_timer_runs_on_a_real_clock() -> None:
    found = screen(HostTimer(), torch.neg, [(torch.zeros(64),)], seconds=0.01)
    assert found.median_us > 0


@pytest.mark.gpu
@pytest.mark.parametrize("regime", ["eager", "graph"])
def test_cuda_timers_rank_by_size(regime: str) -> None:
    small, large = (torch.zeros(n, device="cuda") for n in (1 << 10, 1 << 26))
    timer = timer_for("cuda", regime)
    runs = {"large": lambda x: large + x, "small": lambda x: small + x}
    result = contest(timer, runs, [(torch.ones(1, device="cuda"),)] * 3, seconds=0.2)
    assert result.winner("large", ["small"]) == "small"
    assert result.gain("small", "large") > 0.3


def test_samples_beside_an_unsteady_processor_count_as_disturbed() -> None:
    class Unsteady(VirtualTimer):
        """Steady at every other question after the first ones."""

        asked = 0

        def steady(self) -> bool:
            self.asked += 1
            return self.asked % 7 not in (3, 4)

    timer = Unsteady()
    slow_when = taking(2000.0)

    def run(*inputs: torch.Tensor) -> None:
        slow_when(*inputs)

    assert timer.observe(lambda: 5.0) == (5.0, True)  # questions 1 and 2
    assert timer.observe(lambda: 5.0) == (5.0, False)
    assert screen(timer, run, OPERANDS, seconds=0.05).median_us == pytest.approx(2000.0)
