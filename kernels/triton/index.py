"""Index expressions as Triton source: coordinates of a tile, flattened rows taken apart with division and remainder."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from fuseplan.kernels.gpu.tile import Blocks
from fuseplan.kernels.ir.index import Coord, FloorDiv, Index, Size, as_size, product
from fuseplan.kernels.ir.ir import Segment


def symbol_argument(name: str) -> str:
    """The kernel argument that carries a dynamic size."""
    return f"n_{name}"


def triton_size(size: Size) -> str:
    """Source text of a size, an integer polynomial in the dynamic sizes; ValueError where it is none."""
    if isinstance(size, int):
        return str(size)
    if isinstance(size, Blocks):
        return f"(({triton_size(size.size)} + {size.block - 1}) // {size.block})"
    expression = sympy.expand(size)
    names = sorted(expression.free_symbols, key=lambda symbol: symbol.name)
    try:
        polynomial = sympy.Poly(expression, *names)
    except sympy.PolynomialError:
        raise ValueError(f"size {size} is not a polynomial in its symbols") from None
    terms: list[str] = []
    for powers, coefficient in polynomial.terms():
        if not coefficient.is_Integer:
            raise ValueError(f"size {size} has a coefficient that is not an integer")
        factors = [symbol_argument(name.name) for name, power in zip(names, powers, strict=True) for _ in range(power)]
        if coefficient != 1 or not factors:
            factors.append(str(int(coefficient)))
        terms.append(" * ".join(factors))
    return terms[0] if len(terms) == 1 and "*" not in terms[0] else f"({' + '.join(terms)})"


@dataclass
class Coordinates:
    """Renders the indices of one segment over the flattened ``row`` and ``col``, and remembers what they need.

    Where blocks of ``block_rows`` rows never straddle two values of a coordinate, ``first_row`` gives it.
    """

    segment: Segment
    block_rows: int = 1
    row: str = "row"
    col: str = "col"
    #: Run of row axes ``(first, last)`` -> (name, defining expression), in order of first use.
    used: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)

    def terms(self, index: Index) -> list[str]:
        """The summands of an index: row terms first, so that a program's base address stays a scalar."""
        coefficients: dict[int, Size] = {}
        rest: list[tuple[str, Size]] = []
        for atom, coefficient in index.terms:
            if not isinstance(atom, Coord):
                operator = "//" if isinstance(atom, FloorDiv) else "%"
                base = _scaled(self.text(atom.base), 1)
                rest.append((f"{base} {operator} {triton_size(atom.divisor)}", coefficient))
            elif atom.axis == self.segment.col_axis:
                rest.append((self.col, coefficient))
            else:
                coefficients[atom.axis] = coefficient
        texts = [_scaled(name, coefficient) for name, coefficient in self._runs(coefficients)]
        if not (isinstance(index.const, int) and index.const == 0):
            texts.append(triton_size(index.const))
        rest.sort(key=lambda item: item[0] == self.col)
        texts += [_scaled(text, coefficient) for text, coefficient in rest]
        return texts

    def text(self, index: Index) -> str:
        return " + ".join(self.terms(index)) or "0"

    def definitions(self) -> list[str]:
        return [f"{name} = {expression}" for name, expression in self.used.values()]

    def _runs(self, coefficients: dict[int, Size]) -> list[tuple[str, Size]]:
        """Merge axes that are walked as one (``outer == inner * extent``): fewer divisions."""
        rows = self.segment.rows
        runs: list[tuple[str, Size]] = []
        last = len(rows) - 1
        while last >= 0:
            if last not in coefficients:
                last -= 1
                continue
            first, outer = last, coefficients[last]
            while first > 0:
                outer = as_size(outer * rows[first])
                if first - 1 not in coefficients or as_size(coefficients[first - 1] - outer) != 0:
                    break
                first -= 1
            runs.append((self._coordinate(first, last), coefficients[last]))
            last = first - 1
        return runs[::-1]

    def _coordinate(self, first: int, last: int) -> str:
        """Name of the merged coordinate of row axes ``first .. last``."""
        rows = self.segment.rows
        if (first, last) == (0, len(rows) - 1):
            return self.row
        inner = product(rows[last + 1 :])
        whole = self.block_rows > 1 and isinstance(inner, int) and inner % self.block_rows == 0
        row = "first_row" if whole else "row"
        expression = "row" if inner == 1 else f"{row} // {triton_size(inner)}"
        if first > 0:
            expression = f"{expression} % {triton_size(product(rows[first : last + 1]))}"
        name = f"row{first}" if first == last else f"row{first}_{last}"
        self.used[first, last] = (name, expression)
        return name


def _scaled(text: str, factor: Size) -> str:
    text = text if text.isidentifier() else f"({text})"
    return text if factor == 1 else f"{text} * {triton_size(factor)}"
