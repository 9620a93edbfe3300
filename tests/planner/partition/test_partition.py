"""Covers and the guided loop against brute force over all partitions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import networkx as nx
import pytest
from graph_oracle import anything, make
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from ways import WAYS

from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.candidates import enumerate_candidates
from fuseplan.planner.groups.convex import bits, short_cycles
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.choices import Choice, RegionProblem, region_problem
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.partition import cover as cover_module
from fuseplan.planner.partition.cover import MOST_OPS, CoverProblem, Option, solve_cover
from fuseplan.planner.partition.guided_loop import GuidedResult, cover_problem, guided_partition, predicted_partition


def all_covers(problem: CoverProblem) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every acyclic exact cover with its cost, options by their first op."""

    def extend(left: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield chosen
            return
        for number, option in enumerate(problem.options):
            if option.mask & left & -left and not option.mask & ~left and math.isfinite(option.cost_s):
                yield from extend(left & ~option.mask, (*chosen, number))

    for chosen in extend((1 << problem.num_ops) - 1, ()):
        group_of = {op: number for number in chosen for op in bits(problem.options[number].mask)}
        links = nx.DiGraph((group_of[a], group_of[b]) for a, b in problem.edges if group_of[a] != group_of[b])
        if nx.is_directed_acyclic_graph(links):
            yield math.fsum(problem.options[number].cost_s for number in chosen), chosen


def random_problem(seed: int, num_ops: int, groups: int, ties: bool = False) -> CoverProblem:
    """Random groups of ops over a random order; groups need not be convex, so cycles abound."""
    rng = random.Random(seed)
    edges = tuple((a, b) for b in range(num_ops) for a in range(b) if rng.random() < 0.3)
    masks = {sum(1 << op for op in rng.sample(range(num_ops), rng.randint(1, min(4, num_ops)))) for _ in range(groups)}
    single = [1 << op for op in range(num_ops)]

    def cost(mask: int) -> float:
        return rng.choice([1e-6, 2e-6]) if ties else rng.uniform(0.5, 1.0) * mask.bit_count() ** 0.7 * 1e-6

    return CoverProblem(num_ops, tuple(Option(mask, cost(mask)) for mask in (*single, *sorted(masks))), edges)


@pytest.fixture(scope="module", params=["tried", "by HiGHS"])
def solver(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to solve what is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover_module, "MOST_OPS", MOST_OPS if request.param == "tried" else 0)
        yield


def test_halves_of_groups_are_no_cover(solver: None) -> None:
    """Half of each pair would run three ops at the cost of one and a half groups."""
    problem = CoverProblem(3, tuple(Option(mask, 1e-6) for mask in (0b001, 0b010, 0b100, 0b011, 0b110, 0b101)))
    found = solve_cover(problem)
    assert found.cost_s == pytest.approx(2e-6)
    assert sorted(problem.options[number].mask for number in found.chosen) in ([0b001, 0b110], [0b010, 0b101],
                                                                               [0b011, 0b100])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(0, 14))
def test_covers_are_optimal(solver: None, seed: int, num_ops: int, groups: int) -> None:
    problem = random_problem(seed, num_ops, groups)
    least = min(cost for cost, _ in all_covers(problem))
    cover = solve_cover(problem)
    assert cover.cost_s == pytest.approx(least, rel=1e-6)
    assert cover.bound_s == pytest.approx(least, rel=1e-6)
    assert cover.chosen in {chosen for _, chosen in all_covers(problem)}
    assert solve_cover(problem, break_ties=False).cost_s == pytest.approx(least, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 12), st.sampled_from([0.0, 0.05, 0.3]), st.booleans())
def test_ties_go_to_few_launches_and_then_to_early_options(
    solver: None, seed: int, num_ops: int, groups: int, margin: float, ties: bool
) -> None:
    problem = random_problem(seed, num_ops, groups, ties)
    covers = list(all_covers(problem))
    least = min(cost for cost, _ in covers)
    good = [chosen for cost, chosen in covers if cost <= least * (1 + margin) * (1 + 1e-9)]
    fewest = min(map(len, good))
    assert solve_cover(problem, margin).chosen == min(chosen for chosen in good if len(chosen) == fewest)


def test_ceiling_forbids_what_is_slower_than_unfused(solver: None) -> None:
    options = (Option(0b01, 1.0), Option(0b10, 1.0), Option(0b11, 2.01))
    problem = CoverProblem(2, options)
    assert solve_cover(problem, margin=0.05).chosen == (2,)
    assert solve_cover(problem, margin=0.05, ceiling_s=2.0).chosen == (0, 1)


