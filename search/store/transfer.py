"""Moving records between databases: JSON lines with a header and a checksum trailer; imported whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table

from fuseplan.search.errors import DatabaseError, ImportRefusedError, RecordError, SchemaVersionError, brief
from fuseplan.search.store import codec, location, tables
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import clock_s
from fuseplan.search.store.record import SCHEMA_VERSION, PlanRecord, TuningRecord, is_ahead, now, seconds
from fuseplan.search.store.rows import check_name, device_spec, json_row, record_row

_FORMAT = "fuseplan-records"
#: What a line that holds a record begins with.
KINDS: Mapping[type[TuningRecord | PlanRecord], str] = {TuningRecord: "tuning_record", PlanRecord: "plan_record"}
#: Beginnings of the names of captures that go along: what a report says of whole models.
REPORTED = ("step/", "summary/")


@dataclass(frozen=True)
class Entry:
    """A line of an export file: a record or a plan under its key, or a device's spec or a capture under its name."""

    table: Table
    key: Any
    value: Any

    @property
    def device(self) -> object:
        """Whose it is; None of a capture that does not say so."""
        if self.table is tables.DEVICES:
            return self.key
        return self.value.get("device") if self.table is tables.CAPTURES else self.key.device

    @property
    def created(self) -> object:
        return self.value.get("created") if isinstance(self.value, Mapping) else self.value.evidence.created

    def row(self) -> dict[str, Any]:
        """The row that stores it."""
        if isinstance(self.value, Mapping):
            return json_row({self.table.primary_key.columns[0].name: self.key}, self.value)
        return record_row(self.value)

    def line(self) -> str:
        if self.table is tables.DEVICES:
            return _line({"device": self.key, "spec": self.value})
        if self.table is tables.CAPTURES:
            return _line({"capture": self.key, "value": self.value})
        return _line({KINDS[type(self.value)]: json.loads(codec.dumps(self.value))})


def _of_record(record: TuningRecord | PlanRecord) -> Entry:
    return Entry(tables.TUNINGS if isinstance(record, TuningRecord) else tables.PLANS, record.key, record)


def _contents(database: Database) -> list[Entry]:
    """All of a database that an export may hold."""
    devices = [Entry(tables.DEVICES, name, spec) for name, spec in sorted(database.devices().items())]
    captures = [item for prefix in REPORTED for item in sorted(database.captures(prefix).items())]
    return [
        *devices, *map(_of_record, database.everything()),
        *(Entry(tables.CAPTURES, name, value) for name, value in captures),
    ]


@dataclass(frozen=True)
class Imported:
    """How many records, plans, captures and devices were taken over, and how many were not, by reason."""

    taken: int
    left: Mapping[str, int]


def export(database: Database, path: Path, device: str | None = None) -> int:
    """Write every record, perhaps of one device, and what a report says of models to ``path``; how many lines of data.

    DatabaseError where a part of the database cannot be read; ``path`` is then as it was.
    """
    lines = [_line({"format": _FORMAT, "schema_version": SCHEMA_VERSION, "created": now()})]
    lines += [entry.line() for entry in _contents(database) if device in (None, entry.device)]
    if database.engine is None or database.broken:
        raise DatabaseError(f"there is no readable tuning database at {database.where}, so nothing was exported")
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    lines.append(_line({"trailer": {"count": len(lines) - 1, "sha256": digest}}))
    path = path.expanduser()
    try:
        location.spare_database(path)
        with location.replaced(path) as scratch:
            scratch.write_text("".join(lines))
    except OSError as error:
        raise RecordError(f"cannot write export file {path}: {error.strerror}; pass another path") from None
    return len(lines) - 2


