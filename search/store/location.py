"""Where a tuning database lies: a server, or a file that may not be ours, or corrupt and to be set aside.

Its name in messages never holds a password.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import platformdirs
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from fuseplan.search.errors import Argument, Command, DatabaseError, ForeignDatabaseError, ReadOnlyDatabaseError, plain
from fuseplan.search.store.record import SCHEMA_VERSION, now

#: Marks a SQLite file as ours, in its header ("fuse").
APPLICATION_ID = 0x66757365
#: Device and inode: another file of the same name has another one.
FileIdentity: TypeAlias = tuple[int, int]

_MAGIC = b"SQLite format 3\x00"
#: Where a SQLite file has its application's mark: https://www.sqlite.org/fileformat.html, section 1.3.
_MARK = slice(68, 72)
#: Bytes at the start that hold the schema of a database that was made before there was a mark.
_SCHEMA_BYTES = 64 * 1024
#: Stands for a location that could not be understood.
NOWHERE = URL.create("sqlite", database=":memory:")
_FORM = "write it as dialect://user:password@host:port/name, with special characters of each part as %XX"
#: A user with a password, or a password among the options of a URL.
_CREDENTIALS = re.compile(r"^(?![/.~])[^?]*:[^?]*@|[?&;][^=&;]*(pass|pwd|secret|token|key)[^=&;]*=", re.IGNORECASE)
#: The driver of a PostgreSQL URL that names none.
_POSTGRESQL = "postgresql+psycopg"
#: Seconds that a server has to accept a connection, and to answer a statement, its wait for others included.
CONNECT_S = 5
STATEMENT_S = 30
#: Options of a URL whose values are shown nowhere.
SECRET_OPTION = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)


def default_path() -> Path:
    """Where the database lives unless the user says otherwise: one file for each schema version."""
    return Path(platformdirs.user_data_dir("fuseplan", appauthor=False)) / f"tuning-{SCHEMA_VERSION}.db"


def left_behind() -> str:
    """In words: an older version's default file, where this version has none yet; "" where there is nothing to say."""
    path = default_path()
    older = sorted(file.name for file in path.parent.glob("tuning*.db") if file != path)
    if path.exists() or not older:
        return ""
    return (
        f"plans of another fuseplan stay in {plain(str(path.parent / older[-1]))}; "
        f"what a plan is made for has changed, so everything is tuned anew, into {path.name}"
    )


def resolve_url(location: str | Path | None) -> URL:
    """A SQLAlchemy URL from a URL, a file path, or None for the default file. The :class:`DatabaseError` for what is
    none of them does not repeat it: it may hold a password.
    """
    if location is None:
        location = default_path()
    if not isinstance(location, str | os.PathLike):
        raise DatabaseError("{} {!r} is neither the path of a file nor a SQLAlchemy URL", Argument("db"), location)
    if not str(location).strip():
        raise DatabaseError("the path of the database is empty; pass a file, such as tuning.db, with {}",
                            Argument("db"))
    if isinstance(location, str) and "://" in location:
        try:
            url = make_url(location)
        except (SQLAlchemyError, ValueError):
            raise DatabaseError(f"the database URL cannot be read; {_FORM}") from None
        try:
            url.get_dialect()
        except SQLAlchemyError:
            message = f"cannot open database {location_name(url)}: no driver is called {url.drivername}"
            raise DatabaseError(message) from None
        return url.set(drivername=_POSTGRESQL) if url.drivername == "postgresql" else url
    if isinstance(location, str) and _CREDENTIALS.search(location) and not Path(location).exists():
        raise DatabaseError(f"the database looks like a URL without '://'; {_FORM}")
    try:
        return URL.create("sqlite", database=str(Path(location).expanduser()))
    except RuntimeError as error:  # the home folder of nobody
        raise DatabaseError(f"database path {plain(str(location))}: {error}") from None


def sqlite_file(url: URL) -> Path | None:
    """The file behind a SQLite URL; None for other dialects and for memory databases."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def location_name(url: URL) -> str:
    """The database's name in messages: the file, or the URL without its passwords."""
    if url.get_backend_name() == "sqlite":
        return plain(url.database or "the memory database")
    secret = {name: "***" for name in url.query if SECRET_OPTION.search(name)}
    shown = url.update_query_dict(secret).render_as_string().replace("%2A%2A%2A", "***")
    return plain(shown.replace(f"{_POSTGRESQL}:", "postgresql:", 1))


def without_secrets(text: str, url: URL) -> str:
    """A driver's message as it may be shown: it can quote what it was given."""
    secrets = [str(url.password or "")]
    secrets += [one for name, values in url.normalized_query.items() if SECRET_OPTION.search(name) for one in values]
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return plain(text)


