"""Contests on a virtual clock: interleaving, noise and acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from search_fakes import CLOCK, CPU, OPERANDS, FakeSubject, VirtualTimer, disturbed_every, taking

from fuseplan.search import policy
from fuseplan.search.timing import contest as contest_module
from fuseplan.search.timing.contest import Contest, contest, mean_contest, paired_noise, sum_of_contests
from fuseplan.search.timing.operands import MEMORY, memory_bytes, memory_read
from fuseplan.search.timing.sequence import Part
from fuseplan.search.workers import jobs

BENCH = jobs.Bench(CPU, VirtualTimer())


@pytest.fixture
def reads_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading memory takes 4 ms of the virtual clock, and no time."""
    monkeypatch.setattr(jobs, "memory_read", lambda cache_bytes: lambda *operands: CLOCK.advance(4_000.0))


def test_contest_interleaves_and_pairs() -> None:
    order: list[str] = []

    def named(name: str, us: float) -> Callable[..., None]:
        def run(*inputs: torch.Tensor) -> None:
            order.append(name)
            CLOCK.advance(us)

        return run

    runs = {"unfused": named("unfused", 4000.0), "default": named("default", 3000.0), "c": named("c", 2000.0)}
    result = contest(VirtualTimer(), runs, OPERANDS, seconds=0.0, twice="default")
    assert {name: len(samples) for name, samples in result.samples.items()} == dict.fromkeys(runs, 7)
    rounds = [order[-28:][n : n + 4] for n in range(0, 28, 4)]
    assert all(sorted(turn) == ["c", "default", "default", "unfused"] for turn in rounds)
    assert len({turn[0] for turn in rounds}) > 1
    assert result.noise == pytest.approx(0.0, abs=1e-9)
    assert result.gain("default", "unfused") == pytest.approx(0.25)
    assert result.gain("unfused", "default") == pytest.approx(-1 / 3)
    assert result.time("c").median_us == pytest.approx(2000.0)
    assert result.winner("default", ["c"]) == "c"


def test_rounds_are_bounded_by_time_and_number() -> None:
    slow = contest(VirtualTimer(), {"x": taking(50_000.0)}, OPERANDS, seconds=1.0)
    # Each round has x twice, 0.1 s.
    assert len(slow.samples["x"]) == pytest.approx(10, abs=1)
    quick = contest(VirtualTimer(), {"x": taking(1000.0)}, OPERANDS, seconds=100.0)
    assert len(quick.samples["x"]) == policy.MAX_ROUNDS


@pytest.mark.parametrize(("others", "rounds"), [
    ((2000.0,), 8),  # slower in all rounds
    ((500.0,), 8),  # faster
    ((2000.0, 500.0), 8),
    ((500.0, 500.0), 50),  # which of the two is the fastest?
    ((1000.0,), 50),  # alike
])
def test_a_run_ends_once_all_its_rounds_say_the_same(others: tuple[float, ...], rounds: int) -> None:
    def run_of(*args: object) -> int:
        runs = {"first": taking(1000.0, 0.01)} | {f"{at}": taking(us, 0.01) for at, us in enumerate(others)}
        found = contest_module.decisive(VirtualTimer(), runs, OPERANDS, 0.2, "first", None, *args)
        return len(found.samples["first"])

    assert run_of() == rounds if rounds == 8 else run_of() > 20
    if len(others) == 2:  # whoever does not ask for an order has it at once
        assert run_of(False) == 8


@given(st.lists(st.lists(st.sampled_from([0.9, 0.985, 1.0, 1.1]), min_size=4, max_size=4), min_size=1, max_size=3))
def test_a_run_is_settled_where_any_of_its_rounds_has_the_same_winner(rows: list[list[float]]) -> None:
    samples = {"first": (1.0,) * 4} | {f"{at}": tuple(row) for at, row in enumerate(rows)}
    found = Contest(samples, noise=0.0, regime="eager")
    others = [name for name in samples if name != "first"]
    winners = set()
    for at in range(4):
        alone = Contest({name: (own[at],) for name, own in samples.items()}, 0.0, "eager")
        winners.add(alone.winner("first", others))
    if found.settled("first"):
        assert winners == {found.winner("first", others)}


