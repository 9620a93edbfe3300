"""A copy of a server's database in a file, for dispatch to read while the server cannot be reached."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import time
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import URL, Engine

from fuseplan.search.errors import DatabaseError, counted, plain
from fuseplan.search.store import location, tables
from fuseplan.search.store.connections import connected, transaction
from fuseplan.search.store.location import location_name, resolve_url
from fuseplan.search.store.record import now, seconds

#: What dispatch and reports read; not who is at work, and not what was missed.
_COPIED = (tables.DEVICES, tables.TUNINGS, tables.PLANS, tables.CAPTURES)
_ROWS = 500
_PULLED = "pulled"


def snapshot_path(url: URL) -> Path:
    """The file in the user's data folder that :func:`pull` writes for a server, whatever its password and driver."""
    query = {name: values for name, values in url.normalized_query.items() if not location.SECRET_OPTION.search(name)}
    said = repr((url.get_backend_name(), url.username, url.host, url.port, url.database, sorted(query.items())))
    words = re.sub(r"[^A-Za-z0-9]+", "-", f"{url.host}-{url.database}").strip("-")[:60]
    name = f"snapshot-{words}-{hashlib.sha256(said.encode()).hexdigest()[:12]}.db"
    return location.default_path().with_name(name)


def pull(where: str) -> tuple[Path, int]:
    """Copy devices, records, plans and captures of a server at one moment; the file, and how many rows it has.

    :class:`DatabaseError` where that cannot be; an earlier file is then as it was.
    """
    url = resolve_url(where)
    if url.get_backend_name() == "sqlite":
        raise DatabaseError(f"{location_name(url)} is a file, so there is nothing to pull; give the URL of a server")
    if (server := tables.open_for_reading(url)) is None:
        raise location.absent(url)
    file = snapshot_path(url)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with location.replaced(file) as scratch:
            return file, _copy(server, scratch, location_name(url))
    except OSError as error:
        raise DatabaseError(f"the snapshot {plain(str(file))} cannot be written ({error.strerror})") from None
    finally:
        server.dispose()


def _copy(server: Engine, scratch: Path, source: str) -> int:
    copy, rows = tables.open_for_writing(resolve_url(scratch)), 0
    try:
        whole = {"isolation_level": "REPEATABLE READ"} if server.dialect.name == "postgresql" else {}
        with transaction(server.execution_options(**whole)) as asked, transaction(copy) as written:
            for table in _COPIED:
                for found in asked.execution_options(yield_per=_ROWS).execute(sa.select(table)).mappings().partitions():
                    written.execute(table.insert(), [dict(row) for row in found])
                    rows += len(found)
            for name, value in ((_PULLED, now()), ("source", source)):
                tables.upsert(written, tables.META, {"name": name, "value": value})
        with connected(copy) as settled:  # readers then need no file beside it
            settled.exec_driver_sql("PRAGMA journal_mode=DELETE")
    finally:
        copy.dispose()
    return rows


def instead_of(url: URL) -> tuple[Engine | None, str]:
    """A server's snapshot, open for reading, and what it is in words; None where there is none that can be read."""
    file = snapshot_path(url)
    with contextlib.suppress(DatabaseError):
        if (engine := tables.open_for_reading(resolve_url(file))) is not None:
            with connected(engine) as connection:
                pulled = connection.scalar(sa.select(tables.META.c.value).where(tables.META.c.name == _PULLED))
            return engine, f"its snapshot {plain(str(file))}, pulled {_age(str(pulled))}"
    return None, "it"


def _age(pulled: str) -> str:
    minutes = (time.time() - seconds(pulled)) / 60
    if math.isinf(minutes):
        return "at an unknown time"
    if minutes < 120:
        return f"{counted(max(int(minutes), 0), 'minute')} ago"
    return f"{minutes // 60:.0f} hours ago" if minutes < 48 * 60 else f"{minutes // (24 * 60):.0f} days ago"
