"""Register types and spelling: when int64 may live in 32 bits, and how sizes and constants are written."""

from __future__ import annotations

import math
import re

import ir_samples as samples
import pytest
import sympy

from fuseplan.kernels.cpp.emitter import prelude
from fuseplan.kernels.cpp.types import assign_registers, constant_text, cpp_size, index_bounds
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.ir.index import Index, symbol
from fuseplan.kernels.ir.ir import KernelIR

N = symbol("n")


@pytest.mark.parametrize(
    ("sample", "widest"),
    [
        (samples.rms_norm(2, 8), 4),
        (samples.rms_norm(2, 8, "float64"), 8),
        (samples.softmax(8, 8, causal=True), 4),
        (samples.softmax(N, N, causal=True), 4),
        (samples.position_mask(4, 64), 4),
        (samples.integer_maths(2, 8), 8),
        (samples.cast_chain(2, 8), 8),
    ],
    ids=lambda value: samples.label(value) if isinstance(value, samples.Sample) and not value.ir.symbols else None,
)
def test_the_widest_register_sets_the_lanes(sample: samples.Sample, widest: int) -> None:
    assert assign_registers(sample.ir)[1] == widest


def positions(expression: object) -> KernelIR:
    """A kernel whose only element-level int64 values are what ``expression(body, column)`` makes."""
    buffers = [samples.contiguous("y", "bool", (4, 1000), True)]
    b = samples.Body(buffers, (4,), 1000)
    value = expression(b, b.iota(b.at[1]))  # type: ignore[operator]
    b.store("y", b.at, b("gt", value, b.const(3, "int64")))
    return KernelIR(tuple(buffers), (b.segment(),))


def big(b: samples.Body, number: int) -> int:
    return b.const(number, "int64")


@pytest.mark.parametrize(
    ("expression", "widest"),
    [
        (lambda b, c: b("add", c, big(b, 2**31 - 1001)), 4),
        (lambda b, c: b("add", c, big(b, 2**31 - 1000)), 8),
        (lambda b, c: b("sub", c, big(b, 2**31)), 8),
        (lambda b, c: b("mul", c, big(b, 2**20)), 4),
        (lambda b, c: b("mul", c, big(b, 2**22)), 8),
        (lambda b, c: b("int_remainder", c, big(b, 7)), 4),
        (lambda b, c: b("int_floordiv", c, big(b, -3)), 4),
        (lambda b, c: b("neg", b("abs", c)), 4),
        (lambda b, c: b("where", b("lt", c, big(b, 5)), c, big(b, 2**40)), 8),
        (lambda b, c: b("maximum", c, b("minimum", c, big(b, 2**40))), 4),
        (lambda b, c: b.cast(b.cast(c, "bool"), "int64"), 4),
        (lambda b, c: b.cast(b.cast(c, "float32"), "int64"), 8),
        (lambda b, c: b("add", c, b.reduce("sum", c)), 4),
        (lambda b, c: b("add", c, b.reduce("sum", b("mul", c, big(b, 5000)))), 8),
        (lambda b, c: b("add", c, b.reduce("max", c)), 4),
    ],
)
def test_bounds_decide_whether_positions_are_narrowed(expression: object, widest: int) -> None:
    assert assign_registers(positions(expression))[1] == widest


def test_bounds_of_an_index() -> None:
    column = Index.coord(1, 100)
    assert index_bounds(column * 3 + 5) == (5, 302)
    assert index_bounds(Index(4) - column) == (-95, 4)
    assert index_bounds((Index.coord(0, 7) * 100 + column) % 64) == (0, 63)
    assert index_bounds((column + 3) // 7) == (0, 14)
    assert index_bounds(column * N) is None
    assert index_bounds(column + N) is None
    assert index_bounds(Index.coord(0, N * N)) is None


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (7, "7"), (2**40, f"{2**40}LL"), (N, "s0"), (2 * N + 1, None), (N**3, None), (N * (N + 1) / 2, None),
        (N / 2, None),
    ],
)
def test_sizes_evaluate_to_the_same_number(size: object, text: str | None) -> None:
    written = cpp_size(size, {"n": "s0"})
    assert text is None or written == text
    for value in (2, 4, 10):
        expected = size if isinstance(size, int) else int(sympy.sympify(size).subs(N, value))
        # C's truncating division is Python's on non-negative operands.
        assert eval(written.replace("LL", "").replace("/", "//"), {"s0": value}) == expected


def test_an_unspellable_size_is_refused() -> None:
    with pytest.raises(BuildError, match="size expression"):
        cpp_size(sympy.floor(N / 3), {"n": "n0"})


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("bool", True, "true"), ("int64", -3, "-3LL"), ("int64", -(2**63), "(-9223372036854775807LL - 1)"),
        ("float32", math.inf, "__builtin_inff()"), ("float64", -math.inf, "-__builtin_inf()"),
        ("float32", math.nan, '__builtin_nanf("")'), ("float32", 1e39, "__builtin_inff()"),
        ("float64", 0.5, "0x1.0000000000000p-1"), ("float32", -0.0, "-0x0.0p+0f"),
    ],
)
def test_constants_are_exact(kind: str, value: float, text: str) -> None:
    assert constant_text(kind, value) == text


def test_no_generated_name_is_one_of_the_prelude_s() -> None:
    """Generated names are a letter or a word, and numbers; the ninth buffer once hid the type of a stored boolean."""
    generated = r"(?:[bcenpqrt]|scratch|segment|pass)\d+|s\d+_\w+|a\d+_\d+"
    words = set(re.findall(r"\b[A-Za-z_]\w*\b", re.sub(r'//.*|"[^"]*"', "", prelude())))
    assert {"bf16", "bool8", "vf", "fp_exp"} <= words
    assert [word for word in words if re.fullmatch(generated, word)] == []
