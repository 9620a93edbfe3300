"""The cost model beside the times of the pattern bench."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import report_samples as samples
from bench_samples import row as bench_row
from pattern_predictions import predicted_us, prediction_verdict, with_predictions

from fuseplan.costmodel.roofline import lower_bound
from fuseplan.planner.bench.patterns import PatternBench, plan_case
from fuseplan.planner.bench.rows import bench_frame
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.peers.contestant import EAGER, OURS, trace_cell
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.planner.work.group_work import op_work


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("prediction") / "tuning.db"
    samples.known_machine(path)
    return open_session("cpu", path)


def predicted(session: Session, pattern: str, shape: str) -> float | None:
    case, _ = plan_case(session, cell(pattern, shape, "float32"))
    return predicted_us(case.traced.graph, case.groups, session.spec, "eager")


def test_a_plan_is_priced_between_its_bound_and_the_unfused_chain(session: Session) -> None:
    found = predicted(session, "swiglu", "64x4097")
    traced, _ = trace_cell(cell("swiglu", "64x4097", "float32"), "cpu")
    chain = [op_work(traced.graph, one.name) for one in traced.graph if kind_of(one, traced.graph.specs) != "view"]
    assert session.spec is not None and found is not None
    # Gate and up are read and the product written, whoever does it.
    moved = replace(chain[-1], flops={}, dram_bytes=3.0 * 4 * 64 * 4097, written_bytes=4.0 * 64 * 4097)
    assert lower_bound(moved, session.spec, "kernel") <= found
    assert found < sum(lower_bound(work, session.spec, "eager") for work in chain) * 2
    larger = predicted(session, "swiglu", "640x4097")
    assert larger is not None and larger > 2 * found


def test_only_ours_is_predicted_and_only_as_its_plan_is_meant(session: Session) -> None:
    one = cell("rms_norm", "3x127", "float32")
    frame = bench_frame(PatternBench(session, (EAGER,), ("eager",), 0.0).rows(one))
    by_name = with_predictions(frame, session, [one]).set_index("contestant")["predicted_us"]
    assert pd.isna(by_name[EAGER])
    assert by_name[OURS] == pytest.approx(predicted(session, "rms_norm", "3x127"))


def test_a_device_that_was_not_probed_predicts_nothing(tmp_path: Path) -> None:
    assert predicted(open_session("cpu", tmp_path / "empty.db"), "swiglu", "3x8") is None


def frame_of(*rows: tuple[str, float | None, float | None, str]) -> pd.DataFrame:
    """Rows of ours: the shape, the median, the prediction and the mode."""
    frame = bench_frame([bench_row(shape, OURS, median_us, mode) for shape, median_us, _, mode in rows])
    return frame.assign(predicted_us=pd.Series([predicted for *_, predicted, _ in rows], dtype="float64"))


def test_the_verdict_says_how_far_predictions_are() -> None:
    measured = [1.0, 2.0, 4.0, 8.0, 16.0]
    factors = [1.0, 1.1, 0.9, 1.1, 0.5]  # the last is predicted at the time of the one before, and a little less
    rows = [(f"{n}x8", us, us * factor, "graph") for n, (us, factor) in enumerate(zip(measured, factors, strict=True))]
    (line,) = prediction_verdict(frame_of(
        *rows, ("9x8", None, 3.0, "graph"), ("8x8", 3.0, None, "graph"), ("0x8", 5.0, None, "cold")))
    assert line.startswith("graph: ") and "(5 cells)" in line
    assert "median error 10.0%" in line and "within 34.0%" in line
    assert "rank correlation 0.900" in line  # 1 - 6 * (1 + 1) / (5 * 24)


def test_few_cells_have_no_rank_correlation() -> None:
    (line,) = prediction_verdict(frame_of(("1x8", 2.0, 1.0, "graph"), ("2x8", 4.0, 2.0, "graph")))
    assert "median error 50.0%" in line and "correlation" not in line
    assert prediction_verdict(frame_of(("1x8", 2.0, None, "graph"))) == []
