"""Exact cover: every op in exactly one chosen group, at the least total cost, with no cycle among the groups.

A 0/1 program solved by HiGHS, with cuts for the cycles that a solution has; of few ops by trying, for SciPy takes
longer to import. Among equal costs (within the measurement's noise) the fewest launches win, then earlier options op by
op, so that equal problems have equal answers in every process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its submodules are slow to import, and only solving needs them
from numpy.typing import NDArray

from fuseplan.planner.groups.convex import Hop, bits, short_cycles

#: Costs are scaled so that their median is this: HiGHS stops at an absolute gap of 1e-6.
_SCALE = 1e3
#: Relative slack in comparing a sum of costs with a limit, for rounding.
_ROUNDING = 1e-9
#: Numbers of the relaxation this near to whole ones are whole: HiGHS lets its rows be off by 1e-7.
_WHOLE = 1e-6


@dataclass(frozen=True)
class Option:
    """A way to run some ops: ``mask`` has their bits; ``cost_s`` is infinite for one that must not be chosen."""

    mask: int
    cost_s: float


@dataclass(frozen=True)
class CoverProblem:
    """Ops ``0 .. num_ops - 1`` to cover by ``options``, of which of equally good ones the earlier is preferred;
    ``edges`` are dependencies ``(before, after)`` between ops, those by way of other ops included.
    """

    num_ops: int
    options: tuple[Option, ...]
    edges: tuple[tuple[int, int], ...] = ()

    def cycles(self, chosen: Mapping[int, int]) -> list[list[Hop]]:
        """Some of the cycles among the groups of a cover, whose masks ``chosen`` has by number."""
        group_of = {op: at for at, mask in chosen.items() for op in bits(mask)}
        return short_cycles([group_of[op] for op in range(self.num_ops)], self.edges)


@dataclass(frozen=True)
class Cover:
    """Numbers of the chosen options by the first op they run, and their cost; no cover costs less than ``bound_s``."""

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
    solver = _solver(problem, options)
    chosen = solver.cheapest()
    assert chosen is not None, "every op can be run alone"
    cost_s = math.fsum(options[at].cost_s for at in chosen)
    if break_ties:
        chosen = solver.preferred(chosen, max(cost_s, min(cost_s * (1 + margin), ceiling_s)) * (1 + _ROUNDING))
    return _cover([usable[at] for at in chosen], problem, cost_s)


def best_cover_with(problem: CoverProblem, number: int) -> Cover | None:
    """The cheapest acyclic cover that uses option ``number``; None where there is none."""
    taken = problem.options[number].mask
    usable = [at for at, one in enumerate(problem.options)
              if at == number or (math.isfinite(one.cost_s) and not one.mask & taken)]
    chosen = _solver(problem, [problem.options[at] for at in usable]).cheapest()
    return None if chosen is None else _cover([usable[at] for at in chosen], problem)


def _cover(chosen: Sequence[int], problem: CoverProblem, bound_s: float = 0.0) -> Cover:
    options = problem.options
    by_first_op = sorted(chosen, key=lambda at: options[at].mask & -options[at].mask)
    return Cover(tuple(by_first_op), math.fsum(options[at].cost_s for at in chosen), bound_s)


def _narrow(matrix: Any) -> Any:
    """A sparse matrix with indices of 32 bits: older releases of SciPy hand HiGHS no others."""
    matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
    return matrix


class _Solver:
    """By HiGHS. ``options`` are those that may be chosen; :meth:`preferred` narrows them for good."""

    def __init__(self, problem: CoverProblem, options: Sequence[Option]) -> None:
        self.problem, self.options = problem, options
        costs = np.array([option.cost_s for option in options])
        typical = float(np.median(costs))
        self.unit = _SCALE / typical if typical > 0 else 1.0
        self.scaled = costs * self.unit
        columns = [(op, at) for at, option in enumerate(options) for op in bits(option.mask)]
        rows, cols = zip(*columns, strict=True)
        shape = (problem.num_ops, len(options))
        self.matrix: Any = _narrow(scipy.sparse.csr_array((np.ones(len(columns)), (rows, cols)), shape=shape))
        #: For each option whether it has to be, and may be, chosen.
        self.lower, self.upper = np.zeros(len(options)), np.ones(len(options))
        #: Sums over options, and what they are at most.
        self.rows: list[tuple[NDArray[np.float64], float]] = []

    def cheapest(self) -> list[int] | None:
        """The cheapest acyclic cover, by numbers of options; None without any."""
        return self.minimise(self.scaled)

    def preferred(self, best: list[int], limit_s: float) -> list[int]:
        """Of the covers that cost at most ``limit_s``: fewest launches, then earlier options from op 0 on."""
        self.upper[~self._affordable(limit_s)] = 0.0
        self.upper[best] = 1.0
        if int(self.upper.sum()) == len(best):
            return best
        self.rows.append((self.scaled, limit_s * self.unit))
        launches = np.ones(len(self.options))
        if len(best) > 1:
            best = self.minimise(launches) or best
        self.rows.append((launches, len(best) + 0.5))
        left = (1 << self.problem.num_ops) - 1
        while left:
            op = left & -left
            contenders = [at for at, option in enumerate(self.options)
                          if self.upper[at] and option.mask & op and not option.mask & ~left]
            if contenders[0] not in best:
                rank = np.zeros(len(self.options))
                rank[contenders] = np.arange(len(contenders))
                best = self.minimise(rank) or best
            taken = next(at for at in best if self.options[at].mask & op)
            self.lower[taken] = 1.0
            left &= ~self.options[taken].mask
        return best

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

    def minimise(self, objective: NDArray[np.float64]) -> list[int] | None:
        """Minimise over acyclic covers, cutting off cycles as they appear; None where there is no cover."""
        bounds = scipy.optimize.Bounds(self.lower, self.upper)
        while True:
            constraints = [scipy.optimize.LinearConstraint(self.matrix, 1.0, 1.0)]
            if self.rows:
                limits = [limit for _, limit in self.rows]
                cuts = _narrow(scipy.sparse.csr_array(np.stack([row for row, _ in self.rows])))
                constraints.append(scipy.optimize.LinearConstraint(cuts, -np.inf, limits))
            # Of most covers the relaxation has whole numbers: then it is the answer, a tenth of the time sooner.
            for is_whole in (0, 1):
                result = scipy.optimize.milp(
                    objective, integrality=np.full(len(objective), is_whole), bounds=bounds, constraints=constraints,
                    options={"mip_rel_gap": 0.0},
                )
                if result.x is None:
                    return None
                shares: NDArray[np.float64] = result.x
                if np.allclose(shares, np.round(shares), rtol=0.0, atol=_WHOLE):
                    break
            chosen = [int(at) for at in np.flatnonzero(shares > 0.5)]
            cycles = self.problem.cycles({at: self.options[at].mask for at in chosen})
            if not cycles:
                return chosen
            self.rows += map(self._cut, cycles)

    def _cut(self, cycle: Sequence[Hop]) -> tuple[NDArray[np.float64], float]:
        """Any group that holds a hop's entry and leave closes the same cycle: at most all but one of the hops."""
        row = np.zeros(len(self.options))
        for hop in cycle:
            ends = 1 << hop.entry | 1 << hop.leave
            row[[at for at, option in enumerate(self.options) if option.mask & ends == ends]] = 1.0
        return row, float(len(cycle) - 1)


