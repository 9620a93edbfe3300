"""Integer index expressions: where in a buffer a value lives, as a function of the iteration coordinates.

An :class:`Index` is affine, ``const + sum(coef * atom)``. An atom is a coordinate of the iteration space, or a
floor division or remainder of another index (what a ``view`` that cuts across dimensions leaves behind).
Sizes are plain integers, or sympy expressions over positive integer symbols when a shape is dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

#: Results kept of what is asked again for each group that holds an op.
_REMEMBERED = 2**14
#: A size, stride or offset: an ``int``, or a sympy expression when the shape is dynamic.
Size: TypeAlias = Any


def symbol(name: str) -> sympy.Symbol:
    """A dynamic size: a positive integer symbol."""
    return sympy.Symbol(name, integer=True, positive=True)


def as_size(value: Any) -> Size:
    """Normalise to ``int`` where the value is a known integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, sympy.Expr):
        value = sympy.expand(value)
        return int(value) if value.is_Integer else value
    return int(value)


def is_static(*sizes: Size) -> bool:
    return all(isinstance(size, int) for size in sizes)


def evaluate(size: Size, values: Mapping[str, int | float]) -> int:
    """The number a size stands for once its symbols have values."""
    if isinstance(size, int):
        return size
    result = number(size, values)
    if not isinstance(result, int):
        raise ValueError(f"size {size} is not an integer for {dict(values)}")
    return result


def evaluate_all(sizes: Iterable[Size], values: Mapping[str, int | float]) -> tuple[int, ...]:
    return tuple(evaluate(size, values) for size in sizes)


def number(expression: Any, values: Mapping[str, int | float]) -> int | float:
    """The number that any expression over sizes stands for; KeyError where a symbol has no value."""
    result = expression.subs({sym: values[sym.name] for sym in expression.free_symbols})
    if result in (sympy.true, sympy.false):
        return bool(result)
    return int(result) if result.is_Integer else float(result)


def symbols_of(*sizes: Size) -> set[str]:
    return {sym.name for size in sizes if not isinstance(size, int) for sym in size.free_symbols}


def known_less_equal(a: Size, b: Size) -> bool:
    """True when ``a <= b`` for every value of the symbols (False also when it cannot be told)."""
    if is_static(a, b):
        return bool(a <= b)
    return bool((sympy.expand(b - a)).is_nonnegative)


def divides(k: Size, n: Size) -> Size | None:
    """``n / k`` when it is exact for every value of the symbols, else None."""
    if is_static(k, n):
        return n // k if k != 0 and n % k == 0 else None
    if n == 0:
        return 0
    quotient = sympy.cancel(sympy.sympify(n) / k)
    return as_size(quotient) if quotient.as_numer_denom()[1] == 1 else None


def product(sizes: Iterable[Size]) -> Size:
    result: Size = 1
    for size in sizes:
        result = as_size(result * size)
    return result


@dataclass(frozen=True)
class Coord:
    """Coordinate ``axis`` of the iteration space, ``0 <= value < extent``. The last axis is the column."""

    axis: int
    extent: Size


@dataclass(frozen=True)
class FloorDiv:
    base: Index
    divisor: Size


@dataclass(frozen=True)
class Mod:
    base: Index
    divisor: Size


Atom: TypeAlias = Coord | FloorDiv | Mod


def axes_of(atom: Atom) -> set[int]:
    """The axes whose coordinate an atom depends on."""
    return {atom.axis} if isinstance(atom, Coord) else atom.base.axes()