@pytest.mark.parametrize(("jitter", "steady"), [(0.01, True), (0.5, False)])
@pytest.mark.parametrize("us", [3_000.0, 100_000.0])
def test_whole_steps_run_until_their_gain_is_steady_or_time_is_up(
    us: float, jitter: float, steady: bool, reads_on_the_clock: None
) -> None:
    parts = {"slow": Part(FakeSubject(eager_us=2 * us, jitter=jitter)),
             "fast": Part(FakeSubject("other", eager_us=us, jitter=jitter))}
    began = CLOCK.now
    found = jobs.time_sides(BENCH, parts, {"unfused": ["slow"], "planned": ["fast"]}, ())
    low, high = found.gain_range("planned", "unfused")
    rounds = len(found.samples["planned"])
    assert low <= 2.0 <= high and rounds > policy.STEP_ROUNDS
    assert (high / low - 1 < policy.STEADY_SPREAD) is steady
    if not steady:
        assert rounds == policy.MAX_ROUNDS or CLOCK.now - began > policy.STEP_LIMIT_S


@pytest.mark.parametrize("cached", [False, True])
def test_memory_is_read_beside_whole_steps_that_come_from_it(cached: bool, reads_on_the_clock: None) -> None:
    parts = {name: Part(FakeSubject(name, eager_us=9_000.0)) for name in ("slow", "fast")}
    bench = replace(BENCH, target=replace(CPU, l2_bytes=0 if cached else 1))
    found = jobs.time_sides(bench, parts, {"unfused": ["slow"], "planned": ["fast"]}, ())
    assert (MEMORY in found.samples) is not cached
    if not cached:
        assert found.time(MEMORY).median_us == pytest.approx(4_000.0)


@pytest.mark.parametrize("l2_bytes", [0, 2**20, 2**26])
def test_what_is_read_is_more_than_caches_hold(l2_bytes: int) -> None:
    read = memory_read(l2_bytes)
    assert float(read()) == memory_bytes(l2_bytes) / 4 and memory_bytes(l2_bytes) > 2 * max(l2_bytes, 2**25)


def test_a_run_ends_once_all_its_rounds_say_the_same_though_something_disturbs_it() -> None:
    runs = {"unfused": disturbed_every(4000.0, 1), "fused": disturbed_every(1000.0, 1)}
    found = contest_module.decisive(VirtualTimer(), runs, OPERANDS, 20.0, "unfused")
    assert len(found.samples["fused"]) == 8 and found.accepts("fused", "unfused")


def test_long_samples_are_not_repeated() -> None:
    calls = list[tuple[torch.Tensor, ...]]()

    def disturbed(*inputs: torch.Tensor) -> None:
        calls.append(inputs)
        CLOCK.advance(100_000.0)
        CLOCK.disturbances += 1

    found = contest(VirtualTimer(), {"a": disturbed}, OPERANDS, seconds=0.45)  # no multiple of what a sample takes
    assert len(found.samples["a"]) <= policy.MIN_ROUNDS + 3
    assert len(calls) <= 2 * len(found.samples["a"]) + 12  # and to warm up and calibrate


def test_disturbed_rounds_of_whole_steps_count_and_do_not_make_the_run_longer() -> None:
    began = CLOCK.now
    runs = {"unfused": disturbed_every(40_000.0, 1), "planned": disturbed_every(20_000.0, 1)}
    found = contest(VirtualTimer(), runs, OPERANDS, 4.0, rounds=contest_module.Rounds(tries=1))
    assert 3.0 < CLOCK.now - began < 5.0 and len(found.samples["planned"]) > policy.MIN_ROUNDS


def contest_of(**samples: tuple[float, ...]) -> Contest:
    return Contest(samples, noise=0.02, regime="eager")


def test_a_gain_has_to_exceed_the_noise_and_one_percent() -> None:
    table = contest_of(a=(100.0,) * 5, b=(98.5,) * 5, c=(97.0,) * 5)
    assert table.threshold == 0.02
    assert not table.accepts("b", "a")
    assert table.accepts("c", "a")
    assert Contest(table.samples, 0.001, "eager").threshold == 0.01
    assert Contest(table.samples, 0.001, "eager").accepts("b", "a")


