"""Databases of older and newer revisions: brought up to date whole, read as they are, or left alone."""

from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from postgres_server import Server
from search_records import HERE, SPEC, plan, tuning

from fuseplan.search.errors import DatabaseError, SchemaVersionError
from fuseplan.search.store import maintenance, tables
from fuseplan.search.store.connections import connected, engine_of, transaction
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import listed
from fuseplan.search.store.location import resolve_url
from fuseplan.search.store.record import RecordKey

OLD = Path(__file__).with_name("revision_1.sql").read_text()
MISSED = RecordKey("m1", "cpu-a")


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The location of a database where nothing is."""
    if request.param == "sqlite":
        return str(tmp_path / "tuning.db")
    server: Server = request.getfixturevalue("server")
    return server.url()


@pytest.fixture
def old(empty: str) -> str:
    """One from before there were revisions, with a row of each kind."""
    execute(empty, *OLD.split(";\n"))
    return empty


def execute(where: str, *statements: str) -> None:
    with transaction(engine_of(resolve_url(where))) as connection:
        for statement in filter(str.strip, statements):
            connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def contents(where: str) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table."""
    with connected(engine_of(resolve_url(where))) as connection:
        return {
            name: sorted(map(tuple, connection.exec_driver_sql(f'select * from "{name}"')))
            for name in sorted(sa.inspect(connection).get_table_names())
        }



def _migrated(where: str) -> None:
    execute(where, *OLD.split(";\n"))
    Database(where).close()


@pytest.mark.parametrize("make", [_migrated, lambda where: Database(where).close()], ids=["migrated", "new"])
def test_tables_are_what_the_code_describes(empty: str, make: Callable[[str], None]) -> None:
    make(empty)
    with connected(engine_of(resolve_url(empty))) as connection:
        lite = connection.dialect.name == "sqlite"  # where the index that servers need is not made
        options = {
            "version_table": tables.REVISION.name, "compare_type": True,
            "include_object": lambda item, name, kind, reflected, other: not (lite and kind == "index"),
        }
        context = MigrationContext.configure(connection, opts=options)
        found = compare_metadata(context, tables.METADATA)
        assert context.get_current_revision() == tables.REVISIONS[-1]
    assert found == []


def test_tables_brought_up_to_date_and_made_at_once_are_the_same(tmp_path: Path) -> None:
    def schema(make: Callable[[str], None]) -> list[tuple[object, ...]]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.db"
        make(str(path))
        with sqlite3.connect(path) as connection:
            names = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
            return sorted((name, *row) for name in names for row in connection.execute(f"pragma table_info({name})"))

    columns = [{row[2:5] for row in schema(make)} for make in (_migrated, lambda where: Database(where).close())]
    assert columns[0] == columns[1]


def test_an_old_database_keeps_everything(old: str) -> None:
    before = contents(old)
    with Database(old, versions=HERE) as db:
        after = contents(old)
        assert {name: after[name] for name in before} == before
        assert db.get_record(tuning().key).hit == tuning()
        assert db.get_plans([plan().key])[plan().key].hit == plan()
        assert db.devices() == {"cpu-a": SPEC} and set(db.captures("step/")) == {"step/a"}
        assert [trial.median_us for trial in db.trials(tuning().key)] == [5.0]
        assert [miss["count"] for miss in db.misses()] == [1]
        assert maintenance.verify_database(db) == []


def test_an_old_database_is_read_as_it_is(old: str) -> None:
    before = contents(old)
    for mode in ("read", "inspect"):
        with Database(old, mode, HERE) as db:  # type: ignore[arg-type]
            assert db.get_plans([plan().key])[plan().key].hit == plan()
            assert db.get_device("cpu-a") == SPEC
            assert listed(db) == [] and maintenance.verify_database(db) == []
    assert contents(old) == before


def test_a_newer_database_is_read_and_not_written(empty: str) -> None:
    with Database(empty) as db:
        db.put_plan(plan())
    execute(empty, f"update {tables.REVISION.name} set version_num = '93'", "create table later (name varchar(255))")
    before = contents(empty)
    with Database(empty, "read", HERE) as db:
        assert db.get_plans([plan().key])[plan().key].hit == plan()
    with pytest.raises(SchemaVersionError, match=r"newer fuseplan \(its tables are of revision '93'.*left as it is"):
        Database(empty)
    assert contents(empty) == before


def test_what_fails_halfway_changes_nothing(old: str) -> None:
    execute(old, "alter table misses drop column label")
    before = contents(old)
    with pytest.raises(DatabaseError, match="misses has no label"):
        Database(old)
    assert contents(old) == before


def test_processes_that_open_an_old_database_together_all_succeed(old: str) -> None:
    forked = multiprocessing.get_context("fork")
    go, failed = forked.Event(), forked.SimpleQueue()

    def opened(number: int) -> None:
        go.wait()
        try:
            with Database(old, versions=HERE) as db:
                db.put_record(tuning(f"new{number}"))
        except BaseException as error:
            failed.put(repr(error))

    children = [forked.Process(target=opened, args=(number,)) for number in range(8)]
    for child in children:
        child.start()
    go.set()
    for child in children:
        child.join()
    assert failed.empty(), failed.get()
    with Database(old, "inspect") as db:
        assert {record.key.workload for record in db.records()} == {"w1", *(f"new{number}" for number in range(8))}
        assert maintenance.verify_database(db) == []


@pytest.fixture
def up_to_date(empty: str) -> Iterator[str]:
    with Database(empty) as db:
        db.put_plan(plan())
    yield empty


def test_an_old_server_gets_the_index_that_it_lacks(old: str) -> None:
    Database(old).close()
    with connected(engine_of(resolve_url(old))) as connection:
        made = [one["name"] for one in sa.inspect(connection).get_indexes("captures")]
        assert made == (["captures_by_prefix"] if connection.dialect.name == "postgresql" else [])


def test_a_database_is_opened_without_torch(up_to_date: str) -> None:
    lines = (
        "import sys",
        "from fuseplan.search.store.database import Database",
        f"assert list(Database({up_to_date!r}, 'inspect').plans()) and list(Database({up_to_date!r}).plans())",
        "assert not any(name.split('.')[0] == 'torch' for name in sys.modules)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=300)
