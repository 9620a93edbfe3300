"""PostgreSQL: how often it is asked, with which indexes, by whom, and by which driver."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from paths import ROOT
from postgres_server import Server
from search_records import HERE, SPEC, plan, tuning

from fuseplan.search.errors import DatabaseError, ReadOnlyDatabaseError
from fuseplan.search.store import connections, database, maintenance, rows, tables
from fuseplan.search.store.connections import connected, transaction
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.location import location_name, resolve_url


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_AWAY", {})
    monkeypatch.setattr(database, "_UNLOGGED", set())
    monkeypatch.setattr(connections, "_SERVERS", {})


@pytest.fixture
def url(server: Server) -> str:
    """A database with a plan and a device."""
    made = server.url("asked")
    with Database(made) as db:
        db.put_plan(plan())
        db.put_device("cpu-a", SPEC)
    return made


# -- round trips --------------------------------------------------------------------------------------------------


def test_a_look_up_is_one_statement(server: Server, url: str) -> None:
    keys = [plan(f"r{number}").key for number in range(400)]
    with Database(url, "read", HERE):  # a driver asks a server for its version, once in a process
        pass
    with server.watched("asked") as statements, Database(url, "read", HERE) as reader:
        found = reader.get_plans(keys)
    assert [found[key].status for key in keys] == ["miss", "hit", *["miss"] * 398]
    opened, looked_up = statements
    assert "fuseplan_meta" in opened and "plan_records" in looked_up


def test_a_write_is_one_transaction(server: Server, url: str) -> None:
    with Database(url) as db:
        db.devices()
        db.close()
        with server.watched("asked") as statements:
            db.put_record(tuning())
            db.close()
    assert [one.split(" ")[0] for one in statements] == ["BEGIN", "INSERT", "UPDATE", "COMMIT"]


# -- indexes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowded(server: Server) -> Iterator[sa.Engine]:
    """So many rows that a scan is never the cheaper way."""
    url = server.url("crowded")
    with Database(url) as db:
        engine = db.engine
    assert engine is not None
    keys = "md5(n::text), 'cpu-a', 'graph', 'eager'"
    with transaction(engine) as connection:
        for statement in (
            f"insert into plan_records select {keys}, '', '', '', '', '' from generate_series(1, 20000) n",
            f"insert into tuning_records select {keys}, '', '', '', '', '' from generate_series(1, 20000) n",
            f"insert into misses select {keys}, '', '', '', 1 from generate_series(1, 20000) n",
            f"insert into leases select {keys}, '', 0, '' from generate_series(1, 20000) n",
            "insert into captures select 'step/' || md5(n::text), '', '', '' from generate_series(1, 20000) n",
            f"insert into trials select {keys}, 'cpp', '', '', '', '', 1 from generate_series(1, 20000) n",
            "analyze",
        ):
            connection.exec_driver_sql(statement)
    yield engine
    engine.dispose()


def test_look_ups_use_indexes(crowded: sa.Engine) -> None:
    key, name = plan().key, tables.CAPTURES.c.name
    asked = {"workloads": ["a", "b"], "device": "cpu-a", "regime": "graph", "numerics": "eager"}
    kept = (tables.TRIALS, tables.MISSES, tables.LEASES)
    statements: list[sa.ClauseElement] = [
        rows.records_of(tables.PLANS).params(**asked), rows.records_of(tables.TUNINGS).params(**asked),
        sa.select(name).where(name.startswith("missed/", autoescape=True)),
        *(sa.select(table).where(rows.same_key(table, key)) for table in kept),
        *(table.delete().where(rows.same_key(table, key)) for table in kept),
    ]
    with connected(crowded) as connection:
        for statement in statements:
            text = statement.compile(crowded, compile_kwargs={"literal_binds": True})
            steps = "\n".join(row[0] for row in connection.exec_driver_sql(f"explain {text}"))
            assert "Index" in steps and "Seq Scan" not in steps, f"{text}\n{steps}"


# -- connections --------------------------------------------------------------------------------------------------


def test_a_closed_connection_is_replaced(server: Server, url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for break_off in (lambda: server.disconnect("asked"), server.restart):
            with Database(url, versions=HERE) as writer, Database(url, "read", HERE) as reader:
                assert reader.get_plans([plan().key])[plan().key].hit and writer.devices()
                break_off()
                assert reader.get_plans([plan().key])[plan().key].hit == plan()
                break_off()
                writer.put_record(tuning())
                break_off()
                assert writer.get_record(tuning().key).hit == tuning()
                break_off()
                with Database(url, "inspect") as looking:
                    assert looking.devices() == {"cpu-a": SPEC}


def test_the_driver_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseError, match=r"host/name: .*psycopg.*; pip install 'fuseplan\[postgres\]'"):
        Database("postgresql://fleet@host/name")


def test_a_url_without_a_driver_means_psycopg_3() -> None:
    url = resolve_url("postgresql://fleet@host/name")
    assert url.get_driver_name() == "psycopg" and location_name(url) == "postgresql://fleet@host/name"
    assert resolve_url("postgresql+psycopg2://fleet@host/name").get_driver_name() == "psycopg2"


# -- the roles of the page ----------------------------------------------------------------------------------------


def test_the_page_says_how_to_make_the_roles(server: Server) -> None:
    make, read, collect = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "postgresql.md").read_text(), re.DOTALL)
    server.start()
    server.sql("drop database if exists tuning with (force)")  # what tests of the page itself have left
    server.sql(*make.splitlines())
    server.sql(*read.splitlines(), database="tuning")
    owner, reading = (
        f"postgresql://{role}:password@127.0.0.1:{server.port}/tuning" for role in ("tuner", "reader"))
    with Database(owner) as db:
        db.put_plan(plan())
    with Database(reading, "read", HERE) as reader:
        assert reader.get_plans([plan().key])[plan().key].hit == plan()
        assert not reader.log_misses([Missed(plan("r2").key)])
    database._UNLOGGED.clear()
    server.sql(*collect.splitlines(), database="tuning")
    with Database(reading, "read", HERE) as reader:
        assert reader.log_misses([Missed(plan("r2").key)], {"missed/r2": {}})
    with Database(owner, "inspect") as db:
        assert [miss["workload"] for miss in db.misses()] == ["r2"]


# -- a role that may only read ------------------------------------------------------------------------------------


def test_a_reader_dispatches_and_logs_nothing(server: Server, url: str) -> None:
    reading = server.readonly_url("asked")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Database(reading, "read", HERE) as reader:
            assert reader.get_plans([plan().key])[plan().key].hit == plan()
            assert reader.logs_misses
            assert reader.log_misses([Missed(plan("r2").key)]) is False
        with server.watched("asked") as statements:
            for _ in range(3):
                with Database(reading, "read", HERE) as reader:
                    assert reader.get_plans([plan().key])[plan().key].hit == plan()
                    assert not reader.logs_misses
                    assert reader.log_misses([Missed(plan("r2").key)]) is False
    assert len(statements) == 6 and all(one.startswith("SELECT") for one in statements)
    with Database(url, "inspect") as owner:
        assert owner.misses() == []
        assert maintenance.verify_database(owner) == []


def test_a_reader_cannot_tune(server: Server, url: str) -> None:
    with pytest.raises(ReadOnlyDatabaseError, match="may only read"):
        Database(server.readonly_url("asked"))


def test_misses_of_many_are_counted_together(url: str) -> None:
    with Database(url, "read") as one, Database(url, "read") as other:
        for reader in (one, other, one):
            assert reader.log_misses([Missed(plan("b").key), Missed(plan("a").key, payload={"ops": []})])
    with Database(url, "inspect") as owner:
        assert {miss["workload"]: miss["count"] for miss in owner.misses()} == {"a": 3, "b": 3}
