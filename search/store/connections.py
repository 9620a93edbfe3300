"""Connections to a database, a file or a server: made, kept, replaced, waited for. Drivers' errors come out as ours."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection

from fuseplan.search import errors
from fuseplan.search.store import location
from fuseplan.search.store.location import location_name, sqlite_file, without_secrets

T = TypeVar("T")
#: Connections of the process that this one was forked from: neither used nor closed here.
_INHERITED: list[Any] = []
#: Engines of servers, by process and by what they are told: a new one would ask the server for its version again.
_SERVERS: dict[tuple[object, ...], sa.Engine] = {}
#: Servers that this process has said it waits for.
_AWAITED: set[str] = set()
#: SQLite's mode for a file that nobody changes.
FIXED = "immutable=1"
#: Seconds that a statement waits for what another process holds.
BUSY_S = 30.0
#: How often a transaction that met another runs again, and its longest first pause in seconds, which doubles each time.
_TRIES, _JITTER_S = 5, 0.1
#: Seconds between attempts to reach a server that is away: at first, and at most.
_PAUSE_S = (0.1, 5.0)
#: What drivers raise: their own errors, and Python's for values that they cannot read, bind or hold. SystemError is
#: what Python's sqlite3 makes of an error that it finds no reason for: another thread has asked it something since.
DRIVER_ERRORS = (SQLAlchemyError, ValueError, OverflowError, MemoryError, SystemError)
#: SQLSTATE of what trying again mends: https://www.postgresql.org/docs/current/errcodes-appendix.html
_ENDED = ("57P01", "57P02", "57P03")
_CONFLICT = ("40001", "40P01")
_WAITED = ("55P03", "57014")
_FULL = "53300"
_FORBIDDEN = ("42501", "25006")
#: What a server, or the driver for it, says where no waiting helps: connecting has no SQLSTATE.
_FINAL = ("authentication failed", "does not exist", "pg_hba.conf", "permission denied", "not permitted", "no password",
          "certificate", "invalid", "unsupported")


def engine_of(url: sa.URL, sqlite_mode: str = "", patience_s: float = BUSY_S) -> sa.Engine:
    """An engine whose statements wait ``patience_s`` for what others hold, one a server; DatabaseError: no driver."""
    file = sqlite_file(url)
    if file is None:
        if url.get_backend_name() != "sqlite":
            return _server_engine(url, patience_s)
        engine = _made(url, connect_args={"timeout": patience_s})
    else:
        target = f"{file.absolute().as_uri()}?{sqlite_mode}" if sqlite_mode else str(file)
        # To open a file costs several times a look-up in it, so one connection is kept. A file that is declared never
        # to change is opened each time: an open one would not show that it did.
        pool: dict[str, Any] = {"poolclass": NullPool} if sqlite_mode == FIXED else {"pool_size": 1}
        engine = _made(
            url,
            creator=lambda: sqlite3.connect(target, timeout=patience_s, uri=bool(sqlite_mode), check_same_thread=False),
            **pool,
        )
        _leave_what_is_not_ours(engine, file)
    _own_transactions(engine)
    return engine


def _made(url: sa.URL, **options: Any) -> sa.Engine:
    try:
        return sa.create_engine(url, **options)
    except (*DRIVER_ERRORS, ImportError) as error:
        message = f"cannot open database {location_name(url)}: {without_secrets(str(error), url)}"
        missing = isinstance(error, ImportError) and url.get_driver_name() == "psycopg"
        raise errors.DatabaseError(f"{message}; pip install 'fuseplan[postgres]'" if missing else message) from None


def _server_engine(url: sa.URL, patience_s: float) -> sa.Engine:
    limits = location.server_limits(url, patience_s)
    known = (os.getpid(), url, *sorted(limits.items()))
    if known not in _SERVERS:
        # Nothing here is of type hstore: not to ask for it saves each connection a round trip.
        options: dict[str, Any] = {"use_native_hstore": False} if url.get_driver_name().startswith("psycopg") else {}
        engine = _made(url, connect_args=limits, **options)
        _leave_what_is_not_ours(engine, None)
        _SERVERS[known] = engine
    return _SERVERS[known]


def _leave_what_is_not_ours(engine: sa.Engine, file: Path | None) -> None:
    """Open the database again in a forked process, and when another file has taken its place."""

    def owner_and_file() -> tuple[int, location.FileIdentity | None]:
        return os.getpid(), None if file is None else location.identity(file)

    @sa.event.listens_for(engine, "connect")
    def _connect(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info["identity"] = owner_and_file()

    @sa.event.listens_for(engine, "checkout")
    def _checkout(_connection: object, record: ConnectionPoolEntry, proxy: PoolProxiedConnection) -> None:
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


@contextlib.contextmanager
def connected(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection to read with; drivers' errors come out as :class:`DatabaseError`."""
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "postgresql":  # each statement by itself: to begin and to end are round trips
                connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            yield connection
    except DRIVER_ERRORS as error:
        raise database_error(error, engine) from None


