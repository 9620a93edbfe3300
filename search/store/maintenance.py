"""Looking after a tuning database: list, show, verify, prune.

A clock that was ahead when a row was written is named: what it wrote would look newer than all that is written later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, literal_column, select

from fuseplan.kernels.registry import malformed_config
from fuseplan.search.errors import CorruptDatabaseError, DatabaseError, RecordError, SchemaVersionError, counted, plain
from fuseplan.search.store import codec, location, rows, tables
from fuseplan.search.store.connections import connected
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import clock_s
from fuseplan.search.store.record import PlanRecord, Trial, TuningRecord, Versions, is_ahead, seconds

PRUNE = "`plan db prune` deletes"
#: What writes a row of the future anew, where it is not pruned.
_AGAIN = "`plan tune --again` measures anew what is dated in the future"
_ANEW = {tables.TUNINGS: _AGAIN, tables.PLANS: _AGAIN, tables.DEVICES: "`plan probe --force` probes the device anew"}
#: Columns of :func:`ls`, in order.
LS_COLUMNS = (
    "kind", "workload", "label", "device", "regime", "numerics", "answer", "backend",
    "best_us", "unfused_us", "gain", "created",
)


def ls_rows(database: Database) -> list[tuple[str | float, ...]]:
    """One row per record and plan (columns :data:`LS_COLUMNS`)."""
    found: list[tuple[str | float, ...]] = []
    for record in database.everything():
        key, when = record.key, record.evidence.created
        identity = (key.workload, record.label, key.device, key.regime, key.numerics)
        if isinstance(record, TuningRecord):
            answer = "undecided" if record.undecided else "fuse" if record.fuse else "do not fuse"
            times = (record.best_us, record.unfused.median_us, record.gain)
            found.append(("tuning", *identity, answer, record.backend, *times, when))
        else:
            fused = sum(group.is_kernel for group in record.groups)
            answer = f"{fused} fused of {counted(len(record.groups), 'group')}"
            found.append(("plan", *identity, answer, "", record.planned_us, record.unfused_us, record.margin, when))
    return found


def of_other_versions() -> list[Path]:
    """Databases in the user's data folder that have another schema version: nothing in them is read."""
    found = []
    for file in sorted(location.default_path().parent.glob("tuning*.db")):
        try:
            if (engine := tables.open_for_reading(location.resolve_url(file), patience_s=0.0)) is not None:
                engine.dispose()
        except SchemaVersionError:
            found.append(file)
        except DatabaseError:
            continue
    return found


def show_record(database: Database, prefix: str) -> list[TuningRecord | PlanRecord]:
    """Records and plans whose workload key starts with ``prefix`` or whose label contains it."""
    found = database.everything()
    return [item for item in found if item.key.workload.startswith(prefix) or prefix in item.label]


@dataclass(frozen=True)
class Problem:
    """Something :func:`verify_database` found; ``cure`` says which command mends it, "" where none does."""

    table: str
    row: str
    what: str
    cure: str = ""


def verify_database(database: Database) -> list[Problem]:
    """What is wrong with the file, the schema and every row: unreadable, or of the future; [] when all is well."""
    engine = database.engine
    if engine is None:
        return [Problem("file", "", f"there is no tuning database at {database.where}")]
    problems: list[Problem] = []
    try:
        tables.check_schema(engine)
        with connected(engine) as connection:
            tables.check_columns(connection, (tables.META, *rows.READERS))
            if engine.dialect.name == "sqlite":
                found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check(20)")]
                cure = CorruptDatabaseError.cure
                problems += [Problem("file", "", plain(what), cure) for what in found if what != "ok"]
                problems += [Problem("file", "", what) for what in _foreign_schema(connection)]
            now_s = clock_s(connection)
            for table in rows.READERS:
                for row in [row._asdict() for row in connection.execute(select(table))]:
                    cure = f"{PRUNE} rows that cannot be read"
                    if not (what := _row_problem(table, row)):
                        what, cure = _ahead(row, now_s), _ANEW.get(table, f"{PRUNE} the others of the future")
                    names = [name for name in ("label", table.primary_key.columns[0].name) if name in row]
                    name = plain(" ".join(str(row[name]) for name in names))
                    problems += [Problem(table.name, name, what, cure)] if what else []
    except DatabaseError as error:
        problems.append(Problem("file", "", str(error), getattr(error, "cure", "")))
    return problems


