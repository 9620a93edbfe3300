"""How sizes, indices and constants are written in C++."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence

import sympy

from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.ir.index import Index, Size


def cpp_size(size: Size, names: Mapping[str, str]) -> str:
    """A size as an ``i64`` expression; ``names`` spells the symbols."""
    if isinstance(size, int):
        return f"{size}LL" if abs(size) > 2**31 - 1 else str(size)
    # One division at the end: the terms of an integer polynomial need not be integers themselves.
    numerator, denominator = sympy.sympify(size).as_numer_denom()
    text = _polynomial(sympy.expand(numerator), names)
    return text if denominator == 1 else f"({text} / {_polynomial(sympy.expand(denominator), names)})"


def _polynomial(expr: sympy.Expr, names: Mapping[str, str]) -> str:
    if expr.is_Integer:
        return cpp_size(int(expr), names)
    if expr.is_Symbol:
        return names[expr.name]
    if expr.is_Add or expr.is_Mul:
        return "(" + (" + " if expr.is_Add else " * ").join(_polynomial(arg, names) for arg in expr.args) + ")"
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return "(" + " * ".join([_polynomial(expr.base, names)] * int(expr.exp)) + ")"
    raise BuildError(f"cpp: cannot write the size expression {expr} (only sums, products and powers are supported)")


def index_text(index: Index, coord: Callable[[int], str], names: Mapping[str, str]) -> str:
    """An index as an ``i64`` expression; ``coord`` spells the coordinates."""
    return index.render(coord, lambda size: cpp_size(size, names))


def without_column(index: Index, col_axis: int) -> Index:
    """The index less its plain column term: its value at column 0 when it is affine in the column."""
    return Index.build(index.const, [term for term in index.terms if getattr(term[0], "axis", None) != col_axis])


def constant_text(kind: str, value: float | int | bool) -> str:
    """A scalar literal of a register type, exact (hexadecimal for floats)."""
    if kind == "bool":
        return "true" if value else "false"
    if kind.startswith("int"):
        whole = int(value)
        if whole == -(2**63):
            return "(-9223372036854775807LL - 1)"
        return f"{whole}LL" if kind == "int64" else f"((int){whole}LL)"
    suffix = "f" if kind == "float32" else ""
    number = float(value)
    if kind == "float32" and math.isfinite(number):
        try:
            number = struct.unpack("f", struct.pack("f", number))[0]
        except OverflowError:
            number = math.copysign(math.inf, number)
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    return f"{number.hex()}{suffix}"


def indent(lines: Sequence[str], by: int = 1) -> list[str]:
    return [("  " * by + line) if line else line for line in lines]
