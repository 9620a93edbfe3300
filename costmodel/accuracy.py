"""How far predictions are from measurements."""

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
        kind: What the workload is (``add+rms_norm``).
        regime: Launch mode and phase (``graph/decode``).
    """

    group: str
    choice: str
    predicted_us: float
    measured_us: float
    kind: str = ""
    regime: str = ""


_COLUMNS = ("group", "choice", "kind", "regime", "predicted_us", "measured_us", "ratio", "relative_error")


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


def accuracy_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy over all rows of an :func:`accuracy_frame`, and over those of each kind.

    A row for ``("all", "")`` and one for each ``("kind", kind)``. Columns: ``split``, ``value``, ``pairs`` (rows with
    usable times), ``median_error``, ``p90_error``, ``spearman`` (rank correlation of predicted and measured times). A
    figure that the rows cannot give is NaN.
    """
    splits: list[tuple[str, str, pd.DataFrame]] = [("all", "", frame)]
    splits += [("kind", str(kind), rows) for kind, rows in frame.groupby("kind", sort=True)]
    return pd.DataFrame([{"split": split, "value": value, **_summarise(rows)} for split, value, rows in splits])


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing their mean rank; NaN where either side is constant or empty."""
    ranks = pd.DataFrame({"predicted": predicted, "measured": measured}, dtype=float).rank()
    if len(ranks) < 2 or ranks["predicted"].nunique() < 2 or ranks["measured"].nunique() < 2:
        return math.nan
    return float(np.corrcoef(ranks["predicted"], ranks["measured"])[0, 1])


def _summarise(rows: pd.DataFrame) -> dict[str, float | int]:
    usable = rows[rows["ratio"].notna()]
    errors = usable["relative_error"].astype(float)
    return {
        "pairs": len(usable),
        "median_error": float(errors.median()),
        "p90_error": float(errors.quantile(0.9)),
        "spearman": spearman(list(usable["predicted_us"]), list(usable["measured_us"])),
    }


def _is_time(value: float) -> bool:
    return 0 < value < math.inf
