"""Tables of the tuning database, and opening one safely: schema check, quarantine, read-only access."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection

from fuseplan.search.errors import (
    CorruptDatabaseError,
    DatabaseError,
    ForeignDatabaseError,
    ReadOnlyDatabaseError,
    SchemaVersionError,
    brief,
    plain,
)
from fuseplan.search.store import location
from fuseplan.search.store.location import location_name, sqlite_file, without_secrets
from fuseplan.search.store.record import SCHEMA_VERSION, now

METADATA = sa.MetaData()
_APPLICATION = "fuseplan"
#: Connections of the process that this one was forked from: SQLite asks neither to use nor to close them here.
_INHERITED: list[Any] = []
#: SQLite's mode for a file that nobody changes.
_FIXED = "immutable=1"
#: Seconds a writer waits for another process's transaction.
_BUSY_S = 30.0
#: How often a corrupt file is replaced before giving up.
_ATTEMPTS = 3
#: What drivers raise: their own errors, and Python's for values that they cannot read, bind or hold.
DRIVER_ERRORS = (SQLAlchemyError, ValueError, OverflowError, MemoryError)


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.String(255), primary_key=True)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, default="")


META = sa.Table("fuseplan_meta", METADATA, _key("name"), _text("value"))
#: Measured device specs, as JSON.
DEVICES = sa.Table("devices", METADATA, _key("device"), _text("payload"), _text("checksum"), _text("created"))


def _record_table(name: str) -> sa.Table:
    return sa.Table(
        name, METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"),
        _text("label"), _text("versions"), _text("payload"), _text("checksum"), _text("created"),
    )


TUNINGS = _record_table("tuning_records")
PLANS = _record_table("plan_records")
#: Trials of tunes under way (``open``) or finished; separate from what dispatch reads.
TRIALS = sa.Table(
    "trials", METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"), _key("backend"),
    sa.Column("config_hash", sa.String(64), primary_key=True), _text("versions"), _text("payload"), _text("created"),
    sa.Column("open", sa.Integer, nullable=False, default=1), sa.Column("median_us", sa.Float),
)
MISSES = sa.Table(
    "misses", METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"),
    _text("label"), _text("payload"), _text("first_seen"), sa.Column("count", sa.Integer, nullable=False, default=1),
)
#: Keys that a tuner is at work on: by whom, and until when unless it says more (seconds since 1970 by this database's
#: clock).
LEASES = sa.Table(
    "leases", METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"),
    sa.Column("owner", sa.String(255), nullable=False), sa.Column("expires", sa.Float, nullable=False), _text("taken"),
)
#: Captured graphs, as JSON, so that a second tune need not trace the model again.
CAPTURES = sa.Table("captures", METADATA, _key("name"), _text("payload"), _text("checksum"), _text("created"))


def open_for_writing(url: sa.URL, set_aside: int = _ATTEMPTS, patience_s: float = _BUSY_S) -> sa.Engine:
    """An engine whose tables exist; :class:`DatabaseError` where that cannot be.

    In a file, a transaction waits up to ``patience_s`` seconds for that of another process.

    A corrupt database of ours is kept beside a fresh one, at most ``set_aside`` times, with a warning that names both
    files. What is not ours to change is left as it is.
    """
    file = sqlite_file(url)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReadOnlyDatabaseError(
                f"tuning database {location_name(url)} cannot be written ({error}); pass a writable file with --db"
            ) from None
        location.file_size(file)
    with location.locked(file):
        found = None if file is None else location.identity(file)
        engine = _engine(url, patience_s=patience_s)
        try:
            _create_or_check(engine)
            return engine
        except CorruptDatabaseError as error:
            engine.dispose()  # now: SQLite removes the companions that lie there when it closes the file
            if file is None or found is None or not set_aside:
                raise
            why = str(error)
    # None: another process has been quicker, and what lies there now is fresh.
    if (moved := location.move_aside(file, found, why)) is not None:
        warnings.warn(f"{why}; kept as {plain(str(moved))}, started afresh", stacklevel=3)
    return open_for_writing(url, set_aside - 1, patience_s)


def open_for_reading(url: sa.URL) -> sa.Engine | None:
    """An engine that never writes, or None where there is nothing to read yet; :class:`DatabaseError` where there is
    something that cannot be used.
    """
    file = sqlite_file(url)
    if file is not None and not location.file_size(file):
        return None
    engine = _engine(url, "" if file is None else "mode=ro")
    try:
        with location.locked(file):
            return engine if check_schema(engine) else None
    except CorruptDatabaseError as error:
        if file is not None:
            location.check_ours(file, str(error))
        raise
    except DatabaseError as error:
        if file is None or isinstance(error, SchemaVersionError | ForeignDatabaseError):
            raise
        # A read-only folder has no room for the shared-memory file that WAL readers need.
        engine = _engine(url, _FIXED)
        return engine if check_schema(engine) else None


def _engine(url: sa.URL, sqlite_mode: str = "", patience_s: float = _BUSY_S) -> sa.Engine:
    file = sqlite_file(url)
    if file is None:
        try:
            limits = {"timeout": patience_s} if url.get_backend_name() == "sqlite" else location.server_limits(url)
            engine = sa.create_engine(url, connect_args=limits)
        except (*DRIVER_ERRORS, ImportError) as error:
            message = f"cannot open database {location_name(url)}: {without_secrets(str(error), url)}"
            raise DatabaseError(message) from None
        if url.get_backend_name() != "sqlite":
            return engine
    else:
        target = f"{file.absolute().as_uri()}?{sqlite_mode}" if sqlite_mode else str(file)
        # To open a file costs several times a look-up in it, so one connection is kept. A file that is declared never
        # to change is opened each time: an open one would not show that it did.
        pool: dict[str, Any] = {"poolclass": NullPool} if sqlite_mode == _FIXED else {"pool_size": 1}
        engine = sa.create_engine(
            url,
            creator=lambda: sqlite3.connect(target, timeout=patience_s, uri=bool(sqlite_mode), check_same_thread=False),
            **pool,
        )
        _leave_what_is_not_ours(engine, file)
    _own_transactions(engine)
    return engine


def _leave_what_is_not_ours(engine: sa.Engine, file: Path) -> None:
    """Open the database again in a forked process, and when another file has taken its place."""

    def owner_and_file() -> tuple[int, location.FileIdentity | None]:
        return os.getpid(), location.identity(file)

    @sa.event.listens_for(engine, "connect")
    def _connect(_connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        record.info["identity"] = owner_and_file()

    @sa.event.listens_for(engine, "checkout")
    def _checkout(_connection: sqlite3.Connection, record: ConnectionPoolEntry, proxy: PoolProxiedConnection) -> None:
        if record.info["identity"] == owner_and_file():
            return
        if record.info["identity"][0] != os.getpid():
            _INHERITED.append(record.dbapi_connection)
            record.dbapi_connection = proxy.dbapi_connection = None  # type: ignore[misc]
        raise DisconnectionError


def _own_transactions(engine: sa.Engine) -> None:
    """Let writers take the lock when they begin, so that two processes queue instead of failing half-way."""

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        # One value that is no Unicode would cost the whole result; this way it fails its own checksum.
        connection.text_factory = lambda data: data.decode(errors="replace")
        # What a file's schema says is not run: it may be anybody's.
        connection.execute("PRAGMA trusted_schema=OFF")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # A reader needs neither: each of its statements sees one state of the database.
        if not connection.get_execution_options().get("fuseplan_write", False):
            return
        # Some file systems cannot share memory between processes; the default journal is then right.
        with contextlib.suppress(DBAPIError):
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _create_or_check(engine: sa.Engine) -> None:
    if check_schema(engine):
        if engine.dialect.name == "sqlite":
            with connected(engine) as connection:
                found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA quick_check(3)")]
            if found != ["ok"]:
                raise _corrupt(engine, "; ".join(found))
        with transaction(engine) as connection:
            LEASES.create(connection, checkfirst=True)  # a database from before there were leases
        check_columns(engine)
        return
    with transaction(engine) as connection:
        if engine.dialect.name == "postgresql":  # two that create a table together: the second would fail
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({location.APPLICATION_ID})")
        METADATA.create_all(connection)
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(f"PRAGMA application_id={location.APPLICATION_ID}")
        for name, value in (("application", _APPLICATION), ("schema_version", str(SCHEMA_VERSION)), ("created", now())):
            upsert(connection, META, {"name": name, "value": value})


def check_schema(engine: sa.Engine) -> bool:
    """True when the tables exist and are ours; False for an empty database. :class:`DatabaseError` where it cannot be
    read, is another application's, or has another schema version.
    """
    with connected(engine) as connection:
        names = set(sa.inspect(connection).get_table_names())
        if META.name not in names:
            if names and engine.dialect.name == "sqlite":
                listed = plain(", ".join(sorted(names)[:3]))
                raise ForeignDatabaseError(
                    f"{location_name(engine.url)} holds tables of another application ({listed}); "
                    "pass another file with --db"
                )
            return False
        rows = connection.execute(sa.select(META.c.name, META.c.value)).all()
        meta = {str(name): str(value) for name, value in rows}
    if meta.get("schema_version") != str(SCHEMA_VERSION):
        raise SchemaVersionError(
            f"{location_name(engine.url)} has schema version {brief(meta.get('schema_version'))}, this fuseplan reads "
            f"{SCHEMA_VERSION}; it was left as it is: use the fuseplan that wrote it, or pass another file with --db"
        )
    return True


def check_columns(engine: sa.Engine) -> None:
    """Raise :class:`ForeignDatabaseError` unless every table is there with the columns that this version writes."""
    with connected(engine) as connection:
        found = sa.inspect(connection).get_multi_columns()
    there = {table: {column["name"] for column in columns} for (_schema, table), columns in found.items()}
    for table in METADATA.sorted_tables:
        if missing := {column.name for column in table.columns} - there.get(table.name, set()):
            raise ForeignDatabaseError(
                f"{location_name(engine.url)}: table {table.name} has no {', '.join(sorted(missing))}, so this "
                "fuseplan did not write it; it was left as it is: pass another file with --db"
            )


@contextlib.contextmanager
def connected(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection; drivers' errors come out as :class:`DatabaseError`."""
    try:
        with engine.connect() as connection:
            yield connection
    except DRIVER_ERRORS as error:
        raise database_error(error, engine) from None