@contextlib.contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that takes the write lock when it begins; errors as :func:`connected`."""
    try:
        with engine.execution_options(fuseplan_write=True).begin() as connection:
            yield connection
    except DRIVER_ERRORS as error:
        raise database_error(error, engine) from None


def insist(url: sa.URL, attempt: Callable[[], T], patient: bool) -> T:
    """What ``attempt`` returns, which may run several times.

    A connection that the server has closed is replaced at once and without a word, and one of two transactions that
    waited for each other runs again. One who is ``patient`` also waits a few times for what others hold; and for a
    server that is away as long as it takes, which it says once in the life of this process.
    """
    pause, longest = _PAUSE_S
    tries = conflicts = 0
    while True:
        try:
            return attempt()
        except errors.BusyDatabaseError as error:
            if conflicts == _TRIES or not (patient or error.at_once):
                raise
            time.sleep(random.uniform(0.0, _JITTER_S * 2**conflicts))
            conflicts += 1
        except errors.UnreachableDatabaseError as error:
            if not patient and (tries or not error.at_once):
                raise
            if tries or not error.at_once:
                if (name := location_name(url)) not in _AWAITED:
                    _AWAITED.add(name)
                    warnings.warn(f"waiting for the database at {error}", stacklevel=3)
                time.sleep(pause)
                pause = min(2 * pause, longest)
            tries += 1


def database_error(error: Exception, engine: sa.Engine) -> errors.DatabaseError:
    """The error of our family that a driver's error stands for."""
    said = "out of memory" if isinstance(error, MemoryError) else str(getattr(error, "orig", None) or error)
    text = without_secrets(said, engine.url)
    low = text.lower()
    name = location_name(engine.url)
    if isinstance(error, SystemError):
        return errors.UnreachableDatabaseError(f"{name}: {text}", at_once=True)
    if engine.dialect.name != "sqlite":
        text = without_secrets(said.strip().partition("\n")[0], engine.url)  # then come hints and the statement
        state = str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")
        if state in _FORBIDDEN:
            return errors.ReadOnlyDatabaseError(f"{name} cannot be written ({text}); use a role that may write there")
        if state in (*_CONFLICT, *_WAITED):
            return _busy(name, text, at_once=state in _CONFLICT)
        if isinstance(error, OperationalError | InterfaceError):
            dropped = error.connection_invalidated or state in _ENDED
            # Without a statement it was the connection that failed; without a SQLSTATE nobody said why.
            away = state == _FULL or (not state and error.statement is None and not any(one in low for one in _FINAL))
            if dropped or away:
                return errors.UnreachableDatabaseError(f"{name}: {text}", at_once=dropped)
        return errors.DatabaseError(f"{name}: {text}")
    if "not a database" in low or "malformed" in low or "corrupt" in low:
        return corrupt(engine, text)
    if any(sign in low for sign in ("readonly", "read-only", "unable to open", "disk is full", "disk i/o error")):
        return errors.ReadOnlyDatabaseError(
            "{} cannot be written ({}); pass a writable file with {}", name, text, errors.Argument("db"))
    if "is locked" in low:
        return _busy(name, text)
    if "statements in progress" in low:  # a commit that SQLite refuses on a busy machine: nothing was written
        return _busy(name, text, at_once=True)
    return errors.DatabaseError(f"{name}: {text}")


def _busy(name: str, text: str, at_once: bool = False) -> errors.BusyDatabaseError:
    return errors.BusyDatabaseError(
        f"{name}: {text}: another process holds what was asked for; try again when it is done", at_once)


def corrupt(engine: sa.Engine, why: str) -> errors.CorruptDatabaseError:
    """The error for a database that is not what it was; ``why`` in the driver's words."""
    return errors.CorruptDatabaseError(f"tuning database {location_name(engine.url)} is corrupt ({why})")
