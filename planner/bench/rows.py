"""Measurements to publish: our plan beside its peers, in interleaved rounds of one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, TypeVar, cast

import numpy as np
import pandas as pd

from fuseplan.planner.peers.contestant import EAGER, OURS, PeerError
from fuseplan.planner.reports.frames import geometric_mean
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.timing.contest import Contest, Rounds, contest
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer


@dataclass(frozen=True)
class BenchRow:
    """One contestant's time for one thing.

    Attributes:
        workload: Sizes (``decode 1 @ 256``).
        subject: What was timed: ``model``, or a group's label.
        mode: ``"eager"``: launched from Python. ``"graph"``: replayed from a CUDA graph. ``"cold"``: device time of
            single calls, the last-level cache overwritten before each.
        median_us, p20_us, p80_us: Median and percentiles of the samples; None when it failed.
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
    """Its contestants are samplers, prepared one by one, so that a failure is its contestant's alone."""

    def __init__(self, regime: str) -> None:
        self.regime = regime  # type: ignore[misc]

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        return cast(Sampler, run)


R = TypeVar("R", bound=BenchRow)


class Race(Generic[R]):
    """Contestants that compute one thing, and rows of their times: of one ``kind``, with ``common`` fields."""

    def __init__(self, kind: type[R], **common: Any) -> None:
        self._kind, self._common = kind, common
        self._runs: dict[str, Run] = {}
        #: Fields of each contestant's rows, of those that failed too.
        self._facts: dict[str, Mapping[str, Any]] = {}

    def enter(self, names: Iterable[str], make: Callable[[str], tuple[Run, Mapping[str, Any]]]) -> None:
        """Add contestants: ``make`` builds one, runs it once, and returns what is timed, with fields of its rows."""
        for name in names:
            start = time.perf_counter()
            try:
                run, facts = make(name)
            except Exception as error:  # whatever a peer does must not end the bench
                self._facts[name] = {"note": failure(error)}
            else:
                self._runs[name] = run
                self._facts[name] = {"compile_s": time.perf_counter() - start, **facts}

    def rows(
        self, timer: Timer, operands: Operands, seconds: float, own: Mapping[str, Operands] = {},
        twice: str = EAGER, min_rounds: int = policy.MIN_ROUNDS,
    ) -> list[R]:
        """A row for each contestant in order of entry, timed in interleaved rounds in the timer's mode.

        ``own`` are operand sets in a contestant's own layout; ``twice`` runs again in each round, for the noise.
        """
        samplers: dict[str, Run] = {}
        found: dict[str, Mapping[str, Any]] = {}
        # The second copy runs last, and rounds turn: with the first one in front, all others follow two neighbours.
        for name in sorted(self._runs, key=lambda name: name != twice):
            try:
                samplers[name] = timer.prepare(self._runs[name], own.get(name, operands))
            except Exception as error:  # such as an op that cannot be captured in a CUDA graph
                found[name] = {"note": failure(error)}
        if samplers:
            result = contest(
                _Prepared(timer.regime), samplers, operands, seconds, rounds=Rounds(least=min_rounds)
            ).both_ways()
            found |= {name: times_of(result, name) for name in samplers}
        return [
            self._kind(contestant=name, mode=timer.regime, **{**self._common, **facts, **found.get(name, {})})
            for name, facts in self._facts.items()
        ]


def times_of(result: Contest, name: str) -> dict[str, Any]:
    """A contestant's times in an interleaved run, as fields of its row."""
    samples = result.samples[name]
    low, high = np.quantile(samples, (0.2, 0.8), method="higher")
    gain = result.gain(OURS, name) if OURS in result.samples and name != OURS else None
    return {
        "median_us": statistics.median(samples), "p20_us": float(low), "p80_us": float(high), "rounds": len(samples),
        "noise": result.noise, "gain": gain,
    }


def failure(error: Exception) -> str:
    """An error as a short note for a table."""
    OWN_FAULTS.tolerate(error)
    if isinstance(error, PeerError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def bench_frame(rows: Sequence[Any], kind: type = BenchRow) -> pd.DataFrame:
    """One line per row, a dataclass (``kind`` where there are no rows); numbers that are missing are NaN."""
    kind = type(rows[0]) if rows else kind
    frame = pd.DataFrame([asdict(row) for row in rows], columns=[one.name for one in fields(kind)])
    return frame.astype({one.name: "float64" for one in fields(kind) if one.type == "float | None"})


def median_table(frame: pd.DataFrame, cells: list[str]) -> pd.DataFrame:
    """Medians by ``cells``, with a column per contestant, both in order of first appearance."""
    table = frame.set_index([*cells, "contestant"])["median_us"].unstack()
    order = pd.MultiIndex.from_frame(frame[cells].drop_duplicates())
    return table.reindex(index=order, columns=frame["contestant"].unique())


def comparison(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per subject and mode, a column per contestant (median us), and how ours compares with each peer.

    ``vs_<peer>`` is the peer's time over ours.
    """
    cells = ["workload", "subject", "mode", "key"]
    table = median_table(frame, cells)
    ratios = table.drop(columns=OURS).div(table[OURS], axis=0).add_prefix("vs_")
    return table.add_suffix("_us").join(ratios).reset_index().drop(columns="key")


def verdict(frame: pd.DataFrame, what: str) -> list[str]:
    """Sentences: geometric mean of ours against each peer, and cells that ours loses beyond the noise."""
    table = comparison(frame)
    lines = []
    for name in frame["contestant"].unique():
        if name == OURS:
            continue
        rivals = frame[(frame["contestant"] == name) & frame["gain"].notna()]
        lost = int((rivals["gain"] < -rivals["noise"].clip(lower=0.01)).sum())
        mean = geometric_mean(table[f"vs_{name}"])
        lines.append(f"{what}: {mean:.2f}x {name} (geometric mean of {len(rivals)}); {lost} slower beyond noise")
    return lines