def test_two_groups_that_wait_for_each_other_are_not_both_chosen(solver: None) -> None:
    # 0 -> 3 and 2 -> 1: {0, 1} and {2, 3} are each fine, together neither can go first.
    options = (*(Option(1 << op, 1.0) for op in range(4)), Option(0b0011, 0.5), Option(0b1100, 0.6))
    problem = CoverProblem(4, options, ((0, 3), (2, 1)))
    cover = solve_cover(problem)
    assert cover.chosen == (4, 2, 3)
    assert solve_cover(CoverProblem(4, options)).chosen == (4, 5)


def test_infinite_costs_are_never_chosen(solver: None) -> None:
    options = (Option(0b01, 1.0), Option(0b10, 1.0), Option(0b11, math.inf))
    assert solve_cover(CoverProblem(2, options)).chosen == (0, 1)
    with pytest.raises(ValueError, match="op 1 "):
        solve_cover(CoverProblem(2, (Option(0b01, 1.0), Option(0b10, math.inf), Option(0b11, 1.0))))


def test_empty_and_free_problems(solver: None) -> None:
    assert solve_cover(CoverProblem(0, ())).cost_s == 0.0
    free = solve_cover(CoverProblem(2, (Option(1, 0.0), Option(2, 0.0), Option(3, 0.0))))
    assert (free.chosen, free.bound_s) == ((2,), 0.0)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10))
def test_short_cycles_are_found_exactly_when_there_are_any(seed: int, num_ops: int) -> None:
    rng = random.Random(seed)
    group_of = [rng.randrange(4) for _ in range(num_ops)]
    edges = [(a, b) for b in range(num_ops) for a in range(b) if rng.random() < 0.3]
    links = nx.DiGraph((group_of[a], group_of[b]) for a, b in edges if group_of[a] != group_of[b])
    cycles = short_cycles(group_of, edges)
    assert bool(cycles) != nx.is_directed_acyclic_graph(links)
    for cycle in cycles:
        for hop, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert (hop.leave, following.entry) in edges
            assert group_of[hop.entry] == group_of[hop.leave] == hop.group


class FakeTimes:
    """True times from a seed, lower bounds some way below them; counts what is measured."""

    def __init__(self, problem: RegionProblem, seed: int, looseness: float = 0.6, failing: float = 0.0) -> None:
        rng = random.Random(seed)
        self.true: dict[Choice, float] = {}
        self.low: dict[Choice, float] = {}
        self.measured: list[Choice] = []
        for choice in problem.choices:
            growth = len(choice.group.ops) ** rng.choice([0.4, 0.7, 1.1])
            self.true[choice] = rng.uniform(0.8, 1.2) * 1e-6 * growth
            self.low[choice] = self.true[choice] * rng.uniform(looseness, 1.0)
            if choice.implementation.backends and rng.random() < failing:
                self.true[choice] = rng.choice([math.inf, math.nan])

    def bound_s(self, choice: Choice) -> float:
        return self.low[choice]

    def measure_s(self, choices: Sequence[Choice]) -> list[float]:
        self.measured += choices
        return [self.true[choice] for choice in choices]


def region_problems(seed: int, size: int, order: int = 0) -> list[RegionProblem]:
    graph = random_graph(seed, size, opaque=0.15, order=order)
    return [
        region_problem(GroupTable(graph, "fp32", "cpu"), region, enumerate_candidates(
            graph, region, anything, max_candidates=60), WAYS)
        for region in find_regions(graph)
    ]


def least_cost(problem: RegionProblem, times: FakeTimes) -> float:
    costs = [times.true[choice] for choice in problem.choices]
    finite = [math.inf if math.isnan(cost) else cost for cost in costs]
    return min(cost for cost, _ in all_covers(cover_problem(problem, finite)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10), st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([0.0, 0.3]))
def test_guided_loop_ends_near_the_true_optimum(seed: int, size: int, tolerance: float, failing: float) -> None:
    for problem in region_problems(seed, size, order=seed % 3):
        times = FakeTimes(problem, seed, failing=failing)
        result = guided_partition(problem, times, tolerance)
        least = least_cost(problem, times)
        assert least * (1 - 1e-6) <= result.cost_s <= least / (1 - tolerance) * (1 + 1e-6)
        assert result.bound_s <= least * (1 + 1e-6)
        assert result.gap <= tolerance + 1e-6
        assert len(times.measured) == len(set(times.measured)) == result.measured <= result.enumerated
        assert sorted(op for priced in result.chosen for op in priced.choice.group.ops) == sorted(problem.ops)
        assert result.cost_s == pytest.approx(math.fsum(priced.cost_s for priced in result.chosen))
        assert all(priced.cost_s == times.true[priced.choice] for priced in result.chosen)
        unfused = [times.true[choice] for choice in problem.choices if not choice.implementation.backends]
        assert result.unfused_s == pytest.approx(math.fsum(unfused))
        assert result.cost_s <= result.unfused_s
        assert {p.choice for p in (*result.chosen, *result.rejected)} == set(times.measured)
        assert guided_partition(problem, FakeTimes(problem, seed, failing=failing), tolerance) == result