def test_a_gain_has_to_exceed_its_own_uncertainty() -> None:
    """Three of five rounds met an incumbent that something else slowed down, by different amounts."""
    table = contest_of(a=(100.0, 100.0, 160.0, 250.0, 900.0), b=(100.0,) * 5)
    assert table.gain("b", "a") > 0.3
    assert not table.accepts("b", "a")


def noisy_pair(ratio: float, noise: float) -> Contest:
    return Contest({"fused": (100.0,) * 5, "unfused": (100.0 * ratio,) * 5}, noise, "eager")


@pytest.mark.parametrize(
    ("ratio", "noise", "accepted", "undecided"),
    [
        (1.05, 0.1, False, False),  # alike, as far as a quiet run can tell
        (1.25, 0.3, False, True),
        (1.90, 1.03, False, True),
        (2.10, 1.03, True, False),
        (8.00, 1.03, True, False),  # noise of 100 % and more: no gain is above that, and yet it is no question
        (0.60, 1.03, False, True),
        (0.45, 1.03, False, False),
        (0.97, 0.1, False, False),
    ],
)
def test_noise_hides_what_it_may_look_like_and_no_more(
    ratio: float, noise: float, accepted: bool, undecided: bool
) -> None:
    """An answer where the times differ by more than the noise; else none, if the noise is large."""
    table = noisy_pair(ratio, noise)
    assert table.accepts("fused", "unfused") is accepted
    assert table.undecided("fused", "unfused") is undecided
    assert table.undecided("unfused", "fused") is undecided


def test_samples_all_over_the_place_are_no_answer() -> None:
    table = contest_of(a=(100.0, 100.0, 160.0, 250.0, 900.0), b=(100.0,) * 5)
    assert table.undecided("b", "a")


