"""Rows of a pattern bench as a frame, and in a file that an interrupted bench leaves complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from fuseplan.planner.bench.patterns import PatternRow
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.peers.contestant import OURS


def pattern_frame(rows: Iterable[PatternRow]) -> pd.DataFrame:
    """One row per measurement; numbers that are missing are NaN."""
    frame = pd.DataFrame([asdict(row) for row in rows], columns=list(PatternRow.__dataclass_fields__))
    return frame.astype(dict.fromkeys(_columns("float | None"), "float64"))


def _columns(kind: str) -> list[str]:
    return [name for name, one in PatternRow.__dataclass_fields__.items() if one.type == kind]


class RowLog:
    """Rows of a bench in a CSV file that is complete after every cell, so that an interrupted bench keeps them.

    Args:
        path: The file.
        resume: Go on with the rows that are there; otherwise they are replaced.

    Raises:
        ConfigError: The file's columns are not those of this version.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self._path = path
        self._frame = pattern_frame([])
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._frame = _read(path)
        else:
            self._frame.to_csv(path, index=False)

    @property
    def frame(self) -> pd.DataFrame:
        return self._frame

    def has(self, key: str) -> bool:
        """True when ours was timed in the cell."""
        ours = self._frame[(self._frame["key"] == key) & (self._frame["contestant"] == OURS)]
        return bool(ours["median_us"].notna().any())

    def add(self, rows: Sequence[PatternRow]) -> None:
        """Append the rows of one cell; earlier rows of it (a failure, say) are replaced."""
        if not rows:
            return
        again = self._frame["key"].isin({row.key for row in rows})
        kept = self._frame[~again]
        new = pattern_frame(rows)
        self._frame = new if kept.empty else pd.concat([kept, new], ignore_index=True)
        if again.any():
            self._frame.to_csv(self._path, index=False)
        else:
            new.to_csv(self._path, mode="a", header=False, index=False)


def _read(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ConfigError(f"--resume: {path} is no result file ({error}); leave --resume out to replace it") from None
    wanted = list(PatternRow.__dataclass_fields__)
    if list(frame.columns) != wanted:
        raise ConfigError(f"--resume: {path} has other columns than this version writes; leave --resume out")
    return frame.assign(
        **{name: frame[name].fillna("").astype(str) for name in _columns("str")},
        **{name: frame[name].astype("float64") for name in _columns("float | None")},
    )
