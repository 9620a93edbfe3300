"""Moving records between databases: JSON lines with a header and a checksum trailer; imported whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table

from fuseplan.search.errors import DatabaseError, ImportRefusedError, RecordError, SchemaVersionError, brief
from fuseplan.search.store import codec, tables
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
class Bundle:
    """What an export file holds: device specs by identity, records, and captures by name."""

    devices: Mapping[str, dict[str, Any]]
    records: Sequence[TuningRecord | PlanRecord]
    captures: Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Imported:
    """How many records, plans, captures and devices were taken over, and how many were not, by reason."""

    taken: int
    left: Mapping[str, int]


def export(database: Database, path: Path, device: str | None = None) -> int:
    """Write every record (of one device, when given), and what a report says of models, to ``path``; return how many
    lines of data that were.

    DatabaseError where a part of the database cannot be read; ``path`` is then as it was.
    """
    lines = [_line({"format": _FORMAT, "schema_version": SCHEMA_VERSION, "created": now()})]
    specs, records = database.devices(), database.everything()
    lines += [_line({"device": name, "spec": specs[name]}) for name in sorted(specs) if device in (None, name)]
    wanted = [record for record in records if device in (None, record.key.device)]
    lines += [_line({KINDS[type(record)]: json.loads(codec.dumps(record))}) for record in wanted]
    captures = {name: data for prefix in REPORTED for name, data in sorted(database.captures(prefix).items())}
    lines += [
        _line({"capture": name, "value": data})
        for name, data in captures.items() if device in (None, data.get("device"))
    ]
    if database.engine is None or database.broken:
        raise DatabaseError(f"there is no readable tuning database at {database.where}, so nothing was exported")
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    lines.append(_line({"trailer": {"count": len(lines) - 1, "sha256": digest}}))
    path = path.expanduser()
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.writelines(lines)
            Path(scratch).replace(path)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RecordError(f"cannot write export file {path}: {error.strerror}; pass a writable path") from None
    return len(lines) - 2


def _line(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def read_bundle(path: Path) -> Bundle:
    """What an export file holds. ImportRefusedError where it is missing, truncated, altered, or none, and
    SchemaVersionError where it is of another schema version.
    """
    devices: dict[str, dict[str, Any]] = {}
    records: list[TuningRecord | PlanRecord] = []
    captures: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(checked_lines(path), 2):
        item = _object(line, path, number)
        try:
            if kinds := [cls for cls, kind in KINDS.items() if kind in item]:
                records.append(codec.from_data(kinds[0], item[KINDS[kinds[0]]]))
            elif isinstance(item.get("device"), str) and isinstance(item.get("spec"), dict):
                device_spec(item["spec"])
                devices[item["device"]] = item["spec"]
            elif (found := capture_of(item)) is not None:
                captures[found[0]] = found[1]
            else:
                raise RecordError(f"unknown kind of line ({brief(sorted(item))})")
        except RecordError as error:
            raise ImportRefusedError(f"{path}, line {number}: {error}; nothing was imported") from None
    return Bundle(devices, records, captures)


def capture_of(item: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The name and the value of a line that holds a capture; None of any other line.

    Raises:
        RecordError: The capture is none that an export writes.
    """
    if "capture" not in item:
        return None
    name, value = item["capture"], item.get("value")
    if not isinstance(name, str) or not name.startswith(REPORTED) or not isinstance(value, dict):
        raise RecordError(f"{brief(name)} is no capture of a report")
    check_name(name)
    return name, value


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


@dataclass(frozen=True)
class _Entry:
    """Of a file: the row that would be stored, when it was made, and what is here of that name (None: nothing)."""

    table: Table
    row: Mapping[str, Any]
    new: object
    created: object
    old: object
    old_created: object = ""

    def why_not(self, now_s: float) -> str:
        """Why it is not taken over; "" where it is. What is of the future counts as the oldest."""
        if self.old is None:
            return ""
        if self.new == self.old:
            return "here already"
        if self.table is tables.DEVICES:
            return "of a device that is known here"
        times = self.created, self.old_created
        new_s, old_s = (-math.inf if is_ahead(one, now_s) else seconds(one) for one in times)
        if new_s >= old_s:
            return ""
        return "dated in the future" if is_ahead(self.created, now_s) else "older than what is here"


def _entries(database: Database, found: Bundle) -> Iterator[_Entry]:
    known = {(type(record), record.key): record for record in database.everything()}
    for record in found.records:
        table = tables.TUNINGS if isinstance(record, TuningRecord) else tables.PLANS
        old = known.get((type(record), record.key))
        yield _Entry(table, record_row(record), record, record.evidence.created, old, old and old.evidence.created)
    captures = {name: data for prefix in REPORTED for name, data in database.captures(prefix).items()}
    for name, data in found.captures.items():
        here = captures.get(name)
        yield _Entry(tables.CAPTURES, json_row({"name": name}, data), data, data.get("created"), here,
                     here and here.get("created"))
    specs = database.devices()
    for device, spec in found.devices.items():
        yield _Entry(tables.DEVICES, json_row({"device": device}, spec), spec, "", specs.get(device))


def import_bundle(database: Database, path: Path) -> Imported:
    """Merge an export file into the database in one transaction; a newer record of the same key wins, and what is dated
    in the future, by the database's clock, counts as the oldest.

    Errors as :func:`read_bundle`, and then the database is unchanged.
    """
    entries = list(_entries(database, read_bundle(path)))

    def merge(connection: Connection) -> Counter[str]:
        now_s = clock_s(connection)
        found: Counter[str] = Counter()
        for entry in entries:
            found[why := entry.why_not(now_s)] += 1
            if not why:
                tables.upsert(connection, entry.table, entry.row)
        return found

    left = database.change(merge)
    return Imported(left.pop("", 0), left)
