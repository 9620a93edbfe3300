"""What the tables of the pattern bench conclude."""

from __future__ import annotations

import pandas as pd
import pytest
from bench_samples import row
from headlines import headline_table

from fuseplan.planner.bench.patterns import COPY
from fuseplan.planner.bench.rows import bench_frame
from fuseplan.planner.bench.verdicts import notes, pattern_table, pattern_verdict
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, OURS


def frame() -> pd.DataFrame:
    large = {"bytes": 400e6, "registers": "32", "config": "triton num_warps=4", "kernels": 1}
    return bench_frame([
        row("1x8", OURS, 2.0), row("1x8", EAGER, 8.0), row("1x8", INDUCTOR, 2.5), row("1x8", "liger", None, note="off"),
        row("9x8", OURS, 100.0, p20_us=88.0, p80_us=101.5, **large), row("9x8", EAGER, 300.0, **large),
        row("9x8", INDUCTOR, 90.0, **large), row("9x8", COPY, 93.0, **large),
        row("1x8", OURS, 1.0, "graph"), row("1x8", EAGER, 4.0, "graph"), row("1x8", INDUCTOR, 1.0, "graph"),
    ])


def test_large_cells_in_a_graph_are_held_against_the_faster_copy() -> None:
    large = {"bytes": 400e6}
    rows = [
        row("9x8", OURS, 100.0, "graph", **large), row("9x8", COPY, 150.0, "graph", **large),
        row("9x8", OURS, 104.0, **large), row("9x8", COPY, 95.0, **large),
    ]
    shares = pattern_table(bench_frame(rows)).set_index("mode")["copy_share"]
    assert shares["graph"] == 0.95 and shares["cold"] == pytest.approx(95 / 104)
    slower = [*rows[:3], row("9x8", COPY, 160.0, **large)]
    assert pattern_table(bench_frame(slower)).set_index("mode")["copy_share"].to_dict() == {
        "graph": 1.5, "cold": pytest.approx(160 / 104)
    }


def test_each_cell_is_held_against_its_best_peer() -> None:
    table = pattern_table(frame()).set_index(["mode", "shape"])
    small = table.loc[("cold", "1x8")]
    assert (small["best_peer"], small["vs_best"], small["gbps"]) == (INDUCTOR, 1.25, 1000.0)
    assert pd.isna(small["copy_share"]) and pd.isna(small["liger_us"])
    large = table.loc[("cold", "9x8")]
    assert (large["vs_best"], large["copy_share"], large["mb"]) == (0.9, 0.93, 400.0)
    assert f"{COPY}_us" not in table.columns
    assert list(table.columns[1:3]) == [f"{OURS}_us", f"{EAGER}_us"]


def test_the_verdict_answers_the_bars() -> None:
    lines = pattern_verdict(frame())
    assert lines[0] == (
        "cold: 1.061x the best peer (geometric mean of 2 cells), worst 0.90x; 1 under 0.97x"
    )
    assert "cold, swiglu: 1.061x (2 cells), worst 0.90x" in lines
    assert "cold: 1 cell moves 256 MB or more, at 93.0% to 93.0% of a copy's bandwidth; 1 under 94%" in lines
    assert "graph: 1.000x the best peer (geometric mean of 1 cell), worst 1.00x; 0 under 0.97x" in lines
    assert lines[-1] == (
        "lost: cold, swiglu 9x8: 0.90x inductor (100.00 [88.00 to 101.50] against 90.00 us, noise 1.0%); "
        "400.00 MB at 4000 GB/s, 1 kernel, 32 registers, triton num_warps=4"
    )
    assert sum(line.startswith("lost") for line in lines) == 1


def test_cells_without_ours_or_without_peers_are_shown_and_not_judged() -> None:
    rows = bench_frame([row("1x8", OURS, None, note="broken"), row("1x8", EAGER, 1.0), row("2x8", OURS, 3.0)])
    table = pattern_table(rows).set_index("shape")
    assert pd.isna(table.loc["1x8", "vs_best"]) and pd.isna(table.loc["2x8", "vs_best"])
    assert pattern_verdict(rows) == [] and pattern_verdict(rows.iloc[:0]) == []


def test_notes_are_said_once_for_each_pattern() -> None:
    many = bench_frame([row(f"{n}x8", "liger", None, mode, note="off") for n in (1, 2) for mode in ("cold", "graph")])
    assert notes(many) == ["liger, swiglu (2 sizes): off"]
    assert notes(frame()) == ["liger, swiglu (1x8): off"]


def test_headlines_are_gains_over_eager() -> None:
    table = headline_table(frame(), {"swiglu 1x8": "claimed 3x"}).set_index(["mode", "shape"])
    small = table.loc[("cold", "1x8")]
    assert (small["said"], small[f"{OURS}_x"], small[f"{INDUCTOR}_x"]) == ("claimed 3x", 4.0, 3.2)
    assert table.loc[("cold", "9x8"), "said"] == ""
