"""The tuning database: device specs, tuning records, plans, trials, misses and captures. Data only, never code.

Transactions are short, so several processes may tune and dispatch from one file. A record that other software versions
produced is *stale*: offered for re-validation, never served as a hit.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Engine, Select, Table, select

from fuseplan.search.errors import BusyDatabaseError, DatabaseError, ReadOnlyDatabaseError, RecordError, plain
from fuseplan.search.store import codec, rows, tables
from fuseplan.search.store.connections import BUSY_S, DRIVER_ERRORS, connected, insist, transaction
from fuseplan.search.store.location import (
    NOWHERE,
    absent,
    file_size,
    location_name,
    make_folder,
    resolve_url,
    sqlite_file,
)
from fuseplan.search.store.record import PlanRecord, RecordKey, Trial, TuningRecord, Versions, now
from fuseplan.search.store.rows import R
from fuseplan.search.store.snapshot import instead_of

T = TypeVar("T")
OpenMode = Literal["write", "inspect", "peek", "read"]
#: Servers and locked files that dispatch has said it goes on without, and until when no graph asks for one again.
_AWAY: dict[URL, float] = {}
AWAY_S = 60.0
#: What this process has opened for writing.
_REACHED: set[URL] = set()
#: Servers where the role of this process may not log misses, and those where it may not drop any.
_UNLOGGED: set[URL] = set()
_UNTRIMMED: set[URL] = set()
#: Seconds that compiling a model waits for what another process holds: to look plans up, and to log what was missed.
_LOOKUP_S, _PATIENCE_S = 2.0, 0.5
#: Keys of one statement: old releases of SQLite take 999 parameters.
_BATCH = 500


@dataclass(frozen=True)
class Missed:
    """A look-up that found nothing. ``payload`` is what JSON has."""

    key: RecordKey
    label: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lookup(Generic[R]):
    """What a look-up found.

    ``mismatch`` says why it is no hit: version fields that differ from the caller's, "undecided". A ``shipped`` record
    comes with the package, not from the user's database.
    """

    record: R | None = None
    mismatch: tuple[str, ...] = ()
    shipped: bool = False

    @property
    def status(self) -> Literal["hit", "stale", "miss"]:
        if self.record is None:
            return "miss"
        return "stale" if self.mismatch else "hit"

    @property
    def hit(self) -> R | None:
        """The record if it may be used as it is, else None."""
        return None if self.mismatch else self.record


def reservations(record: TuningRecord | PlanRecord, versions: Versions | None, run: str = "") -> tuple[str, ...]:
    """Why a record is no hit, as :attr:`Lookup.mismatch`; ``versions`` None and ``run`` "" stand for any."""
    found = versions.mismatch(record.evidence.versions) if versions is not None else ()
    undecided = ("undecided",) if record.undecided else ()
    return (*found, *undecided, *(("run",) if run not in ("", record.evidence.run) else ()))


def check_usable(location: str | Path | None) -> None:
    """Raise what opening a database for writing raises. Of a file that is not there yet only the folder is made."""
    file = make_folder(resolve_url(location))
    if file is None or file_size(file):
        Database(location).close()


class Database(contextlib.AbstractContextManager["Database"]):
    """One tuning database, in a file or behind a SQLAlchemy URL; None stands for the user's default file.

    Mode ``"write"`` creates what is missing and sets a corrupt database of ours aside. It waits for a server that goes
    away, once this process has reached it, unless it is not ``patient``. ``"inspect"`` changes nothing, and a database
    that was asked for has to be there; for ``"peek"`` it need not be. ``"read"`` never raises and never writes records:
    what cannot be read is empty, with one warning, but in place of a server that is away its snapshot is read
    (:mod:`.snapshot`). Look-ups compare records with ``versions``; None accepts any. ``tell`` takes warnings; None
    warns as Python does.

    Raises:
        DatabaseError: But in ``"read"`` mode, the location cannot be used; the message says what to do.
    """

    def __init__(
        self, location: str | Path | None = None, mode: OpenMode = "write", versions: Versions | None = None,
        patient: bool = True, tell: Callable[[str], None] | None = None,
    ) -> None:
        self.mode = mode
        self._tell = tell
        self._patient = patient and mode == "write"
        self.versions = versions
        self._warned = False
        self.keeps_misses = True  # False where the user wants none logged
        self.broken = False  # something that is there could not be read, and was taken for empty
        self.engine: Engine | None = None  # None when opened for reading and there is nothing to read
        self.url = NOWHERE
        try:
            self.url = resolve_url(location)
            if mode == "write":
                known = self.url in _REACHED
                self.engine = insist(
                    self.url, lambda: tables.open_for_writing(self.url, tell=tell), self._patient and known)
                _REACHED.add(self.url)
            elif mode == "read" and time.monotonic() < _AWAY.get(self.url, 0.0):
                self._go_without(None)
            else:
                self.engine = tables.open_for_reading(self.url, _LOOKUP_S if mode == "read" else BUSY_S)
                if self.engine is None and mode == "inspect" and location is not None:
                    raise absent(self.url)
        except DatabaseError as error:
            if mode != "read":
                raise
            self._go_without(error)
        if (engine := self.engine) is not None:
            # SQLite merges its log into the file when the last connection is closed, at exit at the latest: the file
            # alone is then whole. A forked process leaves that to its parent.
            process = os.getpid()
            weakref.finalize(self, lambda: engine.dispose() if os.getpid() == process else None)

    @property
    def where(self) -> str:
        """The location in messages, without any password."""
        return location_name(self.url)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release connections; the object may still be used."""
        if self.engine is not None:
            self.engine.dispose()

    def get_record(self, key: RecordKey) -> Lookup[TuningRecord]:
        """The tuning record of exactly this key."""
        return self._get_all(tables.TUNINGS, [key])[key]

    def put_record(self, record: TuningRecord) -> None:
        """Store a tuning record and close the trials that led to it, in one transaction."""
        row = rows.record_row(record)
        left_open = rows.same_key(tables.TRIALS, record.key) & (tables.TRIALS.c.open != 0)

        def put(connection: Connection) -> None:
            tables.upsert(connection, tables.TUNINGS, row)
            connection.execute(tables.TRIALS.update().where(left_open).values(open=0))

        self.change(put)

    def get_plans(self, keys: Iterable[RecordKey]) -> dict[RecordKey, Lookup[PlanRecord]]:
        """The plans of several region keys, in one statement where they share a device, a regime and numerics."""
        return self._get_all(tables.PLANS, keys)

    def put_plan(self, plan: PlanRecord) -> None:
        self._put(tables.PLANS, rows.record_row(plan))

    def records(self) -> Iterator[TuningRecord]:
        """Every readable tuning record, in key order."""
        return self._read(tables.TUNINGS)

    def plans(self) -> Iterator[PlanRecord]:
        """Every readable plan, in key order."""
        return self._read(tables.PLANS)

    def everything(self) -> list[TuningRecord | PlanRecord]:
        """Every readable tuning record, then every plan."""
        return [*self.records(), *self.plans()]

    def get_device(self, device: str) -> dict[str, Any] | None:
        """A device spec, as the JSON object that it was stored from."""
        return dict(self._read(tables.DEVICES, tables.DEVICES.c.device == device)).get(device)

    def put_device(self, device: str, spec: Mapping[str, Any]) -> None:
        self._put(tables.DEVICES, rows.json_row({"device": device}, spec))

    def devices(self) -> dict[str, dict[str, Any]]:
        return dict(self._read(tables.DEVICES))

    def device_keys(self) -> set[str]:
        """Keys of the devices that anything readable or not is stored of."""
        of = (tables.DEVICES, tables.TUNINGS, tables.PLANS, tables.MISSES)
        return {str(row["device"]) for table in of for row in self._run(select(table.c.device).distinct())}

    def captures(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Readable captures whose names start with ``prefix``, oldest first."""
        columns = tables.CAPTURES.c
        where = columns.name.startswith(prefix, autoescape=True)
        return dict(self._read(tables.CAPTURES, where, order=(columns.created, columns.name)))

    def put_capture(self, name: str, capture: Mapping[str, Any]) -> None:
        self._put(tables.CAPTURES, rows.json_row({"name": name}, capture))

    def log_trial(self, trial: Trial, versions: Versions) -> None:
        """Store one finished trial at once, so that a killed tune never repeats it."""
        self._put(tables.TRIALS, rows.trial_row(trial, versions))

    def trials(self, key: RecordKey, versions: Versions | None = None, only_open: bool = False) -> list[Trial]:
        """Finished trials of a key in the order they finished; of these versions only, when given."""
        columns = tables.TRIALS.c
        where = [rows.same_key(tables.TRIALS, key)]
        where += [columns.open == 1] if only_open else []
        where += [columns.versions == codec.dumps(versions)] if versions is not None else []
        return list(self._read(tables.TRIALS, *where, order=(columns.created, columns.config_hash)))

    @property
    def logs_misses(self) -> bool:
        """Whether misses are to be stored, and there is hope that they can be: not where that failed already."""
        return self.keeps_misses and (self.mode == "write" or not (self.broken or self.url in _UNLOGGED))

    def log_misses(self, misses: Iterable[Missed], captures: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
        """Count look-ups that found nothing, and keep ``captures`` that belong to them; of too many, the rarest go.

        Never raises, and never waits long for another process; False when it could not be stored.
        """
        if not self.logs_misses:
            return False
        table, counted = tables.MISSES, {"count": tables.MISSES.c.count + 1}
        try:
            found = [rows.json_row({"name": name}, capture) for name, capture in (captures or {}).items()]
            with self._miss_engine() as engine:
                with transaction(engine) as connection:
                    # In one order: two that count the same keys would else wait for each other.
                    for miss in sorted(misses, key=lambda miss: astuple(miss.key)):
                        payload = {"payload": json.dumps(dict(miss.payload))}
                        row = asdict(miss.key) | {"label": miss.label, "first_seen": now(), "count": 1} | payload
                        tables.upsert(connection, table, row, counted | payload)
                    for row in sorted(found, key=lambda row: str(row["name"])):
                        tables.upsert(connection, tables.CAPTURES, row)
                    too_many = self.url not in _UNTRIMMED and rows.too_many_misses(connection)
                if too_many:
                    self._trim_misses(engine)
        except (DatabaseError, *DRIVER_ERRORS, TypeError) as error:
            self.broken = self.mode == "read"  # what cannot be reached is not waited for at each miss
            if isinstance(error, ReadOnlyDatabaseError) and sqlite_file(self.url) is None:
                _UNLOGGED.add(self.url)
            if self.engine is None and isinstance(error, ReadOnlyDatabaseError):  # there is none and can be none
                with contextlib.suppress(UserWarning):  # where warnings are errors
                    self._warn(f"{error}; going on without it")
            return False
        return True

    def _trim_misses(self, engine: Engine) -> None:
        """In a transaction of its own: what was logged stays, whether or not this may drop or waits for others."""
        try:
            with transaction(engine) as connection:
                rows.trim_misses(connection)
        except ReadOnlyDatabaseError:
            _UNTRIMMED.add(self.url)
        except DatabaseError:  # the next one tries again
            return

    @contextlib.contextmanager
    def _miss_engine(self) -> Iterator[Engine]:
        """An engine that can write, although this object may be open for reading only."""
        if self.engine is not None and (self.mode == "write" or sqlite_file(self.url) is None):
            yield self.engine
            return
        engine = tables.open_for_writing(self.url, set_aside=0, patience_s=_PATIENCE_S)
        try:
            yield engine
        finally:
            engine.dispose()

    def forget_misses(self, keys: Iterable[RecordKey], captures: Iterable[str] = ()) -> None:
        """Delete logged misses, and captures that belonged to them."""
        gone = [tables.MISSES.delete().where(rows.same_key(tables.MISSES, key)) for key in keys]
        gone += [tables.CAPTURES.delete().where(tables.CAPTURES.c.name == name) for name in captures]
        self.change(lambda connection: [connection.execute(one) for one in gone])

    def capture_names(self, prefix: str) -> set[str]:
        """Names of the captures that start with ``prefix``, unread."""
        name = tables.CAPTURES.c.name
        return {str(row["name"]) for row in self._run(select(name).where(name.startswith(prefix, autoescape=True)))}

    def misses(self) -> list[dict[str, Any]]:
        """Every miss with its count, most frequent first: keys, ``label``, ``payload`` (decoded), ``count``."""
        return sorted(self._read(tables.MISSES), key=lambda miss: (-miss["count"], miss["workload"]))

    def change(self, work: Callable[[Connection], T], patient: bool = True) -> T:
        """What ``work`` returns, which changes the database in one transaction that holds the write lock.

        Where a server goes away, one who is ``patient`` waits, and ``work`` runs again, although its first run may have
        been stored: so it must leave the same whether it ran once or twice. Drivers' errors are :class:`DatabaseError`.
        """
        if self.mode != "write" or (engine := self.engine) is None:
            raise ReadOnlyDatabaseError(f"{self.where} was opened for reading only")

        def attempt() -> T:
            with transaction(engine) as connection:
                return work(connection)

        return insist(self.url, attempt, patient and self._patient)

    def _put(self, table: Table, row: Mapping[str, Any]) -> None:
        self.change(lambda connection: tables.upsert(connection, table, row))

    def _read(
        self, table: Table, *where: ColumnElement[bool], order: Iterable[ColumnElement[Any]] = ()
    ) -> Iterator[Any]:
        """What can be read of the rows of a table, in key order unless another is given."""
        return self._sound(table, self._run(select(table).where(*where).order_by(*(order or table.primary_key))))

    def _run(self, query: Select[Any], parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        if (engine := self.engine) is None:
            return []

        def attempt() -> list[dict[str, Any]]:
            with connected(engine) as connection:
                return [row._asdict() for row in connection.execute(query, parameters)]

        try:
            return insist(self.url, attempt, self._patient)
        except DatabaseError as error:
            if self.mode != "read":
                raise
            before = self.broken
            return self._run(query, parameters) if self._go_without(error) and not before else []

    def _get_all(self, table: Table, keys: Iterable[RecordKey]) -> dict[RecordKey, Lookup[Any]]:
        found: dict[RecordKey, Lookup[Any]] = dict.fromkeys(keys, Lookup())
        contexts: dict[tuple[str, str, str], list[str]] = {}
        for key in found:
            contexts.setdefault((key.device, key.regime, key.numerics), []).append(key.workload)
        for (device, regime, numerics), workloads in contexts.items():
            for start in range(0, len(workloads), _BATCH):
                some = workloads[start : start + _BATCH]
                asked = {"workloads": some, "device": device, "regime": regime, "numerics": numerics}
                there = ({**asked, **row} for row in self._run(rows.records_of(table), asked))
                for record in self._sound(table, there):
                    if record.key in found:
                        found[record.key] = Lookup(record, reservations(record, self.versions))
        return found

    def _sound(self, table: Table, found: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        """What each row holds; a damaged one is reported and treated as absent."""
        for row in found:
            try:
                yield rows.READERS[table](row)
            except RecordError as error:
                name = plain(str(row.get("label", row[next(iter(table.primary_key)).name])))
                self._warn(f"{self.where}: damaged row '{name}' of {table.name} ({error}); ignored")

    def _go_without(self, error: DatabaseError | None) -> bool:
        """Whether a server's snapshot is read now. A server's or locked file's ``error`` is told once a process."""
        self.broken, engine, instead = True, None, "it"
        if self.url.get_backend_name() != "sqlite":
            engine, instead = instead_of(self.url)
        elif error is not None and not isinstance(error, BusyDatabaseError):
            self._warn(f"{error}; going on without it")
            return False
        self.engine = engine
        if error is not None:
            if self.url not in _AWAY:
                self._warn(f"{error}; going on {'without it' if engine is None else f'with {instead}'}")
            _AWAY[self.url] = time.monotonic() + AWAY_S
        return engine is not None

    def _warn(self, message: str) -> None:
        if self._warned:
            return
        self._warned = True
        if self._tell is not None:
            self._tell(message)
        else:
            warnings.warn(message, stacklevel=4)
