"""Export files: whole or refused, and what an import keeps."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from database_files import export_sample
from search_records import HERE, evidence, tuning

from fuseplan.search.errors import ImportRefusedError, RecordError, SchemaVersionError
from fuseplan.search.store import transfer
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import TuningRecord


@pytest.fixture
def db(tmp_path: Path) -> Database:
    return Database(tmp_path / "tuning.db", versions=HERE)


@pytest.fixture
def exported(db: Database, tmp_path: Path) -> Path:
    return export_sample(db, tmp_path / "records.jsonl")


def test_an_export_imports_into_an_equal_database(db: Database, exported: Path, tmp_path: Path) -> None:
    other = Database(tmp_path / "other.db")
    assert transfer.import_bundle(other, exported) == transfer.Imported(6, {})
    assert list(other.records()) == list(db.records())
    assert list(other.plans()) == list(db.plans())
    assert other.devices() == db.devices()
    again = tmp_path / "again.jsonl"
    transfer.export(other, again)
    # Only the header's time may differ, and with it the checksum.
    assert again.read_text().splitlines()[1:-1] == exported.read_text().splitlines()[1:-1]
    assert list(tmp_path.glob("*.part")) == []


def test_an_export_takes_the_place_of_no_database_no_pipe_and_no_link(
    db: Database, exported: Path, tmp_path: Path
) -> None:
    Database(other := tmp_path / "other.db").close()
    before = other.read_bytes()
    with pytest.raises(RecordError, match=r"other.db: a database lies there"):
        transfer.export(db, other)
    assert other.read_bytes() == before
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        transfer.export(db, pipe)
        assert pipe.is_fifo() and read.result().splitlines()[1:-1] == exported.read_text().splitlines()[1:-1]
    (target := tmp_path / "target").touch()
    (link := tmp_path / "link").symlink_to(target)
    transfer.export(db, link)
    assert link.is_symlink() and len(transfer.read_bundle(target)) == 6


def test_export_of_one_device(db: Database, exported: Path, tmp_path: Path) -> None:
    assert transfer.export(db, tmp_path / "b.jsonl", device="gpu-b") == 1
    assert [entry.key.device for entry in transfer.read_bundle(tmp_path / "b.jsonl")] == ["gpu-b"]
    assert len(transfer.read_bundle(exported)) == 6


def test_what_a_report_says_of_models_goes_along(db: Database, tmp_path: Path) -> None:
    db.put_capture("summary/a", {"device": "gpu-a", "created": "2026-02-01T00:00:00+00:00", "ops": 3})
    db.put_capture("step/b", {"device": "gpu-b", "unfused_us": 2.0})
    db.put_capture("samples/c", {"device": "gpu-a"})  # what a calibration fits: no report reads it
    path = tmp_path / "all.jsonl"
    assert transfer.export(db, path) == 2
    other = Database(tmp_path / "other.db")
    assert transfer.import_bundle(other, path).taken == 2
    assert other.captures("summary/") == db.captures("summary/") and other.captures("step/") == db.captures("step/")
    assert transfer.export(db, path, device="gpu-b") == 1
    assert [entry.key for entry in transfer.read_bundle(path)] == ["step/b"]


@pytest.mark.parametrize(("month", "kept"), [("01", 7), ("03", 3)])
def test_import_keeps_the_newer_summary(db: Database, tmp_path: Path, month: str, kept: int) -> None:
    db.put_capture("summary/a", {"created": f"2026-{month}-01T00:00:00+00:00", "ops": 3})
    transfer.export(db, path := tmp_path / "all.jsonl")
    db.put_capture("summary/a", {"created": "2026-02-01T00:00:00+00:00", "ops": 7})
    transfer.import_bundle(db, path)
    assert db.captures("summary/")["summary/a"]["ops"] == kept


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The location of a database where nothing is."""
    return str(tmp_path / "own.db") if request.param == "sqlite" else request.getfixturevalue("server").url()


def at(name: str, created: str, us: float = 1.0) -> TuningRecord:
    return tuning(name, us=us, evidence=evidence(created))


@pytest.mark.parametrize(("theirs", "mine", "why"), [
    ("2026-02-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00", ""),
    ("2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00", "older than what is here"),
    ("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00", ""),
    ("2026-01-01T01:00:00+00:00", "2026-01-01T02:00:00+03:00", ""),  # 23:00 of the day before
    ("2026-01-01T00:00:00+00:00", "{ahead}", ""),
    ("{ahead}", "2026-01-01T00:00:00+00:00", "dated in the future"),
    ("{ahead}", "{far}", ""),
    ("2026-01-01T00:00:00+00:00", "noon", ""),
])
def test_import_keeps_the_newer_record(
    db: Database, where: str, tmp_path: Path, theirs: str, mine: str, why: str
) -> None:
    """One of tomorrow keeps no sound one out, and replaces none; alone it is taken."""
    soon = {"ahead": datetime.now(UTC) + timedelta(days=1), "far": datetime.now(UTC) + timedelta(days=900)}
    theirs, mine = (one.format(**{name: time.isoformat(timespec="seconds") for name, time in soon.items()})
                    if one != "noon" else "T" for one in (theirs, mine))
    for name in ("alone", "both"):
        db.put_record(at(name, theirs, us=2.0))
    transfer.export(db, path := tmp_path / "theirs.jsonl")
    own = Database(where, versions=HERE)
    own.put_record(at("both", mine))
    assert transfer.import_bundle(own, path) == transfer.Imported(1 if why else 2, {why: 1} if why else {})
    assert own.get_record(at("both", "").key).hit == (at("both", mine) if why else at("both", theirs, us=2.0))
    assert own.get_record(at("alone", "").key).hit == at("alone", theirs, us=2.0)


def test_an_import_says_what_it_did_not_take(db: Database, exported: Path) -> None:
    """What is here already, of a device that was probed here, or older."""
    assert transfer.import_bundle(db, exported) == transfer.Imported(0, {"here already": 6})
    (device, spec), *_ = db.devices().items()
    db.put_device(device, {**spec, "noise": 0.5})
    db.put_record(tuning("w1", us=1.0, evidence=evidence("2026-11-21T00:00:00+00:00")))
    left = transfer.import_bundle(db, exported).left
    assert sum(left.values()) == 6 and left["here already"] == 4 and len(left) == 3
    assert db.devices()[device]["noise"] == 0.5


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
        "schema": "".join(lines).replace('"schema_version":2', '"schema_version":3'),
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
        ("schema", "schema version 3, this fuseplan reads 2"),
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
    "line", [{"tuning_record": {"fuse": True}}, {"plan_record": 3}, {"device": 1, "spec": {}}, {"pickle": "gASV"},
             {"capture": "samples/a", "value": {}}, {"capture": "step/\x1b", "value": {}}, {"capture": "step/a"}]
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