def _line(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def read_bundle(path: Path) -> list[Entry]:
    """What an export file holds; ImportRefusedError where it is not whole, SchemaVersionError of another version."""
    entries = []
    for number, line in enumerate(checked_lines(path), 2):
        item = _object(line, path, number)
        try:
            entries.append(entry_of(item))
        except RecordError as error:
            raise ImportRefusedError(f"{path}, line {number}: {error}; nothing was imported") from None
    return entries


def entry_of(item: Mapping[str, Any]) -> Entry:
    """What a parsed line holds; :class:`RecordError` where an export writes no such line."""
    for kind, name in KINDS.items():
        if name in item:
            return _of_record(codec.from_data(kind, item[name]))
    if isinstance(device := item.get("device"), str) and isinstance(spec := item.get("spec"), dict):
        device_spec(spec)
        return Entry(tables.DEVICES, device, spec)
    if "capture" not in item:
        raise RecordError(f"unknown kind of line ({brief(sorted(item))})")
    name, value = item["capture"], item.get("value")
    if not isinstance(name, str) or not name.startswith(REPORTED) or not isinstance(value, dict):
        raise RecordError(f"{brief(name)} is no capture of a report")
    check_name(name)
    return Entry(tables.CAPTURES, name, value)


def checked_lines(path: Path) -> list[str]:
    """The data lines of an export file that is whole, unread; errors as :func:`read_bundle`."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ImportRefusedError(f"cannot read export file {path}: {error}") from None
    header = _object(lines[0], path, 1) if lines else {}
    if header.get("format") != _FORMAT:
        raise ImportRefusedError(f"{path} is not a fuseplan export (its first line has no format {_FORMAT!r})")
    if header.get("schema_version") != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has schema version {brief(header.get('schema_version'))}, this fuseplan reads {SCHEMA_VERSION}; "
            "export it again with a matching fuseplan"
        )
    again = "nothing was imported; copy or export the file again"
    trailer = _object(lines[-1], path, len(lines)).get("trailer")
    if not isinstance(trailer, dict):
        raise ImportRefusedError(f"{path} is truncated: it has no trailer line; {again}")
    if trailer.get("count") != len(lines) - 2:
        raise ImportRefusedError(
            f"{path} is truncated: {len(lines) - 2} of {brief(trailer.get('count'))} records are there; {again}"
        )
    if hashlib.sha256("".join(lines[:-1]).encode()).hexdigest() != trailer.get("sha256"):
        raise ImportRefusedError(f"{path} was altered: its checksum does not match; {again}")
    return lines[1:-1]


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = codec.parse(line, f"line {number}")
    except RecordError as error:
        raise ImportRefusedError(f"{path}, {error}: the file is truncated or damaged") from None
    if not isinstance(value, dict):
        raise ImportRefusedError(f"{path}, line {number} is not a JSON object")
    return value


def _why_not(new: Entry, old: Entry | None, now_s: float) -> str:
    """Why ``new`` is not taken over; "" where it is. What is of the future counts as the oldest."""
    if old is None:
        return ""
    if new.value == old.value:
        return "here already"
    if new.table is tables.DEVICES:
        return "of a device that is known here"
    new_s, old_s = (-math.inf if is_ahead(one.created, now_s) else seconds(one.created) for one in (new, old))
    if new_s >= old_s:
        return ""
    return "dated in the future" if is_ahead(new.created, now_s) else "older than what is here"


def import_bundle(database: Database, path: Path) -> Imported:
    """:func:`merge_entries` of an export file. Errors as :func:`read_bundle`."""
    return merge_entries(database, read_bundle(path))


def merge_entries(database: Database, entries: Sequence[Entry]) -> Imported:
    """Merge what an export holds into the database whole, or not at all; a newer record of the same key wins.

    What is dated in the future, by the database's clock, counts as the oldest.
    """
    here = {(entry.table, entry.key): entry for entry in _contents(database)}

    def merge(connection: Connection) -> Counter[str]:
        now_s = clock_s(connection)
        found: Counter[str] = Counter()
        for entry in entries:
            found[why := _why_not(entry, here.get((entry.table, entry.key)), now_s)] += 1
            if not why:
                tables.upsert(connection, entry.table, entry.row())
        return found

    left = database.change(merge)
    return Imported(left.pop("", 0), left)
