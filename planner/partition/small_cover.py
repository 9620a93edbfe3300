"""Covers of few ops, by trying: exact as the program of :mod:`~fuseplan.planner.partition.cover` is, and the same ones.

Most parts of a model have few ops, for which SciPy takes longer to import than a graph to plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fuseplan.planner.groups.convex import bits
from fuseplan.planner.groups.cycles import short_cycles

#: Up to so many ops there are at most 2 to that power of sets that are left to cover.
MOST_OPS = 10


class SmallSolver:
    """Options are numbers of ``masks`` and ``costs_s``; ``edges`` are dependencies between ops."""

    def __init__(
        self, num_ops: int, masks: Sequence[int], costs_s: Sequence[float], edges: Sequence[tuple[int, int]]
    ) -> None:
        self._masks, self._costs_s, self._edges, self._ops = masks, costs_s, edges, num_ops
        self._running = [[at for at, mask in enumerate(masks) if mask >> op & 1] for op in range(num_ops)]
        #: By the set of ops that is left: the least cost, and the fewest launches, cycles or not.
        self._least: dict[int, tuple[float, int]] = {0: (0.0, 0)}

    def cheapest(self) -> list[int]:
        """The cheapest acyclic cover."""
        best: list[int] = []
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

        search((1 << self._ops) - 1, 0.0, [])
        return best

    def preferred(self, best: Sequence[int], limit_s: float) -> list[int]:
        """Of the acyclic covers that cost at most ``limit_s``, as ``best`` does: fewest launches, then earlier options
        from op 0 on.
        """
        everything = (1 << self._ops) - 1

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

        found = (search(everything, 0.0, launches, []) for launches in range(self._of(everything)[1], len(best) + 1))
        return next((one for one in found if one is not None), list(best))

    def _fitting(self, left: int) -> list[int]:
        """Options for the first op of those that are left."""
        return [at for at in self._running[(left & -left).bit_length() - 1] if not self._masks[at] & ~left]

    def _of(self, left: int) -> tuple[float, int]:
        known = self._least.get(left)
        if known is None:
            ways = [(self._costs_s[at], *self._of(left & ~self._masks[at])) for at in self._fitting(left)]
            known = min(cost_s + rest_s for cost_s, rest_s, _ in ways), 1 + min(launches for *_, launches in ways)
            self._least[left] = known
        return known

    def _is_acyclic(self, chosen: Sequence[int]) -> bool:
        group_of = {op: at for at in chosen for op in bits(self._masks[at])}
        return not short_cycles([group_of[op] for op in range(self._ops)], self._edges)
