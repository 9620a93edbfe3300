"""Tables: what a terminal of some width shows of one, and what a pipe and a file have."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fuseplan.planner.cli.output.tables import fitted, left_out_line, shortened
from fuseplan.planner.reports.document import Table, cell_text, table_of

PLACE = "model.layers.0-31: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj -> mlp.gate_proj"
GROUPS = Table(
    "groups", ("workload", "group", "place", "config", "fused_us", "unfused_us", "speedup", "key"),
    (
        ("decode 1 @ 1024", "silu+mul 1x14336 bfloat16", PLACE, "block=1024 warps=4 stages=2", 1.25, 12345.678, 9876.5,
         "f" * 64),
        ("decode 1 @ 1024", "add+rms_norm 1x4096 bfloat16", "", "", None, 2.5, math.nan, "e" * 64),
    ),
    spare=("key", "config", "place", "fused_us", "unfused_us"), keep=("workload", "group", "speedup"),
)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200, 400])
def test_a_row_stays_a_line_with_the_whole_answer(width: int) -> None:
    found = fitted(GROUPS, width)
    assert len(found.lines) == len(GROUPS.rows)
    for line, row in zip((found.heading, *found.lines), (GROUPS.columns, *GROUPS.rows), strict=True):
        assert cell_len(line) <= width
        for name in ("workload", "group", "speedup"):
            text = cell_text(row[GROUPS.columns.index(name)], 2, ",")
            assert text in line, (name, line)


def test_columns_go_in_their_order_and_come_back_in_a_wider_window() -> None:
    assert fitted(GROUPS, 400).left_out == ()
    before: set[str] = set()
    for width in range(400, 59, -1):
        left = fitted(GROUPS, width).left_out
        assert set(left) == set(GROUPS.spare[: len(left)]) >= before
        before = set(left)
    assert len(before) >= 3


def test_a_long_text_is_cut_between_its_ends_and_numbers_never() -> None:
    line = fitted(GROUPS, 120).lines[0]
    assert "…" in line and "12,345.68" in line and PLACE[:6] in line
    narrow = fitted(Table("t", ("name", "first", "last"), (("x" * 50, 1e15, 2e15),), keep=("name", "last")), 30)
    assert narrow.left_out == ("first",) and f"{2e15:,.2f}" in narrow.lines[0] and len(narrow.lines[0]) <= 30


def test_a_column_without_values_is_not_shown() -> None:
    found = fitted(Table("t", ("name", "empty", "time"), (("a", None, 1.0), ("b", math.nan, 2.0))), 80)
    assert found.heading.split() == ["name", "time"] and found.left_out == ()
    assert fitted(Table("t", ("name", "empty"), ()), 80).heading.split() == ["name", "empty"]


@given(st.lists(st.tuples(st.text(max_size=90), st.text(max_size=90), st.floats(-1e6, 1e6)), min_size=1, max_size=5),
       st.integers(60, 130))
def test_whatever_the_text_no_row_is_wider_than_the_terminal(rows: list[tuple[str, str, float]], width: int) -> None:
    found = fitted(Table("t", ("one", "other", "time"), tuple(rows), keep=("one", "time")), width)
    assert all(cell_len(line) <= width and line.isprintable() for line in found.lines)
    assert all(cell_text(row[2], 2, ",") in line for row, line in zip(rows, found.lines, strict=True))


@given(st.text(max_size=60), st.integers(4, 40))
def test_shortened_text_keeps_its_start_and_its_end(text: str, width: int) -> None:
    found = shortened(text, width, cell_len)
    assert cell_len(found) <= width
    if cell_len(text) > width:
        start, _, end = found.partition("…")
        assert text.startswith(start) and text.endswith(found[len(start) + 1:]) and (start or end)
    else:
        assert found == text


@pytest.mark.parametrize("width", [60, 80])
def test_the_line_below_names_columns_as_far_as_they_fit(width: int) -> None:
    columns = [f"column_{number}" for number in range(12)]
    for count in range(1, 13):
        line = left_out_line(columns[:count], width)
        assert len(line) <= width and "--format csv" in line
    assert "column_0" in left_out_line(columns, 80) and "more" in left_out_line(columns, 80)


def test_a_pipe_has_every_column_whole_on_one_line() -> None:
    lines = GROUPS.lines()
    assert lines[0].split("\t") == list(GROUPS.columns) and len(lines) == 1 + len(GROUPS.rows)
    first = lines[1].split("\t")
    assert first[2] == PLACE and first[5] == "12345.68" and first[-1] == "f" * 64
    assert lines[2].split("\t")[4] == "" and len(lines[2].split("\t")) == len(GROUPS.columns)
    odd = Table("t", ("text",), (("a\tb\nc\x1b[31m",),)).lines()
    assert len(odd) == 2 and "\t" not in odd[1] and odd[1].isprintable()


def test_a_number_that_would_be_zeros_keeps_its_digits() -> None:
    values = (0.0, 0.0004, -0.0004, 0.25, 3)
    assert [cell_text(value, 2) for value in values] == ["0.00", "0.0004", "-0.0004", "0.25", "3"]


def test_csv_is_what_pandas_writes() -> None:
    frame = pd.DataFrame({"text": ['a,"b"', None, "c"], "time": [1.1, math.nan, 1e-9], "count": [1, 2, 3]})
    assert table_of(frame, "t").csv() == frame.to_csv(index=False)
    assert next(csv.reader(io.StringIO(GROUPS.csv()))) == list(GROUPS.columns)


def test_json_has_numbers_in_full_and_null() -> None:
    frame = pd.DataFrame({
        "time": [0.1 + 0.2, math.nan, math.inf], "count": np.array([1, 2, 3]), "ok": [True, False, True],
    })
    rows = json.loads(json.dumps(table_of(frame, "t").json(), allow_nan=False))
    assert rows[0] == {"time": 0.1 + 0.2, "count": 1, "ok": True}
    assert [row["time"] for row in rows[1:]] == [None, None]
