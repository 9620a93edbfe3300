"""Index algebra against plain integer arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_oracle import value_of

from fuseplan.kernels.ir.index import (
    Index,
    divides,
    evaluate,
    flatten,
    known_less_equal,
    row_major_strides,
    symbol,
)

EXTENTS = (3, 4, 8)


coefficients = st.lists(st.integers(0, 40), min_size=3, max_size=3)


def affine(coefs: Sequence[int], const: int) -> Index:
    return flatten([Index.coord(axis, extent) for axis, extent in enumerate(EXTENTS)], coefs) + const


def points() -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(extent) for extent in EXTENTS))


@settings(max_examples=60, deadline=None)
@given(coefficients, st.integers(0, 50), st.integers(1, 24))
def test_division_and_remainder_agree_with_integers(coefs: list[int], const: int, divisor: int) -> None:
    index = affine(coefs, const)
    quotient, remainder = index // divisor, index % divisor
    for point in points():
        plain = value_of(index, point)
        assert value_of(quotient, point) == plain // divisor
        assert value_of(remainder, point) == plain % divisor


@settings(max_examples=40, deadline=None)
@given(coefficients, coefficients, st.integers(1, 12), st.integers(1, 12))
def test_substitution_is_composition(outer: list[int], inner: list[int], first: int, second: int) -> None:
    index = (affine(outer, 5) // first) % second
    replacement = affine(inner, 1)
    composed = index.substitute({1: replacement})
    for point in points():
        moved = (point[0], value_of(replacement, point), point[2])
        assert value_of(composed, point) == value_of(index, moved)


@settings(max_examples=40, deadline=None)
@given(coefficients, st.integers(0, 9), st.integers(1, 9))
def test_rendered_text_means_the_index(coefs: list[int], const: int, divisor: int) -> None:
    index = affine(coefs, const) // divisor + affine(coefs, 0) % divisor
    text = index.render(lambda axis: "xyz"[axis], floordiv=lambda a, b: f"({a} // {b})")
    for point in points():
        assert eval(text, dict(zip("xyz", point, strict=True))) == value_of(index, point)


def test_splitting_a_head_dimension_needs_no_division() -> None:
    # (head * 64 + lane) cut by 64 is (head, lane) again: what view(.., H, D) must become.
    joined = Index.coord(0, 4) * 64 + Index.coord(1, 64)
    assert joined // 64 == Index.coord(0, 4)
    assert joined % 64 == Index.coord(1, 64)


def test_size_one_coordinate_is_zero() -> None:
    assert Index.coord(2, 1) == Index(0)


def test_maximum_is_attained() -> None:
    index = affine([7, 2, 1], 3)
    assert index.maximum() == max(value_of(index, point) for point in points())


def test_symbolic_sizes() -> None:
    s = symbol("s0")
    index = Index.coord(0, s) * 64 + Index.coord(1, 64)
    assert index // 64 == Index.coord(0, s)
    assert divides(s, s * 32) == 32
    assert divides(s, 32) is None
    assert known_less_equal(s, s * 2)
    assert not known_less_equal(s, 5)
    assert index.symbols() == {"s0"}
    bound = index.bind({"s0": 3})
    assert bound == Index.coord(0, 3) * 64 + Index.coord(1, 64)
    assert row_major_strides((s, 32, 64)) == (2048, 64, 1)


def test_unbound_symbol_is_an_error() -> None:
    with pytest.raises((KeyError, ValueError)):
        evaluate(symbol("s0") * 2, {})


def test_a_coordinate_of_an_empty_dimension_divides_by_nothing() -> None:
    """Views of tensors without elements: nothing is asked for, and nothing is divided by zero."""
    n = symbol("n")
    flat = flatten([Index.coord(0, 3), Index.coord(1, n)], [n, 1])
    assert flat // 0 == Index() == flat % 0
    for index in (flat // n, flat % n, (flat + 1) // (2 * n), (flat * 3 + 1) % n):
        assert index.bind({"n": 4}).symbols() == set()
        assert index.bind({"n": 0}).symbols() == set()


def test_a_quotient_of_dynamic_sizes_has_an_end() -> None:
    n = symbol("n")
    channel = Index.coord(1, 3 * n) // n
    assert channel.maximum() == 2
    assert (Index.coord(0, 5) * 3 + channel) // 3 == Index.coord(0, 5)


def test_a_common_factor_leaves_a_division() -> None:
    """The scale of a group of 64 for the second number of each word."""
    column = Index.coord(0, 128)
    assert (column * 2 + 1) // 64 == column // 32
    assert (column * 6 + 7) // 64 == (column * 3 + 3) // 32
