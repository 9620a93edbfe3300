"""Two tunes of the same workloads beside each other: what a step takes in either, and which groups differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import pandas as pd

from fuseplan.planner.reports.frames import ReportData
from fuseplan.planner.reports.step_words import time_text
from fuseplan.planner.reports.steps import Step, steps

#: Groups that are named in words.
_SHOWN = 3
#: Of a step: a group whose time differs by less is not named.
_LITTLE = 0.002


def steps_against(here: ReportData, there: ReportData) -> pd.DataFrame:
    """One row per workload that both have: a planned step, and what it takes longer here (negative: shorter)."""
    rows = [
        (one.name, one.planned_us, other.planned_us, one.planned_us - other.planned_us, one.measured, other.measured,
         one.workload.regime) for one, other in _pairs(here, there)
    ]
    names = ["workload", "here_us", "there_us", "change_us", "here_measured", "there_measured", "regime"]
    return pd.DataFrame(rows, columns=names)


def groups_against(here: ReportData, there: ReportData) -> pd.DataFrame:
    """One row per workload and group that is not run by ATen in both, largest change of a step's time first.

    Times are those of all its uses in a step, None where a plan has no such group; ``here`` and ``there`` say what runs
    it. A group that only one plan has replaces others, so it has no change.
    """
    return _group_changes(_pairs(here, there))


def _group_changes(pairs: Iterable[tuple[Step, Step]]) -> pd.DataFrame:
    rows = []
    for one, other in pairs:
        ours, theirs = _groups(one), _groups(other)
        for label in dict.fromkeys((*ours, *theirs)):
            (here_us, way), (there_us, other_way) = ours.get(label, (None, "")), theirs.get(label, (None, ""))
            rows.append((one.name, label, here_us, there_us, way, other_way, one.workload.regime))
    names = ["workload", "group", "here_us", "there_us", "here", "there", "regime"]
    frame = pd.DataFrame(rows, columns=names).astype({"here_us": "float64", "there_us": "float64"})
    frame.insert(4, "change_us", frame["here_us"] - frame["there_us"])
    return frame.sort_values("change_us", key=lambda us: -us.abs().fillna(0.0), kind="stable", ignore_index=True)


def against_lines(here: ReportData, there: ReportData) -> Iterator[str]:
    """In words: each workload that both have, and the groups that differ."""
    pairs = list(_pairs(here, there))
    if not pairs:
        yield "the two databases have no workload in common that is planned in both"
    for one, other in pairs:
        yield f"{one.name}: {_change(one, other)}"
        own = _group_changes([(one, other)])  # of its regime alone
        named = own[own["change_us"].abs() > _LITTLE * other.planned_us].head(_SHOWN)
        for row in named.to_dict("records"):
            runs = f"{row['there']} -> {row['here']}" if row["here"] != row["there"] else row["here"]
            yield f"    {row['group']}: {time_text(row['there_us'])} -> {time_text(row['here_us'])} ({runs})"
        alone = {"only here": own[own["there_us"].isna()], "only there": own[own["here_us"].isna()]}
        for words, found in alone.items():
            if len(found):
                names = ", ".join(found["group"].head(_SHOWN))
                yield f"    {words}: {names}{f' and {len(found) - _SHOWN} more' if len(found) > _SHOWN else ''}"


def _change(one: Step, other: Step) -> str:
    times = f"a step takes {time_text(one.planned_us)} here, {time_text(other.planned_us)} there"
    noise = max((step.times.noise for step in (one, other) if step.times is not None), default=0.0)
    ratio = other.planned_us / one.planned_us if one.planned_us > 0 else math.inf
    if one.times is None or other.times is None:
        times += ", by regions"
    return f"{times}, within the noise" if abs(ratio - 1) <= noise else f"{times} ({ratio:.2f}x)"


def _pairs(here: ReportData, there: ReportData) -> Iterator[tuple[Step, Step]]:
    """Steps of the same model, workload, regime and numerics."""
    others = {one.workload.identity: one for one in steps(there)}
    yield from ((one, others[one.workload.identity]) for one in steps(here) if one.workload.identity in others)


def _groups(one: Step) -> Mapping[str, tuple[float, str]]:
    """By label: what a step's uses of a group take together, and what runs it."""
    found: dict[str, tuple[float, str]] = {}
    for saved in one.saved:
        time_us, way = found.get(saved.label, (0.0, saved.group.implementation))
        found[saved.label] = time_us + saved.uses * saved.planned_us, way
    return found
