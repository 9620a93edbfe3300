"""Looking after a tuning database: list, show, verify, prune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from fuseplan.search import codec, tables
from fuseplan.search.database import Database
from fuseplan.search.errors import DatabaseError, RecordError
from fuseplan.search.record import PlanRecord, TuningRecord, Versions

if TYPE_CHECKING:
    import pandas as pd

#: Columns of :func:`ls`, in order.
LS_COLUMNS = (
    "kind", "workload", "label", "device", "regime", "numerics", "answer", "backend",
    "best_us", "unfused_us", "gain", "created", "stale",
)


def ls(database: Database, versions: Versions | None = None) -> pd.DataFrame:
    """One row per record and plan (columns :data:`LS_COLUMNS`); ``stale`` names version fields that differ."""
    import pandas as pd

    rows = [_tuning_row(record, versions) for record in database.records()]
    rows += [_plan_row(plan, versions) for plan in database.plans()]
    return pd.DataFrame(rows, columns=list(LS_COLUMNS))


def _tuning_row(record: TuningRecord, versions: Versions | None) -> tuple[object, ...]:
    key = record.key
    return (
        "tuning", key.workload, record.label, key.device, key.regime, key.numerics,
        "fuse" if record.fuse else "do not fuse", record.backend, record.best_us, record.unfused.median_us,
        record.gain, record.evidence.created, _stale(versions, record.evidence.versions),
    )


def _plan_row(plan: PlanRecord, versions: Versions | None) -> tuple[object, ...]:
    key = plan.key
    fused = sum(group.kind == "fused" for group in plan.groups)
    return (
        "plan", key.workload, plan.label, key.device, key.regime, key.numerics,
        f"{fused} fused of {len(plan.groups)} groups", "", plan.planned_us, plan.unfused_us,
        plan.margin, plan.evidence.created, _stale(versions, plan.evidence.versions),
    )


def _stale(versions: Versions | None, stored: Versions) -> str:
    return ",".join(versions.mismatch(stored)) if versions is not None else ""


def show(database: Database, prefix: str) -> list[TuningRecord | PlanRecord]:
    """Records and plans whose workload key starts with ``prefix`` or whose label contains it."""
    found: list[TuningRecord | PlanRecord] = [*database.records(), *database.plans()]
    return [item for item in found if item.key.workload.startswith(prefix) or prefix in item.label]


@dataclass(frozen=True)
class Problem:
    """Something :func:`verify` found."""

    table: str
    row: str
    what: str


def verify(database: Database) -> list[Problem]:
    """Check the file's integrity, the schema, and that every stored record can be read; [] when all is well."""
    engine = database.engine
    if engine is None:
        return []
    problems: list[Problem] = []
    try:
        tables.check_schema(engine)
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check(20)")]
                problems += [Problem("file", "", what) for what in found if what != "ok"]
            for table, cls in ((tables.TUNINGS, TuningRecord), (tables.PLANS, PlanRecord)):
                for row in connection.execute(select(table)).mappings():
                    what = _row_problem(row["payload"], row["checksum"], cls)
                    if what:
                        problems.append(Problem(table.name, f"{row['label']} {row['workload']}", what))
            for table in (tables.DEVICES, tables.CAPTURES):
                for row in connection.execute(select(table)).mappings():
                    if codec.checksum(row["payload"]) != row["checksum"]:
                        name = next(iter(row.values()))
                        problems.append(Problem(table.name, str(name), "checksum does not match"))
    except DatabaseError as error:
        problems.append(Problem("file", "", str(error)))
    except SQLAlchemyError as error:
        problems.append(Problem("file", "", str(tables.explain(error, engine))))
    return problems


def _row_problem(payload: str, checksum: str, cls: type[TuningRecord] | type[PlanRecord]) -> str:
    if codec.checksum(payload) != checksum:
        return "checksum does not match"
    try:
        codec.loads(cls, payload)
    except RecordError as error:
        return str(error)
    return ""


def prune(
    database: Database,
    keep_versions: Versions | None = None,
    device: str | None = None,
    trials: bool = True,
    misses: bool = False,
    damaged: bool = True,
) -> dict[str, int]:
    """Delete what is no longer of use and return how many rows went, by table.

    Args:
        database: Opened for writing.
        keep_versions: Delete records and plans that other versions produced; None keeps them.
        device: Delete every record of this device.
        trials: Delete trials of finished tunes.
        misses: Delete logged misses.
        damaged: Delete rows that cannot be read.
    """
    removed: dict[str, int] = {}
    with database.writing() as connection:
        for table, cls in ((tables.TUNINGS, TuningRecord), (tables.PLANS, PlanRecord)):
            removed[table.name] = 0
            for row in list(connection.execute(select(table)).mappings()):
                outdated = keep_versions is not None and row["versions"] != codec.dumps(keep_versions)
                broken = damaged and bool(_row_problem(row["payload"], row["checksum"], cls))
                if outdated or broken or row["device"] == device:
                    same = [table.c[column.name] == row[column.name] for column in table.primary_key]
                    connection.execute(table.delete().where(*same))
                    removed[table.name] += 1
        if trials:
            removed["trials"] = connection.execute(tables.TRIALS.delete().where(tables.TRIALS.c.open == 0)).rowcount
        if misses:
            removed["misses"] = connection.execute(tables.MISSES.delete()).rowcount
    return removed
