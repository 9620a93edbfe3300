"""How far predictions are from measurements, and what it would cost to trust the predictions alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class MeasuredPair:
    """One alternative, predicted and measured.

    Attributes:
        group: Key of the workload; the rows of one group are alternatives for the same work.
        choice: Which alternative (``unfused``, a back end and config, a library call).
        predicted_us: The cost model's time.
        measured_us: The measured time.
        kind: What the workload is (``add+rms_norm``).
        regime: Launch mode and phase (``graph/decode``).
        held_out: False where this measurement was used to calibrate the prediction.
    """

    group: str
    choice: str
    predicted_us: float
    measured_us: float
    kind: str = ""
    regime: str = ""
    held_out: bool = True


_COLUMNS = ("group", "choice", "kind", "regime", "held_out", "predicted_us", "measured_us", "ratio", "relative_error")


def accuracy_frame(pairs: Iterable[MeasuredPair]) -> pd.DataFrame:
    """One row per pair, with ``ratio`` (predicted / measured) and ``relative_error`` (``|ratio - 1|``).

    Ratio and error are NaN where a time is not positive and finite. An empty input gives an empty frame with all
    columns.

    >>> accuracy_frame([MeasuredPair("swiglu", "fused", 3.0, 2.0)])[["ratio", "relative_error"]].values.tolist()
    [[1.5, 0.5]]
    """
    rows = []
    for pair in pairs:
        usable = _is_time(pair.predicted_us) and _is_time(pair.measured_us)
        ratio = pair.predicted_us / pair.measured_us if usable else math.nan
        rows.append({**asdict(pair), "ratio": ratio, "relative_error": abs(ratio - 1.0)})
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def accuracy_summary(
    frame: pd.DataFrame, by: Sequence[str] = ("regime", "kind"), top_k: Sequence[int] = (1, 3)
) -> pd.DataFrame:
    """Accuracy over all rows and over the rows of each value of each column in ``by``.

    Args:
        frame: From :func:`accuracy_frame`.
        by: Columns to split by, one at a time.
        top_k: For each ``k``: regret when only the model's ``k`` best-ranked alternatives are measured.

    Returns:
        A row for ``("all", "")`` and one for each ``(column, value)``. Columns: ``split``, ``value``, ``pairs`` (rows
        with usable times), ``median_error``, ``p90_error``, ``spearman`` (rank correlation of predicted and measured
        times), ``groups`` (workloads with at least two alternatives), ``group_spearman`` (median over those of the
        rank correlation inside the workload), and for each k ``regret_top<k>`` (mean over those workloads) and
        ``worst_regret_top<k>``. A figure that the rows cannot give is NaN: a correlation of fewer than two distinct
        values, a regret without alternatives.
    """
    splits: list[tuple[str, str, pd.DataFrame]] = [("all", "", frame)]
    for column in by:
        splits += [(column, str(value), rows) for value, rows in frame.groupby(column, sort=True)]
    summaries = [{"split": split, "value": value, **_summarise(rows, top_k)} for split, value, rows in splits]
    return pd.DataFrame(summaries)


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing their mean rank; NaN where either side is constant or empty."""
    ranks = pd.DataFrame({"predicted": predicted, "measured": measured}, dtype=float).rank()
    if len(ranks) < 2 or ranks["predicted"].nunique() < 2 or ranks["measured"].nunique() < 2:
        return math.nan
    return float(np.corrcoef(ranks["predicted"], ranks["measured"])[0, 1])


def regret(predicted: Sequence[float], measured: Sequence[float], top_k: int = 1) -> float:
    """How much slower than the best alternative the best of the model's ``top_k`` choices is: 0 is perfect.

    Equal predictions keep their order. NaN where there are fewer than two alternatives.

    >>> regret([1.0, 2.0, 3.0], [15.0, 10.0, 11.0])
    0.5
    """
    if len(measured) < 2:
        return math.nan
    ranked = sorted(range(len(predicted)), key=lambda choice: predicted[choice])
    return min(measured[choice] for choice in ranked[:top_k]) / min(measured) - 1.0


def _summarise(rows: pd.DataFrame, top_k: Sequence[int]) -> dict[str, float | int]:
    usable = rows[rows["ratio"].notna()]
    errors = usable["relative_error"].astype(float)
    # Alternatives in the order of their names, so that ties rank the same way whatever the input's order.
    groups = [
        (list(group["predicted_us"].astype(float)), list(group["measured_us"].astype(float)))
        for _, group in usable.sort_values("choice", kind="stable").groupby("group", sort=True)
        if len(group) >= 2
    ]
    summary: dict[str, float | int] = {
        "pairs": len(usable),
        "median_error": float(errors.median()) if len(errors) else math.nan,
        "p90_error": float(errors.quantile(0.9)) if len(errors) else math.nan,
        "spearman": spearman(list(usable["predicted_us"]), list(usable["measured_us"])),
        "groups": len(groups),
        "group_spearman": _nan_median([spearman(predicted, measured) for predicted, measured in groups]),
    }
    for k in top_k:
        regrets = [regret(predicted, measured, k) for predicted, measured in groups]
        summary[f"regret_top{k}"] = float(np.mean(regrets)) if regrets else math.nan
        summary[f"worst_regret_top{k}"] = max(regrets) if regrets else math.nan
    return summary


def _is_time(value: float) -> bool:
    return 0 < value < math.inf


def _nan_median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan
