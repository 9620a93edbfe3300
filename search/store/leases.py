"""Leases: who is at work on which key, so that tuners on one database share the work instead of doing it twice.

A lease lasts some seconds and is renewed while its owner lives; that of a tuner that was killed ends by itself. The
database's clock counts: those of several hosts differ. SQLite and PostgreSQL have leases; on another database each
tuner works as if it were alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from fuseplan.search.errors import DatabaseError, UnreachableDatabaseError
from fuseplan.search.store import rows, tables
from fuseplan.search.store.connections import connected
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import RecordKey, now

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Seconds that a lease lasts unless it is renewed, and between renewals.
LASTS_S = 30.0
RENEWED_S = 5.0
#: Seconds between looks at what somebody else is at work on.
POLL_S = 0.25
_KEY = tuple(tables.LEASES.primary_key)


class Leases:
    """The leases of one tuner, by default named by host, process and a random number.

    Safe from any thread; a key that is taken twice is released twice.
    """

    def __init__(self, database: Database, owner: str | None = None) -> None:
        self.owner = owner or f"{platform.node()[:200]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._database = database
        self._held: Counter[RecordKey] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._renewing: threading.Thread | None = None

    def take(self, keys: Iterable[RecordKey]) -> set[RecordKey]:
        """Those of ``keys`` that nobody else is at work on; from now on this tuner is."""
        # Two that lock rows in different orders wait for each other.
        wanted = sorted(set(keys), key=astuple)
        dialect = tables.DIALECTS.get(self._database.url.get_backend_name())
        with self._lock:
            taken = {key for key in wanted if self._held[key]}
            if new := [key for key in wanted if key not in taken]:
                taken |= set(new) if dialect is None else self._database.change(partial(self._insert, dialect, new))
            self._held.update(taken)
            self._held = +self._held
            if self._renewing is None and dialect is not None and taken:
                self._renewing = threading.Thread(
                    target=_renew, args=(weakref.ref(self), self._stop), name="leases", daemon=True)
                self._renewing.start()
        return taken

    def release(self, keys: Iterable[RecordKey]) -> None:
        """This tuner is no longer at work on these."""
        with self._lock:
            self._held.subtract(keys)
            gone = [key for key, count in self._held.items() if count <= 0]
            self._held = +self._held
            if gone and self._database.url.get_backend_name() in tables.DIALECTS:
                self._give_up(gone)

    @contextlib.contextmanager
    def taking(self, keys: Iterable[RecordKey]) -> Iterator[set[RecordKey]]:
        """As :meth:`take`; released at the end."""
        taken = self.take(keys)
        try:
            yield taken
        finally:
            self.release(taken)

    @contextlib.contextmanager
    def alone(self, key: RecordKey) -> Iterator[None]:
        """At work on ``key`` alone, once no other tuner is."""
        while True:
            with self.taking([key]) as taken:
                if taken:
                    yield
                    return
            time.sleep(POLL_S)

    def once(self, key: RecordKey, known: Callable[[], _T | None], find: Callable[[], _T]) -> _T:
        """What is known of a key, else what ``find`` finds; while another tuner looks for it, it is waited for."""
        if (found := known()) is not None:
            return found
        with self.alone(key):
            found = known()  # it may have been found since
            return found if found is not None else find()

    def close(self) -> None:
        """Release everything, and stop renewing."""
        self._stop.set()
        with self._lock:
            held = list(self._held.elements())
        with contextlib.suppress(DatabaseError):
            self.release(held)

    def _insert(self, dialect: Any, keys: Sequence[RecordKey], connection: sa.Connection) -> set[RecordKey]:
        """Those of the keys that are free, which are this tuner's from now on."""
        ends = clock(connection) + LASTS_S
        insert = dialect.insert(tables.LEASES).values(
            [asdict(key) | {"owner": self.owner, "expires": ends, "taken": now()} for key in keys])
        mine_now = {name: insert.excluded[name] for name in ("owner", "expires", "taken")}
        free = (tables.LEASES.c.expires < clock(connection)) | (tables.LEASES.c.owner == self.owner)
        taken = insert.on_conflict_do_update(index_elements=_KEY, set_=mine_now, where=free)
        return {RecordKey(**row._asdict()) for row in connection.execute(taken.returning(*_KEY))}

    def _give_up(self, keys: Iterable[RecordKey]) -> None:
        """Nobody waits for a server for this: a lease that stays there ends by itself."""
        gone = tables.LEASES.delete().where(self._held_rows(keys))
        with contextlib.suppress(UnreachableDatabaseError):
            self._database.change(lambda connection: connection.execute(gone), patient=False)

    def _held_rows(self, keys: Iterable[RecordKey]) -> sa.ColumnElement[bool]:
        """This tuner's rows of these keys, locked in the order in which they are taken: as Python sorts them."""
        same = sa.or_(*(rows.same_key(tables.LEASES, key) for key in keys))
        found = sa.select(*_KEY).where(tables.LEASES.c.owner == self.owner, same)
        if self._database.url.get_backend_name() == "postgresql":
            found = found.order_by(*(sa.collate(column, "C") for column in _KEY)).with_for_update()
        return sa.tuple_(*_KEY).in_(sa.select(found.cte()))

    def _renew(self) -> None:
        with self._lock:
            if self._held:
                renewed = tables.LEASES.update().where(self._held_rows(self._held))
                self._database.change(
                    lambda connection: connection.execute(renewed.values(expires=clock(connection) + LASTS_S)),
                    patient=False,  # whoever closes these leases waits for this
                )


def _renew(leases: weakref.ref[Leases], stop: threading.Event) -> None:
    """Renew what is held, until it is closed or forgotten."""
    while not stop.wait(RENEWED_S):
        found = leases()
        if found is None:
            return
        try:
            found._renew()
        except DatabaseError as error:  # others may take over what is held; that costs work, not results
            _log.info("leases are not renewed: %s", error)
        del found


def clock(connection: sa.Connection) -> sa.ColumnElement[float]:
    """Seconds since 1970 by the database's clock."""
    if connection.dialect.name == "postgresql":
        return sa.func.extract("epoch", sa.func.clock_timestamp()).cast(sa.Float)
    # A Julian day is a number of days: https://www.sqlite.org/lang_datefunc.html.
    return (sa.func.julianday("now") - 2440587.5) * 86400.0


def clock_s(connection: sa.Connection) -> float:
    """What :func:`clock` says; this machine's clock on a database that has none."""
    if connection.dialect.name not in tables.DIALECTS:
        return time.time()
    return float(connection.execute(sa.select(clock(connection))).scalar_one())


def listed(database: Database) -> list[dict[str, Any]]:
    """The leases that count now, those taken first first: the columns of each, and how many seconds are ``left_s``."""
    if database.engine is None:
        return []
    with connected(database.engine) as connection:
        if not sa.inspect(connection).has_table(tables.LEASES.name):
            return []  # an older database
        left = (tables.LEASES.c.expires - clock(connection)).label("left_s")
        found = connection.execute(sa.select(tables.LEASES, left).where(left > 0).order_by(tables.LEASES.c.taken))
        return [row._asdict() for row in found]
