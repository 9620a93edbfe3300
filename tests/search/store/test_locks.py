"""What others hold: dispatch goes on without it while it is held, tuners wait for it, and a deadlock costs no work."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from search_records import HERE, plan, tuning

from fuseplan.search.errors import BusyDatabaseError
from fuseplan.search.store import connections, database, location, tables
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import RecordKey

#: Ways to lock a database: a file with each of SQLite's journals, and tables of a server.
LOCKS = ("sqlite delete", "sqlite wal", *(f"postgresql {table}" for table in ("fuseplan_meta", "plan_records")))
#: Longer than any test lasts.
FOR_EVER = 10**6


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(database, "_AWAY", {})
    monkeypatch.setattr(connections, "_SERVERS", {})
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@contextlib.contextmanager
def held(where: str, how: str) -> Iterator[None]:
    """A lock that nobody can read past, while the context lasts."""
    if how == "sqlite delete":
        with contextlib.closing(sqlite3.connect(where, isolation_level=None)) as other:
            other.execute("pragma journal_mode=delete")
            other.execute("begin exclusive")
            yield
    elif how == "sqlite wal":
        with contextlib.closing(sqlite3.connect(where, isolation_level=None)) as other:
            other.execute("pragma locking_mode=exclusive")
            other.execute("pragma user_version=1")
            yield
    else:
        with psycopg.connect(where) as server:
            server.execute(f"lock table {how.split()[1]} in access exclusive mode")
            yield


@pytest.fixture
def where(how: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A database with a plan."""
    made = str(tmp_path / "t.db") if how.startswith("sqlite") else request.getfixturevalue("server").url()
    with Database(made, versions=HERE) as db:
        db.put_plan(plan())
    return made


def within_reason(work: Callable[[], None]) -> None:
    """Fails where ``work`` never ends; with the lock still held, so whatever waits for that does not end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()


@pytest.mark.parametrize("how", LOCKS)
def test_a_look_up_is_a_miss_while_the_lock_is_held(where: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuners would wait for ever."""
    monkeypatch.setattr(database, "BUSY_S", FOR_EVER)
    monkeypatch.setattr(location, "STATEMENT_S", FOR_EVER)
    found: list[str] = []

    def compile_graphs() -> None:
        for _ in range(3):
            with Database(where, "read", HERE) as reader:
                found.append(reader.get_plans([plan().key])[plan().key].status)
                reader.log_misses([Missed(plan("r2").key)])
                found.append(reader.get_record(tuning().key).status)

    with warnings.catch_warnings(record=True) as caught, held(where, how):
        warnings.simplefilter("always")
        within_reason(compile_graphs)
    assert found == ["miss"] * 6
    (said,) = caught
    assert "another process holds" in str(said.message) and "going on without it" in str(said.message)
    database._AWAY.clear()
    with Database(where, "read", HERE) as reader:
        assert reader.get_plans([plan().key])[plan().key].hit == plan()


@pytest.mark.parametrize("how", ["sqlite delete", "postgresql plan_records"])
def test_a_lock_that_comes_between_two_look_ups(where: str, how: str) -> None:
    with Database(where, "read", HERE) as reader:
        assert reader.get_plans([plan().key])[plan().key].hit == plan()
        reader.close()
        with held(where, how), pytest.warns(UserWarning, match="going on without it"):
            assert reader.get_plans([plan().key])[plan().key].status == "miss"


@pytest.mark.parametrize("how", ["sqlite delete", "sqlite wal", "postgresql plan_records"])
def test_a_tuner_tries_again_until_the_lock_is_gone(where: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its tries is short here; the lock goes at the third."""
    monkeypatch.setattr(tables.open_for_writing, "__defaults__", (1, 0.01, None))
    monkeypatch.setattr(connections, "_SERVERS", {})
    tries, sleep = [], connections.time.sleep
    with contextlib.ExitStack() as lock, Database(where, versions=HERE) as tuner:
        tuner.close()
        lock.enter_context(held(where, how))

        def pause(seconds: float) -> None:
            tries.append(seconds)
            if len(tries) == 3:
                lock.close()
            sleep(seconds)

        monkeypatch.setattr(connections.time, "sleep", pause)
        tuner.put_plan(plan("r2"))
        assert tuner.get_plans([plan("r2").key])[plan("r2").key].hit == plan("r2")
    assert len(tries) == 3


@pytest.mark.parametrize("how", ["sqlite delete", "postgresql plan_records"])
@pytest.mark.parametrize("patient", [True, False])
def test_a_lock_that_stays_is_an_error_in_the_end(
    where: str, how: str, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.open_for_writing, "__defaults__", (1, 0.01, None))
    tries: list[float] = []
    monkeypatch.setattr(connections.time, "sleep", tries.append)
    with Database(where, patient=patient) as tuner:
        tuner.close()
        with held(where, how), pytest.raises(BusyDatabaseError, match="another process holds"):
            tuner.put_plan(plan("r2"))
    assert bool(tries) == patient
    assert len(set(tries)) == len(tries)  # two that wait for each other do not go on in step


def test_one_of_two_that_wait_for_each_other_runs_again(request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("server").url()
    both = threading.Barrier(2)
    keys = [RecordKey(name, "dev") for name in ("a", "b")]
    began: list[int] = []

    def count(db: Database, order: list[RecordKey]) -> None:
        runs: list[int] = []

        def work(connection: sa.Connection) -> None:
            began.append(1)
            runs.append(1)
            for key in order:
                row = {"workload": key.workload, "device": key.device, "regime": "eager", "numerics": "fp32",
                       "label": "", "payload": "{}", "first_seen": "", "count": 1}
                tables.upsert(connection, tables.MISSES, row, {"count": tables.MISSES.c.count + 1})
                if len(runs) == 1 and key is order[0]:
                    both.wait(60)

        db.change(work, patient=False)

    with Database(url) as one, Database(url) as other:
        threads = [threading.Thread(target=count, args=pair) for pair in ((one, keys), (other, keys[::-1]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [miss["count"] for miss in one.misses()] == [2, 2]
    assert len(began) == 3


@pytest.mark.parametrize("seed", range(3))
def test_tuners_that_take_many_keys_never_wait_for_each_other(seed: int, request: pytest.FixtureRequest) -> None:
    """Whatever the order in which they name them."""
    server = request.getfixturevalue("server")
    url, chance = server.url(), random.Random(seed)
    keys = [RecordKey(name, "dev") for name in ("a", "B", "_c", "D.1", "d-1", "d1", "E", "e", "+f", "F")]
    failed: list[Exception] = []

    def work(order: list[RecordKey], rounds: list[int]) -> None:
        try:
            leases = Leases(Database(url))
            for most in rounds:
                with leases.taking(order[:most]):
                    leases._renew()
            leases.close()
        except Exception as error:
            failed.append(error)

    before = (server.folder / "log").read_text().count("deadlock detected")
    orders = [chance.sample(keys, len(keys)) for _ in range(6)]
    threads = [threading.Thread(target=work, args=(one, chance.choices(range(2, 11), k=30))) for one in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failed == []
    assert (server.folder / "log").read_text().count("deadlock detected") == before