def chain(length: int) -> tuple[DataflowGraph, RegionProblem]:
    rows = [(f"a{n}", "exp.default", (f"a{n - 1}" if n else "x",)) for n in range(length)]
    graph = make(*rows, outputs=(f"a{length - 1}",))
    (region,) = find_regions(graph)
    found = enumerate_candidates(graph, region, anything)
    return graph, region_problem(GroupTable(graph, "fp32", "cpu"), region, found, WAYS)


@pytest.mark.parametrize("works", [True, False])
def test_a_call_that_won_its_contest_stays_where_the_region_hardly_tells(works: bool) -> None:
    _, problem = chain(4)
    ops = len(problem.ops)
    call = Choice(problem.plain[0].group, WAYS.kernel)
    choices = (*problem.plain, call, *problem.choices[ops:])
    settled = replace(problem, choices=choices, won=frozenset([ops]))

    class Times:
        def bound_s(self, choice: Choice) -> float:
            return 0.0

        def measure_s(self, asked: Sequence[Choice]) -> list[float]:
            return [self.time_s(choice) for choice in asked]

        def time_s(self, choice: Choice) -> float:
            if choice == call:
                return 0.99 if works else math.inf
            return 1.0 if choice in problem.plain else 2.0 * len(choice.group.ops)

    chosen = {one.choice for one in guided_partition(settled, Times(), margin=0.05).chosen}
    alone = {one.choice for one in guided_partition(replace(settled, won=frozenset()), Times(), margin=0.05).chosen}
    assert (call in chosen) is works
    assert call not in alone


class Flat:
    """Every fused group takes ``fused_s``, an unfused op ``unfused_s``; bounds are ``tightness`` of that."""

    def __init__(self, fused_s: float, unfused_s: float = 1.0, tightness: float = 1.0) -> None:
        self.fused_s, self.unfused_s, self.tightness = fused_s, unfused_s, tightness

    def time_s(self, choice: Choice) -> float:
        return self.fused_s if choice.implementation.backends else self.unfused_s

    def bound_s(self, choice: Choice) -> float:
        return self.time_s(choice) * self.tightness

    def measure_s(self, choices: Sequence[Choice]) -> list[float]:
        return [self.time_s(choice) for choice in choices]


def test_most_groups_are_never_measured() -> None:
    _, problem = chain(8)
    assert len(problem.choices) == 8 + 36
    result = guided_partition(problem, Flat(1.0))
    assert [len(priced.choice.group.ops) for priced in result.chosen] == [8]
    assert (result.measured, result.enumerated, result.optimal) == (9, 44, True)
    assert result.unfused_s == 8.0
    assert [bool(priced.choice.implementation.backends) for priced in result.rejected] == [False] * 8


def test_not_fusing_is_an_answer() -> None:
    _, problem = chain(3)
    result = guided_partition(problem, Flat(fused_s=3.5))
    assert [bool(priced.choice.implementation.backends) for priced in result.chosen] == [False] * 3
    assert result.optimal


def test_measurement_budget_leaves_a_stated_gap() -> None:
    _, problem = chain(6)
    result = guided_partition(problem, Flat(2.0, tightness=0.1), max_measured=6)
    assert result.measured == 6
    assert not result.optimal
    assert result.cost_s == 6.0
    assert result.gap == pytest.approx(1 - 0.2 / 6.0)


def test_noise_margin_prefers_one_launch_but_never_above_unfused() -> None:
    _, problem = chain(2)
    fused = guided_partition(problem, Flat(1.0, unfused_s=0.505), tolerance=0.0, margin=0.02)
    assert [bool(priced.choice.implementation.backends) for priced in fused.chosen] == [True]
    slower = guided_partition(problem, Flat(1.01, unfused_s=0.5, tightness=0.9), tolerance=0.0, margin=0.02)
    assert [bool(priced.choice.implementation.backends) for priced in slower.chosen] == [False, False]


def test_failing_unfused_measurement_names_the_op() -> None:
    _, problem = chain(2)
    with pytest.raises(ValueError, match="op a0 has no unfused time"):
        guided_partition(problem, Flat(1.0, unfused_s=math.inf))


def test_predicted_partition_measures_nothing() -> None:
    _, problem = chain(4)
    result: GuidedResult = predicted_partition(problem, Flat(1.0).bound_s)
    assert (result.cost_s, result.measured, result.unfused_s, result.optimal) == (1.0, 0, 4.0, True)
    assert [priced.measured for priced in result.chosen] == [False]
