"""The supervisor of worker processes, driven directly: replies, deadlines, jobs in the background."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest
from worker_jobs import (
    LIMIT,
    PATIENCE_S,
    add,
    crash,
    fail,
    go_on_then_hang,
    hang,
    journal,
    leave,
    meet,
    touch,
    wait_for,
)

from fuseplan.search.workers.supervisor import BACKGROUND, CRASHED, OK, RAISED, TIMED_OUT, Request, Supervisor

#: A job, and its lane, that no test uses.
ASIDE = 99


class Supervised:
    """A supervisor in a thread of this process, watched step by step; limits run out when a test says so."""

    def __init__(self, turn: Path | None = None) -> None:
        self.now = 0.0
        self.pipe, far = Pipe()
        place = str(turn) if turn is not None else None
        self.supervisor = Supervisor(far, threads=1, clock=lambda: self.now, turn=place)
        self.thread = threading.Thread(target=self.supervisor.run, daemon=True)
        self.thread.start()

    def ask(
        self, job: int, function: Callable[..., object], *args: object, lane: int = 0, limit_s: float = LIMIT,
        spare: bool = False,
    ) -> None:
        self.pipe.send(Request(lane, job, limit_s, pickle.dumps((function, args)), spare))

    def pass_time(self, seconds: float) -> list[tuple[int, str, object]]:
        """Let limits run out, for the jobs asked for before; what is answered meanwhile."""
        self.ask(ASIDE, add, 0, 0, lane=ASIDE)
        answers = [self.answer()]
        while answers[-1][0] != ASIDE:
            answers.append(self.answer())
        self.now += seconds
        self.ask(ASIDE, add, 0, 0, lane=ASIDE)  # has the supervisor look at its clock
        answers.append(self.answer())
        while answers[-1][0] != ASIDE:
            answers.append(self.answer())
        return [one for one in answers if one[0] != ASIDE]

    def answer(self) -> tuple[int, str, object]:
        assert self.pipe.poll(PATIENCE_S)
        job, state, payload = self.pipe.recv()
        return job, state, pickle.loads(payload) if state == OK else payload

    def end(self) -> None:
        # The workers, forked from this process, hold copies of this end: closing it alone would not be seen.
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self.pipe.close()
        self.thread.join(PATIENCE_S)
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
    supervised.ask(11, hang, limit_s=2.0)
    assert supervised.pass_time(2.0) == [(11, TIMED_OUT, "")]
    supervised.ask(12, fail, "CUDA error: misaligned address")
    assert supervised.answer() == (12, RAISED, "ValueError: CUDA error: misaligned address")
    supervised.ask(13, add, 1, 1)
    assert supervised.answer() == (13, OK, 2)


def test_lanes_have_their_own_deadlines(supervised: Supervised) -> None:
    supervised.ask(1, hang, lane=1, limit_s=4.0)
    supervised.ask(2, hang, lane=2, limit_s=6.0)
    supervised.ask(3, add, 1, 1, lane=3, limit_s=1.0)
    assert supervised.answer() == (3, OK, 2)
    assert supervised.pass_time(3.0) == []
    assert supervised.pass_time(1.0) == [(1, TIMED_OUT, "")]
    assert supervised.pass_time(2.0) == [(2, TIMED_OUT, "")]


def test_a_worker_killed_while_idle_is_replaced(supervised: Supervised) -> None:
    supervised.ask(1, os.getpid)
    _, _, pid = supervised.answer()
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not supervised.supervisor._lanes)
    supervised.ask(2, add, 1, 1)
    assert supervised.answer() == (2, OK, 2)


# -- jobs in the background -------------------------------------------------------------------------------


def test_background_jobs_answer_nobody_and_hold_up_nobody(supervised: Supervised, tmp_path: Path) -> None:
    supervised.ask(1, hang, lane=BACKGROUND, limit_s=3.0)
    for number in range(4):
        supervised.ask(1, touch, str(tmp_path / str(number)), lane=BACKGROUND)
    supervised.ask(1, crash, lane=BACKGROUND)
    supervised.ask(2, add, 1, 1)
    assert supervised.answer() == (2, OK, 2)
    assert not list(tmp_path.iterdir())
    assert supervised.pass_time(3.0) == []
    for number in range(4):
        wait_for(lambda number=number: (tmp_path / str(number)).exists())
    supervised.ask(3, add, 2, 2)
    assert supervised.answer() == (3, OK, 4)


def test_a_busy_background_worker_gets_no_second_job_and_spare_jobs_wait(
    supervised: Supervised, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    supervised.ask(-1, journal, folder, "first", "gate", lane=BACKGROUND)
    supervised.ask(-1, journal, folder, "spare", lane=BACKGROUND, spare=True)
    supervised.ask(-1, journal, folder, "second", lane=BACKGROUND)
    supervised.ask(2, add, 1, 1)
    assert supervised.answer() == (2, OK, 2)
    assert [request.spare for request in supervised.supervisor._backlog] == [True, False]
    (tmp_path / "gate").touch()
    ran = tmp_path / "journal"
    wait_for(lambda: ran.exists() and ran.read_text().splitlines() == ["first", "second", "spare"])


def test_a_background_job_that_hangs_is_ended_in_time(supervised: Supervised, tmp_path: Path) -> None:
    supervised.ask(-1, hang, lane=BACKGROUND, limit_s=3.0)
    supervised.ask(-1, touch, str(tmp_path / "after"), lane=BACKGROUND)
    assert supervised.pass_time(3.0) == []
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
    supervised.ask(-1, hang, lane=BACKGROUND, limit_s=3.0)
    supervised.ask(4, hang, lane=1, limit_s=5.0)
    assert supervised.pass_time(3.0) == []
    assert supervised.pass_time(4.0) == []
    assert supervised.pass_time(1.0) == [(4, TIMED_OUT, "")]
    supervised.ask(5, crash, lane=1)
    assert supervised.answer() == (5, CRASHED, "killed by SIGSEGV")


def test_a_spare_measurement_waits_until_nothing_else_is_measured(supervised: Supervised, tmp_path: Path) -> None:
    supervised.ask(1, journal, tmp_path, "spare", spare=True)
    supervised.ask(2, journal, tmp_path, "first")
    supervised.ask(3, journal, tmp_path, "second")
    assert [supervised.answer()[0] for _ in range(2)] == [2, 3]
    assert supervised.pass_time(0.0) == []
    assert [job for job, _, _ in supervised.pass_time(1.0)] or supervised.answer()[0] == 1
    assert (tmp_path / "journal").read_text().split() == ["first", "second", "spare"]


# -- turns on the device -------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Supervised, Supervised]]:
    """Two supervisors that measure on one device."""
    running = Supervised(tmp_path / "turn"), Supervised(tmp_path / "turn")
    yield running
    for one in running:
        one.end()


def test_one_process_measures_at_a_time_on_a_device(two: tuple[Supervised, Supervised], tmp_path: Path) -> None:
    first, second = two
    first.ask(1, meet, str(tmp_path), "first", "go")
    wait_for((tmp_path / "first").exists)
    second.ask(2, touch, tmp_path / "second", limit_s=1.0)
    second.ask(3, add, 2, 2, lane=1)  # what is compiled needs no turn
    assert second.answer() == (3, OK, 4)
    assert second.pass_time(1000.0) == []  # its limit has not begun
    assert not (tmp_path / "second").exists()
    (tmp_path / "go").touch()
    assert first.answer()[:2] == (1, OK)
    assert second.answer()[:2] == (2, OK) and (tmp_path / "second").exists()


@pytest.mark.parametrize("end", [crash, hang])
def test_a_job_that_dies_gives_its_turn_away(
    two: tuple[Supervised, Supervised], end: Callable[..., object]
) -> None:
    first, second = two
    first.ask(1, end)
    answers = first.pass_time(2 * LIMIT) if end is hang else [first.answer()]
    assert [(job, state) for job, state, _ in answers] == [(1, TIMED_OUT if end is hang else CRASHED)]
    second.ask(2, add, 1, 1)
    assert second.answer() == (2, OK, 2)


def test_where_nothing_can_be_locked_nobody_waits(tmp_path: Path) -> None:
    running = Supervised(tmp_path / "no such folder" / "turn")
    running.ask(1, add, 1, 1)
    assert running.answer() == (1, OK, 2)
    running.end()


def test_a_job_that_goes_on_has_its_limit_again(supervised: Supervised, tmp_path: Path) -> None:
    """It says so when it has ended a call; one that then hangs is ended when its limit is over once more."""
    supervised.ask(1, go_on_then_hang, str(tmp_path), limit_s=4.0)
    assert supervised.pass_time(3.0) == []
    (tmp_path / "go on").touch()
    wait_for((tmp_path / "went on").exists)
    assert supervised.pass_time(3.0) == []  # of 6 seconds in all
    assert supervised.pass_time(4.0) == [(1, TIMED_OUT, "")]
    supervised.ask(2, add, 1, 1)
    assert supervised.answer() == (2, OK, 2)
