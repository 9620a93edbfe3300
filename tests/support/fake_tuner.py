"""A tuner of fakes: in this process, on the virtual clock."""

from __future__ import annotations

import math
from typing import Any

from inline_executor import InlineExecutor
from search_fakes import CPU, FakeBackend, FakeSubject, ShortTimer
from worker_jobs import LIMIT

from fuseplan.kernels.ir.backend import Backend
from fuseplan.search.store.database import Database
from fuseplan.search.tune.tuner import Budget, Tuner

SUBJECT = FakeSubject()
#: What ends a search is the trials, however busy the machine is.
BUDGET = Budget(trials=30, seconds=math.inf, decide_s=0.002, job_limit_s=LIMIT)


def tuner(db: Database, *backends: Backend, **options: Any) -> Tuner:
    fields: dict[str, Any] = {"budget": BUDGET, "executor": InlineExecutor(), "timer": ShortTimer()}
    return Tuner(db, CPU, backends or (FakeBackend(),), "cpu-test", **(fields | options))
