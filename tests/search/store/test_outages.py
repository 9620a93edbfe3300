"""Servers that go away: a tune waits for them, dispatch goes on without them and reads what was pulled."""

from __future__ import annotations

import _thread
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path

import pytest
from postgres_server import PASSWORD, Server
from search_records import HERE, SPEC, plan, tuning

from fuseplan.planner.cli import main
from fuseplan.search.errors import DatabaseError
from fuseplan.search.store import connections, database, snapshot
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.leases import Leases, listed
from fuseplan.search.store.location import resolve_url
from fuseplan.search.store.record import Trial


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(database, "_AWAY", {})
    monkeypatch.setattr(database, "_UNLOGGED", set())
    monkeypatch.setattr(database, "_REACHED", set())
    monkeypatch.setattr(connections, "_AWAITED", set())
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    """A database with a plan and a device."""
    made = server.url("outages")
    with Database(made) as db:
        db.put_plan(plan())
        db.put_device("cpu-a", SPEC)
    yield made
    server.start()


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        yield caught


@pytest.fixture
def once_waited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Does something as soon as somebody has waited for a server a few times."""

    def arrange(act: Callable[[], None]) -> None:
        paused, sleep = [], connections.time.sleep

        def pause(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) == 3:
                act()
            sleep(seconds)

        monkeypatch.setattr(connections.time, "sleep", pause)

    return arrange


# -- a tune -------------------------------------------------------------------------------------------------------


def test_a_tune_waits_and_goes_on(
    server: Server, url: str, warned: list[warnings.WarningMessage], once_waited: Callable[[Callable[[], None]], None]
) -> None:
    with Database(url, versions=HERE) as tuner:
        for number in range(3):
            server.kill()
            starting = threading.Thread(target=server.start)
            once_waited(starting.start)
            tuner.log_trial(Trial(tuning(f"w{number}").key, "cpp", {"threads": 2}, 5.0), HERE)
            tuner.put_record(tuning(f"w{number}"))
            assert tuner.get_record(tuning(f"w{number}").key).hit
            starting.join()
        assert len(list(tuner.records())) == 3
    (waited,) = warned
    assert "waiting for the database at postgresql://admin:***@" in str(waited.message)
    assert PASSWORD not in str(waited.message)


def test_ctrl_c_ends_the_wait(
    server: Server, url: str, once_waited: Callable[[Callable[[], None]], None]
) -> None:
    with Database(url) as tuner:
        server.kill()
        once_waited(_thread.interrupt_main)
        with pytest.warns(UserWarning, match="waiting"), pytest.raises(KeyboardInterrupt):
            tuner.put_record(tuning())


def test_a_server_that_is_not_there_at_the_start_is_an_error(server: Server, url: str) -> None:
    database._REACHED.clear()
    server.kill()
    with pytest.raises(DatabaseError, match="refused"):
        Database(url)


def test_who_has_reached_a_server_waits_to_open_it_again(
    server: Server, url: str, warned: list[warnings.WarningMessage], once_waited: Callable[[Callable[[], None]], None]
) -> None:
    server.kill()
    starting = threading.Thread(target=server.start)
    once_waited(starting.start)
    with Database(url, versions=HERE) as tuner:  # as a tune of several models does
        assert tuner.get_plans([plan().key])[plan().key].hit == plan()
    starting.join()
    assert len(warned) == 1


def test_dispatch_that_tunes_waits_for_nobody(server: Server, url: str, warned: list[warnings.WarningMessage]) -> None:
    with Database(url, patient=False) as tuner:
        server.kill()
        with pytest.raises(DatabaseError):
            tuner.put_record(tuning())
        with pytest.raises(DatabaseError):
            list(tuner.records())
    with pytest.raises(DatabaseError):
        Database(url, patient=False)
    assert warned == []


@pytest.mark.parametrize("trouble", [
    "alter role {role} password 'another'",
    "drop database outages with (force)",
    "revoke insert on tuning_records from {role}",
])
def test_what_waiting_cannot_mend_is_an_error_at_once(
    server: Server, url: str, trouble: str, warned: list[warnings.WarningMessage]
) -> None:
    own = server.writer_url("outages")
    with Database(own) as tuner:
        tuner.put_record(tuning("w0"))
        place = "outages" if "revoke" in trouble else "postgres"
        server.sql(trouble.format(role=resolve_url(own).username), database=place)
        server.disconnect("outages")
        with pytest.raises(DatabaseError, match=r"authentication failed|does not exist|permission denied"):
            tuner.put_record(tuning())
    assert warned == []


def test_leases_live_through_an_outage_and_nobody_waits_to_let_go(
    server: Server, url: str, warned: list[warnings.WarningMessage]
) -> None:
    key = tuning().key
    mine, other = Leases(Database(url)), Leases(Database(url))
    assert mine.take([key]) == {key}
    server.restart()
    assert other.take([key]) == set() and mine.take([key]) == {key}
    mine.release([key])
    server.kill()
    mine.release([key])
    mine.close()
    server.start()
    (left,) = listed(Database(url, "inspect"))  # it ends by itself
    assert [left[name] for name in ("workload", "device", "regime", "numerics", "owner")] == [*astuple(key), mine.owner]
    assert warned == []


# -- dispatch -----------------------------------------------------------------------------------------------------


def look_up(where: str) -> str:
    """What a graph that is compiled finds; what it misses is logged where that is possible."""
    with Database(where, "read", HERE) as reader:
        found = reader.get_plans([plan().key])[plan().key]
        assert found.hit in (None, plan())
        reader.log_misses([Missed(plan("r2").key)])
        return found.status


def test_dispatch_reads_what_was_pulled(server: Server, url: str, warned: list[warnings.WarningMessage]) -> None:
    file, count = snapshot.pull(url)
    assert count == 2 and PASSWORD not in str(file)
    before = file.read_bytes()
    server.kill()
    assert [look_up(url) for _ in range(3)] == ["hit"] * 3
    (said,) = warned
    assert "refused" in str(said.message)
    assert f"going on with its snapshot {file}, pulled 0 minutes ago" in str(said.message)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_a_server_that_goes_away_in_between_is_left_for_the_snapshot(
    server: Server, url: str, warned: list[warnings.WarningMessage]
) -> None:
    snapshot.pull(url)
    with Database(url, "read", HERE) as reader:
        assert reader.get_device("cpu-a") == SPEC
        server.kill()
        assert reader.get_plans([plan().key])[plan().key].hit == plan()
        assert reader.get_device("cpu-a") == SPEC
        assert not reader.logs_misses
    assert len(warned) == 1


def test_without_a_snapshot_dispatch_goes_on_without(
    server: Server, url: str, warned: list[warnings.WarningMessage]
) -> None:
    server.kill()
    assert [look_up(url) for _ in range(3)] == ["miss"] * 3
    assert [str(one.message).endswith("going on without it") for one in warned] == [True]


def test_a_snapshot_that_is_damaged_is_none(server: Server, url: str, warned: list[warnings.WarningMessage]) -> None:
    file, _ = snapshot.pull(url)
    file.write_bytes(b"SQLite format 3\0" + bytes(5000))
    server.kill()
    assert look_up(url) == "miss"
    assert [str(one.message).endswith("going on without it") for one in warned] == [True]


def test_ten_kills_during_dispatch_give_one_warning(
    server: Server, url: str, warned: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "AWAY_S", 0.0)  # every graph asks the server again
    snapshot.pull(url)
    for _ in range(10):
        server.kill()
        assert look_up(url) == "hit"
        server.start()
        assert look_up(url) == "hit"
    assert len(warned) == 1


# -- pulling ------------------------------------------------------------------------------------------------------


def test_a_pull_takes_the_place_of_the_one_before(server: Server, url: str) -> None:
    file, _ = snapshot.pull(url)
    with Database(url) as db:
        db.put_plan(plan("r2"))
        db.put_record(tuning())
        db.put_capture("step/a", {"device": "cpu-a"})
        db.log_trial(Trial(tuning().key, "cpp", {"threads": 2}, 5.0), HERE)
        db.log_misses([Missed(plan("r3").key)])
    assert snapshot.pull(url) == (file, 5)
    with Database(file, "inspect", HERE) as copy, Database(url, "inspect", HERE) as original:
        assert copy.everything() == original.everything()
        assert (copy.devices(), copy.captures("")) == (original.devices(), original.captures(""))
        assert (copy.misses(), copy.trials(tuning().key)) == ([], [])
    with sqlite3.connect(file) as connection:
        assert connection.execute("pragma journal_mode").fetchone() == ("delete",)


def test_a_pull_that_fails_leaves_the_one_before(
    server: Server, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["db", "pull", url]) == 0
    file = snapshot.snapshot_path(resolve_url(url))
    said = capsys.readouterr().out
    assert f"2 rows of postgresql://admin:***@127.0.0.1:{server.port}/outages written to {file}" in said
    before = file.read_bytes()
    server.kill()
    assert main.run(["db", "pull", "--db", url]) == 2
    assert capsys.readouterr().err.startswith("plan: error: postgresql://admin:***@")
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_there_is_nothing_to_pull_from_a_file_nor_from_nothing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, why in (
        ([str(tmp_path / "tuning.db")], "is a file"), ([server.url()], "there is no tuning database"),
        ([], "give the URL of a server"), (["postgresql://a/b", "--db", "postgresql://a/c"], "two servers"),
    ):
        assert main.run(["db", "pull", *arguments]) == 2
        assert why in capsys.readouterr().err


def test_a_snapshot_is_of_one_server_whatever_the_password() -> None:
    names = [snapshot.snapshot_path(resolve_url(f"postgresql{one}")).name for one in (
        "://me:a@host/name", "://me:b@host/name", "+psycopg2://me@host/name?password=c",
        "://me@host/other", "://me@host:1/name", "://me@elsewhere/name")]
    assert names[0] == names[1] == names[2] and len(set(names)) == 4
