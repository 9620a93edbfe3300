"""Listing, verifying and pruning a tuning database."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from database_files import damage_pages
from search_records import HERE, SPEC, evidence, plan, tuning

from fuseplan.planner.cli import main
from fuseplan.search.store import codec, location, maintenance, tables
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.record import RecordKey, Trial


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "tuning.db"


@pytest.fixture
def db(path: Path) -> Database:
    return Database(path, versions=HERE)


def test_listing_shows_answers(db: Database) -> None:
    db.put_record(tuning("w1"))
    db.put_record(tuning("w2", fuse=False))
    db.put_plan(plan())
    rows = [dict(zip(maintenance.LS_COLUMNS, row, strict=True)) for row in maintenance.ls_rows(db)]
    assert [row["answer"] for row in rows] == ["fuse", "do not fuse", "1 fused of 2 groups"]
    assert [row["best_us"] for row in rows] == [5.0, 10.0, 35.0]
    assert maintenance.ls_rows(Database("sqlite://")) == []
    assert [item.key.workload for item in maintenance.show_record(db, "w")] == ["w1", "w2"]
    assert maintenance.show_record(db, "layer") == [plan()]


@pytest.mark.parametrize("beside", [True, False])
def test_a_database_of_another_version_is_named(
    beside: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the user's own folder, whether or not there is one of this version; what is none is left out."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    own = location.default_path()
    old, newer, other, junk = (own.with_name(f"tuning{name}.db") for name in ("", "-99", "-mine", "-junk"))
    for file, version in ((old, 1), (newer, 99), (other, None)):
        with Database(file) as made:
            if version is not None:
                rewritten = tables.META.update().where(tables.META.c.name == "schema_version").values(value=version)
                made.change(lambda connection, statement=rewritten: connection.execute(statement))  # type: ignore[misc]
    junk.write_text("hello")
    if beside:
        with Database() as made:
            made.put_record(tuning())
    before = {file: file.read_bytes() for file in (old, newer, junk)}
    assert maintenance.of_other_versions() == sorted([old, newer])
    assert main.run(["db", "ls"]) == 0
    said = "".join(capsys.readouterr())
    assert str(old) in said and str(newer) in said and str(junk) not in said and str(other) not in said
    assert ("swiglu w1" in said) == beside and "delete the file" in said
    assert main.run(["db", "ls", "--db", str(other)]) == 0
    assert str(old) not in "".join(capsys.readouterr())
    assert {file: file.read_bytes() for file in before} == before


def test_verify_finds_nothing_in_a_sound_database(db: Database, path: Path) -> None:
    db.put_record(tuning())
    db.put_plan(plan())
    db.put_device("a", SPEC)
    assert maintenance.verify_database(db) == []
    absent = maintenance.verify_database(Database(path.parent / "absent.db", mode="read"))
    assert [(problem.table, problem.what[:27]) for problem in absent] == [("file", "there is no tuning database")]


def test_verify_names_damage(db: Database, path: Path) -> None:
    db.put_record(tuning())
    db.put_device("a", SPEC)
    foreign = json.dumps({"a": 1})
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("update tuning_records set payload = ?, checksum = ?", (foreign, codec.checksum(foreign)))
        raw.execute("update devices set payload = '{}'")
    found = {problem.table: problem.what for problem in maintenance.verify_database(db)}
    assert "missing fields" in found["tuning_records"]
    assert found["devices"] == "checksum does not match"
    for n in range(20):
        db.put_record(tuning(f"w{n}"))
    db.close()
    damage_pages(path)
    assert any(problem.table == "file" for problem in maintenance.verify_database(db))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_verify_names_what_is_of_the_future(kind: str, path: Path, request: pytest.FixtureRequest) -> None:
    """Row by row, with how far it is ahead and what mends it; a minute is no finding, for clocks differ."""
    now = datetime.now(UTC)
    later, minute = ((now + ahead).isoformat() for ahead in (timedelta(days=3, hours=12), timedelta(minutes=1)))
    db = Database(path if kind == "sqlite" else request.getfixturevalue("server").url())
    db.put_record(tuning("ahead", evidence=evidence(later)))
    db.put_record(tuning("minute", evidence=evidence(minute)))
    db.put_plan(plan("ahead", evidence=evidence(later)))
    db.put_device("a", SPEC)
    db.put_capture("step/a", {"created": later})
    db.log_trial(Trial(tuning("w").key, "cpp", {"threads": 1}, 1.0, created=later), HERE)
    db.log_misses([Missed(RecordKey("m", "d"), payload={"last_seen": later})])
    found = {problem.table: problem for problem in maintenance.verify_database(db)}
    assert found.keys() == {"tuning_records", "plan_records", "captures", "trials", "misses"}
    assert all(later in one.what and "3 days, 1" in one.what for one in found.values())
    again = {name for name, one in found.items() if "plan tune --again" in one.cure}
    assert again == {"tuning_records", "plan_records"}
    removed = maintenance.prune_database(db)
    assert {table: count for table, count in removed.items() if count} == {"captures": 1, "trials": 1, "misses": 1}
    assert {one.table for one in maintenance.verify_database(db)} == {"tuning_records", "plan_records"}


def test_a_clock_that_is_behind_finds_a_device_of_the_future(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    db.put_device("a", SPEC)
    monkeypatch.setattr(maintenance, "clock_s", lambda connection: 0.0)
    (problem,) = maintenance.verify_database(db)
    assert problem.table == "devices" and "plan probe" in problem.cure
    assert sum(maintenance.prune_database(db).values()) == 0


@pytest.mark.parametrize("statement", [
    "create trigger swallow after insert on tuning_records begin delete from tuning_records; end",
    "create trigger refuse before update on plan_records begin select raise(abort, 'no'); end",
    "create view shown as select * from missing",
])
def test_verify_names_triggers_and_views(db: Database, path: Path, statement: str) -> None:
    db.put_record(tuning())
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(statement)
    (problem,) = maintenance.verify_database(db)
    kind, name = statement.split()[1:3]
    assert problem.table == "file" and f"{kind} {name}" in problem.what


def test_prune_deletes_only_what_is_asked(db: Database) -> None:
    old = evidence(versions=dataclasses.replace(HERE, torch="2.0"))
    db.put_record(tuning("here"))
    db.put_record(tuning("there", device="gpu-b"))
    db.put_plan(plan())
    db.log_trial(Trial(tuning("open").key, "cpp", {"threads": 1}, 1.0), HERE)
    db.log_trial(Trial(tuning("old").key, "cpp", {"threads": 1}, 1.0), HERE)
    db.put_record(tuning("old", evidence=old))  # ends its trials
    db.log_misses([Missed(RecordKey("m", "d"))])
    assert {table: count for table, count in maintenance.prune_database(db).items() if count} == {"trials": 1}
    pruned = maintenance.prune_database(db, keep_versions=HERE)
    assert {table: count for table, count in pruned.items() if count} == {"tuning_records": 1}
    assert maintenance.prune_database(db, device="gpu-b", misses=True)["misses"] == 1
    assert [record.key.workload for record in db.records()] == ["here"]
    assert len(db.trials(tuning("open").key)) == 1
    assert len(list(db.plans())) == 1


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("cpp", {"rows_per_task": 0}), ("cpp", {"col_tile": 2**30}), ("cpp", {"unroll": "2"}), ("cpp", {"import": 1}),
        ("triton", {"num_warps": 3}), ("triton", {"overlap": "soon"}), ("ninetoothed", {"block_rows": -1}),
    ],
)
def test_configurations_that_no_kernel_has_are_named(db: Database, backend: str, config: dict[str, int | str]) -> None:
    db.put_record(tuning("w1", backend=backend, config=config))
    db.put_record(tuning("w2", backend="later", config=config))
    (problem,) = maintenance.verify_database(db)
    assert problem.table == "tuning_records" and f"no kernel of {backend}" in problem.what
