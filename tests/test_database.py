"""The tuning database: exact keys, staleness, layers, transfer, damage, concurrency."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from search_records import HERE, evidence, plan, tuning
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateTable

from fuseplan.search import codec, maintenance, tables, transfer
from fuseplan.search import layered as layered_module
from fuseplan.search.database import Database
from fuseplan.search.errors import (
    DatabaseError,
    ForeignDatabaseError,
    ImportRefusedError,
    ReadOnlyDatabaseError,
    RecordError,
    SchemaVersionError,
)
from fuseplan.search.layered import LayeredDatabase, shipped_files
from fuseplan.search.record import RecordKey, Trial, TuningRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "tuning.db"


@pytest.fixture
def db(path: Path) -> Database:
    return Database(path, versions=HERE)


def quiet(path: Path) -> Database:
    """Open for dispatch, where a warning would be a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Database(path, mode="read", versions=HERE)


# -- records ----------------------------------------------------------------------------------------------


def test_records_and_plans_come_back_equal(db: Database, path: Path) -> None:
    db.put_record(tuning())
    db.put_plan(plan())
    for database in (db, Database(path), quiet(path)):
        assert database.get_record(tuning().key).hit == tuning()
        assert database.get_plan(plan().key).hit == plan()
    assert list(db.records()) == [tuning()]
    assert list(db.plans()) == [plan()]


def test_every_part_of_the_key_counts(db: Database) -> None:
    key = RecordKey("w", "d", "eager", "fp32")
    db.put_record(tuning(key=key))
    for part, value in (("workload", "W"), ("device", "d2"), ("regime", "graph"), ("numerics", "eager")):
        assert db.get_record(dataclasses.replace(key, **{part: value})).status == "miss"
    assert db.get_plan(key).status == "miss"
    assert db.get_record(key).status == "hit"


def test_many_plans_are_looked_up_at_once(db: Database) -> None:
    stored = [plan(f"r{number}") for number in range(0, 1201, 3)] + [plan("r0", device="cuda-b")]
    for one in stored[:3] + stored[-2:]:
        db.put_plan(one)
    asked = [plan(f"r{number}").key for number in range(1201)] + [plan("r0", device="cuda-b").key]
    found = db.get_plans(asked)
    assert list(found) == asked
    assert {key: one.hit for key, one in found.items() if one.hit} == {
        one.key: one for one in stored[:3] + stored[-2:]
    }
    assert LayeredDatabase(db, shipped=()).get_plans(asked) == found
    assert db.get_plans([]) == {}


def test_the_last_record_of_a_key_stays(db: Database) -> None:
    db.put_record(tuning(us=5.0))
    db.put_record(tuning(us=4.0))
    assert [record.best_us for record in db.records()] == [4.0]


def test_other_versions_are_stale_not_a_hit(path: Path, db: Database) -> None:
    db.put_record(tuning())
    newer = Database(path, versions=dataclasses.replace(HERE, torch="2.14.0"))
    found = newer.get_record(tuning().key)
    assert found.status == "stale"
    assert found.hit is None
    assert found.record == tuning()
    assert found.mismatch == ("torch",)
    assert Database(path).get_record(tuning().key).status == "hit"


def test_devices_and_captures(db: Database) -> None:
    assert db.get_device("a") is None
    db.put_device("a", {"name": "Test", "l2_bytes": 4096})
    db.put_device("a", {"name": "Test", "l2_bytes": 8192})
    assert db.get_device("a") == {"name": "Test", "l2_bytes": 8192}
    assert db.devices() == {"a": {"name": "Test", "l2_bytes": 8192}}
    db.put_capture("llama", {"nodes": [1, 2]})
    assert db.get_capture("llama") == {"nodes": [1, 2]}
    assert db.get_capture("gpt2") is None
    with pytest.raises(RecordError, match="cannot be stored as JSON"):
        db.put_device("b", {"what": object()})