def server_limits(url: URL, patience_s: float) -> dict[str, Any]:
    """Time limits for the driver of a server, ``patience_s`` for what others hold; the URL's options win."""
    driver = url.get_driver_name()
    limits: dict[str, Any] = {}
    if driver in ("psycopg", "psycopg2"):  # https://www.postgresql.org/docs/current/libpq-connect.html
        limits = {"connect_timeout": CONNECT_S, "tcp_user_timeout": STATEMENT_S * 1000}
        limits["options"] = f"-c statement_timeout={STATEMENT_S * 1000} -c lock_timeout={round(patience_s * 1000)}"
    elif driver in ("pymysql", "mysqldb"):
        limits = {"connect_timeout": CONNECT_S, "read_timeout": STATEMENT_S, "write_timeout": STATEMENT_S}
    elif driver == "pg8000":
        limits = {"timeout": STATEMENT_S}
    return {name: value for name, value in limits.items() if name not in url.query}


def absent(url: URL) -> DatabaseError:
    """The error for a place that has no tuning database."""
    return DatabaseError("there is no tuning database at {}; correct the path, or let {} make one there",
                         location_name(url), Command("tune"))


def identity(file: Path) -> FileIdentity | None:
    """Which file lies there now; None where none does."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def file_size(file: Path) -> int:
    """Size in bytes, 0 where nothing lies there; :class:`DatabaseError` where it is no regular file."""
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise DatabaseError("database path {} cannot be used ({}); pass another with {}", plain(str(file)), str(error),
                            Argument("db")) from None
    if stat.S_ISDIR(found.st_mode):
        raise DatabaseError(f"database path {plain(str(file))} is a folder; pass a file in it, such as tuning.db")
    if not stat.S_ISREG(found.st_mode):
        raise DatabaseError("database path {} is no regular file; pass another with {}", plain(str(file)),
                            Argument("db"))
    return found.st_size


def make_folder(url: URL) -> Path | None:
    """The file behind a SQLite URL, in a folder that exists; :class:`DatabaseError` where there can be no such file."""
    file = sqlite_file(url)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReadOnlyDatabaseError(
                "tuning database {} cannot be written ({}); pass a writable file with {}", location_name(url),
                str(error), Argument("db"),
            ) from None
        file_size(file)
    return file


def check_ours(file: Path, why: str) -> None:
    """Raise :class:`ForeignDatabaseError` unless the header or schema of an unreadable file (``why``) is ours."""
    try:
        with file.open("rb") as opened:
            head = opened.read(_SCHEMA_BYTES)
    except OSError as error:
        raise DatabaseError(f"database {plain(str(file))} cannot be read ({error})") from None
    marked = head[_MARK] == APPLICATION_ID.to_bytes(4, "big")
    if not (head.startswith(_MAGIC) and (marked or b"CREATE TABLE fuseplan_meta" in head)):
        raise ForeignDatabaseError(
            "{} is no database of fuseplan ({}); it was left as it is: move it away, or pass another file with {}",
            plain(str(file)), why, Argument("db"),
        )


@contextlib.contextmanager
def locked(file: Path | None, exclusive: bool = False) -> Iterator[None]:
    """Hold a lock on the folder of ``file``: shared to open the file, exclusive to put another in its place.

    SQLite opens the companions of a file by name: a connection to the old file must not find the new one's. Where the
    file system has no such locks, files are opened without, and the exclusive one is an OSError.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(*([] if exclusive else [OSError])):
            if file is not None:
                folder = os.open(file.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
                # Closing alone would leave it to a process that another thread has forked meanwhile.
                stack.callback(fcntl.flock, folder, fcntl.LOCK_UN)
        yield


def spare_database(path: Path) -> None:
    """:class:`FileExistsError` where a SQLite database lies at ``path``: no other file takes its place."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                raise FileExistsError(errno.EEXIST, "a database lies there", str(path))


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new file, which takes the place of ``path`` at the end; OSError where it cannot, and ``path`` is as it was.

    That is the file that a link leads to. A device or a pipe is written to itself.
    """
    if path.is_file():
        path = path.resolve()
    elif path.exists():
        yield path
        return
    scratch = path.with_name(f"{path.name}{secrets.token_hex(4)}.part")
    scratch.touch(exist_ok=False)  # with the permissions that files of this user have
    try:
        yield scratch
        with locked(path):
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def move_aside(file: Path, found: FileIdentity, why: str) -> Path | None:
    """Rename a corrupt database of ours (``why``) beside itself, with SQLite's companions; its new name.

    None where the file is no longer the one that was ``found``: of many processes that find it corrupt one renames it.
    """
    try:
        with locked(file, exclusive=True):
            if identity(file) != found:
                return None
            check_ours(file, why)
            name = f"{file.name}.corrupt-" + now().replace(":", "").replace("+0000", "Z")
            names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
            target = next(free for free in map(file.with_name, names) if not free.exists())
            for suffix in ("-wal", "-shm", ""):
                with contextlib.suppress(FileNotFoundError):
                    file.with_name(file.name + suffix).rename(target.with_name(target.name + suffix))
            return target
    except OSError as error:
        raise DatabaseError(f"corrupt database {plain(str(file))} cannot be set aside ({error})") from None