@dataclass(frozen=True)
class Index:
    """``const + sum(coef * atom)``; terms are merged, non-zero and in a fixed order, so equal means equal."""

    const: Size = 0
    terms: tuple[tuple[Atom, Size], ...] = ()

    def __hash__(self) -> int:  # asked for again and again, and it has many levels
        own = self.__dict__
        if "_hash" not in own:
            own["_hash"] = hash((self.const, self.terms))
        return own["_hash"]  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:  # symbols have other hashes in other processes
        return {"const": self.const, "terms": self.terms}

    @staticmethod
    def build(const: Size, terms: Iterable[tuple[Atom, Size]]) -> Index:
        merged: dict[Atom, Size] = {}
        for atom, coef in terms:
            merged[atom] = as_size(merged.get(atom, 0) + coef)
        kept = [(atom, coef) for atom, coef in merged.items() if coef != 0]
        if len(kept) > 1:
            kept.sort(key=lambda term: repr(term[0]))
        return Index(as_size(const), tuple(kept))._rejoined()

    def _rejoined(self) -> Index:
        """``(x // d) * d * c + (x % d) * c`` is ``x * c``: what a split and a join of the same dimension leave. Of
        three, ``((x // d) % e) * d * c + (x % d) * c`` is ``(x % (d * e)) * c``.
        """
        for atom, coef in self.terms:
            if not isinstance(atom, Mod):
                continue
            quotient = atom.base // atom.divisor
            wanted = {part: as_size(share * coef * atom.divisor) for part, share in quotient.terms}
            present = dict(self.terms)
            if wanted and all(present.get(part) == share for part, share in wanted.items()):
                rest = [term for term in self.terms if term[0] != atom and term[0] not in wanted]
                const = self.const - quotient.const * coef * atom.divisor + atom.base.const * coef
                joined = [(part, share * coef) for part, share in atom.base.terms]
                return Index.build(const, [*rest, *joined])
            for outer, share in self.terms:
                if isinstance(outer, Mod) and outer.base == quotient and share == as_size(coef * atom.divisor):
                    rest = [term for term in self.terms if term[0] not in (atom, outer)]
                    both: Index = atom.base % as_size(atom.divisor * outer.divisor)
                    return Index.build(
                        self.const + both.const * coef, [*rest, *((part, own * coef) for part, own in both.terms)])
        return self

    @staticmethod
    def coord(axis: int, extent: Size) -> Index:
        """The coordinate itself; a dimension of size one is the constant 0."""
        if isinstance(extent, int) and extent == 1:
            return Index(0)
        return Index(0, ((Coord(axis, as_size(extent)), 1),))

    def __add__(self, other: Index | Size) -> Index:
        if not isinstance(other, Index):
            return Index(as_size(self.const + other), self.terms)
        return Index.build(self.const + other.const, (*self.terms, *other.terms))

    def __mul__(self, factor: Size) -> Index:
        if isinstance(factor, int) and factor == 1:
            return self
        return Index.build(self.const * factor, ((atom, coef * factor) for atom, coef in self.terms))

    def __sub__(self, other: Index) -> Index:
        return self + other * -1

    @lru_cache(maxsize=_REMEMBERED)  # noqa: B019  # so many, and small
    def __floordiv__(self, divisor: Size) -> Index:
        if is_static(divisor) and divisor == 0:
            return Index(0)  # a coordinate of an empty dimension: nothing is ever there to be asked for
        if len(self.terms) == 1 and self.const == 0 and self.terms[0][1] == 1:
            atom = self.terms[0][0]
            if isinstance(atom, FloorDiv):  # (x // a) // b
                return atom.base.__floordiv__(as_size(atom.divisor * divisor))
        whole, rest = self._split(divisor)
        if rest == Index() or rest._is_below(divisor):
            return whole
        factors = [divisor, *(coef for _, coef in rest.terms)]
        if is_static(rest.const, *factors) and (common := math.gcd(*factors)) > 1:  # (2x + 1) // 64 is x // 32
            terms = tuple((atom, coef // common) for atom, coef in rest.terms)
            reduced: Index = Index(rest.const // common, terms) // (divisor // common)
            return whole + reduced
        return whole + Index(0, ((FloorDiv(rest, divisor), 1),))

    @lru_cache(maxsize=_REMEMBERED)  # noqa: B019
    def __mod__(self, divisor: Size) -> Index:
        if is_static(divisor) and divisor == 0:
            return Index(0)
        _, rest = self._split(divisor)
        if rest._is_below(divisor):
            return rest
        return Index(0, ((Mod(rest, divisor), 1),))

    def _split(self, divisor: Size) -> tuple[Index, Index]:
        """``(whole, rest)`` with ``self == whole * divisor + rest`` and every term of whole exact."""
        quotients = [(atom, coef, divides(divisor, coef)) for atom, coef in self.terms]
        whole = [(atom, quotient) for atom, _, quotient in quotients if quotient is not None]
        rest = [(atom, coef) for atom, coef, quotient in quotients if quotient is None]
        if is_static(self.const, divisor):
            const_quotient, const_rest = divmod(self.const, divisor)
        else:
            exact = divides(divisor, self.const)
            const_quotient, const_rest = (0, self.const) if exact is None else (exact, 0)
        return Index.build(const_quotient, whole), Index.build(const_rest, rest)

    def _is_below(self, divisor: Size) -> bool:
        """Whether it is known to be at least 0, and less than ``divisor``."""
        nonnegative = all(known_less_equal(0, size) for size in (self.const, *(coef for _, coef in self.terms)))
        return nonnegative and known_less_equal(self.maximum() + 1, divisor)

    def maximum(self) -> Size:
        """Largest value, for indices whose coefficients are non-negative."""
        total: Size = self.const
        for atom, coef in self.terms:
            if not isinstance(atom, FloorDiv):
                top = (atom.extent if isinstance(atom, Coord) else atom.divisor) - 1
            elif is_static(limit := atom.base.maximum(), atom.divisor):
                top = limit // atom.divisor
            else:  # up to where a whole number of divisors ends
                whole = divides(atom.divisor, as_size(limit + 1))
                top = limit if whole is None else whole - 1
            total = total + coef * top
        return as_size(total)

    def axes(self) -> set[int]:
        """The axes whose coordinate this index depends on."""
        return set[int]().union(*(axes_of(atom) for atom, _ in self.terms))

    def coefficient(self, axis: int) -> Size:
        """The coefficient of coordinate ``axis`` where it appears as a plain coordinate (0 when absent)."""
        for atom, coef in self.terms:
            if isinstance(atom, Coord) and atom.axis == axis:
                return coef
        return 0

    def is_affine_in(self, axis: int) -> bool:
        """True when ``axis`` appears at most as a plain coordinate (never inside a division)."""
        return all(isinstance(atom, Coord) or axis not in atom.base.axes() for atom, _ in self.terms)

    def substitute(self, values: Mapping[int, Index]) -> Index:
        """Replace coordinates by index expressions (simplifying again)."""
        return self._rebuilt(lambda atom: values.get(atom.axis, Index(0, ((atom, 1),))), lambda size: size)

    def bind(self, symbols: Mapping[str, int]) -> Index:
        """Replace dynamic sizes by numbers."""
        def bound(size: Size) -> int:
            return evaluate(size, symbols)

        return self._rebuilt(lambda atom: Index.coord(atom.axis, bound(atom.extent)), bound)

    def _rebuilt(self, coordinate: Callable[[Coord], Index], size: Callable[[Size], Size]) -> Index:
        result = Index(size(self.const))
        for atom, coef in self.terms:
            if isinstance(atom, Coord):
                part = coordinate(atom)
            else:
                base, divisor = atom.base._rebuilt(coordinate, size), size(atom.divisor)
                part = base // divisor if isinstance(atom, FloorDiv) else base % divisor
            result = result + part * size(coef)
        return result

    def symbols(self) -> set[str]:
        """Names of the dynamic sizes in this index."""
        found = symbols_of(self.const, *(coef for _, coef in self.terms))
        for atom, _ in self.terms:
            if isinstance(atom, Coord):
                found |= symbols_of(atom.extent)
            else:
                found |= atom.base.symbols() | symbols_of(atom.divisor)
        return found

    def render(
        self, coord: Callable[[int], str], size: Callable[[Size], str] = str,
        floordiv: Callable[[str, str], str] = lambda a, b: f"({a} / {b})",
        mod: Callable[[str, str], str] = lambda a, b: f"({a} % {b})"
    ) -> str:
        """Source text of the index; the defaults spell C (all operands are non-negative)."""
        parts: list[str] = []
        for atom, coef in self.terms:
            if isinstance(atom, Coord):
                text = coord(atom.axis)
            else:
                inner = atom.base.render(coord, size, floordiv, mod)
                spell = floordiv if isinstance(atom, FloorDiv) else mod
                text = spell(inner if inner.isidentifier() else f"({inner})", size(atom.divisor))
            parts.append(text if isinstance(coef, int) and coef == 1 else f"{text} * {size(coef)}")
        if not parts or not (isinstance(self.const, int) and self.const == 0):
            parts.append(size(self.const))
        return " + ".join(parts)


def row_major_strides(shape: Iterable[Size]) -> tuple[Size, ...]:
    """Strides of a contiguous tensor of this shape."""
    strides: list[Size] = []
    running: Size = 1
    for extent in reversed(tuple(shape)):
        strides.append(running)
        running = as_size(running * extent)
    return tuple(reversed(strides))


def flatten(coords: Iterable[Index], strides: Iterable[Size]) -> Index:
    """``sum(coord * stride)``: the element offset of a coordinate tuple."""
    return _flattened(tuple(coords), tuple(strides))


@lru_cache(maxsize=_REMEMBERED)
def _flattened(coords: tuple[Index, ...], strides: tuple[Size, ...]) -> Index:
    return sum((coord * stride for coord, stride in zip(coords, strides, strict=True)), Index())
