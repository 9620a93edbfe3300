"""A tuner of fakes: in this process, on the virtual clock."""

from __future__ import annotations

from typing import Any

from search_fakes import CPU, FakeBackend, FakeSubject, ShortTimer

from fuseplan.kernels.backend import Backend
from fuseplan.search.database import Database
from fuseplan.search.tuner import Budget, Tuner
from fuseplan.search.worker import InlineExecutor

SUBJECT = FakeSubject()
BUDGET = Budget(trials=30, seconds=60.0, decide_s=0.002, job_limit_s=20.0)


def tuner(db: Database, *backends: Backend, **options: Any) -> Tuner:
    fields: dict[str, Any] = {"budget": BUDGET, "executor": InlineExecutor(), "timer": ShortTimer()}
    return Tuner(db, CPU, backends or (FakeBackend(),), "cpu-test", **(fields | options))
