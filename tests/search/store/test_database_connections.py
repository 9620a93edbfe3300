"""The connection that a database keeps, and several processes at one file."""

from __future__ import annotations

import gc
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import SUPPORT
from search_records import HERE, tuning

from fuseplan.search.store import connections, maintenance
from fuseplan.search.store.database import Database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "tuning.db"


@pytest.fixture
def db(path: Path) -> Database:
    return Database(path, versions=HERE)


def test_one_connection_serves_all_look_ups(db: Database, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db.put_record(tuning())
    opened: list[Any] = []
    connect = sqlite3.connect

    def counted(*args: Any, **how: Any) -> sqlite3.Connection:
        opened.append(args)
        return connect(*args, **how)

    monkeypatch.setattr(connections.sqlite3, "connect", counted)
    for _ in range(3):
        assert db.get_record(tuning().key).hit
    assert opened == []
    with Database(path, mode="read") as reader:
        for n in range(3):
            assert reader.get_record(tuning(f"new{n}").key).status == "miss"
            db.put_record(tuning(f"new{n}"))  # is seen by the connection that was open before
            assert reader.get_record(tuning(f"new{n}").key).hit
    assert len(opened) == 1


def test_a_file_that_was_replaced_is_opened_again(db: Database, path: Path, tmp_path: Path) -> None:
    db.put_record(tuning("w0", us=1.0))
    other = tmp_path / "other.db"
    with Database(other) as made:
        made.put_record(tuning("w0", us=2.0))
    db.close()
    assert db.get_record(tuning("w0").key).record == tuning("w0", us=1.0)
    other.replace(path)
    for companion in ("-wal", "-shm"):
        path.with_name(path.name + companion).unlink(missing_ok=True)
    assert db.get_record(tuning("w0").key).record == tuning("w0", us=2.0)


def test_a_database_that_is_let_go_leaves_one_whole_file(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    made = Database(folder / "t.db")
    made.put_record(tuning())
    del made
    gc.collect()
    assert [file.name for file in folder.iterdir()] == ["t.db"]


# -- several processes ------------------------------------------------------------------------------------

FORK = """
import os, sys
sys.path.insert(0, sys.argv[1])
from fuseplan.search.store.database import Database
from search_records import tuning

database = Database(sys.argv[2])
database.put_record(tuning("parent"))
child = os.fork()
if child == 0:
    found = database.get_record(tuning("parent").key).hit
    database.put_record(tuning("child"))
    os._exit(0 if found else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert database.get_record(tuning("child").key).hit
database.put_record(tuning("after"))
"""


def test_a_forked_process_opens_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    command = [sys.executable, "-c", FORK, str(SUPPORT), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["t.db"]  # closed at exit
    with Database(path) as again:
        assert maintenance.verify_database(again) == []
        assert {record.key.workload for record in again.records()} == {"parent", "child", "after"}


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.record import RecordKey, Trial
from search_records import HERE, tuning
db = Database(sys.argv[2])
for n in range(40):
    db.log_trial(Trial(tuning("shared").key, sys.argv[3], {"tile": n}, 1.0), HERE)
    db.put_record(tuning(f"{sys.argv[3]}-{n}"))
    db.put_record(tuning("contended", us=float(n)))
    db.log_misses([Missed(RecordKey("m", "d"))])
"""


def test_two_processes_write_one_new_database(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(SUPPORT), str(path), name])
        for name in ("a", "b")
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    database = Database(path)
    workloads = [record.key.workload for record in database.records()]
    assert len(workloads) == 81
    assert len(database.trials(tuning("shared").key)) == 80
    assert database.misses()[0]["count"] == 80
    assert maintenance.verify_database(database) == []


def test_a_commit_that_fails_without_a_reason_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's sqlite3 raises SystemError where another thread has used the connection at that moment."""
    failures: list[str] = []

    class Odd(sqlite3.Connection):
        def commit(self) -> None:
            if self.in_transaction and failures:
                raise SystemError(failures.pop())
            super().commit()

    connect = sqlite3.connect
    monkeypatch.setattr(connections.sqlite3, "connect", lambda *args, **how: connect(*args, **how, factory=Odd))
    db = Database(path, versions=HERE)
    failures += ["commit returned NULL without setting an exception"]
    db.put_record(tuning())
    assert not failures and db.get_record(tuning().key).hit == tuning()
    assert len(list(db.records())) == 1
