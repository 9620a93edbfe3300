"""Worker processes: isolation, time limits, restart, and an end when the parent ends."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from fuseplan.search.supervisor import BACKGROUND, CRASHED, OK, RAISED, TIMED_OUT, Request, Supervisor
from fuseplan.search.worker import InlineExecutor, WorkerPool

LIMIT = 30.0


def add(a: int, b: int) -> int:
    return a + b


def whoami() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def meet(folder: str, name: str, other: str) -> bool:
    """Only returns True when both parties are there at the same time."""
    Path(folder, name).touch()
    for _ in range(1000):
        if Path(folder, other).exists():
            return True
        time.sleep(0.01)
    return False


def fail(text: str) -> None:
    raise ValueError(text)


def crash() -> None:
    sys.stderr.write("double free or corruption\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(status: int) -> None:
    os._exit(status)


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def child_that_hangs(path: str) -> None:
    """As a compiler would: a process of the worker's own, which must not outlive it."""
    process = subprocess.Popen(["sleep", "3600"])
    Path(path).write_text(str(process.pid))
    process.wait()


def unpicklable() -> object:
    return lambda: None


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def wait_until_dead(*pids: int) -> None:
    for _ in range(500):
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.02)
    raise AssertionError(f"still alive: {[pid for pid in pids if alive(pid)]}")


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
        assert idle.map(add, [], limit_s=LIMIT) == []
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
    assert pool.map(add, [], limit_s=LIMIT) == []
    assert pool.map(whoami, [()], limit_s=LIMIT)[0].value[1] == 1


def where() -> set[int]:
    torch.ones(1 << 20).sum()
    return os.sched_getaffinity(0)


def test_a_bound_worker_has_a_core_and_its_compilers_have_all() -> None:
    mine = os.sched_getaffinity(0)
    with WorkerPool(compilers=1, bind=True) as bound:
        assert bound.call(where, limit_s=LIMIT).value < mine or len(mine) == 1
        assert bound.map(where, [()], limit_s=LIMIT)[0].value == mine


def test_an_unbound_worker_may_run_anywhere(pool: WorkerPool) -> None:
    assert pool.call(where, limit_s=LIMIT).value == os.sched_getaffinity(0)


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
    outcomes = pool.map(leave_or_add, [(0,), (1,), (2,), (3,)], limit_s=LIMIT)
    assert [outcome.value for outcome in outcomes] == [0, None, 2, None]
    assert all("status 9" in outcomes[n].failure for n in (1, 3))


def leave_or_add(number: int) -> int:
    if number % 2:
        os._exit(9)
    return number


def test_a_hang_ends_at_the_limit(pool: WorkerPool) -> None:
    start = time.monotonic()
    outcome = pool.call(hang, limit_s=0.3)
    assert outcome.failure == "no result within 0.3 s"
    assert time.monotonic() - start < 10
    assert pool.call(add, 1, 1, limit_s=LIMIT).value == 2


def test_what_a_hanging_job_started_ends_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert not pool.call(child_that_hangs, str(note), limit_s=0.5).ok
    wait_until_dead(int(note.read_text()))


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


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


def test_an_interrupt_abandons_the_job_and_nothing_else(pool: WorkerPool) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            pool.call(hang, limit_s=LIMIT)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert pool.call(add, 1, 2, limit_s=LIMIT).value == 3


def touch(path: str) -> None:
    Path(path).touch()


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


