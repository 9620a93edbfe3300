"""The few best covers of a region's ops."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace

from fuseplan.planner.partition.cover import CoverProblem, solve_cover

#: What a forbidden option costs, as a multiple of all options together: a cover of this much has one.
_FORBIDDEN = 10.0


def best_covers(problem: CoverProblem, count: int) -> Iterator[tuple[int, ...]]:
    """Up to ``count`` distinct acyclic covers, cheapest first, as numbers of options.

    Murty's ranking (Operations Research 16, 1968): what is left beside the best solution splits into problems that keep
    its first options and forbid the next one, each solved exactly.

    Raises:
        ValueError: An op has no option of finite cost that runs it alone.
    """
    total_s = math.fsum(option.cost_s for option in problem.options if math.isfinite(option.cost_s))
    dear_s = _FORBIDDEN * max(total_s, 1e-12)
    waiting: list[tuple[float, tuple[int, ...], frozenset[int], frozenset[int]]] = []

    def look(kept: frozenset[int], forbidden: frozenset[int]) -> None:
        cover = _solve(problem, kept, forbidden, dear_s)
        if cover is not None:
            heapq.heappush(waiting, (*cover, kept, forbidden))

    look(frozenset(), frozenset())
    for _ in range(count):
        if not waiting:
            return
        _, chosen, kept, forbidden = heapq.heappop(waiting)
        yield chosen
        for option in chosen:
            if option not in kept:
                look(kept, forbidden | {option})
                kept |= {option}


def _solve(
    problem: CoverProblem, kept: frozenset[int], forbidden: frozenset[int], dear_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """The cheapest cover with all of ``kept`` and none of ``forbidden``: its cost and options; None without any."""
    covered = 0
    for number in kept:
        covered |= problem.options[number].mask

    def unwanted(number: int) -> bool:
        return number in forbidden or (number not in kept and bool(problem.options[number].mask & covered))

    options = tuple(
        replace(option, cost_s=dear_s) if unwanted(number) and math.isfinite(option.cost_s) else option
        for number, option in enumerate(problem.options)
    )
    found = solve_cover(replace(problem, options=options), break_ties=False)
    return (found.cost_s, found.chosen) if found.cost_s < dear_s else None
