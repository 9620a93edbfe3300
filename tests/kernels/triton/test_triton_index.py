"""Index expressions as Triton source: evaluated on whole grids, they give the element offsets of the index itself."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.kernels.gpu.tile import Blocks, ceil_div, next_power_of_2
from fuseplan.kernels.ir.index import Index, flatten, symbol
from fuseplan.kernels.ir.ir import Const, Segment
from fuseplan.kernels.triton.index import Coordinates, triton_size


def segment(rows: tuple[int, ...], cols: int) -> Segment:
    return Segment(rows, cols, (Const("float32", 0.0),), ())


def offsets(where: Segment, index: Index) -> list[int]:
    """The offsets that the generated text gives, for every row and column."""
    coordinates = Coordinates(where)
    text = coordinates.text(index)
    found = []
    for row, col in itertools.product(range(math.prod(where.rows)), range(where.cols)):
        names = {"row": row, "col": col}
        for definition in coordinates.definitions():
            name, expression = definition.split(" = ")
            names[name] = eval(expression, {}, names)
        found.append(eval(text, {}, names))
    return found


def expected(where: Segment, index: Index) -> list[int]:
    spaces = [range(extent) for extent in (*where.rows, where.cols)]
    return [_value(index, at) for at in itertools.product(*spaces)]


def _value(index: Index, at: tuple[int, ...]) -> int:
    constants = {axis: Index(value) for axis, value in enumerate(at)}
    bound = index.substitute(constants)
    assert not bound.terms
    return int(bound.const)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_affine_indices_over_any_rows(data: st.DataObject) -> None:
    rows = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    cols = data.draw(st.integers(1, 5))
    coords = [Index.coord(axis, extent) for axis, extent in enumerate((*rows, cols))]
    strides = [data.draw(st.sampled_from([0, 1, 3, 4, 12, 60])) for _ in coords]
    index = flatten(coords, strides) + data.draw(st.integers(0, 7))
    where = segment(rows, cols)
    assert offsets(where, index) == expected(where, index)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 7), st.integers(2, 5))
def test_divisions_and_remainders(rows: int, cols: int, divisor: int, factor: int) -> None:
    row, col = Index.coord(0, rows), Index.coord(1, cols)
    index = (row * factor + col) // divisor * 10 + (row * cols + col * 3) % divisor
    where = segment((rows,), cols)
    assert offsets(where, index) == expected(where, index)


def test_rows_walked_as_one_need_no_division() -> None:
    where = segment((4, 8, 16), 32)
    coords = [Index.coord(axis, extent) for axis, extent in enumerate((4, 8, 16, 32))]
    whole = Coordinates(where)
    assert whole.text(flatten(coords, (4096, 512, 32, 1))) == "row * 32 + col"
    assert whole.definitions() == []
    pair = Coordinates(where)
    assert pair.text(flatten(coords[:3], (0, 16, 1))) == "row1_2"
    assert pair.definitions() == ["row1_2 = row % 128"]


def test_sizes_are_integer_arithmetic() -> None:
    n, m = symbol("n"), symbol("m")
    size = 3 * n * n + n * m + 5
    text = triton_size(size)
    assert eval(text, {}, {"n_n": 7, "n_m": 11}) == 3 * 49 + 77 + 5
    assert triton_size(12) == "12"
    assert eval(triton_size(Blocks(n * 4, 16)), {}, {"n_n": 9}) == 3
    with pytest.raises(ValueError, match="not an integer"):
        triton_size(n / 2)


def test_blocks_are_counted() -> None:
    assert ceil_div(17, 16) == 2
    assert [next_power_of_2(value) for value in (0, 1, 2, 3, 4096, 4097)] == [1, 1, 2, 4, 4096, 8192]
