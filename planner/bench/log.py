"""Rows of a pattern bench in a file that an interrupted bench leaves complete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fuseplan.planner.bench.patterns import PatternRow
from fuseplan.planner.bench.rows import bench_frame, columns_of
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.peers.contestant import OURS


class RowLog:
    """Rows of a bench in a CSV file that is complete after every cell, so that an interrupted bench keeps them.

    With ``resume`` it goes on with the rows that are there; otherwise they are replaced.

    Raises:
        ConfigError: The file's columns are not those of this version.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frame = _read(path) if resume and path.exists() else bench_frame([], PatternRow)
        self._write()

    def has(self, key: str) -> bool:
        """True when ours was timed in the cell."""
        ours = self.frame[(self.frame["key"] == key) & (self.frame["contestant"] == OURS)]
        return bool(ours["median_us"].notna().any())

    def add(self, rows: Sequence[PatternRow]) -> None:
        """Append the rows of one cell; earlier rows of it (a failure, say) are replaced."""
        kept = self.frame[~self.frame["key"].isin({row.key for row in rows})]
        parts = [part for part in (kept, bench_frame(rows)) if len(part)]
        self.frame = pd.concat(parts, ignore_index=True) if parts else kept
        self._write()

    def _write(self) -> None:
        whole = self._path.with_suffix(".part")
        self.frame.to_csv(whole, index=False)
        whole.replace(self._path)


def _read(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ConfigError(f"--resume: {path} is no result file ({error}); leave --resume out to replace it") from None
    wanted = list(bench_frame([], PatternRow))
    if list(frame.columns) != wanted:
        raise ConfigError(f"--resume: {path} has other columns than this version writes; leave --resume out")
    return frame.assign(
        **{name: frame[name].fillna("").astype(str) for name in columns_of(PatternRow, "str")},
        **{name: frame[name].astype("float64") for name in columns_of(PatternRow, "float | None")},
    )
