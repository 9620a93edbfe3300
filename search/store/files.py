"""The file of a SQLite database: whether it is ours, and setting a corrupt one aside."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import TypeAlias

from fuseplan.search.errors import DatabaseError, ForeignDatabaseError
from fuseplan.search.store.plain import plain
from fuseplan.search.store.record import now

#: Marks a SQLite file as ours, in its header ("fuse").
APPLICATION_ID = 0x66757365
#: Device and inode: another file of the same name has another one.
FileIdentity: TypeAlias = tuple[int, int]

_MAGIC = b"SQLite format 3\x00"
#: Where a SQLite file has its application's mark: https://www.sqlite.org/fileformat.html, section 1.3.
_MARK = slice(68, 72)
#: Bytes at the start that hold the schema of a database that was made before there was a mark.
_SCHEMA_BYTES = 64 * 1024


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
        raise DatabaseError(f"database path {_shown(file)} cannot be used ({error}); pass another with --db") from None
    if stat.S_ISDIR(found.st_mode):
        raise DatabaseError(f"database path {_shown(file)} is a folder; pass a file in it, such as tuning.db")
    if not stat.S_ISREG(found.st_mode):
        raise DatabaseError(f"database path {_shown(file)} is no regular file; pass another with --db")
    return found.st_size


def check_ours(file: Path, why: str) -> None:
    """Raise :class:`ForeignDatabaseError` unless a file that SQLite cannot read (``why``) was a database of ours.

    Its header or its schema says so, damaged as the rest may be.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(_SCHEMA_BYTES)
    except OSError as error:
        raise DatabaseError(f"database {_shown(file)} cannot be read ({error})") from None
    marked = head[_MARK] == APPLICATION_ID.to_bytes(4, "big")
    if not (head.startswith(_MAGIC) and (marked or b"CREATE TABLE fuseplan_meta" in head)):
        raise ForeignDatabaseError(
            f"{_shown(file)} is no database of fuseplan ({why}); it was left as it is: move it away, or pass another "
            "file with --db"
        )


def move_aside(file: Path, found: FileIdentity, why: str) -> Path | None:
    """Rename a database of ours that SQLite finds corrupt (``why``) beside itself, with SQLite's companions.

    Whoever renames it holds a lock on the file itself. Of many processes that find it corrupt one renames it, and what
    it starts afresh is no longer the file that the others ``found``.

    Returns:
        The new name of the main file; None when another file had taken its place.

    Raises:
        ForeignDatabaseError: It was no database of ours.
        DatabaseError: It cannot be renamed.
    """
    try:
        with file.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            opened = os.fstat(held.fileno())
            if identity(file) != found or (opened.st_dev, opened.st_ino) != found:
                return None
            check_ours(file, why)
            target = _free_name(file)
            for suffix in ("-wal", "-shm", ""):
                with contextlib.suppress(FileNotFoundError):
                    file.with_name(file.name + suffix).rename(target.with_name(target.name + suffix))
            return target
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatabaseError(f"corrupt database {_shown(file)} cannot be set aside ({error})") from None


def _shown(file: Path) -> str:
    return plain(str(file))


def _free_name(file: Path) -> Path:
    stamp = now().replace(":", "").replace("+0000", "Z")
    target = file.with_name(f"{file.name}.corrupt-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = file.with_name(f"{file.name}.corrupt-{stamp}-{number}")
    return target
