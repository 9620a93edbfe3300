"""Passes over a row: which values a segment's reductions force into which loop over the columns.

A kernel that cannot hold its row in registers walks the columns once for every level of reductions (softmax: maximum,
then sum, then the result). Pass ``k`` may use the reductions folded by passes ``< k`` only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fuseplan.kernels.ir.index import is_static
from fuseplan.kernels.ir.ir import (
    Apply,
    Cast,
    Const,
    Instr,
    Iota,
    Load,
    Reduce,
    Round,
    Scan,
    Segment,
    operands,
    renamed,
)
from fuseplan.kernels.ir.rewrite import ancestors

#: So few rows side by side would leave most of a vector empty, and most of a line unread.
_FEW_ROWS = 8
#: How far a share that is stored as float32 may be off.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Phase:
    """One pass over the columns of a row. All numbers are value ids in body order, unless said otherwise."""

    #: Row-level values (one number per row, reductions excluded) that become computable before this pass.
    rows: tuple[int, ...]
    #: Element-level values this pass evaluates for every column, recomputed ones included.
    elements: tuple[int, ...]
    #: ``Reduce`` values this pass folds. Their operand may be a row-level value.
    reductions: tuple[int, ...]
    #: Positions in ``segment.stores`` written for every column in this pass, and once per row, before the last pass.
    stores: tuple[int, ...]
    row_stores: tuple[int, ...] = ()
    #: Element-level values that this pass takes from the staging buffer, and those that a later pass reads from it.
    reads: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()


@lru_cache(maxsize=1024)  # a search asks for it again with every configuration
def schedule(
    segment: Segment, stage: bool = False, rescale: bool = False, centre: bool = False
) -> tuple[Phase, ...]:
    """Split a segment into passes, one for each level of reductions, and a last one; dead values are dropped.

    A store is in the first pass that evaluates its value for a reduction anyway, else in the earliest that can take
    all such stores together. ``stage``: keep values that several passes need in a staging buffer where that saves
    arithmetic; ``rescale``: fold :func:`rescaled_sums` in the pass of their maximum; ``centre``: fold
    :func:`centred_sums` in the pass of their mean.
    """
    beside = {**(rescaled_sums(segment) if rescale else {}), **(centred_sums(segment) if centre else {})}
    depths = reduction_depths(segment, beside)
    body, per_row = segment.body, segment.per_row
    live = ancestors(body, (*(value for store in segment.stores for value in store.values), *segment.checks))
    reductions = [value for value in live if isinstance(body[value], Reduce)]
    row_level = [value for value in live if per_row[value] and value not in reductions]
    numbers = range(max((depths[value] for value in reductions), default=0) + 1)

    def elements(needed: Iterable[int], kept: Collection[int] = ()) -> tuple[int, ...]:
        """Element-level values that are ``needed``, going no deeper than row-level values and those in ``kept``."""
        values = ancestors(body, needed, lambda value: not per_row[value] and value not in kept)
        return tuple(value for value in values if not per_row[value])

    folded = [tuple(value for value in reductions if depths[value] == number + 1) for number in numbers]
    # A rescaled sum needs what its maximum folds, a centred one what its mean does.
    roots = [{operands(body[beside.get(value, value)])[0] for value in folds} for folds in folded]
    stores = _place_stores(segment, depths, [elements(needed) for needed in roots])
    row_stores = tuple(n for n, store in enumerate(segment.stores) if segment.store_per_row(store))

    phases: list[Phase] = []
    evaluated: list[int] = []
    for number in numbers:
        needed = roots[number] | {value for position in stores[number] for value in segment.stores[position].values}
        needed |= {value for value in segment.checks if depths[value] == number}
        kept = [value for value in evaluated if stage and _worth_staging(segment, value)]
        values = elements(needed, kept)
        own = tuple(value for value in values if value not in kept)
        evaluated.extend(value for value in own if value not in evaluated)
        rows = tuple(value for value in row_level if depths[value] == number)
        reads = tuple(value for value in values if value in kept)
        last = number == numbers[-1]
        phases.append(Phase(rows, own, folded[number], stores[number], row_stores if last else (), reads))
    return tuple(
        replace(phase, stages=tuple(v for v in phase.elements if any(v in later.reads for later in phases[n + 1 :])))
        for n, phase in enumerate(phases)
    )


def sweeps(segment: Segment, rescale: bool = False, centre: bool = False) -> int:
    """How often a kernel that cannot hold a row walks along it; see :func:`schedule`."""
    return sum(bool(phase.reductions or phase.stores) for phase in schedule(segment, False, rescale, centre))


def folds_across(segment: Segment) -> bool:
    """Whether rows lie side by side and what they fold lies apart: several rows at a time then read whole lines."""
    if not segment.rows or not segment.has_reduction():
        return False
    few = is_static(segment.rows[-1]) and segment.rows[-1] < _FEW_ROWS
    return not few and lies_apart(segment, segment.col_axis - 1) < lies_apart(segment, segment.col_axis)


def folds_in_parts(segment: Segment) -> bool:
    """Whether parts of a row can be folded apart, and then together: sums and the like that need no other fold but
    their mean, and nothing for each column after them.
    """
    if not any(isinstance(instr, Reduce) for instr in segment.body) or not is_static(*segment.rows, segment.cols):
        return False
    if segment.products or segment.has_scan() or max(reduction_depths(segment, centred_sums(segment))) > 1:
        return False
    return not any(phase.elements or phase.stores for phase in schedule(segment, centre=True)[1:])


def scans_in_parts(segment: Segment) -> bool:
    """Whether programs can share what is scanned: each folds its columns in one launch, and goes on from those before
    its own in the next.
    """
    return segment.has_scan() and not segment.products and is_static(*segment.rows, segment.cols)


def with_totals(segment: Segment) -> Segment:
    """A segment that :func:`scans_in_parts`, in which each scan has a fold of the same before it."""
    body: list[Instr] = []
    places: list[int] = []
    for instr in segment.body:
        made = renamed(instr, places.__getitem__)
        if isinstance(made, Scan):
            body.append(Reduce(made.dtype, made.kind, made.arg))
            made = replace(made, total=len(body) - 1)
        places.append(len(body))
        body.append(made)
    stores = tuple(store.with_values(places.__getitem__) for store in segment.stores)
    return replace(segment, body=tuple(body), stores=stores)


def lies_apart(segment: Segment, axis: int) -> int:
    """Loads and stores whose elements lie apart along an axis."""
    indices = [access.index for access in segment.accesses]
    return sum(not index.is_affine_in(axis) or index.coefficient(axis) not in (0, 1) for index in indices)


def reduction_depths(segment: Segment, beside: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """For each value the longest chain of reductions below it; those folded ``beside`` another one have its depth."""
    depths: list[int] = []
    for value, instr in enumerate(segment.body):
        below = max((depths[arg] for arg in operands(instr)), default=0) + isinstance(instr, Reduce)
        depths.append(depths[beside[value]] if beside and value in beside else below)
    return tuple(depths)


def rescaled_sums(segment: Segment) -> dict[int, int]:
    """Sums over ``exp(x - max(x))``, each with the ``max(x)`` in whose pass it can be folded.

    While the largest element so far rises from ``old`` to ``new``, the sum so far is multiplied by ``exp(old - new)``
    (Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018).
    """
    body, per_row = segment.body, segment.per_row
    found: dict[int, int] = {}
    for value, total in _sums(body):
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


def _sums(body: Sequence[Instr]) -> list[tuple[int, Reduce]]:
    """Sums, without those of what is scanned, whose parts are needed as they are."""
    totals = {instr.total for instr in body if isinstance(instr, Scan)}
    return [(value, instr) for value, instr in enumerate(body)
            if isinstance(instr, Reduce) and instr.kind == "sum" and value not in totals]


def centred_sums(segment: Segment) -> dict[int, int]:
    """Sums of ``(x - mean(x)) ** 2`` over static columns, each with the sum of ``x`` in whose pass it can be folded.

    Each lane sums how far its columns are from its first one, and the squares of that: neither cancels, for the first
    one is among them. At the end the squares around the means of all lanes are taken together (Chan, Golub and LeVeque,
    *Algorithms for computing the sample variance*, The American Statistician 37, 1983).
    """
    body, per_row = segment.body, segment.per_row
    found: dict[int, int] = {}
    for value, squares in _sums(body):
        if squares.dtype != "float32":
            continue
        square = body[squares.arg]
        if not isinstance(square, Apply) or square.op != "mul" or square.args[0] != square.args[1]:
            continue
        difference = body[square.args[0]]
        if not isinstance(difference, Apply) or difference.op != "sub" or per_row[difference.args[0]]:
            continue
        element, mean = difference.args
        total = _total_of_mean(segment, body[mean])
        if total is not None and operands(body[total]) == (element,) and body[element].dtype == "float32":
            found[value] = total
    return found


def _total_of_mean(segment: Segment, mean: Instr) -> int | None:
    """The sum that ``mean`` multiplies with one over the number of columns; None where it is no such mean."""
    if not isinstance(mean, Apply) or mean.op != "mul" or not is_static(segment.cols):
        return None
    totals = [one for one in mean.args if isinstance(segment.body[one], Reduce)]
    shares = [one.value for one in map(segment.body.__getitem__, mean.args) if isinstance(one, Const)]
    if len(totals) != 1 or len(shares) != 1 or abs(shares[0] * segment.cols - 1) > _ROUNDING:
        return None
    total = segment.body[totals[0]]
    return totals[0] if isinstance(total, Reduce) and (total.kind, total.dtype) == ("sum", "float32") else None


def _place_stores(
    segment: Segment, depths: Sequence[int], elements: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Positions of the per-column stores of each pass."""
    numbers = range(len(elements))
    places: dict[int, int | None] = {}
    latest = 0
    for position, store in enumerate(segment.stores):
        if segment.store_per_row(store):
            continue
        depth = max(depths[value] for value in store.values)
        places[position] = next((number for number in numbers[depth:] if store.value in elements[number]), None)
        if places[position] is None:
            latest = max(latest, depth)
    return [tuple(n for n, place in places.items() if number == (latest if place is None else place))
            for number in numbers]


def _worth_staging(segment: Segment, value: int) -> bool:
    """False for what costs no more to evaluate again than to read back: plain loads, positions, conversions of them."""
    instr = segment.body[value]
    while isinstance(instr, Cast | Round):
        instr = segment.body[instr.arg]
    return not (isinstance(instr, Const | Iota) or (isinstance(instr, Load) and instr.mask is None))
