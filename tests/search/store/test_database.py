"""The tuning database: exact keys, staleness, misses, trials."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from database_files import quiet
from search_records import HERE, SPEC, plan, tuning
from sqlalchemy import select

from fuseplan.search.errors import RecordError
from fuseplan.search.store import tables
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.record import RecordKey, Trial, TuningRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "tuning.db"


@pytest.fixture
def db(path: Path) -> Database:
    return Database(path, versions=HERE)


def test_records_and_plans_come_back_equal(db: Database, path: Path) -> None:
    db.put_record(tuning())
    db.put_plan(plan())
    for database in (db, Database(path), quiet(path)):
        assert database.get_record(tuning().key).hit == tuning()
        assert database.get_plans([plan().key])[plan().key].hit == plan()
    assert list(db.records()) == [tuning()]
    assert list(db.plans()) == [plan()]


def test_every_part_of_the_key_counts(db: Database) -> None:
    key = RecordKey("w", "d", "eager", "fp32")
    db.put_record(tuning(key=key))
    for part, value in (("workload", "W"), ("device", "d2"), ("regime", "graph"), ("numerics", "eager")):
        assert db.get_record(dataclasses.replace(key, **{part: value})).status == "miss"
    assert db.get_plans([key])[key].status == "miss"
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
    db.put_device("a", SPEC | {"noise": 0.5})
    db.put_device("a", SPEC)
    assert db.get_device("a") == SPEC
    assert db.devices() == {"a": SPEC}
    db.put_capture("llama", {"nodes": [1, 2]})
    assert db.captures("llama") == {"llama": {"nodes": [1, 2]}}
    assert db.captures("gpt2") == {}
    with pytest.raises(RecordError, match="cannot be stored as JSON"):
        db.put_device("b", {"what": object()})


def test_selects_are_ordered(db: Database) -> None:
    for n in (3, 1, 2):
        db.put_record(tuning(f"w{n}"))
    assert [record.key.workload for record in db.records()] == ["w1", "w2", "w3"]
    with db.engine.connect() as connection:  # type: ignore[union-attr]
        assert len(connection.execute(select(tables.TUNINGS)).all()) == 3
    with db as same:
        assert isinstance(next(same.records()), TuningRecord)


def test_misses_are_counted_once_each(db: Database, path: Path) -> None:
    one, two = RecordKey("w1", "d"), RecordKey("w2", "d")
    assert db.log_misses([Missed(one, "swiglu", {"shape": [1, 2]})])
    assert db.log_misses([Missed(two)])
    reader = Database(path, mode="read")
    assert reader.log_misses([Missed(two)])
    misses = db.misses()
    assert [(miss["workload"], miss["count"]) for miss in misses] == [("w2", 2), ("w1", 1)]
    assert misses[1]["payload"] == {"shape": [1, 2]}


def test_a_miss_is_never_an_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reader = Database(tmp_path / "file" / "tuning.db", mode="read")
    with pytest.warns(UserWarning, match="cannot be written .*going on without it"):
        assert reader.log_misses([Missed(RecordKey("w", "d"))]) is False
    assert reader.misses() == []


# -- trials -----------------------------------------------------------------------------------------------


def test_trials_are_open_until_the_record_is_there(db: Database) -> None:
    key = tuning().key
    trials = [Trial(key, "cpp", {"tile": n}, float(n), created=f"2026-11-20T10:00:0{n}") for n in (1, 2)]
    for trial in trials:
        db.log_trial(trial, HERE)
    db.log_trial(Trial(RecordKey("other", "d"), "cpp", {"threads": 1}, 1.0), HERE)
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
