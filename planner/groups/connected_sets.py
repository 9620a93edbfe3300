"""Growing connected convex sets of ops one op at a time: all of them, or a stated part where there are too many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fuseplan.planner.groups.convex import Dependencies, bits, union


@dataclass(frozen=True)
class ConnectedSets:
    """Sets of members as masks, smallest first; whether these are all, and in words what is not among them."""

    masks: tuple[int, ...]
    complete: bool
    truncated: str | None


def connected_sets(dependencies: Dependencies, max_ops: int, max_sets: int) -> ConnectedSets:
    """Connected convex sets of at most ``max_ops`` members.

    Past ``max_sets`` of them: every single member, sets joined by data flow (of each size those that cut the fewest
    edges, up to three quarters of the limit), and maximal sets.
    """
    found = _closure(dependencies, dependencies.neighbours, max_ops, max_sets)
    if found is not None:
        masks = _ordered(found)
        is_cut = bool(masks) and masks[-1].bit_count() == max_ops
        return ConnectedSets(masks, True, f"groups of more than {max_ops} ops were not enumerated" if is_cut else None)
    single = [1 << bit for bit in range(len(dependencies))]
    budget = max_sets * 3 // 4
    vertical = _closure(dependencies, dependencies.dataflow, max_ops, budget)
    if vertical is None:
        vertical = _beam(dependencies, max_ops, budget)
    maximal = {
        mask for edges in (dependencies.dataflow, dependencies.neighbours)
        for mask in _maximal(dependencies, edges, max_ops)
    }
    return ConnectedSets(
        _ordered({*single, *vertical, *maximal}), False,
        f"more than {max_sets} groups: kept single ops, {len(vertical)} groups joined by data flow and {len(maximal)} "
        "maximal groups",
    )


def _ordered(masks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(masks, key=lambda mask: (mask.bit_count(), tuple(bits(mask)))))


def _closure(dependencies: Dependencies, edges: Sequence[int], max_ops: int, limit: int) -> list[int] | None:
    """All convex sets connected by ``edges``, by size; None when there are more than ``limit``."""
    layer = _singles(dependencies, edges)
    found = list(layer)
    for _ in range(1, max_ops):
        if len(found) > limit:
            return None
        layer = _wider(dependencies, edges, layer, limit - len(found))
        if not layer:
            break
        found += layer
    return found if len(found) <= limit else None


def _beam(dependencies: Dependencies, max_ops: int, budget: int) -> list[int]:
    """Convex sets joined by data flow: of each size those that cut the fewest data-flow edges, about ``budget``."""
    edges = dependencies.dataflow
    layer = _singles(dependencies, edges)
    found: list[int] = []
    sizes = min(len(layer), max_ops) - 1
    width = max(1, (budget - len(layer)) // max(sizes, 1))
    for _ in range(sizes):
        layer = _wider(dependencies, edges, layer, limit=None)
        best = sorted(_ordered(layer), key=lambda mask: sum((edges[bit] & ~mask).bit_count() for bit in bits(mask)))
        layer = {mask: layer[mask] for mask in best[:width]}
        found += layer
    return found


#: Sets by mask, each with the masks of the members above it, below it, and joined to it.
_Layer: TypeAlias = dict[int, tuple[int, int, int]]


def _singles(dependencies: Dependencies, edges: Sequence[int]) -> _Layer:
    ancestors, descendants = dependencies.ancestors, dependencies.descendants
    return {1 << bit: (ancestors[bit], descendants[bit], edges[bit]) for bit in range(len(dependencies))}


def _wider(dependencies: Dependencies, edges: Sequence[int], layer: _Layer, limit: int | None) -> _Layer:
    """The convex sets that have one member more than a set of ``layer``; it stops soon after ``limit``."""
    ancestors, descendants = dependencies.ancestors, dependencies.descendants
    detours, detours_from = dependencies.detours, dependencies.detours_from
    wider: _Layer = {}
    for mask, (above, below, near) in layer.items():
        for bit in bits(near & ~mask):
            joined = mask | 1 << bit
            if joined in wider or (detours[bit] | detours_from[bit]) & mask:
                continue
            new_above, new_below = above | ancestors[bit], below | descendants[bit]
            if not new_above & new_below & ~joined:
                wider[joined] = (new_above, new_below, near | edges[bit])
        if limit is not None and len(wider) > limit:
            break
    return wider


def _maximal(dependencies: Dependencies, edges: Sequence[int], max_ops: int) -> list[int]:
    """Greedily grown sets, started from each member that no earlier one covers."""
    sets: list[int] = []
    for bit in range(len(dependencies)):
        if not union(sets) >> bit & 1:
            sets.append(_grow_greedily(dependencies, edges, 1 << bit, max_ops))
    return sets


def _grow_greedily(dependencies: Dependencies, edges: Sequence[int], mask: int, max_ops: int) -> int:
    grew = True
    while grew:
        grew = False
        for bit in bits(union(edges[bit] for bit in bits(mask)) & ~mask):
            wider = mask | 1 << bit
            wider |= dependencies.between(wider)
            # What is between is joined by data flow, since no way through the set is a detour.
            if wider.bit_count() <= max_ops and not dependencies.has_detour(wider):
                mask = wider
                grew = True
    return mask


def parts(dependencies: Dependencies, within: int, max_ops: int, allowed: Callable[[int], bool]) -> list[int]:
    """Disjoint connected convex sets that cover ``within``, grown as far as allowed; a refused member is asked once."""
    sets: list[int] = []
    rest = within
    while rest:
        mask = rest & -rest
        untried = rest & ~mask
        while near := untried & union(dependencies.neighbours[bit] for bit in bits(mask)):
            bit = next(bits(near))
            untried &= ~(1 << bit)
            wider = mask | 1 << bit
            wider |= dependencies.between(wider)
            inside = not wider & ~rest and wider.bit_count() <= max_ops
            if inside and dependencies.is_convex(wider) and allowed(wider):
                mask = wider
        rest &= ~mask
        sets.append(mask)
    return sets
