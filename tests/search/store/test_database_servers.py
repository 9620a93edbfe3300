"""Databases on servers: passwords that are shown nowhere, servers that do not answer, many that make one schema."""

from __future__ import annotations

import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import SUPPORT
from postgres_server import Server
from search_records import HERE, plan, tuning
from sqlalchemy import create_engine, text

from fuseplan.planner.cli import main
from fuseplan.planner.cli.output.options import STARTING
from fuseplan.search.errors import DatabaseError
from fuseplan.search.store import database, location, maintenance, tables, transfer
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.location import location_name, resolve_url, without_secrets

SECRET = "hunter2hunter2"


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_AWAY", {})


# -- passwords ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        f"postgresql://fleet:{SECRET}@127.0.0.1:1/tuning",
        f"postgresql://127.0.0.1:1/tuning?user=fleet&password={SECRET}",
        f"postgresql+nosuch://127.0.0.1:1/tuning?passwd={SECRET}",
        f"nosuch://fleet:{SECRET}@127.0.0.1/tuning",
        f"postgresql//fleet:{SECRET}@127.0.0.1/tuning",
        f"postgresql:/fleet:{SECRET}@127.0.0.1/tuning",
        f"postgresql:fleet:{SECRET}@127.0.0.1/tuning",
        f"fleet:{SECRET}@127.0.0.1/tuning",
        f"postgresql//127.0.0.1/tuning?password={SECRET}",
        f"postgresql://fleet:pa/{SECRET}@127.0.0.1/tuning",
        f"postgresql://fleet:{SECRET}@127.0.0.1:{SECRET}/tuning",
        f"://fleet:{SECRET}@127.0.0.1/tuning",
        f"postgresql://127.0.0.1:1/tuning?sslpassword={SECRET}&sslmode={SECRET}",
    ],
)
@pytest.mark.parametrize("command", ["ls", "verify", "prune", "export out.jsonl"])
def test_no_password_is_printed(
    place: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["db", *command.split(), "--db", place]) == 2
    out, err = capfd.readouterr()
    shown = place.startswith("postgresql://127") and "sslmode" in place  # that option is no secret
    assert SECRET not in (out + err).replace(f"sslmode={SECRET}", "" if shown else f"sslmode={SECRET}")
    complaints = [line for line in err.splitlines() if STARTING not in line]
    assert len(complaints) == 1 and "Error:" not in err
    assert list(tmp_path.iterdir()) == []
    with pytest.warns(UserWarning, match="going on without it") as caught:
        Database(place, mode="read")
    assert not any(SECRET in str(one.message).replace(f"sslmode={SECRET}", "") for one in caught)


def test_a_drivers_message_is_shown_without_the_secret() -> None:
    url = resolve_url(f"postgresql://fleet:{SECRET}@host/name?password=p%40ss")
    assert without_secrets(f"not {SECRET}, nor p@ss\x1b[2J", url) == "not ***, nor ***\\x1b[2J"
    assert location_name(url) == "postgresql://fleet:***@host/name?password=***"


@pytest.mark.parametrize("name", ["a:b@c.db", "/tmp/x/a:b@c.db", "key=1.db", "weights.db"])
def test_paths_stay_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.rsplit("/", 1)[-1]).touch()
    assert resolve_url(name).database == name


# -- servers that do not answer -----------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts and never says a word."""
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"postgresql+psycopg://fleet:{SECRET}@127.0.0.1:{listening.getsockname()[1]}/tuning"


def test_a_silent_server_is_asked_once(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph that is compiled opens the database anew."""
    monkeypatch.setattr(location, "CONNECT_S", 2)
    asked = []
    check = tables.check_schema
    monkeypatch.setattr(tables, "check_schema", lambda engine: asked.append(engine) or check(engine))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            reader = Database(silent, mode="read")
            assert reader.get_plans([plan().key])[plan().key].status == "miss"
            assert reader.log_misses([Missed(plan().key)]) is False
    assert [str(one.message).endswith("going on without it") for one in caught] == [True]
    assert len(asked) == 1
    with pytest.raises(DatabaseError):  # a command asks again
        Database(silent, mode="inspect")
    assert len(asked) == 2


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000", "pymysql", "mysqldb"])
def test_every_driver_is_told_how_long_to_wait(driver: str) -> None:
    url = resolve_url(f"{'mysql' if 'mysql' in driver else 'postgresql'}+{driver}://host/name")
    told = location.server_limits(url, 30.0)
    assert {"connect_timeout", "timeout"} & told.keys()
    assert "connect_timeout" not in location.server_limits(url.update_query_dict({"connect_timeout": "60"}), 30.0)


# -- a real one ---------------------------------------------------------------------------------------------------


MAKER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from fuseplan.search.store.database import Database
from search_records import tuning

waiting, go = os.pipe()
children = []
for name in range(16):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.read(waiting, 1)
            Database(sys.argv[2]).put_record(tuning(f"p{name}"))
            status = 0
        except Exception as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    children.append(child)
os.write(go, bytes(16))
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 16
"""


def test_processes_that_make_one_schema_all_succeed(server: Server) -> None:
    url = server.url()
    command = [sys.executable, "-c", MAKER, str(SUPPORT), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    with Database(url, "inspect") as made:
        assert {record.key.workload for record in made.records()} == {f"p{n}" for n in range(16)}


def test_records_plans_and_maintenance_on_a_server(server: Server, tmp_path: Path) -> None:
    with Database(server.url(), versions=HERE) as db:
        db.put_record(tuning())
        db.put_plan(plan())
        assert maintenance.verify_database(db) == []
        assert transfer.export(db, tmp_path / "out.jsonl") == 2
        db.change(lambda connection: connection.execute(text("update tuning_records set payload = '{}'")))
        assert [problem.table for problem in maintenance.verify_database(db)] == ["tuning_records"]
        assert maintenance.prune_database(db)["tuning_records"] == 1
        assert db.get_plans([plan().key])[plan().key].hit == plan()


def test_a_table_that_another_holds_is_not_waited_for_for_ever(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.url()
    with Database(url) as db:
        db.put_plan(plan())
    monkeypatch.setattr(location, "STATEMENT_S", 1)
    holder = create_engine(resolve_url(url))
    with holder.begin() as connection:
        connection.execute(text("lock table plan_records in access exclusive mode"))
        with Database(url, mode="read") as reader, pytest.warns(UserWarning, match="statement timeout"):
            assert reader.get_plans([plan().key])[plan().key].status == "miss"
    holder.dispose()