#: Up to so many ops there are at most 2 to that power of sets that are left to cover.
MOST_OPS = 10


class _SmallSolver:
    """The same by trying, and the same answers."""

    def __init__(self, problem: CoverProblem, options: Sequence[Option]) -> None:
        self._problem = problem
        self._masks, self._costs_s = [one.mask for one in options], [one.cost_s for one in options]
        self._everything = (1 << problem.num_ops) - 1
        self._running = [[at for at, mask in enumerate(self._masks) if mask >> op & 1] for op in range(problem.num_ops)]
        #: By the set of ops that is left: the least cost, and the fewest launches, cycles or not.
        self._least: dict[int, tuple[float, int]] = {0: (0.0, 0)}

    def cheapest(self) -> list[int] | None:
        best: list[int] | None = None
        best_s = math.inf

        def search(left: int, spent_s: float, taken: list[int]) -> None:
            nonlocal best, best_s
            if not left:
                if spent_s < best_s and self._is_acyclic(taken):
                    best, best_s = taken, spent_s
                return
            bounds_s = ((spent_s + self._costs_s[at] + self._of(left & ~self._masks[at])[0], at)
                        for at in self._fitting(left))
            for bound_s, at in sorted(bounds_s):
                if bound_s < best_s:
                    search(left & ~self._masks[at], spent_s + self._costs_s[at], [*taken, at])

        search(self._everything, 0.0, [])
        return best

    def preferred(self, best: Sequence[int], limit_s: float) -> list[int]:
        def search(left: int, spent_s: float, launches: int, taken: list[int]) -> list[int] | None:
            if not left:
                return taken if self._is_acyclic(taken) else None
            for at in self._fitting(left):
                rest, cost_s = left & ~self._masks[at], spent_s + self._costs_s[at]
                least_s, fewest = self._of(rest)
                if cost_s + least_s > limit_s or fewest >= launches:
                    continue
                if (found := search(rest, cost_s, launches - 1, [*taken, at])) is not None:
                    return found
            return None

        fewest = self._of(self._everything)[1]
        found = (search(self._everything, 0.0, launches, []) for launches in range(fewest, len(best) + 1))
        return next((one for one in found if one is not None), list(best))

    def _fitting(self, left: int) -> list[int]:
        """Options for the first op of those that are left."""
        return [at for at in self._running[(left & -left).bit_length() - 1] if not self._masks[at] & ~left]

    def _of(self, left: int) -> tuple[float, int]:
        if left not in self._least:
            ways = [(self._costs_s[at], *self._of(left & ~self._masks[at])) for at in self._fitting(left)]
            least_s = min((cost_s + rest_s for cost_s, rest_s, _ in ways), default=math.inf)
            self._least[left] = least_s, 1 + min((launches for *_, launches in ways), default=0)
        return self._least[left]

    def _is_acyclic(self, chosen: Sequence[int]) -> bool:
        return not self._problem.cycles({at: self._masks[at] for at in chosen})


def _solver(problem: CoverProblem, options: Sequence[Option]) -> _Solver | _SmallSolver:
    return (_Solver if problem.num_ops > MOST_OPS else _SmallSolver)(problem, options)
