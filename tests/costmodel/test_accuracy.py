"""Predicted against measured: errors and rank correlation, against independent oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fuseplan.costmodel.accuracy import accuracy_frame, accuracy_summary, spearman

PAIRS = [
    ("g1", "unfused", "swiglu", "graph/decode", 10.0, 12.0),
    ("g1", "triton", "swiglu", "graph/decode", 4.0, 5.0),
    ("g1", "ninetoothed", "swiglu", "graph/decode", 5.0, 4.0),
    ("g2", "unfused", "norm", "graph/prefill", 20.0, 20.0),
    ("g2", "triton", "norm", "graph/prefill", 30.0, 15.0),
]


def test_frame_has_ratio_and_error() -> None:
    frame = accuracy_frame(PAIRS)
    assert list(frame["ratio"]) == pytest.approx([10 / 12, 0.8, 1.25, 1.0, 2.0])
    assert list(frame["relative_error"]) == pytest.approx([1 / 6, 0.2, 0.25, 0.0, 1.0])


def test_summary_by_hand() -> None:
    summary = accuracy_summary(accuracy_frame(PAIRS)).set_index(["split", "value"])
    every = summary.loc[("all", "")]
    assert every["pairs"] == 5
    assert every["median_error"] == pytest.approx(0.2)  # 0, 1/6, 0.2, 0.25, 1
    assert every["p90_error"] == pytest.approx(0.7)  # 0.25 + 0.6 * (1 - 0.25)
    # Ranks predicted 3 1 2 4 5, measured 3 2 1 5 4: 1 - 6 * (0 + 1 + 1 + 1 + 1) / (5 * 24) = 0.8.
    assert every["spearman"] == pytest.approx(0.8)
    # Of swiglu alone: ranks 3 1 2 against 3 2 1: 1 - 6 * 2 / (3 * 8) = 0.5; of norm: -1.
    assert summary.loc[("kind", "swiglu"), "spearman"] == pytest.approx(0.5)
    assert summary.loc[("kind", "norm"), "spearman"] == pytest.approx(-1.0)
    assert list(summary.index) == [("all", ""), ("kind", "norm"), ("kind", "swiglu")]


def test_empty_input_gives_nan_not_an_error() -> None:
    frame = accuracy_frame([])
    assert list(frame.columns)[:2] == ["group", "choice"] and len(frame) == 0
    summary = accuracy_summary(frame)
    assert len(summary) == 1
    assert summary.loc[0, "pairs"] == 0
    for column in ("median_error", "p90_error", "spearman"):
        assert math.isnan(summary.loc[0, column])


def test_single_row_has_an_error_but_no_ranking() -> None:
    summary = accuracy_summary(accuracy_frame(PAIRS[:1])).iloc[0]
    assert summary["median_error"] == pytest.approx(1 / 6)
    assert math.isnan(summary["spearman"])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_unusable_times_are_kept_as_rows_but_not_counted(bad: float) -> None:
    frame = accuracy_frame([*PAIRS[:2], ("g1", "broken", "", "", 1.0, bad), ("g1", "odd", "", "", bad, 1.0)])
    assert len(frame) == 4
    assert np.isnan(frame["ratio"].iloc[2:]).all()
    summary = accuracy_summary(frame).iloc[0]
    assert summary["pairs"] == 2


def test_constant_predictions_have_no_rank_correlation() -> None:
    assert math.isnan(spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    assert math.isnan(spearman([1.0, 2.0], [3.0, 3.0]))
    assert math.isnan(spearman([], []))


numbers = st.lists(st.integers(0, 8).map(float), min_size=2, max_size=12)


@given(numbers, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_spearman_agrees_with_scipy(predicted: list[float], rng) -> None:
    measured = [float(rng.randint(0, 8)) for _ in predicted]
    if len(set(predicted)) > 1 and len(set(measured)) > 1:
        assert spearman(predicted, measured) == pytest.approx(stats.spearmanr(predicted, measured).statistic)
