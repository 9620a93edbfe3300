"""Several processes that tune for one device: the plans of one process, its answer, and what happens where one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fast_tunes
import pytest
import report_samples as samples
from model_samples import write_config

from fuseplan.planner.api import run
from fuseplan.planner.api.region_processes import RegionProcesses, processes_on
from fuseplan.planner.api.request import TuneRequest
from fuseplan.planner.api.tune import Tuned, tune_request
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.tuning.progress import TuneEvents
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import listed
from fuseplan.search.store.record import PlanRecord, RecordKey
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import ProgressEvent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fast_tunes.count_instead_of_timing(monkeypatch)
    fast_tunes.calibrate_never(monkeypatch)


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes tunes use two, that preload this."""

    def use(preload: str) -> None:
        monkeypatch.setattr(run, "processes_on", lambda kind: 2)
        monkeypatch.setattr(run, "RegionProcesses", partial(RegionProcesses, preload=(preload,)))

    return use


class Hears:
    """A progress that calls ``on_trial`` with each step of a search, and keeps what is noted."""

    def __init__(self, on_trial: Callable[[ProgressEvent], None] = lambda event: None) -> None:
        self.on_trial, self.notes = on_trial, list[str]()

    def on_graph(self, graph: DataflowGraph, undecided: Sequence[Region]) -> None: ...

    def on_region(self, workload: str, label: str, number: int, total: int) -> None: ...

    def status(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(lambda text: None)

    def tuning(self) -> AbstractContextManager[TuneEvents]:
        return nullcontext(self)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None: ...


def tuned(tmp_path: Path, db: Path, decode: str, **more: Any) -> Tuned:
    given = ModelArguments(config=write_config(tmp_path, "llama"), layers=2, decode=decode, kv_len=16, calls=False)
    (found,) = tune_request(TuneRequest("cpu", given, db=samples.known_machine(db)), **more)
    assert isinstance(found, Tuned)
    return found


def said(plan: PlanRecord) -> list[tuple[Any, ...]]:
    return sorted((one.ops, one.implementation, tuple(sorted(one.config.items())), one.workload) for one in plan.groups)


def decided(db: Path) -> dict[RecordKey, list[tuple[Any, ...]]]:
    with Database(db) as database:
        assert listed(database) == []
        return {plan.key: said(plan) for plan in database.plans()}


def test_two_processes_end_with_the_plans_of_one(tmp_path: Path, two_processes: Callable[[str], None]) -> None:
    expected = tuned(tmp_path, tmp_path / "alone.db", "1,2")
    two_processes("fast_tunes:count_here")
    account = TimeAccount()
    found = tuned(tmp_path, tmp_path / "two.db", "1,2", account=account)
    assert account.spent()["tuning in processes"].times > 2
    assert decided(tmp_path / "two.db") == decided(tmp_path / "alone.db") != {}
    assert found.result is not None and expected.result is not None
    for mine, theirs in zip(found.result.plans, expected.result.plans, strict=True):
        assert mine.workload == theirs.workload
        assert [one.region for one in mine.plan.regions] == [one.region for one in theirs.plan.regions]
        assert [said(one.record) for one in mine.plan.regions] == [said(one.record) for one in theirs.plan.regions]
        assert {one.source for one in mine.plan.regions} == {one.source for one in theirs.plan.regions}
    assert found.result.measured == expected.result.measured > 0
    assert found.steps["workload"].tolist() == expected.steps["workload"].tolist() != []


def test_what_processes_that_die_leave_is_done_here(tmp_path: Path, two_processes: Callable[[str], None]) -> None:
    expected = tuned(tmp_path, tmp_path / "alone.db", "1")
    two_processes("fast_tunes:die_at_each_region")
    heard = Hears()
    found = tuned(tmp_path, tmp_path / "two.db", "1", progress=heard)
    assert decided(tmp_path / "two.db") == decided(tmp_path / "alone.db") != {}
    assert heard.notes and all("killed by SIGKILL" in note for note in heard.notes)
    assert (found.warnings, found.failure) == (expected.warnings, expected.failure)


def test_an_interrupted_tune_leaves_no_lease_and_goes_on(tmp_path: Path, two_processes: Callable[[str], None]) -> None:
    two_processes("fast_tunes:count_here")

    def interrupt(event: ProgressEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, tmp_path / "two.db", "1", progress=Hears(interrupt))
    with Database(tmp_path / "two.db") as database:
        assert listed(database) == []
    found = tuned(tmp_path, tmp_path / "two.db", "1")
    assert found.result is not None and {one.source for _, one in found.result.distinct()} == {"tuned"}


def test_cpus_are_tuned_by_one_process() -> None:
    assert processes_on("cpu") == 1
