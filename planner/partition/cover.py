"""Exact cover: every op in exactly one chosen group, at the least total cost, with no cycle among the groups.

A 0/1 program solved by HiGHS. Cycles are rare, so they are cut off only when a solution has one. Among solutions
that cost the same (within the measurement's noise) the one with the fewest launches wins, then the one that prefers
earlier options op by op, so that equal problems have equal answers in every process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy  # its submodules are slow to import, and only solving needs them
from numpy.typing import NDArray

from fuseplan.planner.groups.convex import bits
from fuseplan.planner.groups.cycles import Hop, short_cycles
from fuseplan.planner.partition.small_cover import MOST_OPS, SmallSolver

#: Costs are scaled so that their median is this: HiGHS stops at an absolute gap of 1e-6.
_SCALE = 1e3
#: Relative slack in comparing a sum of costs with a limit, for rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Option:
    """A way to run some ops: ``mask`` has their bits; ``cost_s`` is infinite for one that must not be chosen."""

    mask: int
    cost_s: float


@dataclass(frozen=True)
class CoverProblem:
    """Ops ``0 .. num_ops - 1`` to cover by ``options``, of which of equally good ones the earlier is preferred.

    ``edges`` are dependencies ``(before, after)`` between ops, those by way of other ops included.
    """

    num_ops: int
    options: tuple[Option, ...]
    edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Cover:
    """Numbers of the chosen options, by the first op they run, and their total cost; no cover costs less than
    ``bound_s``.
    """

    chosen: tuple[int, ...]
    cost_s: float
    bound_s: float


def solve_cover(
    problem: CoverProblem, margin: float = 0.0, ceiling_s: float = math.inf, break_ties: bool = True
) -> Cover:
    """The cheapest acyclic cover.

    Covers within ``(1 + margin)`` of the least cost count as equally good, but only those that cost no more than
    ``ceiling_s`` (where any does). Without ``break_ties`` any cheapest cover is returned, sooner. ValueError where an
    op has no option that runs it alone, so a cover may not exist.
    """
    usable = [number for number, option in enumerate(problem.options) if math.isfinite(option.cost_s)]
    alone = {problem.options[number].mask for number in usable}
    for op in range(problem.num_ops):
        if 1 << op not in alone:
            raise ValueError(f"op {op} of the cover problem has no option of finite cost that runs it alone")
    if not problem.num_ops:
        return Cover((), 0.0, 0.0)
    options = [problem.options[number] for number in usable]
    solver: SmallSolver | _Solver = _Solver(problem, usable) if problem.num_ops > MOST_OPS else SmallSolver(
        problem.num_ops, [one.mask for one in options], [one.cost_s for one in options], problem.edges)
    chosen = solver.cheapest()
    cost_s = math.fsum(options[at].cost_s for at in chosen)
    if break_ties:
        chosen = solver.preferred(chosen, max(cost_s, min(cost_s * (1 + margin), ceiling_s)) * (1 + _ROUNDING))
    by_first_op = sorted(chosen, key=lambda at: options[at].mask & -options[at].mask)
    total_s = math.fsum(options[at].cost_s for at in chosen)
    return Cover(tuple(usable[at] for at in by_first_op), total_s, cost_s)


@dataclass
class _Program:
    """Rows besides the cover itself, and variables that are fixed."""

    keep: NDArray[np.bool_]
    rows: list[tuple[NDArray[np.float64], float]] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)


def _narrow(matrix: Any) -> Any:
    """A sparse matrix with indices of 32 bits: older releases of SciPy hand HiGHS no others."""
    matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
    return matrix


class _Solver:
    """Works on the usable options, renumbered ``0 .. n - 1``."""

    def __init__(self, problem: CoverProblem, usable: list[int]) -> None:
        self.problem = problem
        self.usable = usable
        self.options = [problem.options[number] for number in usable]
        self.costs = np.array([option.cost_s for option in self.options])
        typical = float(np.median(self.costs))
        self.unit = _SCALE / typical if typical > 0 else 1.0
        self.scaled = self.costs * self.unit
        columns = [(op, at) for at, option in enumerate(self.options) for op in bits(option.mask)]
        rows, cols = zip(*columns, strict=True)
        shape = (problem.num_ops, len(self.options))
        self.matrix: Any = _narrow(scipy.sparse.csr_array((np.ones(len(columns)), (rows, cols)), shape=shape))
        self.cuts: list[tuple[NDArray[np.float64], float]] = []

    def numbers(self, chosen: Sequence[int]) -> tuple[int, ...]:
        by_first_op = sorted(chosen, key=lambda at: (self.options[at].mask & -self.options[at].mask))
        return tuple(self.usable[at] for at in by_first_op)

    def cost(self, chosen: Sequence[int]) -> float:
        return math.fsum(self.options[at].cost_s for at in chosen)

    def cheapest(self) -> list[int]:
        """The cheapest cover."""
        found = self.minimise(self.scaled, _Program(np.ones(len(self.options), dtype=bool)))
        if found is None:
            raise RuntimeError("HiGHS finds no cover, though every op can be run alone")
        return found

    def preferred(self, best: list[int], limit_s: float) -> list[int]:
        """Of the covers that cost at most ``limit_s``: fewest launches, then earlier options from op 0 on."""
        program = _Program(self._affordable(limit_s))
        program.keep[best] = True
        if int(program.keep.sum()) == len(best):
            return best
        program.rows.append((self.scaled, limit_s * self.unit))
        launches = np.ones(len(self.options))
        if len(best) > 1:
            best = self.minimise(launches, program) or best
        program.rows.append((launches, len(best) + 0.5))
        left = (1 << self.problem.num_ops) - 1
        while left:
            best = self._prefer(left & -left, left, best, program)
            taken = next(at for at in best if self.options[at].mask & left & -left)
            program.fixed.add(taken)
            left &= ~self.options[taken].mask
        return best

    def _prefer(self, op: int, left: int, best: list[int], program: _Program) -> list[int]:
        """A cover like ``best`` that runs ``op`` by the earliest possible option."""
        contenders = [
            at for at, option in enumerate(self.options)
            if program.keep[at] and option.mask & op and not option.mask & ~left
        ]
        if contenders[0] in best:
            return best
        rank = np.zeros(len(self.options))
        rank[contenders] = np.arange(len(contenders))
        return self.minimise(rank, program) or best

    def _affordable(self, limit_s: float) -> NDArray[np.bool_]:
        """Options that some cover within ``limit_s`` may use, by their reduced cost in the linear relaxation."""
        ones = np.ones(self.problem.num_ops)
        result = scipy.optimize.linprog(self.scaled, A_eq=self.matrix, b_eq=ones, method="highs")
        if result.fun is None:
            raise RuntimeError(f"HiGHS could not solve the relaxation of a cover: {result.message}")
        prices = np.asarray(result.eqlin.marginals)
        relaxed, reduced = float(result.fun) / self.unit, (self.scaled - self.matrix.T @ prices) / self.unit
        affordable: NDArray[np.bool_] = reduced <= limit_s - relaxed + 1e-6 * max(limit_s, 1e-300)
        return affordable

    def minimise(self, objective: NDArray[np.float64], program: _Program) -> list[int] | None:
        """Minimise over acyclic covers, cutting off cycles as they appear; None where there is no cover."""
        lower = np.zeros(len(self.options))
        lower[list(program.fixed)] = 1.0
        bounds = scipy.optimize.Bounds(lower, program.keep.astype(float))
        while True:
            constraints = [scipy.optimize.LinearConstraint(self.matrix, 1.0, 1.0)]
            rows = [*program.rows, *self.cuts]
            if rows:
                limits = [limit for _, limit in rows]
                cuts = _narrow(scipy.sparse.csr_array(np.stack([row for row, _ in rows])))
                constraints.append(scipy.optimize.LinearConstraint(cuts, -np.inf, limits))
            result = scipy.optimize.milp(
                objective, integrality=np.ones(len(objective), dtype=np.int64), bounds=bounds, constraints=constraints,
                options={"mip_rel_gap": 0.0},
            )
            if result.x is None:
                return None
            chosen = [int(at) for at in np.flatnonzero(result.x > 0.5)]
            group_of = {op: at for at in chosen for op in bits(self.options[at].mask)}
            cycles = short_cycles([group_of[op] for op in range(self.problem.num_ops)], self.problem.edges)
            if not cycles:
                return chosen
            self.cuts += map(self._cut, cycles)

    def _cut(self, cycle: Sequence[Hop]) -> tuple[NDArray[np.float64], float]:
        """Any group that holds a hop's entry and leave closes the same cycle: at most all but one of the hops."""
        row = np.zeros(len(self.options))
        for hop in cycle:
            ends = 1 << hop.entry | 1 << hop.leave
            row[[at for at, option in enumerate(self.options) if option.mask & ends == ends]] = 1.0
        return row, float(len(cycle) - 1)


def best_cover_with(problem: CoverProblem, number: int) -> tuple[float, tuple[int, ...]] | None:
    """The cheapest acyclic cover that uses option ``number``: its cost in seconds and its options.

    None where the others cannot run what that option leaves, be it that a cycle cannot be avoided.
    """
    solver = _Solver(problem, [at for at, option in enumerate(problem.options) if math.isfinite(option.cost_s)])
    everything = np.ones(len(solver.options), dtype=bool)
    chosen = solver.minimise(solver.scaled, _Program(everything, fixed={solver.usable.index(number)}))
    return None if chosen is None else (solver.cost(chosen), solver.numbers(chosen))
