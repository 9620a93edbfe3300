"""Measurements to publish: our plan beside its peers, in interleaved rounds of one run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pandas as pd

from fuseplan.planner.peers.contestant import EAGER, OURS
from fuseplan.planner.report.frames import geometric_mean
from fuseplan.search.timing.contest import Contest, contest
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer


@dataclass(frozen=True)
class BenchRow:
    """One contestant's time for one thing.

    Attributes:
        workload: Sizes (``decode 1 @ 256``).
        subject: What was timed: ``model``, or a group's label.
        mode: ``"eager"``: launched from Python. ``"graph"``: replayed from a CUDA graph. ``"cold"``: device time of
            single calls, the last-level cache overwritten before each.
        median_us: Median of the samples; None when it failed. 20th and 80th percentile stand beside it.
        rounds: Samples, each the mean of two interleaved rounds: one in either order of the contestants.
        noise: Relative A/A noise of the run.
        gain: Median paired gain of ours over this contestant, relative to it; positive when ours is faster.
        error: Normwise relative error: of a group against float64, of a model against eager. None where unknown.
        compile_s: Seconds until the first call had returned.
        note: What was special, or why it failed.
    """

    workload: str
    subject: str
    contestant: str
    mode: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    rounds: int = 0
    noise: float | None = None
    gain: float | None = None
    error: float | None = None
    compile_s: float | None = None
    note: str = ""
    key: str = ""


class _Prepared(Timer):
    """Hands out samplers that were prepared one by one, so that a failure is its contestant's alone."""

    def __init__(self, timer: Timer, samplers: Mapping[int, Sampler]) -> None:
        self._samplers = samplers
        self.regime = timer.regime  # type: ignore[misc]

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        return self._samplers[id(run)]


def fair_contest(
    timer: Timer, runs: Mapping[str, Run], operands: Operands, seconds: float, own: Mapping[str, Operands] | None = None
) -> tuple[Contest | None, dict[str, str]]:
    """Time all contestants in interleaved rounds: the samples (None when nobody is left), and why the others failed.

    ``own`` has the operand sets of contestants that want the same values in a layout of their own.
    """
    samplers: dict[int, Sampler] = {}
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            samplers[id(run)] = timer.prepare(run, (own or {}).get(name, operands))
        except Exception as error:  # such as an op that cannot be captured in a CUDA graph
            failed[name] = failure(error)
    standing = {name: run for name, run in runs.items() if name not in failed}
    if not standing:
        return None, failed
    twice = EAGER if EAGER in standing else None
    # Eager's second copy runs last, and rounds turn: with eager first, everyone else follows two different neighbours.
    standing = {name: standing[name] for name in sorted(standing, key=lambda name: name != twice)}
    return contest(_Prepared(timer, samplers), standing, operands, seconds, twice), failed


def failure(error: Exception) -> str:
    """An error as a short note for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def mode_rows(
    timer: Timer, runs: Mapping[str, Run], operands: Operands, seconds: float, facts: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Operands] | None = None, **common: Any,
) -> list[BenchRow]:
    """Time ``runs`` as in :func:`fair_contest`: a row for every contestant, whatever happens to it.

    The timer's regime is the mode. ``facts`` are fields of each contestant, ``common`` those that all rows share.
    """
    result, failed = fair_contest(timer, runs, operands, seconds, own)
    rows = rows_of(result.both_ways(), **common) if result is not None else {}
    rows |= {name: BenchRow(contestant=name, mode=timer.regime, **common) for name in failed}
    return [
        replace(rows[name], **{**facts[name], **({"note": failed[name]} if name in failed else {})}) for name in runs
    ]


def rows_of(result: Contest, **common: Any) -> dict[str, BenchRow]:
    """A row for every contestant of an interleaved run; ``common`` fills the fields that all share."""
    found: dict[str, BenchRow] = {}
    for name, samples in result.samples.items():
        ordered = sorted(samples)
        low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.2, 0.8))
        gain = result.gain(OURS, name) if OURS in result.samples and name != OURS else None
        found[name] = BenchRow(
            contestant=name, mode=result.regime, median_us=statistics.median(samples), p20_us=low, p80_us=high,
            rounds=len(samples), noise=result.noise, gain=gain, **common,
        )
    return found


def bench_frame(rows: Sequence[Any], kind: type = BenchRow) -> pd.DataFrame:
    """One line per row, a dataclass (``kind`` where there are no rows); numbers that are missing are NaN."""
    kind = type(rows[0]) if rows else kind
    frame = pd.DataFrame([asdict(row) for row in rows], columns=[one.name for one in fields(kind)])
    return frame.astype(dict.fromkeys(columns_of(kind, "float | None"), "float64"))


def columns_of(kind: type, annotation: str) -> list[str]:
    """Columns of a frame whose fields are annotated so."""
    return [one.name for one in fields(kind) if one.type == annotation]


def comparison(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per subject and mode, a column per contestant (median us), and how ours compares with each peer.

    ``vs_<peer>`` is the peer's time over ours: above 1, ours is faster.
    """
    names = list(dict.fromkeys(frame["contestant"]))
    rows = []
    for (workload, subject, mode, _), part in frame.groupby(["workload", "subject", "mode", "key"], sort=False):
        times = {str(row["contestant"]): row["median_us"] for row in part.to_dict("records")}
        ours = times.get(OURS)
        row: dict[str, Any] = {"workload": workload, "subject": subject, "mode": mode}
        row |= {f"{name}_us": times.get(name) for name in names}
        if ours is not None:
            row |= {f"vs_{name}": times[name] / ours for name in names if name != OURS and times.get(name) is not None}
        rows.append(row)
    return pd.DataFrame(rows)


def verdict(frame: pd.DataFrame, what: str) -> list[str]:
    """Sentences: geometric mean of ours against each peer, and cells that ours loses beyond the noise."""
    table = comparison(frame)
    lines = []
    for name in dict.fromkeys(frame["contestant"]):
        column = f"vs_{name}"
        if column not in table:
            continue
        rivals = frame[(frame["contestant"] == name) & frame["gain"].notna()]
        lost = int((rivals["gain"] < -rivals["noise"].clip(lower=0.01)).sum())
        mean = geometric_mean(table[column].dropna())
        lines.append(f"{what}: {mean:.2f}x {name} (geometric mean of {len(rivals)}); {lost} slower beyond noise")
    return lines
