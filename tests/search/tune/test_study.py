"""Searches as Optuna studies: what a storage holds is what the search did, and the search does not depend on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from fake_tuner import SUBJECT, tuner
from optuna.trial import TrialState

from fuseplan.search.errors import StudyError
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import TuningRecord
from fuseplan.search.tune.study import Studies, study_name


def searched(studies: Studies | None = None) -> TuningRecord:
    return tuner(Database("sqlite://"), studies=studies).tune(SUBJECT)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_the_best_trial_of_a_study_is_the_winner(tmp_path: Path, kind: str) -> None:
    where = f"sqlite:///{tmp_path}/studies.db" if kind == "sqlite" else str(tmp_path / "studies.log")
    record = searched(Studies(where))
    storage = where if kind == "sqlite" else optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(where))
    (name,) = optuna.get_all_study_names(storage)
    assert name == study_name(record) and record.label in name and record.key.device in name
    study = optuna.load_study(study_name=name, storage=storage)
    assert len(study.trials) == record.measured == len({str(sorted(one.params.items())) for one in study.trials})
    best = dict(study.best_trial.params)
    assert best.pop("backend") == record.backend and best == dict(record.config)
    assert study.user_attrs["answer"] == "fuse" and study.user_attrs["unfused_us"] == record.unfused.median_us
    assert all(one.state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL) for one in study.trials)


def test_a_search_is_the_same_without_a_study(tmp_path: Path) -> None:
    plain, kept = searched(), searched(Studies(f"sqlite:///{tmp_path}/studies.db"))
    for name in ("key", "fuse", "backend", "config", "enumerated", "compiled", "measured", "rejected", "refusals"):
        assert getattr(plain, name) == getattr(kept, name)
    assert plain.gain == pytest.approx(kept.gain)


def test_each_search_is_a_study_of_its_own(tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path}/studies.db"
    studies = Studies(where)
    record = searched(studies)
    for second in range(3):
        created = f"2026-01-01T00:00:0{second}+00:00"
        studies.add(replace(record, evidence=replace(record.evidence, created=created)), [])
    assert len(optuna.get_all_study_names(where)) == 4


@pytest.mark.parametrize("where", ["sqlite:////no/such/folder/s.db", "nonsense://x", "/no/such/folder/studies.log"])
def test_a_storage_that_cannot_be_opened_is_named(where: str) -> None:
    with pytest.raises(StudyError, match=r"no studies can be kept in .*; name a file, or a URL"):
        Studies(where)


def test_a_study_that_cannot_be_written_costs_no_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    studies = Studies(f"sqlite:///{tmp_path}/studies.db")
    record = searched(studies)
    with caplog.at_level(logging.WARNING):
        studies.add(record, [])  # there is a study of that name
    assert "is not kept" in caplog.text
