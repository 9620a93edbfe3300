"""The few best covers, against all covers by brute force."""

from __future__ import annotations

import itertools
import random

import pytest
from best_covers import best_covers

from fuseplan.planner.partition.cover import CoverProblem, Option


def acyclic(problem: CoverProblem, chosen: tuple[int, ...]) -> bool:
    owner = {op: at for at in chosen for op in range(problem.num_ops) if problem.options[at].mask >> op & 1}
    before = {at: {owner[a] for a, b in problem.edges if owner[b] == at and owner[a] != at} for at in chosen}
    done: set[int] = set()
    while len(done) < len(chosen):
        ready = [at for at in chosen if at not in done and before[at] <= done]
        if not ready:
            return False
        done.update(ready)
    return True


def all_costs(problem: CoverProblem) -> list[float]:
    """Costs of all acyclic covers, sorted."""
    whole = (1 << problem.num_ops) - 1
    found = []
    for size in range(1, problem.num_ops + 1):
        for chosen in itertools.combinations(range(len(problem.options)), size):
            masks = [problem.options[at].mask for at in chosen]
            exact = sum(masks) == whole and all(not a & b for a, b in itertools.combinations(masks, 2))
            if exact and acyclic(problem, chosen):
                found.append(sum(problem.options[at].cost_s for at in chosen))
    return sorted(found)


@pytest.mark.parametrize("seed", range(12))
def test_the_first_covers_are_the_cheapest_of_all(seed: int) -> None:
    generator = random.Random(seed)
    num_ops = generator.randint(1, 5)
    masks = [1 << op for op in range(num_ops)] + [generator.randrange(1, 1 << num_ops) for _ in range(6)]
    options = tuple(Option(mask, generator.uniform(1e-6, 1e-4)) for mask in masks)
    edges = tuple((a, b) for a in range(num_ops) for b in range(a + 1, num_ops) if generator.random() < 0.5)
    problem = CoverProblem(num_ops, options, edges)
    expected = all_costs(problem)
    found = list(best_covers(problem, 8))
    assert len(set(map(frozenset, found))) == len(found) == min(8, len(expected))
    assert all(acyclic(problem, cover) for cover in found)
    assert [sum(options[at].cost_s for at in cover) for cover in found] == pytest.approx(expected[: len(found)])


def test_there_may_be_fewer_than_wanted() -> None:
    assert list(best_covers(CoverProblem(2, (Option(1, 1e-6), Option(2, 1e-6))), 8)) == [(0, 1)]
    assert list(best_covers(CoverProblem(1, (Option(1, 1e-6),)), 0)) == []
