"""The log of misses: it keeps the most frequent, no more than it should, and counts what it dropped."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from postgres_server import Server

from fuseplan.planner.cli import main
from fuseplan.planner.tuning.miss_list import dropped
from fuseplan.search.store import database, maintenance, rows, tables
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.record import RecordKey

MOST, GRAPHS = 40, 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_MISSES", MOST)
    monkeypatch.setattr(rows, "MOST_GRAPHS", GRAPHS)
    minutes = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=number) for number in itertools.count())
    monkeypatch.setattr(database, "now", lambda: next(minutes).isoformat(timespec="seconds"))
    monkeypatch.setattr(database, "_UNTRIMMED", set())
    monkeypatch.setattr(database, "_UNLOGGED", set())


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: object) -> str:
    return f"{tmp_path}/t.db" if request.param == "sqlite" else request.getfixturevalue("server").url("missed")


def missed(name: str, region: str = "") -> Missed:
    return Missed(RecordKey(name, "cpu-a"), name, {"region": region or name})


def log(db: Database, name: str, region: str = "") -> None:
    region = region or name
    assert db.log_misses([missed(name, region)], {f"{rows.MISSED}{region}": {"graph": region}})


def test_frequent_misses_outlive_any_number_of_rare_ones(where: str) -> None:
    with Database(where) as db:
        for _ in range(3):
            for number in range(10):
                log(db, f"often{number}")
        most = 0
        for number in range(5 * MOST):
            log(db, f"once{number}")
            kept = db.misses()
            assert len(kept) <= MOST and len(db.capture_names(rows.MISSED)) <= GRAPHS
            assert any(miss["workload"] == f"once{number}" for miss in kept)  # it may become frequent yet
            most = max(most, len(kept))
        assert most == MOST
        assert [miss["count"] for miss in kept[:11]] == [3] * 10 + [1]
        assert dropped(db) == 10 + 5 * MOST - len(kept)
        often = {f"{rows.MISSED}often{number}" for number in range(10)}
        assert often <= db.capture_names(rows.MISSED)
        assert maintenance.verify_database(db) == []


@pytest.mark.parametrize("seed", range(2))
def test_what_is_dropped_came_least(where: str, seed: int) -> None:
    """Of random traffic: against a count of everything that was said."""
    chance = random.Random(seed)
    with Database(where) as db:
        said: Counter[str] = Counter()
        for _ in range(150):
            name = f"w{int(chance.paretovariate(0.3))}"
            before = {miss["workload"]: miss["count"] for miss in db.misses()}
            log(db, name, region=f"r{name[-1]}")
            said[name] += 1
            after = {miss["workload"]: miss["count"] for miss in db.misses()}
            if gone := before.keys() - after.keys():
                assert max(before[one] for one in gone) <= min(after.values())
            regions = {f"{rows.MISSED}{miss['payload']['region']}" for miss in db.misses()}
            assert db.capture_names(rows.MISSED) <= regions
        assert all(after[name] <= said[name] for name in after)
        assert dropped(db) >= len(said) - len(after) > 0


def test_what_cannot_be_read_is_dropped_first(where: str) -> None:
    with Database(where) as db:
        log(db, "damaged")
        damage = tables.MISSES.update().values(payload="{", count=10**6)
        db.change(lambda connection: connection.execute(damage))
        for number in range(MOST):
            log(db, f"w{number}")
        assert "damaged" not in {row.workload for row in db.change(
            lambda connection: connection.execute(sa.select(tables.MISSES)).all())}


def test_many_that_log_at_once_lose_no_count(where: str) -> None:
    Database(where).close()
    failed: list[int] = []

    def traffic(who: int) -> None:
        with Database(where) as db:
            for number in range(60):
                pair = [missed(f"w{who}-{number}"), missed("common")]
                captures = {f"{rows.MISSED}{one.label}": {} for one in random.Random(number).sample(pair, 2)}
                if not db.log_misses(pair, captures):
                    failed.append(who)

    threads = [threading.Thread(target=traffic, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    with Database(where, "inspect") as db:
        kept = {miss["workload"]: miss["count"] for miss in db.misses()}
        assert failed == [] and kept["common"] == 240
        assert dropped(db) + len(kept) == 241


def test_a_role_that_may_not_delete_goes_on_counting(server: Server) -> None:
    url = server.url("missed")
    with Database(url) as owner:
        own = server.readonly_url("missed")
        server.sql("grant insert, update on misses, captures to looker", database="missed")
        with Database(own, "read") as reader:
            for number in range(MOST + 20):
                assert reader.log_misses([missed(f"w{number}")])
        with server.watched("missed") as asked, Database(own, "read") as reader:
            assert reader.log_misses([missed("another")])
        assert not any("DELETE" in one or "misses.payload" in one for one in asked)  # it does not try for ever
        assert len(owner.misses()) == MOST + 21
        log(owner, "last")
        assert len(owner.misses()) <= MOST


def test_the_list_says_what_was_dropped(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Database(where) as db:
        for number in range(MOST + 1):
            log(db, f"w{number}")
        count = dropped(db)
    assert count
    assert main.run(["db", "misses", "--db", where]) == 0
    assert f"{count} misses that came least were dropped" in "".join(capsys.readouterr())
    assert main.run(["db", "prune", "--misses", "--db", where]) == 0
    capsys.readouterr()
    assert main.run(["db", "misses", "--db", where]) == 0
    assert "dropped" not in "".join(capsys.readouterr())
