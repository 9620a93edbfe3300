"""Database files that are corrupt, cut short, altered, of another version or not ours."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from database_files import damage_pages
from paths import SUPPORT
from search_records import HERE, tuning
from sqlalchemy import Engine, event

from fuseplan.planner.cli import main
from fuseplan.search.errors import CorruptDatabaseError, DatabaseError, ForeignDatabaseError, SchemaVersionError
from fuseplan.search.store import location, maintenance, tables
from fuseplan.search.store.database import Database, Missed, OpenMode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "tuning.db"


@pytest.fixture
def db(path: Path) -> Database:
    return Database(path, versions=HERE)


def ruined(path: Path, mark: bool = True) -> bytes:
    """What a database of ours is after its pages were lost: its content, with a schema that cannot be read."""
    with Database(path) as made:
        made.put_record(tuning("lost"))
    damage_pages(path)
    content = path.read_bytes()
    if not mark:
        content = content[:68] + bytes(4) + content[72:]
        path.write_bytes(content)
    return content


def set_aside(path: Path) -> list[Path]:
    """The files that were set aside, without SQLite's companions."""
    return [file for file in path.parent.glob(f"{path.name}.corrupt-*") if not file.name.endswith(("-wal", "-shm"))]


def can_be_replaced(path: Path) -> bool:
    """Whether a process that finds the file corrupt may set it aside now."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(folder)


@pytest.mark.parametrize("mark", [True, False], ids=["marked", "made before there was a mark"])
def test_a_corrupt_database_is_set_aside_for_writing(path: Path, mark: bool) -> None:
    content = ruined(path, mark)
    with pytest.warns(UserWarning, match=r"is corrupt .* kept as .*tuning\.db\.corrupt-"):
        database = Database(path)
    database.put_record(tuning())
    assert database.get_record(tuning().key).hit
    assert [file.read_bytes() for file in set_aside(path)] == [content]


def test_two_set_aside_in_one_second_are_both_kept(path: Path) -> None:
    ours = ruined(path)
    for content in (ours + b"one", ours + b"two"):
        path.write_bytes(content)
        found = location.identity(path)
        assert found is not None
        assert location.move_aside(path, found, "") is not None
    assert {file.read_bytes()[-3:] for file in path.parent.iterdir()} == {b"one", b"two"}


USERS = {
    "weights": bytes(range(256)) * 40,
    "json": b'{"hidden_size": 64}',
    "words": b"this is not a database" * 50,
    "another application's database, damaged": b"SQLite format 3\x00" + b"\x01" * 5000,
}


@pytest.mark.parametrize("content", USERS.values(), ids=USERS)
def test_a_users_file_stays_where_it_is(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ForeignDatabaseError, match=r"is no database of fuseplan .* left as it is.*file with db"):
        Database(path)
    with pytest.raises(ForeignDatabaseError, match="left as it is"):
        Database(path, mode="inspect")
    with pytest.warns(UserWarning, match="left as it is.*going on without it"):
        reader = Database(path, mode="read")
    assert reader.log_misses([Missed(tuning().key)]) is False
    assert [(file.name, file.read_bytes()) for file in path.parent.iterdir()] == [("tuning.db", content)]


def test_a_reader_that_logs_a_miss_sets_nothing_aside(db: Database, path: Path) -> None:
    """It was sound when it was opened."""
    db.put_record(tuning())
    db.close()
    reader = Database(path, mode="read")
    damage_pages(path)
    content = path.read_bytes()
    assert reader.log_misses([Missed(tuning("w2").key)]) is False
    assert path.read_bytes() == content
    assert set_aside(path) == []


def test_who_finds_a_fresh_database_in_a_corrupt_ones_place_leaves_it(path: Path) -> None:
    """Two processes find the same file corrupt; the second comes to set it aside when the first has done all."""
    ruined(path)
    found = location.identity(path)
    assert found is not None
    with pytest.warns(UserWarning, match="kept as"):
        first = Database(path)
    first.put_record(tuning("acknowledged"))
    assert location.move_aside(path, found, "") is None
    assert Database(path).get_record(tuning("acknowledged").key).hit
    assert len(set_aside(path)) == 1


@pytest.mark.parametrize("mode", ["write", "read", "inspect"])
def test_no_file_is_set_aside_while_another_process_opens_it(
    path: Path, mode: OpenMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite opens the log of a file by its name: it would find the log of the file that takes its place."""
    with Database(path) as made:
        made.put_record(tuning())
    check, free = tables.check_schema, []

    def checked(engine: Engine) -> bool:
        free.append(can_be_replaced(path))
        return check(engine)

    monkeypatch.setattr(tables, "check_schema", checked)
    with Database(path, mode=mode) as database:
        assert free == [False]
        assert can_be_replaced(path)  # a database that is open holds nobody up
        assert database.get_record(tuning().key).hit


