"""How far predictions are from measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd

#: Of a measured choice: its group's key, itself, its kind (``cpp``), its regime, and both times.
_COLUMNS = ("group", "choice", "kind", "regime", "predicted_us", "measured_us")


def accuracy_frame(choices: Iterable[tuple[str, str, str, str, float, float]]) -> pd.DataFrame:
    """One row per choice, with ``ratio`` (predicted / measured) and ``relative_error`` (``|ratio - 1|``).

    Both are NaN where a time is not positive and finite. An empty input gives an empty frame with all columns.

    >>> accuracy_frame([("swiglu", "fused", "cpp", "eager", 3.0, 2.0)])[["ratio", "relative_error"]].values.tolist()
    [[1.5, 0.5]]
    """
    frame = pd.DataFrame(choices, columns=_COLUMNS)
    times_us = frame[["predicted_us", "measured_us"]].astype(float)
    usable = ((times_us > 0) & (times_us < math.inf)).all(axis=1)
    frame["ratio"] = (times_us["predicted_us"] / times_us["measured_us"]).where(usable)
    frame["relative_error"] = (frame["ratio"] - 1.0).abs()
    return frame


def accuracy_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy over all rows of an :func:`accuracy_frame`, and over those of each kind.

    A row for ``("all", "")`` and one for each ``("kind", kind)``. Columns: ``split``, ``value``, ``pairs`` (rows with
    usable times), ``median_error``, ``p90_error``, ``spearman`` (rank correlation of predicted and measured times). A
    figure that the rows cannot give is NaN.
    """
    summaries = []
    for split, value, rows in [("all", "", frame), *(("kind", str(k), own) for k, own in frame.groupby("kind"))]:
        usable = rows[rows["ratio"].notna()]
        errors = usable["relative_error"].astype(float)
        summaries.append({
            "split": split, "value": value, "pairs": len(usable), "median_error": float(errors.median()),
            "p90_error": float(errors.quantile(0.9)),
            "spearman": spearman(list(usable["predicted_us"]), list(usable["measured_us"])),
        })
    return pd.DataFrame(summaries)


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing their mean rank; NaN where either side is constant or empty."""
    times = pd.DataFrame({"predicted": predicted, "measured": measured}, dtype=float)
    return float(times.corr("spearman").to_numpy()[0, 1])