def test_misses_are_counted_once_each(db: Database, path: Path) -> None:
    one, two = RecordKey("w1", "d"), RecordKey("w2", "d")
    assert db.log_miss(one, "swiglu", {"shape": [1, 2]})
    assert db.log_miss(two)
    reader = Database(path, mode="read")
    assert reader.log_miss(two)
    misses = db.misses()
    assert [(miss["workload"], miss["count"]) for miss in misses] == [("w2", 2), ("w1", 1)]
    assert misses[1]["payload"] == {"shape": [1, 2]}


def test_a_miss_is_never_an_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reader = Database(tmp_path / "file" / "tuning.db", mode="read")
    assert reader.log_miss(RecordKey("w", "d")) is False
    assert reader.misses() == []


# -- trials -----------------------------------------------------------------------------------------------


def test_trials_are_open_until_the_record_is_there(db: Database) -> None:
    key = tuning().key
    trials = [Trial(key, "cpp", {"tile": n}, float(n), created=f"2026-11-20T10:00:0{n}") for n in (1, 2)]
    for trial in trials:
        db.log_trial(trial, HERE)
    db.log_trial(Trial(RecordKey("other", "d"), "cpp", {"tile": 1}, 1.0), HERE)
    assert {str(t.config) for t in db.trials(key, HERE, only_open=True)} == {str(t.config) for t in trials}
    assert db.trials(key, dataclasses.replace(HERE, torch="9")) == []
    db.put_record(tuning())
    assert db.trials(key, HERE, only_open=True) == []
    assert len(db.trials(key)) == 2
    assert len(db.trials(RecordKey("other", "d"), only_open=True)) == 1


def test_a_repeated_trial_replaces_the_first(db: Database) -> None:
    key = tuning().key
    db.log_trial(Trial(key, "cpp", {"a": 1, "b": 2}, 9.0), HERE)
    db.log_trial(Trial(key, "cpp", {"b": 2, "a": 1}, 8.0), HERE)
    assert [trial.median_us for trial in db.trials(key)] == [8.0]
    db.forget_trials(key)
    assert db.trials(key, only_open=True) == []


# -- opening ----------------------------------------------------------------------------------------------


def test_reading_what_is_not_there_creates_nothing(path: Path) -> None:
    database = quiet(path)
    assert database.get_record(tuning().key).status == "miss"
    assert list(database.records()) == []
    assert not path.parent.exists()


def test_a_reader_cannot_write(db: Database, path: Path) -> None:
    with pytest.raises(ReadOnlyDatabaseError, match="opened for reading only"):
        Database(path, mode="read").put_record(tuning())


def test_the_default_file_is_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert tables.default_path() == tmp_path / "fuseplan" / "tuning.db"
    Database().put_record(tuning())
    assert (tmp_path / "fuseplan" / "tuning.db").exists()


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