@contextlib.contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that takes the write lock when it begins; errors as :func:`connected`."""
    with connected(engine.execution_options(fuseplan_write=True)) as connection, connection.begin():
        yield connection


def upsert(connection: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> None:
    """Insert ``row``, or replace the row of the same primary key."""
    keys = [column.name for column in table.primary_key]
    changed = {name: value for name, value in row.items() if name not in keys}
    if dialect := {"sqlite": sqlite, "postgresql": postgresql}.get(connection.dialect.name):
        insert = dialect.insert(table).values(**row)
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=changed))
        return
    same = [table.c[name] == row[name] for name in keys]
    if connection.execute(table.update().where(*same).values(**changed)).rowcount == 0:
        connection.execute(table.insert().values(**row))


def database_error(error: Exception, engine: sa.Engine) -> DatabaseError:
    """The error of our family that a driver's error stands for."""
    said = "out of memory" if isinstance(error, MemoryError) else str(getattr(error, "orig", None) or error)
    text = without_secrets(said, engine.url)
    low = text.lower()
    if "not a database" in low or "malformed" in low or "corrupt" in low:
        return _corrupt(engine, text)
    name = location_name(engine.url)
    if any(sign in low for sign in ("readonly", "read-only", "unable to open", "disk is full")):
        return ReadOnlyDatabaseError(f"{name} cannot be written ({text}); pass a writable file with --db")
    return DatabaseError(f"{name}: {text}")


def _corrupt(engine: sa.Engine, why: str) -> CorruptDatabaseError:
    return CorruptDatabaseError(f"tuning database {location_name(engine.url)} is corrupt ({why})")
