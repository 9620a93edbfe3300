"""Predicted against measured: errors, rank correlation and regret, against independent oracles."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fuseplan.costmodel.accuracy import MeasuredPair, accuracy_frame, accuracy_summary, regret, spearman

PAIRS = [
    MeasuredPair("g1", "unfused", 10.0, 12.0, "swiglu", "graph/decode"),
    MeasuredPair("g1", "triton", 4.0, 5.0, "swiglu", "graph/decode"),
    MeasuredPair("g1", "ninetoothed", 5.0, 4.0, "swiglu", "graph/decode"),
    MeasuredPair("g2", "unfused", 20.0, 20.0, "norm", "graph/prefill"),
    MeasuredPair("g2", "triton", 30.0, 15.0, "norm", "graph/prefill", held_out=False),
]


def test_frame_has_ratio_and_error() -> None:
    frame = accuracy_frame(PAIRS)
    assert list(frame["ratio"]) == pytest.approx([10 / 12, 0.8, 1.25, 1.0, 2.0])
    assert list(frame["relative_error"]) == pytest.approx([1 / 6, 0.2, 0.25, 0.0, 1.0])
    assert list(frame["held_out"]) == [True, True, True, True, False]


def test_summary_by_hand() -> None:
    summary = accuracy_summary(accuracy_frame(PAIRS)).set_index(["split", "value"])
    every = summary.loc[("all", "")]
    assert every["pairs"] == 5 and every["groups"] == 2
    assert every["median_error"] == pytest.approx(0.2)  # 0, 1/6, 0.2, 0.25, 1
    assert every["p90_error"] == pytest.approx(0.7)  # 0.25 + 0.6 * (1 - 0.25)
    # Ranks predicted 3 1 2 4 5, measured 3 2 1 5 4: 1 - 6 * (0 + 1 + 1 + 1 + 1) / (5 * 24) = 0.8.
    assert every["spearman"] == pytest.approx(0.8)
    # g1: triton is chosen, 5 / 4 - 1 = 0.25. g2: unfused is chosen, 20 / 15 - 1 = 1/3.
    assert every["regret_top1"] == pytest.approx((0.25 + 1 / 3) / 2)
    assert every["worst_regret_top1"] == pytest.approx(1 / 3)
    assert every["regret_top3"] == 0.0
    # Inside g1: ranks 3 1 2 against 3 2 1: 1 - 6 * 2 / (3 * 8) = 0.5; inside g2: -1. Median: -0.25.
    assert every["group_spearman"] == pytest.approx(-0.25)
    assert summary.loc[("kind", "swiglu"), "regret_top1"] == pytest.approx(0.25)
    assert summary.loc[("regime", "graph/prefill"), "spearman"] == pytest.approx(-1.0)
    assert list(summary.index) == [
        ("all", ""), ("regime", "graph/decode"), ("regime", "graph/prefill"), ("kind", "norm"), ("kind", "swiglu")
    ]


def test_empty_input_gives_nan_not_an_error() -> None:
    frame = accuracy_frame([])
    assert list(frame.columns)[:2] == ["group", "choice"] and len(frame) == 0
    summary = accuracy_summary(frame)
    assert len(summary) == 1
    assert summary.loc[0, "pairs"] == 0
    for column in ("median_error", "p90_error", "spearman", "group_spearman", "regret_top1", "worst_regret_top3"):
        assert math.isnan(summary.loc[0, column])


def test_single_row_has_an_error_but_no_ranking() -> None:
    summary = accuracy_summary(accuracy_frame(PAIRS[:1])).iloc[0]
    assert summary["median_error"] == pytest.approx(1 / 6)
    assert summary["groups"] == 0
    assert math.isnan(summary["spearman"]) and math.isnan(summary["regret_top1"])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_unusable_times_are_kept_as_rows_but_not_counted(bad: float) -> None:
    frame = accuracy_frame([*PAIRS[:2], MeasuredPair("g1", "broken", 1.0, bad), MeasuredPair("g1", "odd", bad, 1.0)])
    assert len(frame) == 4
    assert np.isnan(frame["ratio"].iloc[2:]).all()
    summary = accuracy_summary(frame).iloc[0]
    assert summary["pairs"] == 2
    assert summary["regret_top1"] == 0.0


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


@pytest.mark.parametrize("measured", list(itertools.permutations([1.0, 2.0, 4.0])))
@pytest.mark.parametrize("top_k", [1, 2, 3, 9])
def test_regret_against_the_definition(measured: tuple[float, ...], top_k: int) -> None:
    predicted = [3.0, 1.0, 2.0]
    order = (1, 2, 0)  # by prediction
    best = min(measured[choice] for choice in order[:top_k])
    assert regret(predicted, measured, top_k) == pytest.approx(best / 1.0 - 1.0)


def test_regret_needs_alternatives_and_keeps_the_order_of_ties() -> None:
    assert math.isnan(regret([1.0], [1.0]))
    assert regret([1.0, 1.0], [3.0, 2.0]) == pytest.approx(0.5)


def test_ties_do_not_depend_on_the_order_of_rows() -> None:
    tied = [MeasuredPair("g", "b", 1.0, 2.0), MeasuredPair("g", "a", 1.0, 3.0)]
    for pairs in (tied, tied[::-1]):
        assert accuracy_summary(accuracy_frame(pairs)).iloc[0]["regret_top1"] == pytest.approx(0.5)  # "a": 3 / 2 - 1
