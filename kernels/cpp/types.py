"""How sizes, indices, constants and types are written in C++, and which type holds each value of a kernel.

One int64 position in a mask would halve the lanes of a float32 softmax: int64 values are held in int32 where interval
arithmetic proves that all of them fit.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import sympy

from fuseplan.kernels.cpp.row_vectors import folded_size
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.ir.index import Coord, Index, Mod, Size
from fuseplan.kernels.ir.ir import Apply, Cast, Const, Instr, Iota, KernelIR, Load, Reduce, Scan, Segment

#: Inclusive bounds of an integer value; None when unknown.
Interval: TypeAlias = tuple[int, int] | None

#: Bound assumed for a dynamic size. A tensor dimension beyond it is no sequence length, batch or width.
DYNAMIC_SIZE_LIMIT = 2**30
_INT32_LIMIT = 2**31 - 2

SCALAR_TYPE = {"float32": "float", "float64": "double", "int64": "i64", "int32": "int", "bool": "bool"}
#: What an array of vectors consists of.
ELEMENT_TYPE = {**SCALAR_TYPE, "bool": "int"}
VECTOR_TYPE = {"float32": "vf", "float64": "vd", "int64": "vl", "int32": "vi", "bool": "vm"}
STORAGE_TYPE = {
    "float64": "double", "float32": "float", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "int",
    "int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool8",
    "float8_e4m3fn": "f8",
}

#: In which elements a sum is carried from column to column: of float32 in double precision, as in ATen.
_CARRIED_TYPE = {"float32": "float64", "float64": "float64", "int64": "int64", "int32": "int64"}

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
#: Ops whose bounds are among their results at the bounds of their operands.
_MONOTONE: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "maximum": max, "minimum": min,
}


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


def carried_type(kind: str, scan: Scan) -> str:
    """In which registers a scan of those of ``kind`` is carried: extremes are no more exact in wider ones."""
    return kind if scan.kind in ("max", "min") else _CARRIED_TYPE[kind]


def indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" if line else line for line in lines]


def assign_registers(ir: KernelIR) -> tuple[tuple[tuple[str, ...], ...], int]:
    """``kinds[segment][value]``, the register type that holds each value, and the bytes of the widest one (4 or 8)."""
    bodies = [list(zip(segment.body, segment.per_row, strict=True)) for segment in ir.segments]
    wide = {instr.dtype for body in bodies for instr, row_level in body if not row_level}
    if "float64" in wide or ("int64" in wide and not all(_fits_int32(segment) for segment in ir.segments)):
        return tuple(tuple(instr.dtype for instr, _ in body) for body in bodies), 8
    kinds = tuple(
        tuple("int32" if instr.dtype == "int64" and not row_level else instr.dtype for instr, row_level in body)
        for body in bodies
    )
    return kinds, 4


def _fits_int32(segment: Segment) -> bool:
    """True when every int64 value computed per element (and every reduction of one) has bounds inside int32."""
    intervals: list[Interval] = []
    for instr, row_level in zip(segment.body, segment.per_row, strict=True):
        interval = _interval(instr, segment, intervals)
        intervals.append(interval)
        fits = interval is not None and max(-interval[0], interval[1]) <= _INT32_LIMIT
        if instr.dtype == "int64" and not fits and (not row_level or isinstance(instr, Reduce)):
            return False
    return True


def _interval(instr: Instr, segment: Segment, known: Sequence[Interval]) -> Interval:
    if instr.dtype == "bool":
        return (0, 1)
    if isinstance(instr, Iota):
        return index_bounds(instr.index)
    if isinstance(instr, Const) and not instr.dtype.startswith("float"):
        return (int(instr.value), int(instr.value))
    if isinstance(instr, Cast):
        source = segment.body[instr.arg].dtype
        return known[instr.arg] if not source.startswith("float") else None
    if isinstance(instr, Load):
        return (-(2**31), 2**31 - 1) if instr.dtype == "int32" else None
    if isinstance(instr, Reduce | Scan) and instr.kind != "prod":
        operand = known[instr.arg]
        if instr.kind != "sum" or operand is None:
            return operand
        size = folded_size(segment)
        count = size if isinstance(size, int) else DYNAMIC_SIZE_LIMIT
        return (min(0, operand[0] * count), max(0, operand[1] * count))
    if isinstance(instr, Apply):
        return _apply_interval(instr.op, [known[arg] for arg in instr.args])
    return None


def _apply_interval(op: str, operands: Sequence[Interval]) -> Interval:
    numbers = [interval for interval in operands if interval is not None]
    if len(numbers) != len(operands) or op in COMPARISONS:
        return None
    if op == "where":
        (_, a, b) = numbers
        return (min(a[0], b[0]), max(a[1], b[1]))
    if op in ("neg", "abs"):
        reach = max(map(abs, numbers[0]))
        return (-reach, reach)
    if len(numbers) != 2:
        return None
    (a, b) = numbers
    if op in ("int_remainder", "int_floordiv"):
        reach = max(map(abs, b)) if op == "int_remainder" else max(map(abs, a)) + 1
        return (-reach, reach)
    if op == "shift_right" and 0 <= b[0] <= b[1] < 32:  # by more, 32 bits are not shifted as 64 are
        return (min(a[0], a[0] >> b[0]), max(a[1], a[1] >> b[0]))
    if op == "bit_and" and (a[0] >= 0 or b[0] >= 0):
        return (0, min(end for low, end in (a, b) if low >= 0))
    if op not in _MONOTONE:
        return None
    ends = [_MONOTONE[op](x, y) for x in a for y in b]
    return (min(ends), max(ends))


def index_bounds(index: Index) -> Interval:
    """Bounds of an index over the iteration space; a dynamic size counts as ``DYNAMIC_SIZE_LIMIT``."""
    if not isinstance(index.const, int):
        return None
    low = high = index.const
    for atom, coef in index.terms:
        if not isinstance(coef, int):
            return None
        if isinstance(atom, Coord | Mod):
            top = _top(atom.extent if isinstance(atom, Coord) else atom.divisor)
        else:
            inner = index_bounds(atom.base)
            top = inner[1] // atom.divisor if inner and inner[0] >= 0 and isinstance(atom.divisor, int) else None
        if top is None:
            return None
        low, high = (low, high + coef * top) if coef > 0 else (low + coef * top, high)
    return (low, high)


def _top(extent: Size) -> int | None:
    if isinstance(extent, int):
        return max(extent - 1, 0)
    return DYNAMIC_SIZE_LIMIT if getattr(extent, "is_Symbol", False) else None
