"""The feasible space and the strategies over it, against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_fakes import CPU, FakeBackend, muladd_ir

from fuseplan.kernels.ir.backend import Config, Tunable, config_key
from fuseplan.search.tune.space import Space, enumerate_space
from fuseplan.search.tune.strategy import Strategy


def space_of(sizes: tuple[int, ...], keep: set[tuple[int, ...]] | None = None) -> Space:
    """A space over parameters p0, p1, ... with choices 1, 2, 4, ...; only ``keep`` (positions) is feasible."""
    tunables = tuple(Tunable(f"p{n}", tuple(2**i for i in range(size))) for n, size in enumerate(sizes))
    points = itertools.product(*(range(size) for size in sizes))
    configs = [
        {f"p{n}": 2**i for n, i in enumerate(point)} for point in points if keep is None or point in keep
    ]
    return Space(tunables, tuple(configs))


def run(strategy: Strategy, times: dict[int, float | None], batch: int = 1) -> list[int]:
    asked: list[int] = []
    while proposed := strategy.ask(batch):
        assert len(proposed) <= batch
        asked += proposed
        for position in proposed:
            strategy.tell(position, times[position])
    return asked


def test_enumeration_is_the_filtered_product_with_the_default_first() -> None:
    backend = FakeBackend()
    space = enumerate_space(backend, muladd_ir(3, 127), CPU)
    expected = [
        {"tile": tile, "unroll": unroll}
        for tile in backend.tiles for unroll in backend.unrolls if tile * unroll <= 1024
    ]
    assert [dict(config) for config in space.configs] == expected
    assert space.default == {"tile": 16, "unroll": 1}


def test_a_default_in_the_middle_leads_and_appears_once() -> None:
    class Middle(FakeBackend):
        def default_config(self, ir, target):  # type: ignore[no-untyped-def]
            return {"unroll": 2, "tile": 64}

    space = enumerate_space(Middle(), muladd_ir(3, 127), CPU)
    assert space.default == {"tile": 64, "unroll": 2}
    keys = [config_key(config) for config in space.configs]
    assert len(set(keys)) == len(keys) == 19


def test_a_default_outside_the_choices_is_kept() -> None:
    class Odd(FakeBackend):
        def default_config(self, ir, target):  # type: ignore[no-untyped-def]
            return {"tile": 48, "unroll": 1}

    space = enumerate_space(Odd(), muladd_ir(3, 127), CPU)
    assert space.default["tile"] == 48
    assert len(space) == 20
    strategy = Strategy(space, trials=12, seed=0)
    assert len(set(run(strategy, dict.fromkeys(range(20), 1.0)))) == 12


def test_a_huge_space_is_thinned() -> None:
    huge = FakeBackend(tiles=tuple(range(1, 1001)), unrolls=tuple(range(1, 501)))
    space = enumerate_space(huge, muladd_ir(1, 1), CPU)
    assert 1 < len(space) <= 50_001


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_neighbours_are_one_feasible_step_away(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    points = list(itertools.product(*(range(size) for size in sizes)))
    keep = data.draw(st.sets(st.sampled_from(points), min_size=1))
    space = space_of(sizes, keep)
    listed = [point for point in points if point in keep]
    for position, point in enumerate(listed):
        expected = set()
        for axis in range(len(sizes)):
            line = [p for p in listed if p != point and all(p[a] == point[a] for a in range(len(sizes)) if a != axis)]
            below = [p for p in line if p[axis] < point[axis]]
            above = [p for p in line if p[axis] > point[axis]]
            expected |= {listed.index(max(below))} if below else set()
            expected |= {listed.index(min(above))} if above else set()
        assert set(space.neighbours(position)) == expected


def test_nearest_matches_brute_force_and_ignores_foreign_parameters() -> None:
    space = space_of((4, 4), {(0, 0), (3, 0), (1, 2), (3, 3)})
    assert space.nearest({"p0": 2, "p1": 4}) == space.find({"p0": 2, "p1": 4})
    assert dict(space.configs[space.nearest({"p0": 8, "p1": 4, "warps": 4})]) == {"p0": 8, "p1": 8}
    assert space.nearest({"stages": 3}) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_strategies_never_repeat_and_exhaustive_finds_the_minimum(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    space = space_of(sizes)
    raw = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 99)), min_size=len(space), max_size=len(space)))
    times = {n: None if t is None else float(t) for n, t in enumerate(raw)}
    strategy = Strategy(space, trials=len(space), seed=0, first=[len(space) - 1])
    asked = run(strategy, times, batch=data.draw(st.integers(1, 4)))
    assert sorted(asked) == list(range(len(space)))
    assert asked[0] == 0
    good = [(time, n) for n, time in times.items() if time is not None]
    assert strategy.best == (min(good)[1] if good else None)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("trials", [1, 5, 30])
def test_guided_spends_its_trials_without_repeating(trials: int, batch: int) -> None:
    space = space_of((5, 5, 5))
    times = {n: 10.0 + n % 7 for n in range(len(space))}
    strategy = Strategy(space, trials, seed=3, first=[7, 0, 7])
    asked = run(strategy, times, batch)
    assert len(asked) == len(set(asked)) == trials
    assert asked[:2] == [0, 7][:trials]


def test_coordinate_descent_ends_where_no_step_is_faster() -> None:
    space = space_of((6, 6))
    times: dict[int, float | None] = {}
    for n, config in enumerate(space.configs):
        x, y = math.log2(int(config["p0"])), math.log2(int(config["p1"]))
        times[n] = 5 + (x - 4) ** 2 + (y - 3) ** 2
    # Too few trials for the sampler: the walk 0,0 -> 4,3 must come from descent alone.
    strategy = Strategy(space, 20, seed=0)
    strategy._sampled_until = 0
    run(strategy, times)
    best = strategy.best
    assert best is not None
    assert dict(space.configs[best]) == {"p0": 16, "p1": 8}
    assert all(times[n] > times[best] for n in space.neighbours(best))  # type: ignore[operator]


def test_guided_search_crosses_failures_and_infeasible_points() -> None:
    keep = {(x, y) for x in range(6) for y in range(6) if (x, y) != (1, 0)}
    space = space_of((6, 6), keep)
    times: dict[int, float | None] = {}
    for n, config in enumerate(space.configs):
        x, y = round(math.log2(int(config["p0"]))), round(math.log2(int(config["p1"])))
        times[n] = None if (x, y) == (0, 1) else 5.0 + abs(x - 5) + abs(y - 5)
    strategy = Strategy(space, 24, seed=1)
    run(strategy, times)
    best = strategy.best
    assert best is not None
    assert times[best] == pytest.approx(5.0)


def test_same_seed_same_proposals() -> None:
    space = space_of((5, 5, 5))
    times = {n: 10.0 + (n * 37) % 101 for n in range(len(space))}
    first, second = (run(Strategy(space, 40, seed=9), dict(times)) for _ in range(2))
    assert first == second
    assert first != run(Strategy(space, 40, seed=10), dict(times))


def test_known_times_are_not_asked_again() -> None:
    space = space_of((3, 3))
    strategy = Strategy(space, 9, seed=0)
    for position in (0, 4, 5):
        strategy.tell(position, 3.0)
    assert sorted(strategy.ask(20)) == [1, 2, 3, 6, 7, 8]


def test_named_choices_work_with_the_sampler() -> None:
    tunables = (Tunable("order", ("rows", "cols", "tiles")), Tunable("n", tuple(range(1, 100))))
    configs = tuple({"order": order, "n": n} for order in tunables[0].choices for n in tunables[1].choices)
    space = Space(tunables, configs)
    times = {i: (1.0 if c["order"] == "cols" else 2.0) + abs(int(c["n"]) - 40) / 100 for i, c in enumerate(configs)}
    strategy = Strategy(space, 60, seed=0)
    asked = run(strategy, dict(times), batch=2)
    assert len(set(asked)) == 60
    assert strategy.best is not None
    assert configs[strategy.best]["order"] == "cols"


def tiles_and_modes() -> Space:
    tunables = (Tunable("mode", ("wait", "early", "late")), Tunable("tile", (1, 2, 4, 8)), Tunable("warps", (1, 2, 4)))
    names = [tunable.name for tunable in tunables]
    configs = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(tunable.choices for tunable in tunables))
    ]
    default = {"mode": "wait", "tile": 2, "warps": 2}
    return Space(tunables, (default, *(config for config in configs if config != default)))


def test_every_other_name_is_a_neighbour() -> None:
    space = tiles_and_modes()
    around = [dict(space.configs[position]) for position in space.neighbours(0)]
    assert [c["mode"] for c in around[:2]] == ["early", "late"]
    late = space.find({"mode": "late", "tile": 2, "warps": 2})
    assert late is not None
    assert [space.configs[n]["mode"] for n in space.neighbours(late)[:2]] == ["wait", "early"]
    near = {"mode": "late", "tile": 16, "warps": 4}
    by_hand = min(range(len(space)), key=lambda n: (
        (space.configs[n]["mode"] != "late") + 4 + abs(math.log2(int(space.configs[n]["warps"])) - 2), n
    ))
    assert space.nearest(near) == by_hand


def ratio(config: Config, mode: dict[str, float], tile: dict[int, float]) -> float:
    return 10.0 * mode[str(config["mode"])] * tile[int(config["tile"])] * (1.2 if config["warps"] != 2 else 1.0)


@pytest.mark.parametrize("batch", [1, 8])
def test_few_trials_end_at_the_best_steps_together(batch: int) -> None:
    space = tiles_and_modes()
    times = {
        n: ratio(config, {"wait": 1.0, "early": 0.7, "late": 0.8}, {1: 0.9, 2: 1.0, 4: 1.1, 8: 1.2})
        for n, config in enumerate(space.configs)
    }
    strategy = Strategy(space, 6, seed=0)
    asked = run(strategy, dict(times), batch)
    assert asked[0] == 0 and [space.configs[n]["mode"] for n in asked[1:3]] == ["early", "late"]
    assert len(asked) == 6
    assert strategy.best is not None and strategy.best == min(times, key=times.__getitem__)


def test_prospects_hold_whatever_steps_together_come_next() -> None:
    space = tiles_and_modes()
    strategy = Strategy(space, 6, seed=0)
    assert strategy.prospects() == []  # nothing was asked for yet
    asked = strategy.ask(8)
    prospects = strategy.prospects()
    changed = [{k for k, v in space.configs[n].items() if v != space.default[k]} for n in prospects]
    assert changed and all(len(names) > 1 for names in changed)
    assert not set(prospects) & set(asked) and len(set(prospects)) == len(prospects)
    # Whatever times come back, the kept trial is one of them.
    wanted = set()
    for gains in itertools.product((0.8, 1.2), repeat=len(asked) - 1):
        again = Strategy(space, 6, seed=0)
        assert again.ask(8) == asked
        for position, gain in zip(asked, (1.0, *gains), strict=True):
            again.tell(position, 10.0 * gain)
        wanted |= set(again.ask(8))
    assert wanted and wanted <= set(prospects)


def test_strategies_that_keep_no_trial_have_no_prospects() -> None:
    for strategy in (Strategy(space_of((3, 2)), 20, seed=0), Strategy(space_of((9, 9, 9)), 30, seed=0)):
        strategy.ask(8)
        assert strategy.prospects() == []


@pytest.mark.parametrize(
    ("mode", "tile", "hint"),
    [
        ({"wait": 1.0, "early": 1.3, "late": 1.2}, {1: 1.1, 2: 1.0, 4: 1.1, 8: 1.2}, ()),  # nothing gained
        ({"wait": 1.0, "early": 0.7, "late": 1.2}, {1: 1.1, 2: 1.0, 4: 1.1, 8: 1.2}, ()),  # one step gained: known
        ({"wait": 1.0, "early": 0.999, "late": 1.2}, {1: 0.998, 2: 1.0, 4: 1.1, 8: 1.2}, ()),  # not worth compiling
        ({"wait": 1.0, "early": 0.9, "late": 1.2}, {1: 0.9, 2: 1.0, 4: 1.1, 8: 0.4}, (8,)),  # a hint was better
    ],
)
def test_the_kept_trial_is_spent_on_a_promise_only(
    mode: dict[str, float], tile: dict[int, float], hint: tuple[int, ...]
) -> None:
    space = tiles_and_modes()
    first = [n for n, c in enumerate(space.configs) if c["tile"] in hint and c["mode"] == "wait" and c["warps"] == 4]
    times = {n: ratio(config, mode, tile) for n, config in enumerate(space.configs)}
    assert len(run(Strategy(space, 6, seed=0, first=first), dict(times), batch=8)) == 5


def test_the_kept_trial_survives_failures() -> None:
    space = tiles_and_modes()
    failing: dict[int, float | None] = dict.fromkeys(range(len(space)))
    assert len(run(Strategy(space, 6, seed=0), failing, batch=8)) == 5
    default_fails: dict[int, float | None] = {**dict.fromkeys(range(len(space)), 3.0), 0: None}
    assert len(run(Strategy(space, 6, seed=0), default_fails, batch=8)) == 5