def _foreign_schema(connection: Connection) -> list[str]:
    """Triggers and views of a SQLite file: fuseplan makes none, and a trigger may change or refuse what is stored."""
    found = connection.exec_driver_sql("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')")
    return [plain(f"the {kind} {name} is none of fuseplan's: drop it with SQLite's own tools") for kind, name in found]


def _row_problem(table: Table, row: Mapping[str, Any]) -> str:
    try:
        found = rows.READERS[table](row)
    except RecordError as error:
        return str(error)
    configs = [(found.backend, found.config)] if isinstance(found, TuningRecord | Trial) else []
    if isinstance(found, PlanRecord):
        configs = [(group.implementation, group.config) for group in found.groups if group.is_kernel]
    for backend, config in configs:
        if reason := malformed_config(backend, config):
            return f"no kernel of {backend} has a configuration of it: {reason}"
    return ""


def _ahead(row: Mapping[str, Any], now_s: float) -> str:
    """How far a readable row is dated in the future, by itself or what it stores; "" where it is not."""
    data = codec.parse(row["payload"], "payload")
    holders = [row, data, data.get("evidence") if isinstance(data, dict) else None]
    dates = (one[name] for one in holders if isinstance(one, Mapping)
             for name in ("created", "first_seen", "last_seen") if name in one)
    text = max(dates, key=seconds, default="")
    if not is_ahead(text, now_s):
        return ""
    ahead = timedelta(seconds=round(seconds(text) - now_s))
    return f"is dated {plain(str(text))}, {ahead} (h:mm:ss) in the future: the clock of whoever wrote it was ahead"


def prune_database(
    database: Database, keep_versions: Versions | None = None, device: str | None = None, misses: bool = False
) -> dict[str, int]:
    """Delete finished tunes' trials, unreadable rows, and trials, misses and captures of the future; count by table.

    Also records and plans of other versions than ``keep_versions``, every record of ``device``, and logged ``misses``
    with their graphs. ``database`` is open for writing.
    """

    def prune(connection: Connection) -> dict[str, int]:
        removed: dict[str, int] = {}
        now_s, lite = clock_s(connection), connection.dialect.name == "sqlite"
        if lite:
            connection.exec_driver_sql("REINDEX")  # a damaged index hides rows, and lets none be deleted
        for table in rows.READERS:
            records = table in (tables.TUNINGS, tables.PLANS)
            removed[table.name] = 0
            # Not by its key: that may be what is damaged.
            place: list[ColumnElement[Any]] = [literal_column("rowid")] if lite else list(table.primary_key)
            named = [column.label(f"place{number}") for number, column in enumerate(place)]
            for row in [row._asdict() for row in connection.execute(select(table, *named))]:
                broken = bool(_row_problem(table, row)) or (table not in _ANEW and bool(_ahead(row, now_s)))
                outdated = records and keep_versions is not None and row["versions"] != codec.dumps(keep_versions)
                if broken or outdated or (records and row["device"] == device):
                    same = [column == row[name.name] for column, name in zip(place, named, strict=True)]
                    removed[table.name] += connection.execute(table.delete().where(*same)).rowcount
        removed["trials"] += connection.execute(tables.TRIALS.delete().where(tables.TRIALS.c.open == 0)).rowcount
        if misses:
            removed["misses"] += connection.execute(tables.MISSES.delete()).rowcount
            name = tables.CAPTURES.c.name
            gone = name.startswith(rows.MISSED, autoescape=True) | (name == rows.DROPPED)
            removed["captures"] += connection.execute(tables.CAPTURES.delete().where(gone)).rowcount
        return removed

    return database.change(prune)
