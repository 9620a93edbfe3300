"""The partition of a region: which groups run its ops, found by measuring as few groups as possible.

Every unmeasured way to run some ops counts with its lower bound, so the cost of the cheapest cover is a lower bound
of the true optimum. Only what such a cover uses is worth measuring; measuring raises its cost, and another cover may
become the cheapest. When the cheapest cover is all measured it is optimal, though most groups were never compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fuseplan.planner.implementations.choices import Choice, RegionProblem
from fuseplan.planner.partition.cover import Cover, CoverProblem, Option, solve_cover


class Prices(Protocol):
    """What a choice costs, in seconds."""

    def bound_s(self, choice: Choice) -> float:
        """No measurement of the choice comes out lower. Infinite for one that must not be chosen."""
        ...

    def measure_s(self, choices: Sequence[Choice]) -> Sequence[float]:
        """Measured times, in order; infinite for a choice that fails (it is then never chosen)."""
        ...


@dataclass(frozen=True)
class Priced:
    """A choice with its cost: measured, or (``measured`` False) its lower bound or prediction."""

    choice: Choice
    cost_s: float
    measured: bool


@dataclass(frozen=True)
class GuidedResult:
    """A region's partition and what is known about it.

    Attributes:
        chosen: The partition, every op once.
        cost_s: Its cost.
        bound_s: No partition into the enumerated groups costs less (by the prices given).
        optimal: True when all costs of the last cover were measured.
        measured, enumerated: Choices measured, and choices there are.
        iterations: Covers solved on the way.
        unfused_s: Cost of running every op by itself, unfused.
        rejected: Measured choices that were not chosen, cheapest first; after them the full unfused partition is
            in ``unfused_s``.
    """

    chosen: tuple[Priced, ...]
    cost_s: float
    bound_s: float
    optimal: bool
    measured: int
    enumerated: int
    iterations: int
    unfused_s: float
    rejected: tuple[Priced, ...]

    @property
    def gap(self) -> float:
        """Share of the cost that a better partition might save at most."""
        return max(0.0, 1.0 - self.bound_s / self.cost_s) if self.cost_s > 0 else 0.0


def cover_problem(problem: RegionProblem, costs_s: Sequence[float]) -> CoverProblem:
    """The region's problem as one of numbers, with what each choice costs."""
    number = {op: at for at, op in enumerate(problem.ops)}
    options = tuple(
        Option(sum(1 << number[op] for op in choice.group.ops), cost)
        for choice, cost in zip(problem.choices, costs_s, strict=True)
    )
    return CoverProblem(len(problem.ops), options, problem.edges)


def predicted_partition(
    problem: RegionProblem,
    predict_s: Callable[[Choice], float],
    margin: float = 0.0,
) -> GuidedResult:
    """The cheapest partition by predicted costs; nothing is measured."""
    costs = [predict_s(choice) for choice in problem.choices]
    unfused_s = math.fsum(costs[: len(problem.ops)])
    cover = solve_cover(cover_problem(problem, costs), margin, unfused_s)
    chosen = tuple(Priced(problem.choices[at], costs[at], False) for at in cover.chosen)
    return GuidedResult(chosen, cover.cost_s, cover.bound_s, True, 0, len(costs), 1, unfused_s, rejected=())


def guided_partition(
    problem: RegionProblem,
    prices: Prices,
    tolerance: float = 0.01,
    margin: float = 0.0,
    max_measured: int | None = None,
    start: Sequence[Choice] = (),
) -> GuidedResult:
    """Find a partition whose measured cost is within ``tolerance`` of the least possible.

    Args:
        problem: The region.
        prices: Lower bounds, and the measurement. Every op is measured unfused first.
        tolerance: Relative distance from the lower bound at which to stop.
        margin: Partitions within ``(1 + margin)`` of the best measured one count as equally good (the noise of the
            measurements); of those the one with the fewest launches is taken, but none slower than unfused.
        max_measured: Choices to measure at most; the gap that is left then is in the result.
        start: Choices to measure before the first cover is solved; good ones let the loop stop sooner.

    Raises:
        ValueError: An op could not be measured unfused.
    """
    return _Guided(problem, prices).run(tolerance, margin, max_measured, start)


class _Guided:
    def __init__(self, problem: RegionProblem, prices: Prices) -> None:
        self.problem = problem
        self.prices = prices
        self.bounds = [prices.bound_s(choice) for choice in problem.choices]
        self.times: dict[int, float] = {}

    def run(
        self, tolerance: float, margin: float, max_measured: int | None, start: Sequence[Choice]
    ) -> GuidedResult:
        unfused = range(len(self.problem.ops))
        first = set(start)
        others = [at for at, choice in enumerate(self.problem.choices) if at not in unfused and choice in first]
        self._measure([*unfused, *others])
        unfused_s = math.fsum(self.times[at] for at in unfused)
        bound_s, exact, iterations = 0.0, False, 0
        while True:
            iterations += 1
            cover = self._solve([self.times.get(at, bound) for at, bound in enumerate(self.bounds)])
            bound_s = max(bound_s, cover.bound_s)
            unmeasured = [at for at in cover.chosen if at not in self.times]
            exact = not unmeasured
            if not unmeasured or self._best_measured().cost_s * (1 - tolerance) <= bound_s:
                break
            if max_measured is not None:
                unmeasured = unmeasured[: max(0, max_measured - len(self.times))]
            if not unmeasured:
                break
            self._measure(unmeasured)
        final = solve_cover(cover_problem(self.problem, self._measured_costs()), margin, unfused_s)
        return self._result(final, min(bound_s, final.cost_s), exact, iterations, unfused_s)

    def _measure(self, numbers: Sequence[int]) -> None:
        choices = [self.problem.choices[at] for at in numbers]
        for at, choice, time_s in zip(numbers, choices, self.prices.measure_s(choices), strict=True):
            failed = math.isnan(time_s) or math.isinf(time_s)
            if failed and at < len(self.problem.ops):
                raise ValueError(f"op {choice.group.ops[0]} has no unfused time: its measurement failed")
            self.times[at] = math.inf if failed else time_s

    def _solve(self, costs_s: Sequence[float]) -> Cover:
        return solve_cover(cover_problem(self.problem, costs_s), break_ties=False)

    def _measured_costs(self) -> list[float]:
        return [self.times.get(at, math.inf) for at in range(len(self.problem.choices))]

    def _best_measured(self) -> Cover:
        return self._solve(self._measured_costs())

    def _result(
        self, cover: Cover, bound_s: float, optimal: bool, iterations: int, unfused_s: float
    ) -> GuidedResult:
        def priced(at: int) -> Priced:
            return Priced(self.problem.choices[at], self.times[at], measured=True)

        others = sorted(self.times.keys() - set(cover.chosen), key=lambda at: (self.times[at], at))
        return GuidedResult(
            tuple(priced(at) for at in cover.chosen),
            cover.cost_s,
            bound_s,
            optimal,
            len(self.times),
            len(self.problem.choices),
            iterations,
            unfused_s,
            tuple(priced(at) for at in others),
        )
