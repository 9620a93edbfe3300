"""The partition of a region: which groups run its ops, found by measuring as few groups as possible.

What is unmeasured counts with its lower bound, so the cheapest cover's cost is a lower bound of the optimum. Only what
such a cover uses is measured, which raises its cost, until the cheapest cover is all measured: then it is optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fuseplan.planner.implementations.choices import Choice, RegionProblem
from fuseplan.planner.partition.cover import CoverProblem, Option, solve_cover
from fuseplan.search import policy


class Prices(Protocol):
    """What a choice costs, in seconds."""

    def bound_s(self, choice: Choice) -> float:
        """No measurement of the choice comes out lower. Infinite for one that must not be chosen."""

    def measure_s(self, choices: Sequence[Choice]) -> Sequence[float]:
        """Measured times, in order; infinite for a choice that fails (it is then never chosen)."""


@dataclass(frozen=True)
class Priced:
    """A choice with its cost: measured, or (``measured`` False) its prediction."""

    choice: Choice
    cost_s: float
    measured: bool = True


def gap(cost: float, bound: float) -> float:
    """Share of the cost that a better partition might save at most."""
    return max(0.0, 1.0 - bound / cost) if cost > 0 else 0.0


@dataclass(frozen=True)
class GuidedResult:
    """A region's partition and what is known about it.

    Attributes:
        chosen: The partition, every op once.
        rejected: Measured choices that were not chosen.
        bound_s: No partition into the enumerated groups costs less (by the prices given).
        optimal: True when all costs of the last cover were measured.
        iterations: Covers solved on the way.
        unfused_s: Cost of running every op by itself, unfused.
        undecided: Whether noise hid an answer that it rests on.
    """

    chosen: tuple[Priced, ...]
    rejected: tuple[Priced, ...]
    bound_s: float
    optimal: bool
    enumerated: int
    iterations: int
    unfused_s: float
    reason: str = ""
    undecided: bool = False

    @property
    def cost_s(self) -> float:
        """Cost of the partition."""
        return math.fsum(priced.cost_s for priced in self.chosen)

    @property
    def measured(self) -> int:
        """How many choices were measured."""
        return sum(priced.measured for priced in (*self.chosen, *self.rejected))

    @property
    def gap(self) -> float:
        return gap(self.cost_s, self.bound_s)


def cover_problem(problem: RegionProblem, costs_s: Sequence[float]) -> CoverProblem:
    """The region's problem as one of numbers, with what each choice costs."""
    number = {op: at for at, op in enumerate(problem.ops)}
    lost = {number[problem.choices[at].group.ops[0]] for at in problem.won if math.isfinite(costs_s[at])}
    options = tuple(
        Option(sum(1 << number[op] for op in choice.group.ops), math.inf if at in lost else cost)
        for at, (choice, cost) in enumerate(zip(problem.choices, costs_s, strict=True))
    )
    return CoverProblem(len(problem.ops), options, problem.edges)


def predicted_partition(
    problem: RegionProblem, predict_s: Callable[[Choice], float], margin: float = 0.0, reason: str = ""
) -> GuidedResult:
    """The cheapest partition by predicted costs; nothing is measured."""
    costs = [predict_s(choice) for choice in problem.choices]
    unfused_s = math.fsum(costs[: len(problem.ops)])
    cover = solve_cover(cover_problem(problem, costs), margin, unfused_s)
    chosen = tuple(Priced(problem.choices[at], costs[at], False) for at in cover.chosen)
    return GuidedResult(chosen, (), cover.bound_s, True, len(costs), 1, unfused_s, reason)


def guided_partition(
    problem: RegionProblem, prices: Prices, tolerance: float = policy.GAP_TOLERANCE, margin: float = 0.0,
    max_measured: int | None = None, start: Collection[Choice] = (),
) -> GuidedResult:
    """Find a partition whose measured cost is within ``tolerance`` of the least possible. ValueError without unfused
    times.

    Every op is measured unfused first, and ``start``; of all choices at most ``max_measured``. Of partitions within
    ``(1 + margin)`` of the best, which is the measurements' noise, the one with the fewest launches is taken, but none
    slower than unfused.
    """
    choices, ops = problem.choices, len(problem.ops)
    bounds = [prices.bound_s(choice) for choice in choices]
    times: dict[int, float] = {}

    def measure(numbers: Sequence[int]) -> None:
        for at, time_s in zip(numbers, prices.measure_s([choices[at] for at in numbers]), strict=True):
            if not math.isfinite(time_s) and at < ops:
                raise ValueError(f"op {choices[at].group.ops[0]} has no unfused time: its measurement failed")
            times[at] = time_s if math.isfinite(time_s) else math.inf

    def measured_costs() -> CoverProblem:
        return cover_problem(problem, [times.get(at, math.inf) for at in range(len(choices))])

    wanted = set(start)
    measure([at for at, choice in enumerate(choices) if at < ops or choice in wanted])
    unfused_s = math.fsum(times[at] for at in range(ops))
    bound_s, iterations = 0.0, 0
    while True:
        iterations += 1
        costs = [times.get(at, bound) for at, bound in enumerate(bounds)]
        cover = solve_cover(cover_problem(problem, costs), break_ties=False)
        bound_s = max(bound_s, cover.bound_s)
        unmeasured = [at for at in cover.chosen if at not in times]
        optimal = not unmeasured
        if optimal or solve_cover(measured_costs(), break_ties=False).cost_s * (1 - tolerance) <= bound_s:
            break
        if max_measured is not None:
            unmeasured = unmeasured[: max(0, max_measured - len(times))]
        if not unmeasured:
            break
        measure(unmeasured)
    final = solve_cover(measured_costs(), margin, unfused_s)
    priced = {at: Priced(choices[at], time_s) for at, time_s in times.items()}
    others = sorted(times.keys() - set(final.chosen), key=lambda at: (times[at], at))
    return GuidedResult(
        tuple(priced[at] for at in final.chosen), tuple(priced[at] for at in others), min(bound_s, final.cost_s),
        optimal, len(choices), iterations, unfused_s,
    )
