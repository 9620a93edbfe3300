"""Passes over a row: which values a segment's reductions force into which loop over the columns.

A row-wise kernel that cannot hold its row in registers walks the columns once for every level of reductions (softmax:
maximum, then sum, then the result; one pass fewer where the sum is folded beside the maximum, see
:func:`rescaled_sums`). Pass ``k`` may use the reductions folded by passes ``< k`` only. A value that
two passes need is evaluated in both, unless the emitter keeps it in a staging buffer (``stage=True``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fuseplan.kernels.ir.ir import (
    Apply,
    Cast,
    Const,
    Instr,
    Iota,
    Load,
    Reduce,
    Round,
    Segment,
    Store,
    ancestors,
    operands,
)


@dataclass(frozen=True)
class Phase:
    """One pass over the columns of a row. All numbers are value ids in body order, unless said otherwise.

    Attributes:
        rows: Row-level values (one number per row, reductions excluded) that become computable before this pass.
            Every live one is in exactly one phase.
        elements: Element-level values this pass evaluates for every column, recomputed ones included.
        reductions: ``Reduce`` values this pass folds. Their operand may be a row-level value.
        stores: Positions in ``segment.stores`` written for every column in this pass.
        row_stores: Positions in ``segment.stores`` written once per row, before the pass; the last phase has them all.
        reads: Element-level values this pass takes from the staging buffer instead of evaluating them.
        stages: Element-level values evaluated here that a later pass reads from the staging buffer.
    """

    rows: tuple[int, ...]
    elements: tuple[int, ...]
    reductions: tuple[int, ...]
    stores: tuple[int, ...]
    row_stores: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()

    @property
    def has_loop(self) -> bool:
        """False for a last phase that only computes and stores row-level values."""
        return bool(self.reductions or self.stores)


def schedule(segment: Segment, stage: bool = False, rescale: bool = False) -> tuple[Phase, ...]:
    """Split a segment into passes; dead values are dropped.

    Args:
        stage: Keep values that several passes need in a staging buffer (``reads`` and ``stages``) where that saves
            arithmetic; otherwise every pass evaluates all it needs, from the loads up.
        rescale: Fold :func:`rescaled_sums` in the pass of their maximum.

    Returns:
        One phase for each level of reductions, and a last one. A store is in the first pass that evaluates its value
        for a reduction anyway, else in the earliest pass that can take all such stores together.
    """
    beside = rescaled_sums(segment) if rescale else {}
    depths = reduction_depths(segment, beside)
    per_row = segment.per_row()
    live = ancestors(segment.body, (value for store in segment.stores for value in store.values))
    reductions = [value for value in live if isinstance(segment.body[value], Reduce)]
    row_level = [value for value in live if per_row[value] and value not in reductions]
    last = max((depths[value] for value in reductions), default=0)

    folded = [tuple(value for value in reductions if depths[value] == number + 1) for number in range(last + 1)]
    # A rescaled sum needs what its maximum folds.
    roots = [
        {operands(segment.body[beside.get(value, value)])[0] for value in folded[number]} for number in range(last + 1)
    ]
    elements = [_elements(segment.body, per_row, roots[number]) for number in range(last + 1)]
    stores = _place_stores(segment, depths, elements)
    row_stores = tuple(n for n, store in enumerate(segment.stores) if segment.store_per_row(store))

    phases: list[Phase] = []
    evaluated: list[int] = []
    for number in range(last + 1):
        needed = roots[number] | {value for position in stores[number] for value in segment.stores[position].values}
        kept = [value for value in evaluated if stage and _worth_staging(segment.body, value)]
        values = _elements(segment.body, per_row, needed, kept)
        own = tuple(value for value in values if value not in kept)
        evaluated.extend(value for value in own if value not in evaluated)
        phases.append(
            Phase(
                rows=tuple(value for value in row_level if depths[value] == number),
                elements=own,
                reductions=folded[number],
                stores=stores[number],
                row_stores=row_stores if number == last else (),
                reads=tuple(value for value in values if value in kept),
            )
        )
    return _with_stages(phases)


def reduction_depths(segment: Segment, beside: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """For each value, the longest chain of reductions below it: a pass ``k`` can evaluate depths ``<= k``.

    Reductions that are folded ``beside`` another one (``rescaled_sums``) have its depth.
    """
    depths: list[int] = []
    for value, instr in enumerate(segment.body):
        below = max((depths[arg] for arg in operands(instr)), default=0)
        if beside and value in beside:
            depths.append(depths[beside[value]])
        else:
            depths.append(below + 1 if isinstance(instr, Reduce) else below)
    return tuple(depths)


def rescaled_sums(segment: Segment) -> dict[int, int]:
    """Sums over ``exp(x - max(x))``, each with the ``max(x)`` in whose pass it can be folded.

    While the largest element so far rises from ``old`` to ``new``, the sum so far is multiplied by ``exp(old - new)``
    (Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018): a softmax then reads its row twice
    instead of three times.
    """
    body, per_row = segment.body, segment.per_row()
    found: dict[int, int] = {}
    for value, total in enumerate(body):
        if not isinstance(total, Reduce) or total.kind != "sum":
            continue
        power = body[total.arg]
        difference = body[power.args[0]] if isinstance(power, Apply) and power.op == "exp" else None
        if not isinstance(difference, Apply) or difference.op != "sub":
            continue
        element, top = difference.args
        largest = body[top]
        if not isinstance(largest, Reduce) or largest.kind != "max" or largest.arg != element or per_row[element]:
            continue
        if {one.dtype for one in (total, power, difference, largest, body[element])} == {total.dtype}:
            found[value] = top
    return found


def _place_stores(
    segment: Segment, depths: Sequence[int], elements: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Positions of the per-column stores of each pass."""
    places: dict[int, int] = {}
    homeless: list[int] = []
    for position, store in enumerate(segment.stores):
        if segment.store_per_row(store):
            continue
        for number in range(_depth(store, depths), len(elements)):
            if store.value in elements[number]:
                places[position] = number
                break
        else:
            homeless.append(position)
    latest = max((_depth(segment.stores[position], depths) for position in homeless), default=0)
    places.update(dict.fromkeys(homeless, latest))
    return [
        tuple(position for position in sorted(places) if places[position] == number) for number in range(len(elements))
    ]


def _depth(store: Store, depths: Sequence[int]) -> int:
    return max(depths[value] for value in store.values)


def _elements(
    body: Sequence[Instr], per_row: Sequence[bool], roots: Iterable[int], kept: Collection[int] = ()
) -> tuple[int, ...]:
    """Element-level values that ``roots`` need, going no deeper than row-level values and those in ``kept``."""
    values = ancestors(body, roots, lambda value: not per_row[value] and value not in kept)
    return tuple(value for value in values if not per_row[value])


def _worth_staging(body: Sequence[Instr], value: int) -> bool:
    """False for what costs no more to evaluate again than to read back: plain loads, positions, conversions of them."""
    instr = body[value]
    while isinstance(instr, Cast | Round):
        instr = body[instr.arg]
    return not (isinstance(instr, Const | Iota) or (isinstance(instr, Load) and instr.mask is None))


def _with_stages(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Fill in ``stages`` from the later phases' ``reads``."""
    return tuple(
        replace(phase, stages=tuple(v for v in phase.elements if any(v in later.reads for later in phases[n + 1 :])))
        for n, phase in enumerate(phases)
    )
