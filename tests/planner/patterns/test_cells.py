"""Which cells the pattern bench has."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fuseplan.planner.errors import ShapeError, UnknownPatternError
from fuseplan.planner.patterns.cells import ROWS, cell, parse_sizes, sweep_cells
from fuseplan.planner.patterns.table import PATTERNS


def test_the_default_sweeps_cover_the_groups_that_engines_ship() -> None:
    cells, _ = sweep_cells()
    keys = {one.key for one in cells}
    assert len(keys) == len(cells)
    for name in ("swiglu", "geglu"):
        assert {(rows, cols) for rows in ROWS for cols in (8192, 14336, 28672)} == {
            one.shape for one in cells if one.pattern == name
        }
    for name in ("add_rms_norm", "rms_norm", "layer_norm"):
        assert {one.shape[1] for one in cells if one.pattern == name} == {2048, 4096, 8192, 5120}
    heads = {one.shape for one in cells if one.pattern == "rope"}
    assert all(shape[:2] == (1, 32) and shape[-1] == 128 for shape in heads)
    assert {shape[-2] for shape in heads} == set(ROWS)
    assert max(one.shape[0] for one in cells if one.pattern == "sampling_softmax") == 512


def test_a_sweep_says_what_it_leaves_out() -> None:
    cells, left_out = sweep_cells(["causal_softmax"], (8, 4096), (512,))
    assert [one.shape for one in cells] == [(8, 512)]
    assert len(left_out) == 1 and "4096x512" in left_out[0]
    with pytest.raises(ShapeError, match="4096x512"):
        sweep_cells(["causal_softmax"], (4096,), (512,))


def test_rows_and_widths_can_be_chosen_and_names_are_checked() -> None:
    cells, _ = sweep_cells(["soft_cap", "swiglu", "soft_cap"], (1, 3), (127,), "float16")
    assert [one.key for one in cells] == [
        "soft_cap 1x127 float16", "soft_cap 3x127 float16", "swiglu 1x127 float16", "swiglu 3x127 float16"
    ]
    with pytest.raises(UnknownPatternError, match="did you mean swiglu"):
        sweep_cells(["swiglou"])
    with pytest.raises(UnknownPatternError, match="did you mean swiglu"):
        cell("swiglou", "3x8")
    assert cell("sin_chain", "10000000").dtype == PATTERNS["sin_chain"].dtype == "float32"


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_lists_of_sizes_are_read_back(numbers: list[int]) -> None:
    assert parse_sizes(", ".join(map(str, numbers)), "rows") == tuple(dict.fromkeys(numbers))


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1x2", "-1", "1.5", "0x8"])
def test_what_is_no_list_of_sizes_is_a_mistake(text: str) -> None:
    with pytest.raises(ShapeError, match="rows"):
        parse_sizes(text, "rows")