@pytest.mark.parametrize(("quiet_after", "runs"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_run_without_an_answer_is_repeated_for_longer(
    quiet_after: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int]] = []

    def scripted(
        timer: object, contestants: object, operands: object, seconds: float, twice: str | None = None,
        max_rounds: int = policy.MAX_ROUNDS,
    ) -> Contest:
        asked.append((seconds, max_rounds))
        return noisy_pair(1.3, 0.05 if len(asked) >= quiet_after else 0.9)

    monkeypatch.setattr(contest_module, "contest", scripted)
    found = contest_module.decisive(VirtualTimer(), {"fused": taking(1), "unfused": taking(1)}, [], 0.5, "unfused")
    assert len(asked) == runs and asked == sorted(set(asked))
    assert found.undecided("fused", "unfused") is (quiet_after > runs)


@pytest.mark.parametrize(("gains", "runs", "found"), [
    ((0.3, 0.0, 0.0), 1, 0.3),  # far above the noise
    ((0.04, -0.03, -0.02), 2, -0.03),  # two runs without a gain
    ((-0.02, 0.03, 0.3), 2, -0.02),
    ((0.02, -0.3, 0.3), 2, 0.02),
    ((0.01, 0.08, 0.2), 3, 0.08),
    ((0.04, 0.08, 0.02), 3, 0.04),
    ((-0.2, 0.3, 0.3), 1, -0.2),  # far below
])
def test_the_middle_one_of_three_where_noise_hides_the_answer(
    gains: tuple[float, ...], runs: int, found: float
) -> None:
    made = [Contest({"a": (10.0,) * 7, "b": (10.0 * (1 - gain),) * 7, "c": (13.0,) * 7}, 0.05, "eager")
            for gain in gains]
    rest = iter(made)
    middle = contest_module.middle_of_three(lambda: next(rest), "a")
    assert middle.gain("b", "a") == pytest.approx(found)
    assert len(list(rest)) == 3 - runs


def test_a_long_call_is_run_once() -> None:
    """Three runs of a large last layer took a quarter of a minute, to say that it gains nothing."""
    rest = iter([Contest({"a": (9e4,) * 7, "b": (8.9e4,) * 7}, 0.01, "eager")])
    assert contest_module.middle_of_three(lambda: next(rest), "a").gain("b", "a") == pytest.approx(1 / 90)


def test_a_run_without_challengers_is_run_once() -> None:
    rest = iter([Contest({"a": (10.0,) * 7}, 0.05, "eager")])
    assert contest_module.middle_of_three(lambda: next(rest), "a").samples.keys() == {"a"}


def test_ties_keep_the_incumbent_and_then_the_first_in_order() -> None:
    table = contest_of(a=(100.0,) * 5, b=(90.0,) * 5, c=(89.0,) * 5, d=(70.0,) * 5, e=(99.0,) * 5)
    assert table.winner("a", ["e"]) == "a"
    assert table.winner("a", ["b", "c"]) == "b"
    assert table.winner("a", ["c", "b"]) == "c"
    assert table.winner("a", ["b", "c", "d"]) == "d"
    assert table.winner("a", []) == "a"


def test_disturbed_samples_of_a_round_are_repeated() -> None:
    runs = {"a": disturbed_every(3000.0, 3), "b": taking(2000.0)}
    result = contest(VirtualTimer(), runs, OPERANDS, seconds=0.1)
    assert max(result.samples["a"]) == pytest.approx(3000.0)
    assert result.noise == pytest.approx(0.0, abs=1e-9)
    assert result.gain("b", "a") == pytest.approx(1 / 3)
    never_alone = contest(VirtualTimer(), {"a": disturbed_every(3000.0, 1)}, OPERANDS, seconds=0.1)
    assert len(never_alone.samples["a"]) >= 5


def test_rounds_that_stay_disturbed_are_left_out() -> None:
    """A stall longer than the tries of one sample, every twentieth call."""
    calls = iter(range(10**9))

    def run(*inputs: torch.Tensor) -> None:
        stalled = next(calls) % 20 < 6
        CLOCK.disturbances += stalled
        CLOCK.advance(2000.0 + 8000.0 * stalled)

    result = contest(VirtualTimer(), {"a": run}, OPERANDS, seconds=0.3)
    assert len(result.samples["a"]) >= 5
    assert max(result.samples["a"]) == pytest.approx(2000.0)


def test_noise_grows_with_jitter_and_covers_an_offset() -> None:
    assert paired_noise([10.0] * 9, [10.0] * 9) == 0.0
    assert paired_noise([10.0] * 9, [9.0] * 9) == pytest.approx(0.1)
    calm = contest(VirtualTimer(), {"x": taking(2000.0, 0.01)}, OPERANDS, seconds=0.2)
    wild = contest(VirtualTimer(), {"x": taking(2000.0, 0.5)}, OPERANDS, seconds=0.2)
    assert calm.noise < wild.noise


def test_identical_contestants_are_never_told_apart() -> None:
    for _ in range(20):
        result = contest(
            VirtualTimer(), {"a": taking(3000.0, 0.3), "b": taking(3000.0, 0.3)}, OPERANDS, seconds=0.4
        )
        assert abs(result.gain("b", "a")) < 0.1
    exact = contest(VirtualTimer(), {"a": taking(3000.0), "b": taking(3000.0)}, OPERANDS, seconds=0.1)
    assert exact.winner("a", ["b"]) == "a"


def test_two_conditions_count_alike() -> None:
    hot = Contest({"a": (4.0, 6.0, 4.0, 6.0), "b": (10.0,) * 4, "unfused": (99.0,) * 4}, 0.03, "graph")
    cold = Contest({"b": (10.0, 10.0), "a": (20.0, 45.0)}, 0.04, "cold")
    both = mean_contest(hot, cold)
    # Pairs of the longer run's rounds are averaged: 5 and 5; sqrt(5 * 20) = 10, sqrt(5 * 45) = 15.
    assert both.samples == {"a": pytest.approx((10.0, 15.0)), "b": pytest.approx((10.0, 10.0))}
    assert both.noise == pytest.approx(0.025)  # of a square root of a product: half, added as independent errors
    assert both.regime == "graph"


def test_parts_of_a_whole_count_as_often_as_they_occur() -> None:
    layer = Contest({"a": (4.0, 6.0, 5.0, 5.0), "b": (10.0,) * 4, "else": (1.0,) * 4}, 0.03, "eager")
    last = Contest({"b": (20.0, 40.0), "a": (20.0, 40.0)}, 0.1, "eager")
    whole = sum_of_contests((layer, last), (8.0, 1.0))
    assert whole.samples == {"a": pytest.approx((60.0, 80.0)), "b": pytest.approx((100.0, 120.0))}
    # 0.03 of 40 and 0.1 of 30, as independent errors, over 70
    assert whole.noise == pytest.approx((1.2**2 + 3.0**2) ** 0.5 / 70)
    assert whole.accepts("a", "b") and not whole.conditions
    assert sum_of_contests((layer,), (8.0,)) is layer


def test_conditions_of_parts_are_those_of_the_whole() -> None:
    def part(launched: float, alone: float) -> Contest:
        return mean_contest(*(Contest({"a": (one,) * 3, "b": (10.0,) * 3}, 0.0, "eager") for one in (launched, alone)))

    whole = sum_of_contests((part(5.0, 12.0), part(10.0, 10.0)), (3.0, 2.0))
    assert [one.samples["a"] for one in whole.conditions] == [(35.0,) * 3, (56.0,) * 3]
    assert whole.time("b").median_us == 50.0 and not whole.accepts("a", "b")  # it loses in one of two conditions


@pytest.mark.parametrize(("cold_us", "wins"), [(10.0, True), (10.09, True), (10.2, False), (12.0, False)])
def test_a_mean_does_not_hide_a_loss_under_one_condition(cold_us: float, wins: bool) -> None:
    hot = Contest({"default": (10.0,) * 9, "tuned": (5.0,) * 9}, 0.0, "graph")
    cold = Contest({"default": (10.0,) * 9, "tuned": (cold_us,) * 9}, 0.0, "cold")
    both = mean_contest(hot, cold)
    assert both.gain("tuned", "default") > 0.2
    assert both.accepts("tuned", "default") is wins
    assert both.winner("default", ["tuned"]) == ("tuned" if wins else "default")
    noisy = mean_contest(hot, replace(cold, noise=0.3))
    assert noisy.accepts("tuned", "default")


@pytest.mark.parametrize("order", [("modest", "best"), ("best", "modest")])
def test_of_two_that_lose_nowhere_the_better_mean_wins(order: tuple[str, str]) -> None:
    """The best loses to a modest one under one condition, but not to the incumbent: it is no tie."""
    hot = Contest({"default": (10.0,) * 9, "modest": (10.0,) * 9, "best": (6.0,) * 9}, 0.0, "graph")
    cold = Contest({"default": (10.0,) * 9, "modest": (9.6,) * 9, "best": (10.0,) * 9}, 0.0, "cold")
    both = mean_contest(hot, cold)
    assert both.accepts("modest", "default") and both.accepts("best", "default")
    assert not both.accepts("best", "modest")
    assert both.winner("default", order) == "best"


@pytest.mark.parametrize(("steady_us", "winner"), [(5.2, "steady"), (5.9, "best")])
def test_of_almost_equal_means_the_one_that_loses_least_under_any_condition_wins(steady_us: float, winner: str) -> None:
    """The best mean is 5.2 % slower than somebody under one condition; another is at most 4 %, and hardly slower."""
    times = {"default": (10.0, 10.0), "cold": (9.0, 9.6), "steady": (steady_us, 9.7), "best": (5.0, 10.1)}
    hot, cold = (
        Contest({name: (pair[at],) * 9 for name, pair in times.items()}, 0.0, regime)
        for at, regime in enumerate(("graph", "cold"))
    )
    both = mean_contest(hot, cold)
    assert both.accepts("best", "default") and both.gain("best", "steady") > -0.01
    assert both.winner("default", ["cold", "best", "steady"]) == winner


def test_averages_cover_every_round() -> None:
    uneven = Contest({"a": (1.0, 2.0, 3.0, 4.0, 5.0)}, 0.0, "graph")
    other = Contest({"a": (1.0, 1.0)}, 0.0, "cold")
    assert mean_contest(uneven, other).samples["a"] == pytest.approx((1.5**0.5, 2.0))


@pytest.mark.parametrize(("launched_us", "safer"), [(11.0, True), (12.2, True), (13.0, False), (14.0, False)])
def test_who_loses_less_where_two_conditions_disagree_is_safer(launched_us: float, safer: bool) -> None:
    """One takes 10 and the other 13 us in a CUDA graph; launched, it is the other way round, by more or less."""
    launched = Contest({"one": (launched_us,) * 9, "other": (10.0,) * 9}, 0.0, "eager")
    graph = Contest({"one": (10.0,) * 9, "other": (13.0,) * 9}, 0.0, "graph")
    both = mean_contest(launched, graph)
    assert both.is_safer("one", "other") is safer
    assert both.is_safer("other", "one") is (launched_us == 14.0)
