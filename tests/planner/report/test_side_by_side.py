"""Workloads side by side: which rows share a line, where that turns, and what else was measured."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import report_samples as samples

from fuseplan.planner.reports.frames import ReportData
from fuseplan.planner.reports.html_page import html_report
from fuseplan.planner.reports.side_by_side import PlannedRegion, in_words, side_by_side
from fuseplan.planner.tuning.summary import RegionSummary, WorkloadSummary
from fuseplan.search.store.record import Alternative, GroupChoice, PlanRecord, RecordKey

#: A layer: output projection, residual, two projections that read it, their product, attention of that.
OPS = ("linear.default", "add.Tensor", "view.default", "linear.default", "to.dtype", "linear.default", "mul.Tensor",
       "scaled_dot_product_attention.default")
KINDS = ("anchor", "compute", "view", "anchor", "compute", "anchor", "compute", "anchor")
EDGES = ((0, 1), (1, 2), (2, 3), (2, 5), (3, 4), (4, 6), (5, 6), (6, 7))


def layer(rows: int, columns: tuple[int, int] = (64, 64)) -> RegionSummary:
    first, second = (f"{rows}x1x{count} bfloat16" for count in columns)
    shapes = (first, first, first, second, second, second, second, f"{rows}x8x3x16 bfloat16")
    return RegionSummary("k" * 64, 4, OPS, KINDS, EDGES, shapes)


def group(ops: tuple[int, ...], time_us: float, implementation: str = "triton") -> GroupChoice:
    workload = "t" * 64 if implementation == "triton" else ""
    return GroupChoice(ops, implementation, workload, "x", {}, 1.0, measured_us=time_us)


def plan(groups: tuple[GroupChoice, ...], rejected: tuple[Alternative, ...] = (), unfused_us: float = 100.0
         ) -> PlanRecord:
    return PlanRecord(
        RecordKey("k" * 64, "gpu"), "layer", groups, 50.0, unfused_us, 0.5, 40.0, rejected, 3, 2, 0.0, 0, 0,
        samples.EVIDENCE,
    )


def alternative(ops: tuple[int, ...], time_us: float | None, implementation: str = "triton") -> Alternative:
    return Alternative(ops, "x", "costs more", measured_us=time_us, implementation=implementation)


def fused(rows: int, time_us: float = 5.0) -> PlannedRegion:
    groups = (group((0, 1, 2), time_us), group((3, 4, 5, 6), 9.0), group((7,), 3.0, "attention.split"))
    lost = (alternative((0,), 6.0, "aten"), alternative((0,), 7.5, "matmul.other"), alternative((7,), 4.0, "aten"))
    return f"decode {rows}", layer(rows), plan(groups, lost)


def apart(rows: int, lost: tuple[Alternative, ...] = ()) -> PlannedRegion:
    groups = (group((0,), 10.0, "aten"), group((1, 2), 2.0), group((3,), 8.0, "aten"), group((4,), 1.0),
              group((5,), 8.5, "aten"), group((6,), 1.5), group((7,), 30.0, "aten"))
    return f"prefill {rows}", layer(rows), plan(groups, lost)


def test_each_matmul_and_attention_is_listed_by_rows() -> None:
    rows = side_by_side([apart(512), fused(1), fused(16)])
    assert [(row.op, row.rows) for row in rows] == [
        (op, count) for op in ("linear to 64", "linear to 64 (2)", "scaled_dot_product_attention to 16")
        for count in ((3, 48, 1536) if op.startswith("scaled") else (1, 16, 512))
    ]
    first, _, far, pair, *_ = rows
    assert (first.runs, first.time_us) == ("one triton kernel, add+linear", 5.0)
    assert first.otherwise == "by itself 6.00 us, ATen"
    assert (far.runs, far.time_us) == ("by itself, ATen's op", 10.0)
    assert far.otherwise == "no kernel with more was measured"
    assert (pair.runs, pair.time_us) == ("one triton kernel, linear+mul", 9.0)
    assert rows[5].time_us == 16.5  # both of them
    assert list(pd.DataFrame(rows).columns) == ["op", "rows", "workload", "runs", "time_us", "otherwise"]
    assert len(pd.DataFrame(rows)) == len(rows) == 9


def test_what_was_measured_as_one_kernel_is_set_against_its_parts() -> None:
    lost = (alternative((0, 1, 2), 14.0), alternative((0, 1), None), alternative((3, 4, 5), 17.0))
    found = {row.op: row for row in side_by_side([fused(1), apart(64, lost)]) if row.rows == 64}
    assert found["linear to 64"].otherwise == "as one kernel, add+linear, 14.00 us, apart 12.00 us"
    assert found["linear to 64 (2)"].otherwise == "as one kernel, linear, 17.00 us, apart 17.50 us"


def test_lines_are_shared_and_say_where_it_turns() -> None:
    lines = list(in_words(side_by_side([fused(1, 4.0), fused(16), apart(64), apart(512)])))
    assert lines[:7] == [
        "  linear to 64",
        "    1 to 16 rows: one triton kernel, add+linear (4.00, 5.00 us)",
        "      decode 16: by itself 6.00 us, ATen",
        "    64 to 512 rows: by itself, ATen's op (10.00, 10.00 us)",
        "      prefill 64: no kernel with more was measured",
        "    turns between 16 and 64 rows",
        "  linear to 64 (2)",
    ]


def test_a_matmul_by_itself_is_set_against_other_calls_of_it() -> None:
    lost = (alternative((0,), 11.0, "matmul.other"),)
    found = {row.rows: row.otherwise for row in side_by_side([fused(1), apart(64, lost), apart(512, lost)])
             if row.op == "linear to 64"}
    assert found[64] == "by itself 11.00 us, matmul.other"
    assert found[512] == "by itself 11.00 us, matmul.other"


def test_times_of_ops_of_one_place_are_of_all_of_them() -> None:
    lost = (alternative((3,), 7.0, "matmul.other"), alternative((5,), 7.5, "matmul.other"))
    whole = "by themselves 14.50 us, matmul.other"
    for known, words in ((lost, whole), (lost[:1], "no kernel with more was measured")):
        (found,) = (row for row in side_by_side([fused(1), apart(64, known)])
                    if row.op == "linear to 64 (2)" and row.rows == 64)
        assert (found.time_us, found.otherwise) == (16.5, words)


def test_what_runs_alike_everywhere_turns_nowhere() -> None:
    lines = list(in_words(side_by_side([fused(1), fused(8)])))
    assert not any("turns" in line or "by itself 6" in line for line in lines)
    assert any("1 to 8 rows" in line for line in lines)


@pytest.mark.parametrize("planned", [[], [fused(1)], [fused(1), ("other", layer(8, (96, 32)), fused(8)[2])]])
def test_what_one_workload_alone_has_is_not_listed(planned: list[PlannedRegion]) -> None:
    ops = {row.op for row in side_by_side(planned)}
    assert ops <= {"scaled_dot_product_attention to 16"}


def test_the_region_that_takes_most_time_counts() -> None:
    name, region, record = apart(8)
    small = plan(record.groups, unfused_us=1.0)
    rows = side_by_side([fused(1), (name, region, small), (name, *fused(8)[1:])])
    assert {row.runs for row in rows if row.workload == name and row.op == "linear to 64"} == {
        "one triton kernel, add+linear"
    }


def test_the_page_has_a_table_where_workloads_have_something_in_common() -> None:
    found = [fused(1), apart(512)]
    workloads = tuple(
        WorkloadSummary("llama", name, "gpu", "eager", "fp32", 8, 1, 4, {}, (replace(region, key=name),))
        for name, region, _ in found
    )
    plans = {RecordKey(name, "gpu"): replace(record, key=RecordKey(name, "gpu")) for name, _, record in found}
    page = html_report(ReportData("gpu", "llama", None, {}, plans, workloads))
    assert "side by side" in page and "one triton kernel, add+linear" in page and "prefill 512" in page
    assert "side by side" not in html_report(ReportData("gpu", "llama", None, {}, plans, workloads[:1]))
