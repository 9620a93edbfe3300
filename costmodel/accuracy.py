"""How far predictions are from measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import pandas as pd


@dataclass(frozen=True)
class MeasuredPair:
    """A ``choice`` for a ``group`` of some ``kind`` (``add+rms_norm``) in a ``regime`` (``graph/decode``)."""

    group: str
    choice: str
    predicted_us: float
    measured_us: float
    kind: str = ""
    regime: str = ""


def accuracy_frame(pairs: Iterable[MeasuredPair]) -> pd.DataFrame:
    """One row per pair, with ``ratio`` (predicted / measured) and ``relative_error`` (``|ratio - 1|``).

    Both are NaN where a time is not positive and finite. An empty input gives an empty frame with all columns.

    >>> accuracy_frame([MeasuredPair("swiglu", "fused", 3.0, 2.0)])[["ratio", "relative_error"]].values.tolist()
    [[1.5, 0.5]]
    """
    columns = ["group", "choice", "kind", "regime", "predicted_us", "measured_us"]
    frame = pd.DataFrame(map(asdict, pairs), columns=columns)
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
