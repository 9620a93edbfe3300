"""What ``plan db verify`` must find in a mutated database, told by ``sqlite3``, ``json``, ``hashlib``.

A row that is as it was must not be found. A row must be found whose checksum is not that of its text, whose text is no
JSON object, whose key is not the one in its text, or that a mutation calls impossible. Of other changed rows nothing is
said: they may hold what somebody could have stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Tables whose rows ``verify`` reads, and the columns of their keys that stand in the text, too.
KEYS = ("workload", "device", "regime", "numerics")
USUAL = {"regime": "eager", "numerics": "fp32"}
KEYED = ("tuning_records", "plan_records", "trials")
SEALED = ("tuning_records", "plan_records", "devices", "captures")
TABLES = (*KEYED, "misses", "devices", "captures")
#: The tables whose rows an export has.
MOVED = ("tuning_records", "plan_records", "devices", "captures")

#: A row: its table and its number.
Place = tuple[str, int]
Rows = Mapping[str, Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True)
class Expected:
    """What a mutation itself knows: rows that cannot have been written here, and of the file what must be found.

    ``file`` is True where a problem of the whole must be found, False where none may be, None where either may be.
    """

    rows: frozenset[Place] = field(default_factory=frozenset)
    file: bool | None = False


def rows_of(path: Path) -> Rows | None:
    """Every row by its number; None where SQLite cannot read a table that should be there."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as raw:
            raw.text_factory = lambda content: content.decode(errors="surrogateescape")
            raw.row_factory = sqlite3.Row
            return {
                table: {row["place"]: dict(row) for row in raw.execute(f"select rowid as place, * from {table}")}
                for table in TABLES
            }
    except (sqlite3.Error, UnicodeError):
        return None


def impossible(table: str, row: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Why nobody can have stored the row, or an empty text."""
    text = row.get("payload")
    if not isinstance(text, str):
        return "no text"
    if table in SEALED and hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest() != row.get("checksum"):
        return "another checksum"
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(held, dict):
        return "no object"
    key = held.get("key")  # the usual regime and numerics may be left out
    if table in KEYED and (not isinstance(key, dict) or USUAL | key != {name: row.get(name) for name in KEYS}):
        return "another key"
    if table == "trials" and before is not None:
        was = json.loads(before["payload"])
        if held.get("config") != was["config"] and row.get("config_hash") == before["config_hash"]:
            return "another configuration"
    return ""


def misjudged(before: Rows, path: Path, expected: Expected, problems: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong with the ``problems``, tables and texts, that verify found in the mutated database at ``path``."""
    found = Counter(table for table, _ in problems)
    unreadable = found.pop("file", 0)
    wrong = [f"verify says nothing of a problem of {table}" for table, what in problems if len(what) < 4]
    after = rows_of(path)
    if after is None or expected.file:
        return wrong + ([] if unreadable else ["verify does not find that the database cannot be used"])
    if unreadable:
        return wrong + (["verify finds a problem of the file, which is sound"] if expected.file is False else [])
    for table in TABLES:
        changed = [place for place, row in after[table].items() if row != before[table].get(place)]
        sure = [
            f"{table} {place}: {why}" for place in changed
            if (why := impossible(table, after[table][place], before[table].get(place)))
            or (why := "as the mutation says" if (table, place) in expected.rows else "")
        ]
        if found[table] < len(sure):
            wrong.append(f"verify finds {found[table]} rows of {table}, and must find {'; '.join(sure)}")
        if found[table] > len(changed):
            wrong.append(f"verify finds {found[table]} rows of {table}, of which {len(changed)} are changed")
    return wrong


def all_impossible(before: Rows, path: Path, expected: Expected, table: str) -> bool:
    """Whether no row of a table is one that somebody can have stored, so that none may be served."""
    after = rows_of(path)
    return after is not None and not expected.file and all(
        (table, place) in expected.rows or impossible(table, row, before[table].get(place))
        for place, row in after[table].items()
    )


def moved(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """What of a database an export has, without what says when and where it was stored."""
    left_out = {"place", "created"}
    return {
        table: sorted(
            ({name: value for name, value in row.items() if name not in left_out} for row in rows[table].values()
             if table != "captures" or row["name"].startswith(("step/", "summary/"))),
            key=repr,
        )
        for table in MOVED
    }
