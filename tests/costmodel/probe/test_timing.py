"""The probe's clocks, driven by a clock that only moves when told to."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from fuseplan.costmodel.probe import timing
from fuseplan.costmodel.probe.timing import GraphTimer, HostCallTimer, TimeBudget, Timing, time_calls


class Clock:
    """Every call of ``work`` takes ``cost_us``; reading the time is free."""

    def __init__(self, cost_us: float) -> None:
        self.now_us = 0.0
        self.cost_us = cost_us
        self.calls = 0

    def work(self) -> None:
        self.calls += 1
        self.now_us += self.cost_us

    def perf_counter_ns(self) -> int:
        return round(self.now_us * 1e3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(2.0)
    monkeypatch.setattr(timing.time, "perf_counter_ns", clock.perf_counter_ns)
    return clock


def test_host_timer_averages_over_enough_calls(clock: Clock) -> None:
    sampler = HostCallTimer(sample_us=100.0, repeats=3).prepare(clock.work)
    before = clock.calls
    assert sampler(math.inf) == pytest.approx([2.0, 2.0, 2.0])
    assert clock.calls - before == 3 * 50  # 100 us / 2 us calls in each of 3 samples


def test_host_timer_cuts_a_stalled_batch_short(clock: Clock) -> None:
    sampler = HostCallTimer(sample_us=100.0, repeats=9).prepare(clock.work)
    clock.cost_us = 40.0  # 50 calls now take 2000 us; 4 * 100 * 9 = 3600 us are gone after two samples
    assert sampler(math.inf) == pytest.approx([40.0] * 3)


def test_host_timer_asks_a_busy_processor_no_longer_than_it_waits_for_samples(clock: Clock) -> None:
    """It never runs at full speed, and to find that out takes 2 ms each time: two of them are what a batch may take."""
    asked: list[float] = []

    def steady(limit_us: float) -> bool:
        asked.append(clock.now_us)
        clock.now_us += 2000.0
        return False

    sampler = HostCallTimer(sample_us=100.0, repeats=9, steady=steady).prepare(clock.work)
    assert sampler(math.inf) == pytest.approx([2.0] * 3)
    assert len(asked) == 4


def test_host_timer_counts_the_wait_for_the_device(clock: Clock) -> None:
    waits = []

    def finish() -> None:
        waits.append(clock.now_us)
        clock.now_us += 10.0

    sampler = HostCallTimer(sample_us=100.0, repeats=1, finish=finish, max_calls=10).prepare(clock.work)
    before = clock.calls
    # 10 calls of 2 us and one wait of 10 us inside the sample (the one before it is outside): 30 / 10.
    assert sampler(math.inf) == pytest.approx([3.0])
    assert clock.calls - before == 10
    assert waits


def test_timing_of_batches() -> None:
    # All samples sorted: 1 1 2 2 3 9; the faster half 1 1 2, median 1. Halves: (1 2 9): 1 2 -> 1.5; (1 2 3): 1.5.
    assert Timing.of([[9.0, 1.0, 2.0], [1.0, 2.0, 3.0]]) == Timing(1.0, 1.0, 0.0)
    # Batches 0 and 2 against batch 1: 2 and 3, whose faster half over all (2 2) is 2.
    assert Timing.of([[2.0], [3.0], [2.0]]) == Timing(2.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("batches", "disturbed"),
    [([[1.0, 1.0], [1.0, 1.0]], False), ([[1.0, 1.05], [1.0, 1.05]], False), ([[1.0], [2.0]], True)],
)
def test_disturbed_samples_are_noticed(batches: list[list[float]], disturbed: bool) -> None:
    assert Timing.of(batches).disturbed is disturbed


class ScriptedTimer:
    """Samplers that return one scripted batch after the other."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def prepare(self, call, limit_us):
        name, batches = call()

        def sampler(limit_us: float) -> list[float]:
            self.taken.append(name)
            return batches.pop(0)

        return sampler


def test_passes_interleave_and_repeat_only_what_was_disturbed() -> None:
    timer = ScriptedTimer()
    fractions: list[float] = []
    listening = TimeBudget(math.inf, report=lambda fraction, label: fractions.append(fraction))
    calm = [[1.0], [1.0]]
    shaky = [[5.0], [2.0], [2.0], [2.0], [2.0]]
    timings = time_calls({"calm": lambda: ("calm", calm), "shaky": lambda: ("shaky", shaky)}, timer, listening)
    # Third pass: the even half (5, 2) still says 2 and the odd half 2, so nothing more is taken.
    assert timer.taken == ["calm", "shaky", "calm", "shaky", "shaky"]
    assert timings["calm"] == Timing(1.0, 1.0, 0.0)
    assert timings["shaky"] == Timing(2.0, 2.0, 0.0)
    assert fractions == [0.25, 0.5, 0.75, 1.0]


