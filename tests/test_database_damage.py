"""Database files that are corrupt, cut short, altered, of another version or not ours."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from database_files import damage_pages
from search_records import HERE, tuning

from fuseplan.search import maintenance, tables
from fuseplan.search.database import Database
from fuseplan.search.errors import ForeignDatabaseError, SchemaVersionError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "tuning.db"


@pytest.fixture
def db(path: Path) -> Database:
    return Database(path, versions=HERE)


@pytest.mark.parametrize("content", [b"this is not a database" * 50, b"SQLite format 3\x00" + b"\x01" * 5000])
def test_a_corrupt_file_is_set_aside_for_writing(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"is corrupt .* kept as .*tuning\.db\.corrupt-"):
        database = Database(path)
    database.put_record(tuning())
    assert database.get_record(tuning().key).hit
    kept = list(path.parent.glob("tuning.db.corrupt-*"))
    assert [file.read_bytes() for file in kept] == [content]


def test_two_quarantines_in_one_second_keep_both(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"one" * 1000, b"two" * 1000):
        path.write_bytes(content)
        tables.quarantine(path)
    assert len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize("content", [b"this is not a database" * 50, b"SQLite format 3\x00" + b"\x01" * 5000])
def test_a_corrupt_file_is_empty_for_dispatch(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="going on without it"):
        database = Database(path, mode="read")
    assert database.get_record(tuning().key).status == "miss"
    assert path.read_bytes() == content


def test_damage_inside_is_noticed_by_writers_and_survived_by_readers(db: Database, path: Path) -> None:
    for n in range(20):
        db.put_record(tuning(f"w{n}"))
    db.close()
    damage_pages(path)
    with pytest.warns(UserWarning, match="going on without it"):
        reader = Database(path, mode="read")
        assert reader.get_record(tuning("w3").key).status == "miss"
        assert list(reader.records()) == []
    with pytest.warns(UserWarning, match="is corrupt"):
        writer = Database(path)
    assert list(writer.records()) == []
    assert len(list(path.parent.glob("*.corrupt-*"))) >= 1


def test_a_truncated_file_is_survived(db: Database, path: Path) -> None:
    for n in range(20):
        db.put_record(tuning(f"w{n}"))
    db.close()
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.warns(UserWarning, match=r"tuning\.db is corrupt \(.*malformed\); going on without it"):
        reader = Database(path, mode="read")
        assert reader.get_record(tuning("w3").key).status == "miss"


def test_an_altered_row_is_reported_and_ignored(db: Database, path: Path) -> None:
    db.put_record(tuning("w1"))
    db.put_record(tuning("w2"))
    with sqlite3.connect(path) as raw:
        raw.execute("update tuning_records set payload = replace(payload, '\"gain\":0.5', '\"gain\":0.9') "
                    "where workload = 'w1'")
    with pytest.warns(UserWarning, match=r"damaged TuningRecord 'swiglu w1' \(checksum"):
        assert db.get_record(tuning("w1").key).status == "miss"
    assert db.get_record(tuning("w2").key).status == "hit"
    problems = maintenance.verify(db)
    assert [(problem.table, problem.what) for problem in problems] == [("tuning_records", "checksum does not match")]
    assert maintenance.prune(db)["tuning_records"] == 1
    assert maintenance.verify(db) == []


def test_another_schema_version_is_left_alone(db: Database, path: Path) -> None:
    db.put_record(tuning())
    with sqlite3.connect(path) as raw:
        raw.execute("update fuseplan_meta set value = '99' where name = 'schema_version'")
    db.close()
    before = path.read_bytes()
    with pytest.raises(SchemaVersionError, match=r"has schema version 99, this fuseplan reads 1.*--db"):
        Database(path)
    with pytest.warns(UserWarning, match="schema version 99"):
        assert Database(path, mode="read").get_record(tuning().key).status == "miss"
    assert path.read_bytes() == before


def test_another_applications_database_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    raw = sqlite3.connect(path)
    raw.execute("create table bookmarks (url text)")
    raw.commit()
    raw.close()
    with pytest.raises(ForeignDatabaseError, match=r"another application \(bookmarks\)"):
        Database(path)
    with pytest.warns(UserWarning, match="another application"):
        Database(path, mode="read")
    raw = sqlite3.connect(path)
    assert [row[0] for row in raw.execute("select name from sqlite_master")] == ["bookmarks"]
