"""Worker processes: isolation, time limits, restart, and an end when the parent ends."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_executor import InlineExecutor
from paths import SUPPORT
from worker_jobs import (
    LIMIT,
    PATIENCE_S,
    add,
    alive,
    child_that_hangs,
    crash,
    fail,
    hang,
    interrupt_and_hang,
    kill_parent,
    kill_parent_once,
    leave,
    leave_or_add,
    meet,
    touch,
    unpicklable,
    wait_for,
    wait_until_dead,
    where,
    whoami,
)

from fuseplan.search.workers.worker import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(compilers=2) as pool:
        yield pool


def test_a_job_returns_its_value(pool: WorkerPool) -> None:
    outcome = pool.call(add, 2, 3, limit_s=LIMIT)
    assert outcome.ok
    assert outcome.value == 5


def test_a_pool_without_work_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args))
    with WorkerPool(compilers=1) as idle:
        assert not list(idle.map(add, [], limit_s=LIMIT))
        idle.prefetch(add, [], limit_s=LIMIT)
    assert not started


def test_the_measuring_worker_is_another_process_and_stays(pool: WorkerPool) -> None:
    first, second = (pool.call(whoami, limit_s=LIMIT).value for _ in range(2))
    assert first == second
    assert first[0] != os.getpid()
    assert first[1] == torch.get_num_threads()


def test_compile_lanes_run_beside_each_other_in_order(pool: WorkerPool, tmp_path: Path) -> None:
    outcomes = pool.map(meet, [(str(tmp_path), "a", "b"), (str(tmp_path), "b", "a")], limit_s=LIMIT)
    assert [outcome.value for outcome in outcomes] == [True, True]
    assert [o.value for o in pool.map(add, [(n, 1) for n in range(7)], limit_s=LIMIT)] == [1, 2, 3, 4, 5, 6, 7]
    assert not list(pool.map(add, [], limit_s=LIMIT))
    assert next(pool.map(whoami, [()], limit_s=LIMIT)).value[1] == 1


def test_outcomes_are_given_while_others_compile(pool: WorkerPool, tmp_path: Path) -> None:
    outcomes = pool.map(meet, [(str(tmp_path), "a", "a"), (str(tmp_path), "b", "late")], limit_s=LIMIT)
    assert next(outcomes).value
    assert [one.value for one in pool.map(add, [(1, 1), (2, 2), (3, 3)], limit_s=LIMIT)] == [2, 4, 6]
    assert pool.call(touch, str(tmp_path / "late"), limit_s=LIMIT).ok
    assert [one.value for one in outcomes] == [True]


def test_a_job_that_takes_long_holds_up_no_outcome_of_another(pool: WorkerPool, tmp_path: Path) -> None:
    jobs = [(str(tmp_path), "slow", "go"), (str(tmp_path), "a", "a"), (str(tmp_path), "b", "b")]
    outcomes = pool.as_completed(meet, jobs, limit_s=LIMIT)
    assert [next(outcomes)[0], next(outcomes)[0]] == [1, 2]
    (tmp_path / "go").touch()
    assert [(number, one.value) for number, one in outcomes] == [(0, True)]
    assert not list(pool.as_completed(add, [], limit_s=LIMIT))


@pytest.mark.parametrize("way", [WorkerPool.map, WorkerPool.as_completed])
def test_arguments_that_cannot_be_sent_end_what_was_sent(way: Any, tmp_path: Path) -> None:
    with WorkerPool(compilers=2) as sending:
        worker, _ = sending.call(whoami, limit_s=LIMIT).value
        with pytest.raises((AttributeError, pickle.PicklingError)):
            list(way(sending, meet, [(str(tmp_path), "slow", "never"), (lambda: 0, "a", "a")], limit_s=LIMIT))
        wait_until_dead(worker)


def test_a_bound_worker_has_a_core_and_its_compilers_have_all() -> None:
    mine = os.sched_getaffinity(0)
    with WorkerPool(compilers=1, bind=True) as bound:
        assert bound.call(where, limit_s=LIMIT).value < mine or len(mine) == 1
        assert next(bound.map(where, [()], limit_s=LIMIT)).value == mine


def test_an_unbound_worker_may_run_anywhere(pool: WorkerPool) -> None:
    assert pool.call(where, limit_s=LIMIT).value == os.sched_getaffinity(0)


def test_a_pool_prefetches_beside_its_jobs(pool: WorkerPool, tmp_path: Path) -> None:
    pool.prefetch(touch, [(str(tmp_path / str(number)),) for number in range(5)], limit_s=LIMIT)
    assert pool.call(add, 1, 2, limit_s=LIMIT).value == 3
    wait_for(lambda: len(list(tmp_path.iterdir())) == 5)
    with WorkerPool(compilers=1) as fresh:
        fresh.prefetch(touch, [(str(tmp_path / "first"),)], limit_s=LIMIT)
        wait_for((tmp_path / "first").exists)
    InlineExecutor().prefetch(touch, [(str(tmp_path / "never"),)], limit_s=LIMIT)
    assert not (tmp_path / "never").exists()


def test_outcomes_of_submitted_jobs_find_who_asked(pool: WorkerPool) -> None:
    later = [pool.submit(add, number, 1, limit_s=LIMIT) for number in range(3)]
    failing = pool.submit(fail, limit_s=LIMIT)
    assert pool.call(add, 20, 3, limit_s=LIMIT).value == 23
    assert [one.value for one in pool.map(add, [(4, 5), (6, 7), (8, 9)], limit_s=LIMIT)] == [9, 13, 17]
    assert [later[number]().value for number in (2, 0, 1, 2)] == [3, 1, 2, 3]
    assert failing().failure


def test_submitted_jobs_end_with_the_supervisor(pool: WorkerPool, tmp_path: Path) -> None:
    both = tmp_path / "both are submitted"
    lost = pool.submit(kill_parent_once, str(both), limit_s=LIMIT)
    behind = pool.submit(add, 1, 1, limit_s=LIMIT)
    both.touch()
    assert "supervisor ended" in lost().failure and "supervisor ended" in behind().failure
    assert pool.submit(add, 1, 2, limit_s=LIMIT)().value == 3


def test_the_inline_executor_reports_like_the_pool() -> None:
    inline = InlineExecutor()
    assert inline.call(add, 1, 2, limit_s=1).value == 3
    assert inline.call(fail, "x", limit_s=1).failure == "ValueError: x"
    assert [o.value for o in inline.map(add, [(1, 1), (2, 2)], limit_s=1)] == [2, 4]
    inline.close()


# -- failures ---------------------------------------------------------------------------------------------


def test_an_exception_costs_the_job_only(pool: WorkerPool) -> None:
    before = pool.call(whoami, limit_s=LIMIT).value
    outcome = pool.call(fail, "no such tile", limit_s=LIMIT)
    assert not outcome.ok
    assert outcome.failure == "ValueError: no such tile"
    assert "pickle" in pool.call(unpicklable, limit_s=LIMIT).failure.lower()
    assert pool.call(whoami, limit_s=LIMIT).value == before


def test_a_device_error_ends_the_worker_that_has_it(pool: WorkerPool) -> None:
    before = pool.call(whoami, limit_s=LIMIT).value
    outcome = pool.call(fail, "CUDA error: an illegal memory access was encountered", limit_s=LIMIT)
    assert "illegal memory access" in outcome.failure
    assert pool.call(whoami, limit_s=LIMIT).value[0] != before[0]


def test_a_crash_is_named_and_the_next_job_runs(pool: WorkerPool) -> None:
    outcome = pool.call(crash, limit_s=LIMIT)
    assert outcome.failure == "crashed: killed by SIGSEGV: double free or corruption"
    assert pool.call(leave, 3, limit_s=LIMIT).failure == "crashed: exited with status 3"
    assert pool.call(add, 1, 1, limit_s=LIMIT).value == 2


def test_a_crash_in_one_lane_leaves_the_others_alone(pool: WorkerPool) -> None:
    outcomes = list(pool.map(leave_or_add, [(0,), (1,), (2,), (3,)], limit_s=LIMIT))
    assert [outcome.value for outcome in outcomes] == [0, None, 2, None]
    assert all("status 9" in outcomes[n].failure for n in (1, 3))


def test_a_hang_ends_at_the_limit(pool: WorkerPool) -> None:
    outcome = pool.call(hang, limit_s=0.3)
    assert outcome.failure == "no result within 0.3 s"
    assert pool.call(add, 1, 1, limit_s=LIMIT).value == 2


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_hanging_job_started_ends_with_it(pool: WorkerPool, tmp_path: Path, apart: bool) -> None:
    note, limit_s = tmp_path / "pid", 0.5
    while not note.exists():  # it may not have got that far
        assert not pool.call(child_that_hangs, str(note), apart, limit_s=limit_s).ok
        limit_s *= 2
    wait_until_dead(int(note.read_text()))


@pytest.mark.slow
def test_a_killed_worker_reads_as_out_of_memory(pool: WorkerPool) -> None:
    outcome = pool.call(os.kill, pool.call(whoami, limit_s=LIMIT).value[0], signal.SIGKILL, limit_s=LIMIT)
    assert "SIGKILL (out of memory?)" in outcome.failure


def test_a_killed_supervisor_is_replaced(pool: WorkerPool) -> None:
    worker = pool.call(whoami, limit_s=LIMIT).value[0]
    supervisor = pool.call(os.getppid, limit_s=LIMIT).value
    os.kill(supervisor, signal.SIGKILL)
    wait_until_dead(supervisor, worker)
    assert pool.call(add, 4, 4, limit_s=LIMIT).value == 8
    doomed = pool.call(kill_parent, limit_s=LIMIT)
    assert "supervisor ended" in doomed.failure
    assert pool.call(add, 4, 4, limit_s=LIMIT).value == 8


def test_an_interrupt_abandons_the_job_and_nothing_else(pool: WorkerPool) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.call(interrupt_and_hang, os.getpid(), limit_s=LIMIT)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert pool.call(add, 1, 2, limit_s=LIMIT).value == 3


# -- the end ----------------------------------------------------------------------------------------------


def test_a_pool_that_was_started_and_not_used_ends_at_once() -> None:
    idle = WorkerPool(compilers=1, preload=["worker_jobs:hang"])
    idle.start()
    process = idle._process
    assert process is not None
    idle.close()
    assert process.returncode == -signal.SIGKILL
    with WorkerPool(compilers=1) as used:
        used.start()
        assert used.call(add, 1, 2, limit_s=LIMIT).value == 3


PARENT = """
import os, signal, sys, time
# A shell starts background jobs with the interrupt ignored, and so would this process be.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
import worker_jobs
from fuseplan.search.workers.worker import WorkerPool
pool = WorkerPool(compilers=1)
worker = pool.call(worker_jobs.whoami, limit_s=600).value[0]
supervisor = pool.call(os.getppid, limit_s=600).value
print(worker, supervisor, flush=True)
pool.call(worker_jobs.hang, limit_s=3600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(SUPPORT)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    line = parent.stdout.readline()
    worker, supervisor = (int(word) for word in line.split())
    assert alive(worker)
    assert alive(supervisor)
    parent.send_signal(how)
    parent.wait(PATIENCE_S)
    wait_until_dead(worker, supervisor)
