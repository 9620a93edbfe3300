"""Searches kept as Optuna studies: what is written, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from fake_tuner import BUDGET, SUBJECT, tuner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from search_fakes import FakeBackend, FakeSubject, OtherBackend

from fuseplan.kernels.ir.backend import config_key
from fuseplan.search.errors import StudyError
from fuseplan.search.store.database import Database
from fuseplan.search.tune.study import Studies


@pytest.fixture
def db() -> Database:
    return Database("sqlite://")


def only(storage: str | JournalStorage) -> optuna.Study:
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'studies.db'}"


def test_a_study_holds_every_trial_and_its_best_is_the_winner(db: Database, url: str) -> None:
    faulty = FakeBackend(faults={"tile=64,unroll=1": "build", "tile=64,unroll=2": "wrong"})
    record = tuner(db, faulty, OtherBackend(floor_us=3.0), studies=Studies(url)).tune(SUBJECT)
    study = only(url)
    assert study.study_name.startswith("muladd 3x127 on cpu-test, eager [subject-")
    assert study.best_trial.params == {"backend": "other", **record.config}
    assert study.best_value == pytest.approx(record.best_us)
    assert (study.user_attrs["answer"], study.user_attrs["reason"]) == ("fuse", record.evidence.reason)
    stored = {(one.backend, config_key(one.config)): one.median_us for one in db.trials(record.key)}
    configs = [(one.params["backend"], {name: one.params[name] for name in record.config}) for one in study.trials]
    times = [one.user_attrs.get("median_us") for one in study.trials]
    assert {(name, config_key(config)): us for (name, config), us in zip(configs, times, strict=True)} == stored
    assert all(one.value == one.user_attrs["median_us"] for one in study.get_trials(states=[TrialState.COMPLETE]))
    failed = {one.params["unroll"]: one.user_attrs["reason"] for one in study.get_trials(states=[TrialState.FAIL])}
    assert "syntax error" in failed[1] and "wrong result" in failed[2] and len(failed) == 2


def test_a_sampled_search_is_kept_with_the_same_answer_as_without(db: Database, url: str) -> None:
    large = FakeBackend(tiles=tuple(range(16, 80)), unrolls=(1, 2, 4, 8))
    alone = tuner(Database("sqlite://"), large).tune(SUBJECT)
    kept = tuner(db, large, studies=Studies(url)).tune(SUBJECT)
    assert (kept.config, kept.measured, kept.rejected) == (alone.config, alone.measured, alone.rejected)
    assert len(only(url).trials) == kept.measured == BUDGET.trials
    assert only(url).best_trial.params == {"backend": "fake", **kept.config}


def test_what_was_faster_only_within_noise_is_pruned_with_its_reason(db: Database, url: str) -> None:
    record = tuner(db, FakeBackend(slope_us=0.02), studies=Studies(url)).tune(SUBJECT)
    study = only(url)
    assert dict(record.config) == {"tile": 16, "unroll": 1}  # the default
    assert study.best_trial.params == {"backend": "fake", **record.config}
    pruned = study.get_trials(states=[TrialState.PRUNED])
    assert pruned and all(one.intermediate_values[0] <= study.best_value for one in pruned)
    reasons = {one.user_attrs["reason"] for one in pruned}
    assert reasons == {"no faster than the winner beyond noise", "not in the decision"}


def test_do_not_fuse_has_a_study_and_a_stored_answer_gets_no_second_one(db: Database, url: str) -> None:
    studies = Studies(url)
    slow = FakeSubject(eager_us=8.0)
    tuner(db, studies=studies).tune(slow)
    tuner(db, studies=studies).tune(slow)
    assert only(url).user_attrs["answer"] == "do not fuse"


def test_a_journal_file_is_named_by_its_path(db: Database, tmp_path: Path) -> None:
    path = tmp_path / "studies.log"
    record = tuner(db, studies=Studies(str(path))).tune(SUBJECT)
    study = only(JournalStorage(JournalFileBackend(str(path))))
    assert study.best_trial.params == {"backend": "fake", **record.config}


@pytest.mark.parametrize("where", ["", "nosuchdialect://host/db", "/no/such/folder/studies.log"])
def test_a_storage_that_cannot_be_opened_is_one_line(where: str) -> None:
    with pytest.raises(StudyError, match=r"^no studies can be kept in .*sqlite:///studies\.db$"):
        Studies(where)


def test_no_journal_is_written_into_an_sqlite_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    Database(path, "write").close()
    before = path.read_bytes()
    with pytest.raises(StudyError, match=f"written sqlite:///{path}"):
        Studies(str(path))
    assert path.read_bytes() == before


def test_a_study_that_cannot_be_written_costs_no_search(
    db: Database, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    studies = Studies(url)
    record = tuner(db, studies=studies).tune(SUBJECT)
    studies.add(replace(record, label="again"), ())
    studies.add(replace(record, label="again"), ())  # there is a study of this name
    assert "the study of again is not kept" in caplog.text
