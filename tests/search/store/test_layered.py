"""The user's records over the shipped ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from database_files import export_sample
from search_records import HERE, evidence, plan, tuning

from fuseplan.search.store import layered as layered_module
from fuseplan.search.store import transfer
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.record import RecordKey


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return export_sample(Database(tmp_path / "exported.db", versions=HERE), tmp_path / "records.jsonl")


def test_the_users_layer_lies_over_the_shipped_one(exported: Path, tmp_path: Path) -> None:
    mine = Database(tmp_path / "mine.db", versions=HERE)
    mine.put_record(tuning("w1", us=2.0))
    layered = LayeredDatabase(mine, [exported])
    assert layered.get_record(tuning("w1").key).hit == tuning("w1", us=2.0)
    assert layered.get_record(tuning("w0").key).hit == tuning("w0")
    assert layered.get_plans([plan().key])[plan().key].hit == plan()
    assert layered.get_record(tuning("w77").key).status == "miss"
    mine.put_plan(plan(label="mine"))
    assert layered.get_plans([plan().key])[plan().key].hit == plan(label="mine")
    assert mine.log_misses([Missed(RecordKey("w77", "d"))])
    assert len(layered.misses()) == 1


def test_shipped_captures_lie_under_the_users_and_go_with_plans_that_fit(tmp_path: Path) -> None:
    made = Database(tmp_path / "made.db", versions=HERE)
    made.put_plan(plan())
    made.put_capture("summary/a", {"ops": 1})
    made.put_capture("summary/b", {"ops": 2})
    made.put_capture("step/a", {"ops": 3})
    transfer.export(made, shipped := tmp_path / "shipped.jsonl")
    mine = Database(tmp_path / "mine.db", versions=HERE)
    mine.put_capture("summary/b", {"ops": 4})
    assert LayeredDatabase(mine, [shipped]).captures("summary/") == {"summary/a": {"ops": 1}, "summary/b": {"ops": 4}}
    mine.versions = dataclasses.replace(HERE, torch="3")
    assert LayeredDatabase(mine, [shipped]).captures("summary/") == {"summary/b": {"ops": 4}}


def test_staleness_across_layers(exported: Path, tmp_path: Path) -> None:
    old = dataclasses.replace(HERE, torch="2.0")
    mine = Database(tmp_path / "mine.db", versions=HERE)
    mine.put_record(tuning("w1", us=2.0, evidence=evidence(versions=old)))
    mine.put_record(tuning("w8", us=2.0, evidence=evidence(versions=old)))
    layered = LayeredDatabase(mine, [exported])
    assert layered.get_record(tuning("w1").key).hit == tuning("w1")
    assert layered.get_record(tuning("w8").key).status == "stale"
    nothing = Database(tmp_path / "none.db", mode="read", versions=dataclasses.replace(HERE, torch="3"))
    newer = LayeredDatabase(nothing, [exported])
    assert newer.get_record(tuning("w1").key).status == "stale"


@pytest.mark.parametrize("created", ["2020-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"])
def test_a_tune_that_measures_anew_takes_only_what_it_wrote(exported: Path, tmp_path: Path, created: str) -> None:
    """Whatever the clocks of those who wrote the rest."""
    mine = Database(tmp_path / "mine.db", versions=HERE)
    for name, run in (("before", ""), ("others", "b"), ("own", "a")):
        mine.put_record(tuning(name, evidence=dataclasses.replace(evidence(created), run=run)))
        mine.put_plan(plan(name, evidence=dataclasses.replace(evidence(created), run=run)))
    anew = LayeredDatabase(mine, [exported], run="a")
    for name in ("before", "others", "own"):
        expected = "hit" if name == "own" else "stale"
        assert anew.get_record(tuning(name).key).status == expected
        assert anew.get_plans([plan(name).key])[plan(name).key].status == expected
        assert LayeredDatabase(mine, [exported]).get_record(tuning(name).key).status == "hit"
    assert anew.get_record(tuning("w0").key).status == "stale"  # shipped


def test_a_damaged_shipped_file_is_skipped(exported: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("hello")
    layered = LayeredDatabase(Database("sqlite://"), [broken, exported])
    with pytest.warns(UserWarning, match="shipped records skipped"):
        assert layered.get_record(tuning("w0").key).hit


def test_shipped_files_are_read_once_and_decoded_where_asked(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    decoded: list[Mapping[str, Any]] = []
    check, decode = transfer.checked_lines, transfer.entry_of

    def checked(path: Path) -> list[str]:
        read.append(path)
        return check(path)

    def counted(item: Mapping[str, Any]) -> transfer.Entry:
        decoded.append(item)
        return decode(item)

    monkeypatch.setattr(layered_module, "checked_lines", checked)
    monkeypatch.setattr(layered_module, "entry_of", counted)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(exported.read_bytes())
    for _ in range(3):
        layered = LayeredDatabase(Database("sqlite://"), [copy])
        assert layered.get_record(tuning("w0").key).hit == tuning("w0")
        assert layered.get_record(dataclasses.replace(tuning("w0").key, regime="graph")).status == "miss"
        assert layered.get_record(dataclasses.replace(tuning("w0").key, workload="w")).status == "miss"
    # A part of a name decodes nothing; another regime does, and is refused. A line decoded by another test is known.
    assert read == [copy] and len(decoded) <= 1