def test_who_always_comes_too_late_gives_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file is in its place each time that it comes to set a corrupt one aside, and that is corrupt, too."""
    content = ruined(path)
    monkeypatch.setattr(location, "move_aside", lambda *_: None)
    with pytest.raises(CorruptDatabaseError, match="is corrupt"):
        Database(path)
    assert path.read_bytes() == content


def test_a_process_forked_while_a_file_is_opened_does_not_keep_the_lock(path: Path) -> None:
    path.parent.mkdir()
    waiting, go = os.pipe()
    with location.locked(path):
        if not (child := os.fork()):
            os.read(waiting, 1)
            os._exit(0)
    try:
        assert can_be_replaced(path)
    finally:
        os.write(go, b"1")
        os.waitpid(child, 0)


def test_a_file_system_without_locks_opens_files_and_sets_none_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = ruined(path)

    def flock(_folder: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DatabaseError, match=r"cannot be set aside .*No locks available"):
        Database(path)
    assert path.read_bytes() == content and set_aside(path) == []
    fresh = path.with_name("fresh.db")
    with Database(fresh) as database:
        database.put_record(tuning())
    assert Database(fresh, mode="read").get_record(tuning().key).hit


OPENERS = """
import os, sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
from fuseplan.search.store.database import Database
from search_records import tuning

waiting, go = os.pipe()

def work(name):
    os.read(waiting, 1)
    db = Database(sys.argv[2])
    for n in range(10):
        db.put_record(tuning(f"{name}-{n}"))
        os.write(1, f"{name}-{n}\\n".encode())

children = []
for name in range(16):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(name)
            status = 0
        except Exception as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    children.append(child)
os.write(go, bytes(16))
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 16
"""


def test_processes_that_find_one_file_corrupt_lose_no_record(path: Path) -> None:
    ruined(path)
    command = [sys.executable, "-c", OPENERS, str(SUPPORT), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    acknowledged = done.stdout.split()
    assert len(acknowledged) == 160
    with Database(path) as database:
        assert {record.label for record in database.records()} == {f"swiglu {name}" for name in acknowledged}
    assert len(set_aside(path)) == 1


def test_a_corrupt_file_is_empty_for_dispatch(path: Path) -> None:
    content = ruined(path)
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


def test_what_does_not_fit_into_memory_is_unread(db: Database, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged page may claim any length: SQLite then has no memory, which drivers raise as Python's MemoryError."""
    db.put_record(tuning())
    readers = Database(path, "read", HERE), Database(path, "inspect")

    def exhaust(*_: object) -> None:
        raise MemoryError

    event.listen(Engine, "before_cursor_execute", exhaust)
    try:
        with pytest.warns(UserWarning, match="out of memory; going on without it"):
            assert readers[0].get_record(tuning().key).status == "miss"
        assert "out of memory" in maintenance.verify_database(readers[1])[0].what
        with pytest.raises(DatabaseError, match="out of memory"):
            db.put_record(tuning())
        assert main.run(["db", "ls", "--db", str(path)]) == 2
    finally:
        event.remove(Engine, "before_cursor_execute", exhaust)
    assert "Traceback" not in capsys.readouterr().err
    assert db.get_record(tuning().key).hit


def test_an_altered_row_is_reported_and_ignored(db: Database, path: Path) -> None:
    db.put_record(tuning("w1"))
    db.put_record(tuning("w2"))
    with sqlite3.connect(path) as raw:
        raw.execute("update tuning_records set payload = replace(payload, '\"gain\":0.5', '\"gain\":0.9') "
                    "where label = 'swiglu w1'")
    with pytest.warns(UserWarning, match=r"damaged row 'swiglu w1' of tuning_records \(checksum"):
        assert db.get_record(tuning("w1").key).status == "miss"
    assert db.get_record(tuning("w2").key).status == "hit"
    problems = maintenance.verify_database(db)
    assert [(problem.table, problem.what) for problem in problems] == [("tuning_records", "checksum does not match")]
    assert maintenance.prune_database(db)["tuning_records"] == 1
    assert maintenance.verify_database(db) == []


def test_another_schema_version_is_left_alone(db: Database, path: Path) -> None:
    db.put_record(tuning())
    with sqlite3.connect(path) as raw:
        raw.execute("update fuseplan_meta set value = '99' where name = 'schema_version'")
    db.close()
    before = path.read_bytes()
    with pytest.raises(SchemaVersionError, match=r"has schema version '99', this fuseplan reads 2.*file with db"):
        Database(path)
    with pytest.warns(UserWarning, match="schema version '99'"):
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
