"""Failures during a tune of fakes cost one config; a tune that is killed resumes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_tuner import SUBJECT, tuner
from inline_executor import InlineExecutor
from paths import SUPPORT
from search_fakes import FakeBackend, FakeSubject

from fuseplan.kernels.ir.backend import config_key
from fuseplan.search.errors import SubjectError
from fuseplan.search.store import limits, maintenance
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import Trial, TuningRecord
from fuseplan.search.workers.worker import Outcome, WorkerPool


@pytest.fixture
def db() -> Database:
    return Database("sqlite://")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(compilers=2) as pool:
        yield pool


def test_every_finished_trial_is_checked_and_failures_cost_only_themselves(db: Database) -> None:
    faults = {
        "tile=128,unroll=4": "nan",
        "tile=128,unroll=2": "wrong",
        "tile=64,unroll=4": "raise",
        "tile=256,unroll=4": "build",
        "tile=64,unroll=2": "spill",
        "tile=16,unroll=8": "after",
    }
    record = tuner(db, FakeBackend(faults=faults)).tune(SUBJECT)
    assert record.fuse
    assert record.fused is not None
    assert record.fused.median_us == pytest.approx(15.0)
    assert dict(record.config) == {"tile": 128, "unroll": 8}
    reasons = {config_key(r.config): r.reason for r in record.rejected}
    assert set(reasons) == set(faults)
    assert "NaN" in reasons["tile=128,unroll=4"]
    assert "wrong result: output 0" in reasons["tile=128,unroll=2"]
    assert reasons["tile=64,unroll=4"] == "RuntimeError: launch failed"
    assert "does not compile: BuildError: fake: syntax error" in reasons["tile=256,unroll=4"]
    assert reasons["tile=64,unroll=2"] == "spills 64 bytes of registers"
    assert "written outside" in reasons["tile=16,unroll=8"]
    assert record.compiled == 18
    assert record.measured == 13


def test_spilling_no_more_than_the_default_is_no_reason(db: Database) -> None:
    faults = {"tile=16,unroll=1": "spill", "tile=128,unroll=4": "spill"}
    record = tuner(db, FakeBackend(faults=faults)).tune(SUBJECT)
    assert dict(record.config) == {"tile": 128, "unroll": 4}
    assert record.rejected == ()


def test_a_failing_default_leaves_the_challengers(db: Database) -> None:
    record = tuner(db, FakeBackend(faults={"tile=16,unroll=1": "wrong"})).tune(SUBJECT)
    assert dict(record.config) == {"tile": 128, "unroll": 4}
    assert "default" not in [finalist.name for finalist in record.finalists]
    assert record.default_gain == 0.0


def test_no_working_kernel_means_do_not_fuse(db: Database) -> None:
    tiles = {"tiles": (16,), "unrolls": (1, 2)}
    record = tuner(db, FakeBackend(faults={"tile=16,unroll=1": "nan", "tile=16,unroll=2": "nan"}, best=(0, 0), **tiles)
                   ).tune(SUBJECT)
    assert not record.fuse
    assert (record.backend, record.fused, record.gain) == ("", None, 0.0)
    assert record.unfused.median_us == pytest.approx(100.0)
    assert "no kernel works: wrong result" in record.evidence.reason
    assert [trial.error for trial in db.trials(record.key)] == [limits.WORST_ERROR] * 2
    assert maintenance.verify_database(db) == []


def test_a_subject_whose_chain_fails_is_an_error(db: Database) -> None:
    with pytest.raises(SubjectError, match=r"muladd 3x127: cannot be tuned: .*the chain does not run"):
        tuner(db).tune(FakeSubject(broken="eager"))


def test_a_decisive_run_that_fails_is_repeated_with_less(db: Database) -> None:
    class Fragile(InlineExecutor):
        """Fails to decide between more than ``most`` kernels."""

        def __init__(self, most: int) -> None:
            self.most = most

        def call(self, function: Any, *args: Any, limit_s: float) -> Outcome:
            if function.__name__ == "decide_finalists" and len(args[2]) > self.most:
                return Outcome(failure="crashed: killed by SIGSEGV")
            return super().call(function, *args, limit_s=limit_s)

    record = tuner(db, executor=Fragile(1)).tune(SUBJECT)
    assert record.fuse
    assert dict(record.config) == {"tile": 16, "unroll": 1}
    assert "the decisive run failed: crashed" in record.rejected[0].reason
    record = tuner(db, executor=Fragile(0)).tune(FakeSubject(key="b"))
    assert not record.fuse
    assert len(record.finalists) == 1
    with pytest.raises(SubjectError, match="cannot be timed"):
        tuner(db, executor=Fragile(-1)).tune(FakeSubject(key="c"))


class Shaky(InlineExecutor):
    """Its decisive runs have this much noise."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def call(self, function: Any, *args: Any, limit_s: float) -> Outcome:
        outcome = super().call(function, *args, limit_s=limit_s)
        if function.__name__ != "decide_finalists":
            return outcome
        return Outcome(replace(outcome.value, contest=replace(outcome.value.contest, noise=self.noise)))