def damage_pages(path: Path) -> None:
    """Overwrite everything after the first page, as a failing disk would."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


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
    with pytest.warns(UserWarning):
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


def test_an_empty_file_becomes_a_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert quiet(path).get_record(tuning().key).status == "miss"
    Database(path).put_record(tuning())
    assert quiet(path).get_record(tuning().key).hit


def test_locations_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadOnlyDatabaseError, match=r"file/tuning\.db cannot be written .*--db"):
        Database(tmp_path / "file" / "tuning.db")
    with pytest.raises(DatabaseError, match="is a folder"):
        Database(tmp_path)
    with pytest.raises(ReadOnlyDatabaseError, match="cannot be written"):
        Database("/proc/tuning.db")
    with pytest.raises(DatabaseError, match="cannot be read"):
        Database("://host/name")
    with pytest.raises(DatabaseError, match="cannot open database"):
        Database("nosuchdb://host/name")


def test_a_file_in_a_read_only_folder_can_be_read(
    db: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.put_record(tuning())
    db.close()
    real, modes = tables._engine, []

    def no_room_for_shared_memory(url: URL, mode: str = "") -> Engine:
        modes.append(mode)
        return real(tables.resolve_url(path.parent / "absent.db") if mode == "mode=ro" else url, mode)

    monkeypatch.setattr(tables, "_engine", no_room_for_shared_memory)
    assert quiet(path).get_record(tuning().key).hit
    assert modes == ["mode=ro", "immutable=1"]


def test_errors_of_the_driver_are_sorted() -> None:
    engine = create_engine("sqlite://")
    cases = {
        "attempt to write a readonly database": ReadOnlyDatabaseError,
        "unable to open database file": ReadOnlyDatabaseError,
        "database is locked": DatabaseError,
    }
    for text, kind in cases.items():
        error = tables.explain(sqlalchemy_error(text), engine)
        assert type(error) is kind
        assert text in str(error)


def sqlalchemy_error(text: str) -> Exception:
    return OperationalError("select", {}, sqlite3.OperationalError(text))


def test_a_memory_database_works() -> None:
    database = Database("sqlite://")
    database.put_record(tuning())
    assert database.get_record(tuning().key).hit
    assert "memory" in tables.describe(database.engine)  # type: ignore[arg-type]


def test_statements_compile_for_postgresql() -> None:
    for table in tables.METADATA.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=postgresql.dialect()))


class _Recording:
    """Stands in for a connection of another dialect and records what is executed."""

    def __init__(self, name: str, rowcount: int) -> None:
        self.dialect = type("D", (), {"name": name})
        self.rowcount = rowcount
        self.statements: list[str] = []

    def execute(self, statement: object) -> _Recording:
        dialect = postgresql.dialect() if self.dialect.name == "postgresql" else None  # type: ignore[attr-defined]
        self.statements.append(str(statement.compile(dialect=dialect)).split("\n")[0])  # type: ignore[attr-defined]
        return self


def test_upsert_speaks_each_dialect() -> None:
    table = Table("t", MetaData(), Column("k", Integer, primary_key=True), Column("v", Text))
    post = _Recording("postgresql", 1)
    tables.upsert(post, table, {"k": 1, "v": "a"})  # type: ignore[arg-type]
    assert "ON CONFLICT (k) DO UPDATE SET v" in post.statements[0]
    for rowcount, count in ((1, 1), (0, 2)):
        other = _Recording("mysql", rowcount)
        tables.upsert(other, table, {"k": 1, "v": "a"})  # type: ignore[arg-type]
        assert len(other.statements) == count
        assert other.statements[0].startswith("UPDATE t")


# -- list, show, verify, prune ----------------------------------------------------------------------------


def test_listing_shows_answers_and_staleness(db: Database) -> None:
    db.put_record(tuning("w1"))
    db.put_record(tuning("w2", fuse=False))
    db.put_plan(plan())
    frame = maintenance.ls(db, dataclasses.replace(HERE, triton="4"))
    assert list(frame.columns) == list(maintenance.LS_COLUMNS)
    assert list(frame["answer"]) == ["fuse", "do not fuse", "1 fused of 2 groups"]
    assert list(frame["best_us"]) == [5.0, 10.0, 35.0]
    assert set(frame["stale"]) == {"triton"}
    assert set(maintenance.ls(db)["stale"]) == {""}
    assert len(maintenance.ls(Database("sqlite://"))) == 0
    assert [item.key.workload for item in maintenance.show(db, "w")] == ["w1", "w2"]
    assert maintenance.show(db, "layer") == [plan()]


def test_verify_finds_nothing_in_a_sound_database(db: Database, path: Path) -> None:
    db.put_record(tuning())
    db.put_plan(plan())
    db.put_device("a", {"x": 1})
    assert maintenance.verify(db) == []
    assert maintenance.verify(Database(path.parent / "absent.db", mode="read")) == []


def test_verify_names_damage(db: Database, path: Path) -> None:
    db.put_record(tuning())
    db.put_device("a", {"x": 1})
    foreign = json.dumps({"a": 1})
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("update tuning_records set payload = ?, checksum = ?", (foreign, codec.checksum(foreign)))
        raw.execute("update devices set payload = '{}'")
    found = {problem.table: problem.what for problem in maintenance.verify(db)}
    assert "missing fields" in found["tuning_records"]
    assert found["devices"] == "checksum does not match"
    for n in range(20):
        db.put_record(tuning(f"w{n}"))
    db.close()
    damage_pages(path)
    assert any(problem.table == "file" for problem in maintenance.verify(db))


def test_prune_deletes_only_what_is_asked(db: Database) -> None:
    old = evidence(versions=dataclasses.replace(HERE, torch="2.0"))
    db.put_record(tuning("old", evidence=old))
    db.put_record(tuning("here"))
    db.put_record(tuning("there", device="gpu-b"))
    db.put_plan(plan())
    db.log_trial(Trial(tuning("open").key, "cpp", {"tile": 1}, 1.0), HERE)
    db.log_trial(Trial(tuning("old").key, "cpp", {"tile": 1}, 1.0), HERE)
    db.forget_trials(tuning("old").key)
    db.log_miss(RecordKey("m", "d"))
    assert maintenance.prune(db, trials=False) == {"tuning_records": 0, "plan_records": 0}
    assert maintenance.prune(db, keep_versions=HERE) == {"tuning_records": 1, "plan_records": 0, "trials": 1}
    assert maintenance.prune(db, device="gpu-b", misses=True)["misses"] == 1
    assert [record.key.workload for record in db.records()] == ["here"]
    assert len(db.trials(tuning("open").key)) == 1
    assert len(list(db.plans())) == 1


# -- export and import ------------------------------------------------------------------------------------


@pytest.fixture
def exported(db: Database, tmp_path: Path) -> Path:
    for n in range(3):
        db.put_record(tuning(f"w{n}"))
    db.put_record(tuning("w9", device="gpu-b"))
    db.put_plan(plan())
    db.put_device("cpu-a", {"x": 1})
    target = tmp_path / "records.jsonl"
    assert transfer.export(db, target) == 6
    return target


def test_an_export_imports_into_an_equal_database(db: Database, exported: Path, tmp_path: Path) -> None:
    other = Database(tmp_path / "other.db")
    assert transfer.import_bundle(other, exported) == 6
    assert list(other.records()) == list(db.records())
    assert list(other.plans()) == list(db.plans())
    assert other.devices() == db.devices()
    again = tmp_path / "again.jsonl"
    transfer.export(other, again)
    # Only the header's time may differ, and with it the checksum.
    assert again.read_text().splitlines()[1:-1] == exported.read_text().splitlines()[1:-1]
    assert list(tmp_path.glob("*.part")) == []


def test_export_of_one_device(db: Database, exported: Path, tmp_path: Path) -> None:
    assert transfer.export(db, tmp_path / "b.jsonl", device="gpu-b") == 1
    assert [r.key.device for r in transfer.read_bundle(tmp_path / "b.jsonl").records] == ["gpu-b"]
    assert len(transfer.read_bundle(exported)) == 6


def test_import_keeps_the_newer_record(db: Database, exported: Path) -> None:
    newer = tuning("w1", us=1.0, evidence=evidence("2027-01-01T00:00:00+00:00"))
    db.put_record(newer)
    older = tuning("w2", us=1.0, evidence=evidence("2020-01-01T00:00:00+00:00"))
    db.put_record(older)
    transfer.import_bundle(db, exported)
    assert db.get_record(newer.key).hit == newer
    assert db.get_record(older.key).hit == tuning("w2")


def edited(path: Path, change: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    text = {
        "no trailer": "".join(lines[:-1]),
        "cut mid-line": "".join(lines)[:-700],
        "a record less": "".join(lines[:2] + lines[3:]),
        "altered": "".join(lines).replace("swiglu", "swigly"),
        "foreign": "hello\n",
        "foreign json": '{"format": "other"}\n',
        "a list": "[1]\n",
        "empty": "",
        "schema": "".join(lines).replace('"schema_version":1', '"schema_version":2'),
    }[change]
    path.write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no trailer", "truncated"),
        ("cut mid-line", "truncated"),
        ("a record less", "truncated: 5 of 6"),
        ("altered", "altered: its checksum"),
        ("foreign", "not JSON"),
        ("foreign json", "not a fuseplan export"),
        ("a list", "not a JSON object"),
        ("empty", "not a fuseplan export"),
        ("schema", "schema version 2, this fuseplan reads 1"),
    ],
)
def test_a_damaged_export_changes_nothing(exported: Path, tmp_path: Path, change: str, message: str) -> None:
    other = Database(tmp_path / "other.db")
    other.put_record(tuning("mine"))
    edited(exported, change)
    with pytest.raises((ImportRefusedError, SchemaVersionError), match=message):
        transfer.import_bundle(other, exported)
    assert [record.key.workload for record in other.records()] == ["mine"]


def reseal(path: Path, replacement: dict[str, object]) -> None:
    """Replace the first data line and make the trailer right again."""
    import hashlib

    lines = path.read_text().splitlines(keepends=True)
    lines[1] = json.dumps(replacement) + "\n"
    digest = hashlib.sha256("".join(lines[:-1]).encode()).hexdigest()
    lines[-1] = json.dumps({"trailer": {"count": len(lines) - 2, "sha256": digest}}) + "\n"
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    "line", [{"tuning_record": {"fuse": True}}, {"plan_record": 3}, {"device": 1, "spec": {}}, {"pickle": "gASV"}]
)
def test_a_sealed_but_foreign_line_changes_nothing(exported: Path, tmp_path: Path, line: dict[str, object]) -> None:
    reseal(exported, line)
    other = Database(tmp_path / "other.db")
    with pytest.raises(ImportRefusedError, match="line 2"):
        transfer.import_bundle(other, exported)
    assert list(other.records()) == []


def test_missing_files_are_named(db: Database, tmp_path: Path) -> None:
    with pytest.raises(ImportRefusedError, match=r"cannot read export file .*absent\.jsonl"):
        transfer.import_bundle(db, tmp_path / "absent.jsonl")
    with pytest.raises(RecordError, match="cannot write export file"):
        transfer.export(db, tmp_path / "no" / "folder.jsonl")


# -- layers -----------------------------------------------------------------------------------------------


def test_the_users_layer_lies_over_the_shipped_one(exported: Path, tmp_path: Path) -> None:
    mine = Database(tmp_path / "mine.db", versions=HERE)
    mine.put_record(tuning("w1", us=2.0))
    layered = LayeredDatabase(mine, [exported])
    assert layered.get_record(tuning("w1").key).hit == tuning("w1", us=2.0)
    assert layered.get_record(tuning("w0").key).hit == tuning("w0")
    assert layered.get_plan(plan().key).hit == plan()
    assert layered.get_record(tuning("w77").key).status == "miss"
    mine.put_plan(plan(label="mine"))
    assert layered.get_plan(plan().key).hit == plan(label="mine")
    assert layered.log_miss(RecordKey("w77", "d"))
    assert len(mine.misses()) == 1


def test_staleness_across_layers(exported: Path, tmp_path: Path) -> None:
    old = dataclasses.replace(HERE, torch="2.0")
    mine = Database(tmp_path / "mine.db", versions=HERE)
    mine.put_record(tuning("w1", us=2.0, evidence=evidence(versions=old)))
    mine.put_record(tuning("w8", us=2.0, evidence=evidence(versions=old)))
    layered = LayeredDatabase(mine, [exported])
    assert layered.get_record(tuning("w1").key).hit == tuning("w1")
    assert layered.get_record(tuning("w8").key).status == "stale"
    nothing = Database(tmp_path / "none.db", mode="read")
    newer = LayeredDatabase(nothing, [exported], dataclasses.replace(HERE, torch="3"))
    assert newer.get_record(tuning("w1").key).status == "stale"


def test_a_damaged_shipped_file_is_skipped(exported: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("hello")
    layered = LayeredDatabase(Database("sqlite://"), [broken, exported])
    with pytest.warns(UserWarning, match="shipped records skipped"):
        assert layered.get_record(tuning("w0").key).hit
    assert all(file.suffix == ".jsonl" for file in shipped_files())


def test_shipped_files_are_read_once_and_decoded_where_asked(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    decoded: list[str] = []
    check, decode = transfer.checked_lines, layered_module._decode

    def checked(path: Path) -> list[str]:
        read.append(path)
        return check(path)

    def counted(cls: Any, kind: str, line: str) -> Any:
        decoded.append(line)
        return decode(cls, kind, line)

    monkeypatch.setattr(layered_module, "checked_lines", checked)
    monkeypatch.setattr(layered_module, "_decode", counted)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(exported.read_bytes())
    for _ in range(3):
        layered = LayeredDatabase(Database("sqlite://"), [copy])
        assert layered.get_record(tuning("w0").key).hit == tuning("w0")
        assert layered.get_record(dataclasses.replace(tuning("w0").key, regime="graph")).status == "miss"
        assert layered.get_record(dataclasses.replace(tuning("w0").key, workload="w")).status == "miss"
    assert read == [copy] and len(decoded) == 6  # a part of a name decodes nothing; another regime does, and is refused
    transfer.export(Database(tmp_path / "empty.db"), copy)
    assert LayeredDatabase(Database("sqlite://"), [copy]).get_record(tuning("w0").key).status == "miss"


# -- the connection that is kept --------------------------------------------------------------------------


def test_one_connection_serves_all_look_ups(db: Database, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db.put_record(tuning())
    opened: list[Any] = []
    connect = sqlite3.connect

    def counted(*args: Any, **how: Any) -> sqlite3.Connection:
        opened.append(args)
        return connect(*args, **how)

    monkeypatch.setattr(tables.sqlite3, "connect", counted)
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


FORK = """
import os, sys
sys.path.insert(0, sys.argv[1])
from fuseplan.search.database import Database
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
    command = [sys.executable, "-c", FORK, str(Path(__file__).parent), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["t.db"]  # closed at exit
    with Database(path) as again:
        assert maintenance.verify(again) == []
        assert {record.key.workload for record in again.records()} == {"parent", "child", "after"}


# -- several processes ------------------------------------------------------------------------------------

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from fuseplan.search.database import Database
from fuseplan.search.record import RecordKey, Trial
from search_records import HERE, tuning
db = Database(sys.argv[2])
for n in range(40):
    db.log_trial(Trial(tuning("shared").key, sys.argv[3], {"tile": n}, 1.0), HERE)
    db.put_record(tuning(f"{sys.argv[3]}-{n}"))
    db.put_record(tuning("contended", us=float(n)))
    db.log_miss(RecordKey("m", "d"))
"""


def test_two_processes_write_one_new_database(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(Path(__file__).parent), str(path), name])
        for name in ("a", "b")
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    database = Database(path)
    workloads = [record.key.workload for record in database.records()]
    assert len(workloads) == 81
    assert len(database.trials(tuning("shared").key)) == 80
    assert database.misses()[0]["count"] == 80
    assert maintenance.verify(database) == []


def test_selects_are_ordered(db: Database) -> None:
    for n in (3, 1, 2):
        db.put_record(tuning(f"w{n}"))
    assert [record.key.workload for record in db.records()] == ["w1", "w2", "w3"]
    with db.engine.connect() as connection:  # type: ignore[union-attr]
        assert len(connection.execute(select(tables.TUNINGS)).all()) == 3
    with db as same:
        assert isinstance(next(same.records()), TuningRecord)