PARENT = """
import os, signal, sys, time
# A shell starts background jobs with the interrupt ignored, and so would this process be.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
import test_worker
from fuseplan.search.worker import WorkerPool
pool = WorkerPool(compilers=1)
worker = pool.call(test_worker.whoami, limit_s=60).value[0]
supervisor = pool.call(os.getppid, limit_s=60).value
print(worker, supervisor, flush=True)
pool.call(test_worker.hang, limit_s=3600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(Path(__file__).parent)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    line = parent.stdout.readline()
    worker, supervisor = (int(word) for word in line.split())
    assert alive(worker)
    assert alive(supervisor)
    parent.send_signal(how)
    parent.wait(20)
    wait_until_dead(worker, supervisor)


def test_the_inline_executor_reports_like_the_pool() -> None:
    inline = InlineExecutor()
    assert inline.call(add, 1, 2, limit_s=1).value == 3
    assert inline.call(fail, "x", limit_s=1).failure == "ValueError: x"
    assert [o.value for o in inline.map(add, [(1, 1), (2, 2)], limit_s=1)] == [2, 4]
    inline.close()


# -- the supervisor, driven directly ----------------------------------------------------------------------


class Supervised:
    """A supervisor in a thread of this process, so that its steps can be watched."""

    def __init__(self) -> None:
        self.pipe, far = Pipe()
        self.supervisor = Supervisor(far, threads=1)
        self.thread = threading.Thread(target=self.supervisor.run, daemon=True)
        self.thread.start()

    def ask(
        self, job: int, function: Callable[..., object], *args: object, lane: int = 0, limit_s: float = 20.0,
        spare: bool = False,
    ) -> None:
        self.pipe.send(Request(lane, job, limit_s, pickle.dumps((function, args)), spare))

    def answer(self) -> tuple[int, str, object]:
        assert self.pipe.poll(20)
        job, state, payload = self.pipe.recv()
        return job, state, pickle.loads(payload) if state == OK else payload

    def end(self) -> None:
        # The workers, forked from this process, hold copies of this end: closing it alone would not be seen.
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self.pipe.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    running = Supervised()
    yield running
    running.end()


def test_replies_name_their_job_and_state(supervised: Supervised) -> None:
    supervised.ask(7, add, 2, 3)
    assert supervised.answer() == (7, OK, 5)
    supervised.ask(8, fail, "no")
    assert supervised.answer() == (8, RAISED, "ValueError: no")
    supervised.ask(9, crash)
    assert supervised.answer() == (9, CRASHED, "killed by SIGSEGV")
    supervised.ask(10, leave, 4)
    assert supervised.answer() == (10, CRASHED, "exited with status 4")
    supervised.ask(11, hang, limit_s=0.2)
    assert supervised.answer() == (11, TIMED_OUT, "")
    supervised.ask(12, fail, "CUDA error: misaligned address")
    assert supervised.answer() == (12, RAISED, "ValueError: CUDA error: misaligned address")
    supervised.ask(13, add, 1, 1)
    assert supervised.answer() == (13, OK, 2)


def test_lanes_have_their_own_deadlines(supervised: Supervised) -> None:
    supervised.ask(1, hang, lane=1, limit_s=0.4)
    supervised.ask(2, add, 1, 1, lane=2)
    assert supervised.answer() == (2, OK, 2)
    assert supervised.answer() == (1, TIMED_OUT, "")


def test_a_worker_killed_while_idle_is_replaced(supervised: Supervised) -> None:
    supervised.ask(1, os.getpid)
    _, _, pid = supervised.answer()
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    for _ in range(500):
        if not supervised.supervisor._lanes:
            break
        time.sleep(0.01)
    supervised.ask(2, add, 1, 1)
    assert supervised.answer() == (2, OK, 2)


def test_background_jobs_answer_nobody_and_hold_up_nobody(supervised: Supervised, tmp_path: Path) -> None:
    supervised.ask(1, hang, lane=BACKGROUND, limit_s=0.3)
    for number in range(4):
        supervised.ask(1, touch, str(tmp_path / str(number)), lane=BACKGROUND)
    supervised.ask(1, crash, lane=BACKGROUND)
    supervised.ask(2, add, 1, 1)
    assert supervised.answer() == (2, OK, 2)
    for number in range(4):
        wait_for(lambda number=number: (tmp_path / str(number)).exists())
    supervised.ask(3, add, 2, 2)
    assert supervised.answer() == (3, OK, 4)


def journal(folder: str, name: str, gate: str = "") -> str:
    """Note that this ran, once ``gate`` is open."""
    while gate and not Path(folder, gate).exists():
        time.sleep(0.005)
    with Path(folder, "journal").open("a") as file:
        file.write(f"{name}\n")
    return name


def test_a_busy_background_worker_gets_no_second_job_and_spare_jobs_wait(
    supervised: Supervised, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    supervised.ask(-1, journal, folder, "first", "gate", lane=BACKGROUND)
    supervised.ask(-1, journal, folder, "spare", lane=BACKGROUND, spare=True)
    supervised.ask(-1, journal, folder, "second", lane=BACKGROUND)
    supervised.ask(2, add, 1, 1)
    assert supervised.answer() == (2, OK, 2)
    assert [len(queue) for queue in (supervised.supervisor._backlog, supervised.supervisor._spare)] == [1, 1]
    (tmp_path / "gate").touch()
    ran = tmp_path / "journal"
    wait_for(lambda: ran.exists() and ran.read_text().splitlines() == ["first", "second", "spare"])


def test_a_background_job_that_hangs_is_ended_in_time(supervised: Supervised, tmp_path: Path) -> None:
    supervised.ask(-1, hang, lane=BACKGROUND, limit_s=0.3)
    supervised.ask(-1, touch, str(tmp_path / "after"), lane=BACKGROUND)
    wait_for((tmp_path / "after").exists)


def test_who_wants_what_the_background_is_at_gets_that_result(supervised: Supervised, tmp_path: Path) -> None:
    folder = str(tmp_path)
    supervised.ask(-1, journal, folder, "once", "gate", lane=BACKGROUND)
    supervised.ask(-1, journal, folder, "queued", lane=BACKGROUND)
    for job in (4, 5):
        supervised.ask(job, journal, folder, "once", "gate", lane=job - 3)
    supervised.ask(6, journal, folder, "queued", lane=3)  # nobody is at it yet: it runs now, and not again
    assert supervised.answer() == (6, OK, "queued")
    (tmp_path / "gate").touch()
    assert supervised.answer() == (4, OK, "once")
    assert supervised.answer() == (5, OK, "once")
    supervised.ask(7, add, 1, 1)
    assert supervised.answer() == (7, OK, 2)
    assert (tmp_path / "journal").read_text().splitlines() == ["queued", "once"]


def test_a_job_that_the_background_fails_at_is_tried_again(supervised: Supervised) -> None:
    supervised.ask(-1, hang, lane=BACKGROUND, limit_s=0.5)
    supervised.ask(4, hang, lane=1, limit_s=0.5)
    assert supervised.answer() == (4, TIMED_OUT, "")
    supervised.ask(5, crash, lane=1)
    assert supervised.answer() == (5, CRASHED, "killed by SIGSEGV")


def test_a_pool_that_was_started_and_not_used_ends_at_once() -> None:
    idle = WorkerPool(compilers=1, preload=["test_worker:hang"])
    idle.start()
    process = idle._process
    assert process is not None
    idle.close()
    assert process.returncode == -signal.SIGKILL
    with WorkerPool(compilers=1) as used:
        used.start()
        assert used.call(add, 1, 2, limit_s=LIMIT).value == 3


def test_a_pool_prefetches_beside_its_jobs(pool: WorkerPool, tmp_path: Path) -> None:
    pool.prefetch(touch, [(str(tmp_path / str(number)),) for number in range(5)], limit_s=LIMIT)
    assert pool.call(add, 1, 2, limit_s=LIMIT).value == 3
    wait_for(lambda: len(list(tmp_path.iterdir())) == 5)
    with WorkerPool(compilers=1) as fresh:
        fresh.prefetch(touch, [(str(tmp_path / "first"),)], limit_s=LIMIT)
        wait_for((tmp_path / "first").exists)
    InlineExecutor().prefetch(touch, [(str(tmp_path / "never"),)], limit_s=LIMIT)
    assert not (tmp_path / "never").exists()