def test_noise_is_no_verdict_and_the_next_tune_asks_again(db: Database) -> None:
    """The default takes 85 of 100 us, which noise may look like; the second tune is quiet, and finds one of 60."""
    slow = FakeBackend(floor_us=60.0)
    first = tuner(db, slow, executor=Shaky(1.0)).tune(SUBJECT)
    assert first.undecided and not first.fuse
    assert "no verdict: a gain of 15.0%" in first.evidence.reason and "noise of 100%" in first.evidence.reason
    assert db.get_record(first.key).status == "stale" and db.get_record(first.key).hit is None
    second = tuner(db, slow, executor=Shaky(0.01)).tune(SUBJECT)
    assert second.fuse and not second.undecided
    assert db.get_record(first.key).hit == second


def test_a_kernel_that_is_many_times_faster_is_fused_whatever_the_noise(db: Database) -> None:
    record = tuner(db, executor=Shaky(1.03)).tune(SUBJECT)  # 10 of 100 us
    assert record.fuse and not record.undecided and record.gain > record.threshold


def test_a_kernel_that_is_wrong_on_fresh_inputs_loses_its_place(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuseplan.search.timing.verify import CheckResult, check_result
    from fuseplan.search.workers import jobs

    def only_first_seed(kernel: Any, subject: Any, oracle: Any, device: str) -> CheckResult:
        verdict = check_result(kernel, subject, oracle, device)
        fresh = oracle.inputs[0][0, 0] != subject.make_inputs(0, device)[0][0, 0]
        return replace(verdict, ok=False, reason="differs") if fresh and kernel._us == 10.0 else verdict

    monkeypatch.setattr(jobs, "check_result", only_first_seed)
    record = tuner(db).tune(SUBJECT)
    assert record.fused is not None
    assert record.fused.median_us == pytest.approx(15.0)
    assert [r.reason for r in record.rejected] == ["differs"]


# -- in worker processes ----------------------------------------------------------------------------------


class EndsHangs:
    """A pool whose time limit runs out for kernels that hang, and for no other, however busy the machine is.

    Args:
        pool: Where jobs run.
        hanging: Keys of the configs that never end.
    """

    def __init__(self, pool: WorkerPool, *hanging: str) -> None:
        self._pool, self._hanging = pool, hanging

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Outcome:
        configs = [config_key(arg.config) for arg in args if isinstance(arg, Trial)]
        return self._pool.call(function, *args, limit_s=0.5 if set(configs) & set(self._hanging) else limit_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def test_hanging_and_crashing_kernels_cost_only_their_config(db: Database, pool: WorkerPool) -> None:
    faults = {"tile=16,unroll=1": "hang", "tile=32,unroll=1": "crash", "tile=32,unroll=2": "exit"}
    backend = FakeBackend(faults=faults, tiles=(16, 32, 64), unrolls=(1, 2), best=(2, 1))
    record = tuner(db, backend, executor=EndsHangs(pool, "tile=16,unroll=1")).tune(SUBJECT)
    assert dict(record.config) == {"tile": 64, "unroll": 2}
    reasons = {config_key(r.config): r.reason for r in record.rejected}
    assert reasons["tile=16,unroll=1"].startswith("no result within 0.5 s (")  # with its size, and what allows more
    assert "--job-limit" in reasons["tile=16,unroll=1"]
    assert "SIGSEGV" in reasons["tile=32,unroll=1"]
    assert "status 3" in reasons["tile=32,unroll=2"]
    assert record.measured == 3


@pytest.mark.slow
def test_one_pool_serves_many_subjects(db: Database, pool: WorkerPool) -> None:
    backend = FakeBackend(tiles=(16, 32), unrolls=(1, 2), best=(1, 1))
    with tuner(db, backend, executor=pool) as shared:
        records = [shared.tune(FakeSubject(key=f"s{n}", cols=n)) for n in (1, 3, 4097)]
    assert [record.fuse for record in records] == [True] * 3
    assert pool.call(os.getpid, limit_s=20).ok


TUNE = """
import math, os, signal, sys
sys.path.insert(0, sys.argv[1])
from search_fakes import CPU, FakeBackend, FakeSubject, ShortTimer
from fuseplan.search.store.database import Database
from fuseplan.search.store import leases
from fuseplan.search.tune.tuner import Budget, Tuner
from inline_executor import InlineExecutor

class Killed(FakeBackend):
    "Kills its process a number of calls after a number of compilations."
    left = []
    def prepare(self, *args):
        self.left[0] -= 1
        if self.left[0] == 0:
            sys.setprofile(self.count)
        return super().prepare(*args)
    def count(self, frame, event, arg):
        self.left[1] -= event == "call"
        if self.left[1] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

def tune():
    budget = Budget(trials=30, seconds=math.inf, decide_s=0.002)
    backend, executor = Killed(journal=sys.argv[3]), InlineExecutor()
    tuner = Tuner(Database(sys.argv[2]), CPU, (backend,), "cpu-test", budget, executor=executor, timer=ShortTimer())
    leases.LASTS_S = 1.0  # the next tune waits for the end of a killed one's
    for number in range(3):
        tuner.tune(FakeSubject(key=f"subject-{number}"))

for line in sys.stdin:  # forked from a process that has imported all that they need
    if not (child := os.fork()):
        Killed.left = [int(word) for word in line.split()]
        tune()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def tune(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Exit status of a tune of three subjects, killed ``calls`` calls after so many compilations; 0 for never."""
    command = [sys.executable, "-c", TUNE, str(SUPPORT), str(tmp_path / "tuning.db"), str(tmp_path / "journal")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        orders, statuses = process.stdin, process.stdout
        assert orders is not None and statuses is not None

        def run(compilations: int = 0, calls: int = 0) -> int:
            print(compilations, calls, file=orders, flush=True)
            return int(statuses.readline())

        yield run


def test_kill_nine_loses_nothing_that_was_finished(tmp_path: Path, tune: Callable[..., int]) -> None:
    path, journal = tmp_path / "tuning.db", tmp_path / "journal"
    chance = random.Random(5)
    seen: list[TuningRecord] = []
    # Of 57 compilations, and one more for each kill: in the first tune, where it ends, in the second, in the third.
    kills = (4, 17, 11, 16)
    for number in kills:
        assert tune(number, chance.randrange(3000)) == -signal.SIGKILL
        database = Database(path)
        assert maintenance.verify_database(database) == []
        records = list(database.records())
        assert [record for record in seen if record not in records] == []
        seen = records
    assert len(seen) >= 2
    assert tune() == 0
    database = Database(path)
    records = list(database.records())
    assert [record for record in seen if record not in records] == []
    assert [dict(record.config) for record in records] == [{"tile": 128, "unroll": 4}] * 3
    assert maintenance.verify_database(database) == []
    assert all(len(database.trials(record.key)) == 19 for record in records)
    # At most one compile per kill was under way and had to be repeated.
    assert 3 * 19 <= journal.read_text().count("compile ") <= 3 * 19 + len(kills)
