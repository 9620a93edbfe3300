"""Straightforward evaluation of an index at a point: the oracle of the index tests."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.kernels.ir.index import Coord, FloorDiv, Index, Mod, evaluate


def value_of(index: Index, point: Sequence[int]) -> int:
    """Straightforward evaluation, the oracle."""
    total = evaluate(index.const, {})
    for atom, coef in index.terms:
        if isinstance(atom, Coord):
            term = point[atom.axis]
        elif isinstance(atom, FloorDiv):
            term = value_of(atom.base, point) // atom.divisor
        else:
            assert isinstance(atom, Mod)
            term = value_of(atom.base, point) % atom.divisor
        total += term * coef
    return total
