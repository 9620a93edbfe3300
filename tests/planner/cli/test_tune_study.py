"""``plan tune --study``: the searches of a tune, opened with Optuna."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
import report_samples as samples
from inline_executor import InlineExecutor

from fuseplan.planner.cli import main
from fuseplan.search.store.database import Database
from fuseplan.search.tune import tuner


def test_the_best_trial_of_a_study_is_the_stored_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "make_pool", lambda _: InlineExecutor())
    path, url = tmp_path / "tuning.db", f"sqlite:///{tmp_path / 'studies.db'}"
    samples.known_machine(path)
    line = f"tune --pattern add_rms_norm --shape 32x512 --device cpu --trials 2 --seconds 0.1 --db {path} --study {url}"
    assert main.run(line.split()) == 0
    with Database(path, mode="read") as database:
        records = {record.key.workload: record for record in database.records() if record.backend}
    studies = [optuna.load_study(study_name=name, storage=url) for name in optuna.get_all_study_names(url)]
    assert {study.user_attrs["key"] for study in studies} == set(records) != set()
    for study in studies:
        assert len(study.trials) <= 2
        record = records[study.user_attrs["key"]]
        assert study.study_name.startswith(f"{record.label} on {record.key.device}, eager [")
        assert study.best_trial.params == {"backend": record.backend, **record.config}
        assert study.best_trial.user_attrs["decided_us"] == record.best_us or not record.fuse
    assert_opens_in_the_dashboard(url, len(studies[0].trials), studies[0].study_name)


def assert_opens_in_the_dashboard(url: str, trials: int, name: str) -> None:
    """Ask optuna-dashboard, as a browser would, for the studies and for one of them."""
    dashboard = pytest.importorskip("optuna_dashboard")
    app = dashboard.wsgi(optuna.storages.RDBStorage(url))

    def ask(path: str) -> Any:
        environ: dict[str, Any] = {"PATH_INFO": path}
        setup_testing_defaults(environ)
        answered = []
        body = b"".join(app(environ, lambda status, headers, *rest: answered.append(status)))
        assert answered == ["200 OK"]
        return json.loads(body)

    listed = {study["study_name"]: study["study_id"] for study in ask("/api/studies")["study_summaries"]}
    shown = ask(f"/api/studies/{listed[name]}")
    assert len(shown["trials"]) == trials
    assert {param["name"] for trial in shown["trials"] for param in trial["params"]} >= {"backend"}
