"""Rewrites of a segment's values: no clamp that a conversion repeats and, to within rounding, cheaper arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fuseplan.kernels.ir.ir import LARGEST, Apply, Buffer, Const, Instr, Round, Segment, operands, renamed


def identity(instr: Instr) -> object:
    """What two equal instructions share. The constants 0.0 and -0.0 are not equal, though Python says so."""
    return (instr, math.copysign(1.0, instr.value)) if isinstance(instr, Const) else instr


def without_repeated_clamps(segment: Segment, buffers: Sequence[Buffer]) -> Segment:
    """The segment whose saturating conversions read past the clamps that they repeat; values keep their numbers."""
    def source(value: int, to: str) -> int:
        return _unclamped(segment.body, value, LARGEST[to]) if to in LARGEST else value

    body = tuple(
        replace(instr, arg=source(instr.arg, instr.to)) if isinstance(instr, Round) else instr
        for instr in segment.body
    )
    stores = tuple(replace(store, value=source(store.value, buffers[store.buffer].dtype)) for store in segment.stores)
    return replace(segment, body=body, stores=stores)


def _unclamped(body: Sequence[Instr], value: int, largest: float) -> int:
    """What ``value`` is a clamp of, to bounds no closer than the two numbers of magnitude ``largest``."""
    instr = body[value]
    if not isinstance(instr, Apply) or instr.op not in ("maximum", "minimum"):
        return value
    for one, other in (instr.args, instr.args[::-1]):
        bound = body[other]
        if isinstance(bound, Const) and (bound.value if instr.op == "minimum" else -bound.value) >= largest:
            return _unclamped(body, one, largest)
    return value


def cheaper_arithmetic(segment: Segment) -> Segment:
    """The segment with dear arithmetic spelled differently, where exact arithmetic would not tell the difference.

    * ``1 + tanh(u)`` becomes ``2 sigmoid(2u)``: one exponential without a polynomial beside it.
    * A division by a constant becomes a product with its reciprocal, as in ATen's CUDA kernels; so does one by a
      number of the whole row whose bounds are known and ordinary, such as the scale of a quantised row.

    Results differ by rounding: not for kernels that are to round as ATen does.
    """
    maker = _Maker(segment)
    for instr in segment.body:
        made = maker.cheaper(instr)
        maker.places.append(maker.emit(renamed(instr, maker.places.__getitem__)) if made is None else made)
    stores = [store.with_values(maker.places.__getitem__) for store in segment.stores]
    body, places = needed(maker.body, (value for store in stores for value in store.values))
    return replace(segment, body=body, stores=tuple(store.with_values(places.__getitem__) for store in stores))


#: Between these, reciprocals of float32 numbers are normal numbers, by a factor of two: none is flushed to zero, even
#: where a GPU's approximation is 2 units off. An int8 row's scale may be 2^121.
_SMALL, _LARGE = 2.0**-125, 2.0**125
#: No float32 is this large.
_LARGEST = 2.0**128


class _Maker:
    """Copies a body, instruction by instruction, in the cheaper spelling."""

    def __init__(self, segment: Segment) -> None:
        self.old = segment.body
        self.body: list[Instr] = []
        #: Where each value of the old body is in the new one.
        self.places: list[int] = []
        self._known: dict[object, int] = {}
        #: How many instructions and stores read each value.
        self._users = Counter(arg for instr in segment.body for arg in operands(instr))
        self._users.update(value for store in segment.stores for value in store.values)
        self._per_row = segment.per_row

    def emit(self, instr: Instr) -> int:
        place = self._known.setdefault(identity(instr), len(self.body))
        if place == len(self.body):
            self.body.append(instr)
        return place

    def cheaper(self, instr: Instr) -> int | None:
        """The value in its cheaper spelling, where it has one."""
        if not isinstance(instr, Apply) or instr.dtype not in ("float32", "float64"):
            return None
        if instr.op == "add":
            for one, other in (instr.args, instr.args[::-1]):
                tanh = self.old[other]
                if self._number(one) != 1.0 or self._users[other] > 1:
                    continue
                if isinstance(tanh, Apply) and tanh.op == "tanh":
                    return self._one_plus_tanh(tanh)
        return self._product(instr, *instr.args) if instr.op == "div" else None

    def _product(self, instr: Apply, dividend: int, divisor: int) -> int | None:
        """The division as a product with a reciprocal, where that is a normal number of a float32 and saves work."""
        least, most = self._magnitude(divisor)
        if not _SMALL < least <= most < _LARGE:
            return None
        number = self._number(divisor)
        if number is not None:
            inverse = self.emit(Const(instr.dtype, 1.0 / number))
        elif self._per_row[divisor] and not self._per_row[dividend]:
            inverse = self.emit(Apply(instr.dtype, "reciprocal", (self.places[divisor],)))
        else:
            return None
        return self.emit(Apply(instr.dtype, "mul", (self.places[dividend], inverse)))

    def _magnitude(self, value: int) -> tuple[float, float]:
        """Bounds of the absolute value, should it be a finite number."""
        number, instr = self._number(value), self.old[value]
        if number is not None:
            return abs(number), abs(number)
        if isinstance(instr, Apply) and instr.op in ("maximum", "mul", "div"):
            for one, other in (instr.args, instr.args[::-1]):
                constant = self._number(other)
                if constant is None or (instr.op == "div" and one != instr.args[0]):
                    continue
                least, most = self._magnitude(one)
                if instr.op == "maximum" and constant > 0:
                    return constant, max(constant, most)
                if instr.op == "mul":
                    return least * abs(constant), most * abs(constant)
                if instr.op == "div" and constant != 0:
                    return least / abs(constant), most / abs(constant)
        return 0.0, _LARGEST

    def _number(self, value: int) -> float | None:
        instr = self.old[value]
        return float(instr.value) if isinstance(instr, Const) and math.isfinite(instr.value) else None

    def _one_plus_tanh(self, tanh: Apply) -> int:
        two = self.emit(Const(tanh.dtype, 2.0))
        double = self.emit(Apply(tanh.dtype, "mul", (self.places[tanh.args[0]], two)))
        curve = self.emit(Apply(tanh.dtype, "sigmoid", (double,)))
        return self.emit(Apply(tanh.dtype, "mul", (curve, two)))


def ancestors(
    body: Sequence[Instr], roots: Iterable[int], through: Callable[[int], bool] = lambda value: True
) -> list[int]:
    """``roots`` and what they are computed from, in body order; ``through`` says whose operands count."""
    found: set[int] = set()
    pending = list(roots)
    while pending:
        value = pending.pop()
        if value not in found:
            found.add(value)
            pending.extend(operands(body[value]) if through(value) else ())
    return sorted(found)


def needed(body: Sequence[Instr], values: Iterable[int]) -> tuple[tuple[Instr, ...], dict[int, int]]:
    """The part of a body that some values are made of, and where each value kept is there."""
    kept = ancestors(body, values)
    places = {old: new for new, old in enumerate(kept)}
    return tuple(renamed(body[old], places.__getitem__) for old in kept), places
