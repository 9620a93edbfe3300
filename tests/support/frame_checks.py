"""What no report can say: shares beyond the whole, times below nothing, floors above what was measured, rows twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from fuseplan.planner.api.report import Report
from fuseplan.planner.reports.steps import BETWEEN, CACHE_REUSE

#: Relative room for sums of floats.
_ROUNDING = 1e-6
#: What tells rows apart.
_NAMES = {
    "steps": ("workload", "regime"), "parts": ("workload", "part", "regime"),
    "saved": ("workload", "regime", "key", "group", "runs"), "groups": ("key", "regime"),
    "regions": ("workload", "key", "regime"), "coverage": ("workload",), "accuracy": ("split", "value"),
    "misses": ("key", "label", "regime", "numerics"),
}
#: Differences, which may be below zero, and numbers that some rows rightly have not.
_SIGNED = {"saved_us", "share", "spearman"}
_OPTIONAL = {
    "steps": {"speedup", "speedup_low", "speedup_high", "floor_us", "over_floor", "noise", "inductor_us", "doubt",
              "read_low_gbps", "read_high_gbps"},
    "saved": {"share", "doubt"},
    "groups": {"times", "fused_us", "unfused_us", "speedup", "noise", "measured_configs", "enumerated_configs",
               "doubt"},
    "regions": {"times", "speedup"}, "coverage": {"coverage", "planned_us", "unfused_us"},
    "accuracy": {"median_error", "p90_error", "spearman"}, "parts": set[str](), "misses": None,
}


def impossible(report: Report, several: bool = False) -> list[str]:
    """What is wrong with a report's frames, one line each. One of ``several`` numerics may name rows alike."""
    found = []
    for name, named in _NAMES.items():
        frame: pd.DataFrame = getattr(report, name)
        found += [f"{name}: {one}" for one in _numbers(frame, _OPTIONAL[name])]
        if not several and len(twice := frame[_told_apart(name, frame).duplicated([*named, "time"])]):
            found.append(f"{name}: rows twice: {twice[list(named)].to_dict('records')[:3]}")
    found += _of_groups(report.groups)
    found += _of_steps(report)
    for row in _rows(report.coverage):
        if not 0 <= row["fused"] <= row["fusable"] or not 0 <= row["launches"] <= row["launches_unfused"]:
            found.append(f"coverage: {row}")
    for row in _rows(report.regions):
        if not (0 <= row["gap"] <= 1 and row["measured_candidates"] <= row["candidates"]):
            found.append(f"regions: {row}")
    return found


def _told_apart(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """With a library call's time in ``time``: its name does not tell how large the weights of a linear are."""
    call = {"saved": lambda: frame["key"] == "", "groups": lambda: frame["answer"] == "library call"}.get(name)
    time = {"saved": "planned_us", "groups": "fused_us"}.get(name)
    return frame.assign(time=frame[time].where(call()) if call and time else None)


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return rows


def _numbers(frame: pd.DataFrame, optional: set[str] | None) -> Iterator[str]:
    """Numbers that are missing, infinite, or below zero."""
    for column in frame.columns:
        for number, value in enumerate(frame[column]):
            missing = value is None or (isinstance(value, float) and math.isnan(value))
            if missing and optional is not None and column not in optional:
                yield f"no {column} in row {number}"
            if isinstance(value, int | float) and not missing:
                if math.isinf(value):
                    yield f"{column} {value} in row {number}"
                if value < 0 and column not in _SIGNED and frame[frame.columns[1]][number] != CACHE_REUSE:
                    yield f"{column} {value} in row {number}"


def _of_groups(groups: pd.DataFrame) -> Iterator[str]:
    for row in _rows(groups):
        runs_us = row["unfused_us"] / row["speedup"] if row["speedup"] else row["fused_us"]
        if runs_us is not None and runs_us < row["lower_bound_us"] * (1 - _ROUNDING) and not row["doubt"]:
            yield f"groups: floor {row['lower_bound_us']} above {runs_us} of {row['group']}"
        if row["measured_configs"] is not None and row["measured_configs"] > row["enumerated_configs"]:
            yield f"groups: {row['measured_configs']} configurations measured of {row['enumerated_configs']}"


def _of_steps(report: Report) -> Iterator[str]:
    all_parts, all_saved = _by_step(report.parts), _by_step(report.saved)
    for row in _rows(report.steps):
        step = row["workload"], row["regime"]
        below = row["floor_us"] is not None and min(row["unfused_us"], row["planned_us"]) < row["floor_us"]
        if below and not row["doubt"]:
            yield f"steps: floor above what was measured of {row['workload']}"
        parts = all_parts.get(step, [])
        for side in ("unfused_us", "planned_us"):
            if BETWEEN in {one["part"] for one in parts} and not _close([one[side] for one in parts], row[side]):
                yield f"parts: {side} of {row['workload']} do not add up to its step"
        for one in all_saved.get(step, []):
            if one["saved_us"] > row["unfused_us"] * (1 + _ROUNDING) and not one["doubt"]:
                yield f"saved: {one['saved_us']} us of a step of {row['unfused_us']} us"


def _by_step(frame: pd.DataFrame) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of each step."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in _rows(frame):
        found.setdefault((row["workload"], row["regime"]), []).append(row)
    return found


def _close(parts: Sequence[float], whole: float) -> bool:
    return math.isclose(math.fsum(parts), whole, rel_tol=_ROUNDING, abs_tol=_ROUNDING * max(map(abs, parts), default=0))