def test_extra_passes_end() -> None:
    timer = ScriptedTimer()
    batches = [[float(2**number)] for number in range(20)]
    time_calls({"x": lambda: ("x", batches)}, timer)
    assert len(timer.taken) == 2 + 3


class FakeGraph:
    """Records the calls captured into it; a replay costs their time."""

    current: FakeGraph | None = None

    def __init__(self) -> None:
        self.nodes = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads go on using the device"
        FakeGraph.current = self

    def capture_end(self) -> None:
        FakeGraph.current = None

    def replay(self) -> None:
        FakeEvent.now_us += 3.0 * self.nodes  # every node takes 3 us


class FakeEvent:
    now_us = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_us = 0.0

    def record(self) -> None:
        self.at_us = FakeEvent.now_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at_us - self.at_us) * 1e-3  # milliseconds, as CUDA says


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


def test_graph_timer_divides_a_replay_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 4))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    warm_ups: list[int] = []

    def call() -> None:
        if FakeGraph.current is None:
            warm_ups.append(1)
        else:
            FakeGraph.current.nodes += 1

    graphs: list[int] = []
    real = timing.record_calls

    def counting(calls):
        graphs.append(len(calls))
        return real(calls)

    monkeypatch.setattr(timing, "record_calls", counting)
    sampler = GraphTimer(sample_us=300.0, repeats=4).prepare(call)
    assert sampler(math.inf) == pytest.approx([3.0] * 4)
    assert sampler(0.0) == pytest.approx([3.0])
    assert graphs == [10, 100]  # an estimate, then 300 us / 3 us calls
    assert warm_ups  # lazy initialisation happens outside the capture


# -- a limited time ---------------------------------------------------------------------------------------------------


def budget_of(clock: Clock, seconds: float) -> TimeBudget:
    return TimeBudget.of(seconds, lambda: clock.now_us * 1e-6)


def test_a_budget_counts_down_and_its_parts_end_within_it() -> None:
    now = 100.0
    budget = TimeBudget.of(10.0, lambda: now)
    half = budget.part(0.5, "half")
    assert budget.left_us() == pytest.approx(10e6) and half.left_us() == pytest.approx(5e6)
    assert budget.share_us(4) == pytest.approx(7.5e6)  # more than an even share
    assert budget.share_us(1) == pytest.approx(10e6)  # but not more than there is
    now = 106.0
    assert budget.left_us() == pytest.approx(4e6) and half.left_us() == 0.0
    half.note()
    half.note()
    assert budget.short == ["half"]


def test_without_a_budget_nothing_ends() -> None:
    assert TimeBudget(math.inf).part(0.1).share_us(1000) == math.inf


@pytest.mark.parametrize("cost_us", [2.0, 3e3, 1e5])
@pytest.mark.parametrize("asking_us", [0.0, 2e4])
def test_calls_are_timed_within_their_budget(clock: Clock, cost_us: float, asking_us: float) -> None:
    """However slow calls and questions are: what runs when the time is up is ended, and no more is begun but first
    samples. Here a call costs at most 2 to warm up, and 1 as a sample."""
    clock.cost_us = cost_us

    def steady(limit_us: float) -> bool:
        assert limit_us > 0
        clock.now_us += min(asking_us, limit_us)
        return False

    budget = budget_of(clock, 2.0)
    timings = time_calls(dict.fromkeys(range(7), clock.work), HostCallTimer(500.0, 9, steady=steady), budget=budget)
    assert [timing.typical_us for timing in timings.values()] == pytest.approx([cost_us] * 7)
    assert clock.now_us <= 2e6 + 7 * 3 * max(cost_us, 500.0) + asking_us
    assert bool(budget.short) == (clock.now_us >= 2e6)


def test_enough_time_changes_nothing(clock: Clock) -> None:
    calls = dict.fromkeys(range(5), clock.work)
    spent = []
    for budget in (TimeBudget(math.inf), budget_of(clock, 1.0)):
        began_us = clock.now_us
        assert time_calls(calls, HostCallTimer(100.0, 3), budget=budget)[4] == Timing(2.0, 2.0, 0.0)
        assert budget.short == []
        spent.append(clock.now_us - began_us)
    assert spent[0] == spent[1]


def test_without_time_the_first_calls_get_one_sample_and_the_others_none(clock: Clock) -> None:
    budget = budget_of(clock, 0.0).part(1.0, "memory bandwidth")
    timings = time_calls(dict.fromkeys(range(5), clock.work), HostCallTimer(2.0, 9), budget=budget, least=2)
    assert timings == {0: Timing(2.0, 2.0, 1.0), 1: Timing(2.0, 2.0, 1.0)}  # nothing confirms a single sample
    assert clock.calls == 2 * (2 + 1)
    assert budget.short == ["memory bandwidth"]


def test_one_batch_is_compared_with_itself() -> None:
    assert Timing.of([[1.0, 2.0]]).noise == pytest.approx(1.0)
    assert Timing.of([[2.0, 2.0, 2.0]]) == Timing(2.0, 2.0, 0.0)
