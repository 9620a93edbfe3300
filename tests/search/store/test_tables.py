"""Opening a database: where it lies, what may be written, what each dialect is told."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from database_files import quiet
from search_records import HERE, tuning
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateTable

from fuseplan.search.errors import BusyDatabaseError, DatabaseError, ReadOnlyDatabaseError
from fuseplan.search.store import connections, location, tables
from fuseplan.search.store.database import Database, Missed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "tuning.db"


@pytest.fixture
def db(path: Path) -> Database:
    return Database(path, versions=HERE)


def test_reading_what_is_not_there_creates_nothing(path: Path) -> None:
    database = quiet(path)
    assert database.get_record(tuning().key).status == "miss"
    assert list(database.records()) == []
    assert not path.parent.exists()


def test_a_reader_cannot_write(db: Database, path: Path) -> None:
    with pytest.raises(ReadOnlyDatabaseError, match="opened for reading only"):
        Database(path, mode="read").put_record(tuning())


def test_the_default_file_is_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    own = location.default_path()
    assert own.parent == tmp_path / "fuseplan" and own.name.endswith(".db")
    assert location.left_behind() == ""
    own.parent.mkdir()
    older = own.with_name("tuning.db")
    older.touch()
    assert str(older) in location.left_behind() and own.name in location.left_behind()
    own.touch()
    assert location.left_behind() == ""
    Database().put_record(tuning())
    assert (tmp_path / "fuseplan" / "tuning.db").exists()


def test_an_empty_file_becomes_a_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert quiet(path).get_record(tuning().key).status == "miss"
    Database(path).put_record(tuning())
    assert quiet(path).get_record(tuning().key).hit


def test_locations_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadOnlyDatabaseError, match=r"file/tuning\.db cannot be written .*a writable file with db"):
        Database(tmp_path / "file" / "tuning.db")
    with pytest.raises(DatabaseError, match="is a folder"):
        Database(tmp_path)
    for empty in ("", " "):
        with pytest.raises(DatabaseError, match=r"path of the database is empty; pass a file, .*, with db"):
            Database(empty)
    with pytest.raises(DatabaseError, match="db 3 is neither the path of a file nor a SQLAlchemy URL"):
        Database(3)  # type: ignore[arg-type]
    with pytest.raises(ReadOnlyDatabaseError, match="cannot be written"):
        Database("/proc/tuning.db")
    with pytest.raises(DatabaseError, match="cannot be read"):
        Database("://host/name")
    with pytest.raises(DatabaseError, match="cannot open database"):
        Database("nosuchdb://host/name")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, why in ((tmp_path / "pipe", "is no regular file"), (tmp_path, "is a folder")):
        with pytest.raises(DatabaseError, match=why):
            Database(place)
        with pytest.raises(DatabaseError, match=why):
            Database(place, mode="inspect")
        with pytest.warns(UserWarning, match=why):
            assert Database(place, mode="read").log_misses([Missed(tuning().key)]) is False
    with pytest.raises(DatabaseError, match="cannot be used"):
        Database(tmp_path / ("x" * 300), mode="inspect")


def test_a_file_in_a_read_only_folder_can_be_read(
    db: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.put_record(tuning())
    db.close()
    real, modes = connections.engine_of, []

    def no_room_for_shared_memory(url: URL, mode: str = "", *more: float) -> Engine:
        modes.append(mode)
        return real(location.resolve_url(path.parent / "absent.db") if mode == "mode=ro" else url, mode, *more)

    monkeypatch.setattr(connections, "engine_of", no_room_for_shared_memory)
    assert quiet(path).get_record(tuning().key).hit
    assert modes == ["mode=ro", "immutable=1"]


def test_errors_of_the_driver_are_sorted() -> None:
    engine = create_engine("sqlite://")
    cases = {
        "attempt to write a readonly database": ReadOnlyDatabaseError,
        "unable to open database file": ReadOnlyDatabaseError,
        "database is locked": BusyDatabaseError,
        "database table is locked": BusyDatabaseError,
        "no such column": DatabaseError,
    }
    for text, kind in cases.items():
        error = connections.database_error(sqlalchemy_error(text), engine)
        assert type(error) is kind
        assert text in str(error)


def sqlalchemy_error(text: str) -> Exception:
    return OperationalError("select", {}, sqlite3.OperationalError(text))


def test_a_memory_database_works() -> None:
    database = Database("sqlite://")
    database.put_record(tuning())
    assert database.get_record(tuning().key).hit
    assert "memory" in database.where


def test_statements_compile_for_postgresql() -> None:
    for table in tables.METADATA.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=postgresql.dialect()))


class _Recording:
    """Stands in for a connection of another dialect and records what is executed."""

    def __init__(self, name: str, rowcount: int) -> None:
        self.dialect = type("D", (), {"name": name})
        self.rowcount = rowcount
        self.statements: list[str] = []

    def execute(self, statement: object) -> _Recording:
        dialect = postgresql.dialect() if self.dialect.name == "postgresql" else None  # type: ignore[attr-defined]
        self.statements.append(str(statement.compile(dialect=dialect)).split("\n")[0])  # type: ignore[attr-defined]
        return self


def test_upsert_speaks_each_dialect() -> None:
    table = Table("t", MetaData(), Column("k", Integer, primary_key=True), Column("v", Text))
    post = _Recording("postgresql", 1)
    tables.upsert(post, table, {"k": 1, "v": "a"})  # type: ignore[arg-type]
    assert "ON CONFLICT (k) DO UPDATE SET v" in post.statements[0]
    for rowcount, count in ((1, 1), (0, 2)):
        other = _Recording("mysql", rowcount)
        tables.upsert(other, table, {"k": 1, "v": "a"})  # type: ignore[arg-type]
        assert len(other.statements) == count
        assert other.statements[0].startswith("UPDATE t")
