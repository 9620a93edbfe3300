"""Processes that share a GPU tune a model: they take its regions and its whole step, and nothing is left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_samples import write_config

from fuseplan.planner.api.region_processes import processes_on
from fuseplan.planner.api.request import HowToTune, TuneRequest
from fuseplan.planner.api.tune import Tuned, tune_request
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import listed
from fuseplan.search.tune.time_account import TimeAccount

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_model_is_tuned_by_processes_that_share_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if processes_on("cuda") < 2:
        pytest.skip("one process has the GPU: there are too few cores, or too little of its memory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = ModelArguments(
        config=write_config(tmp_path, "llama"), layers=2, decode="1,2", prefill="16", kv_len=16, calls=False)
    account, db = TimeAccount(), tmp_path / "plans.db"
    request = TuneRequest("cuda", given, how=HowToTune(trials=1, seconds=0.2), db=db)
    (found,) = tune_request(request, account=account)
    assert isinstance(found, Tuned) and found.result is not None
    assert (found.warnings, found.failure) == ((), "")
    assert account.spent()["tuning in processes"].times > 2 and "screening" not in account.spent()
    assert {plan.source for _, plan in found.result.distinct()} == {"tuned"}
    assert len(found.steps) == 3
    with Database(db) as database:
        assert listed(database) == []
