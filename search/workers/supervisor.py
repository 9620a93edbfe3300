"""The far side of :mod:`fuseplan.search.workers.worker`: imports torch once, forks workers, watches them.

A forked worker starts in milliseconds, so a crash or a hang costs one job and almost no time. The supervisor itself
never touches a device, runs no job and starts no thread, which is what makes the fork safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from fuseplan.kernels.native.allowance import kill_tree
from fuseplan.search.timing import signs

#: Reply states. The payload of ``OK`` is a pickled result, of the others a text.
OK, RAISED, CRASHED, TIMED_OUT = "ok", "raised", "crashed", "timed out"
#: As ``RAISED``, by the machine's fault (:func:`of_machine`).
STARVED = "starved"
#: No reply: the job goes on, and its time limit begins again.
_GOES_ON = "goes on"

_NICE = 10
#: Errors after which a CUDA context cannot be used again.
_FATAL = ("CUDA error", "AcceleratorError", "illegal memory access", "unspecified launch failure")
#: Option of prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: The measuring lane, and that of jobs that some idle background worker does, of which nobody hears again.
MEASURING, BACKGROUND = 0, -1
#: Seconds of idleness before a spare job is measured: between two jobs that somebody waits for there are moments.
_PAUSE_S = 0.01
#: Seconds between attempts to get the turn on a device that another process is measuring on.
_TRY_S = 0.005


@dataclass(frozen=True)
class Request:
    """A job for one lane: a pickled ``(function, args)``, ended after ``limit_s`` seconds without a sign of it.

    A ``spare`` one of the background waits until no others do, one of the measuring lane until that is idle.
    """

    lane: int
    job: int
    limit_s: float
    payload: bytes
    spare: bool = False


@dataclass
class _Lane:
    """A worker process and the request it is at."""

    pid: int
    pipe: Connection
    request: Request | None = None
    deadline: float = 0.0


class Turn:
    """The right to measure, for one process at a time: a lock of the file ``path``; without a file nobody waits."""

    def __init__(self, path: str | None) -> None:
        self._file = -1
        if path is not None:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def take(self) -> bool:
        """Take the turn, unless another process has it."""
        if self._file >= 0:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
        return True

    def give(self) -> None:
        """Let another process measure. Said aloud: workers forked meanwhile have the open file, too."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)


class Supervisor:
    """Runs requests of its parent in one worker process per lane, until the parent is gone.

    ``parent`` sends requests and gets ``(job, state, payload)``. The measuring lane has so many torch ``threads``, the
    compiling lanes have one each and run on ``cores``: the OpenMP runtime may have bound this process to one core. The
    ``background`` workers have the lanes -1, -2, ... A job of the measuring lane waits for the ``turn`` on the device;
    its time limit begins when it has it.
    """

    def __init__(
        self, parent: Connection, threads: int, cores: Iterable[int] = (), background: int = 1,
        clock: Callable[[], float] = time.monotonic, turn: str | None = None,
    ) -> None:
        self._parent = parent
        self._turn = Turn(turn)
        #: Whether a job that is due waits for another process's turn to end.
        self._refused = False
        self._clock = clock
        self._threads = threads
        self._background = range(-1, -1 - background, -1)
        self._backlog: list[Request] = []
        #: Requests of the measuring lane that were not started, and since when the lane is idle.
        self._unmeasured: list[Request] = []
        self._idle_since = clock()
        #: Requests that wait for the same job of a background worker.
        self._held: dict[int, list[Request]] = {}
        self._cores = tuple(cores)
        self._lanes: dict[int, _Lane] = {}

    def run(self) -> None:
        try:
            while True:
                self._step()
        except (EOFError, ConnectionError):
            pass
        finally:
            for lane in self._lanes.values():  # all before the first is waited for: a GPU's driver takes its time
                kill_tree(lane.pid)
            for number in list(self._lanes):
                self._end(number)

    def _step(self) -> None:
        deadlines = [self._lanes[number].deadline for number in self._busy()]
        if self._unmeasured and max(self._busy(), default=BACKGROUND) < MEASURING:
            deadlines.append(self._idle_since + _PAUSE_S)
        if self._refused:
            deadlines.append(self._clock() + _TRY_S)
        patience = max(0.0, min(deadlines) - self._clock()) if deadlines else None
        ready = wait([self._parent, *(lane.pipe for lane in self._lanes.values())], patience)
        for number, lane in list(self._lanes.items()):
            if lane.pipe in ready:
                self._collect(number, lane)
            elif lane.request is not None and self._clock() >= lane.deadline:
                self._end(number)
                self._finish(number, lane.request, TIMED_OUT, "")
        if self._parent in ready:
            request = self._parent.recv()
            if request.lane == BACKGROUND:
                self._backlog.append(request)
            elif request.lane == MEASURING:
                self._unmeasured.append(request)
            else:
                alike = [number for number, lane in self._lanes.items() if number in self._background
                         and lane.request is not None and lane.request.payload == request.payload]
                if alike:  # a background worker is at it already: its result will do
                    self._held.setdefault(alike[0], []).append(request)
                else:
                    self._backlog = [one for one in self._backlog if one.payload != request.payload]
                    self._start(request)
        self._feed()

    def _busy(self) -> list[int]:
        """Lanes that are at a job."""
        return [number for number, lane in self._lanes.items() if lane.request is not None]

    def _feed(self) -> None:
        """Hand waiting jobs to the measuring lane and to background workers that are idle."""
        if self._unmeasured and MEASURING not in self._busy():
            waiting = min(self._unmeasured, key=lambda request: request.spare)  # of equals the first
            idle = max(self._busy(), default=BACKGROUND) < MEASURING
            due = not waiting.spare or (idle and self._clock() >= self._idle_since + _PAUSE_S)
            self._refused = due and not self._turn.take()
            if due and not self._refused:
                self._unmeasured.remove(waiting)
                self._start(waiting)
        for number in self._background:
            if self._backlog and number not in self._busy():
                waiting = min(self._backlog, key=lambda request: request.spare)
                self._backlog.remove(waiting)
                self._start(replace(waiting, lane=number))

    def _finish(self, number: int, request: Request | None, state: str, payload: Any) -> None:
        """Tell who waits for what a lane has done."""
        if number == MEASURING:
            self._idle_since = self._clock()
            self._turn.give()
        if request is not None and number not in self._background:
            self._parent.send((request.job, state, payload))
        for held in self._held.pop(number, ()):
            if state == OK:
                self._parent.send((held.job, state, payload))
            else:
                self._start(held)

    def _start(self, request: Request) -> None:
        lane = self._lanes.get(request.lane)
        if lane is not None and lane.pipe.poll():
            # An idle worker has nothing to say: this is the end of one that died, or gave itself up.
            self._end(request.lane)
            lane = None
        if lane is None:
            lane = self._lanes[request.lane] = self._fork(request.lane)
        lane.request = request
        lane.deadline = self._clock() + request.limit_s
        # A worker that dies right now shows when its pipe is read.
        with contextlib.suppress(OSError):
            lane.pipe.send_bytes(request.payload)

    def _collect(self, number: int, lane: _Lane) -> None:
        request = lane.request
        try:
            state, payload, fatal = lane.pipe.recv()
        except (EOFError, OSError):
            cause = self._end(number)
            if request is not None:
                self._finish(number, request, CRASHED, cause)
            return
        if state == _GOES_ON:
            lane.deadline = self._clock() + (request.limit_s if request is not None else 0.0)
            return
        lane.request = None
        if fatal:
            self._end(number)
        self._finish(number, request, state, payload)

    def _end(self, number: int) -> str:
        """Kill a lane's worker with everything it started; the cause of its death in words."""
        lane = self._lanes.pop(number)
        lane.pipe.close()
        # A worker that is dying by itself gets a moment, so that its own signal is the one reported.
        status = _reap(lane.pid, 0.5 if lane.request is not None and self._clock() < lane.deadline else 0.0)
        if status is None:
            kill_tree(lane.pid)  # a compiler with a session of its own too
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(lane.pid, signal.SIGKILL)
        if status is None:
            status = os.waitpid(lane.pid, 0)[1]
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"exited with status {os.WEXITSTATUS(status)}"

    def _fork(self, number: int) -> _Lane:
        from multiprocessing import Pipe

        near, far = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            near.close()
            self._parent.close()
            for lane in self._lanes.values():
                lane.pipe.close()
            if number and self._cores:
                os.sched_setaffinity(0, self._cores)
            if number in self._background:
                os.nice(_NICE)  # yields to whatever somebody waits for
            _work(far, self._threads if number == 0 else 1)
        far.close()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return _Lane(pid, near)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is gone, even in the middle of a job that hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(pid: int, patience_s: float) -> int | None:
    """Wait status of a child that ends by itself within ``patience_s``; None when it does not."""
    end = time.monotonic() + patience_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def _work(pipe: Connection, threads: int) -> None:
    """A worker's life: jobs in, results out, until the pipe closes. Never returns."""
    import torch

    code = 0
    try:
        os.setpgid(0, 0)
        die_with_parent()
        torch.set_num_threads(threads)
        signs.listen(lambda: pipe.send((_GOES_ON, None, False)))
        while True:
            pipe.send(_attempt(pipe.recv_bytes()))
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        code = 1
    # Skip the interpreter's shutdown: it would run exit handlers that belong to the supervisor.
    sys.stderr.flush()
    os._exit(code)


def _attempt(request: bytes) -> tuple[str, Any, bool]:
    """Run one job: its state, its payload, and whether the process is beyond further use."""
    try:
        function, args = pickle.loads(request)
        return OK, pickle.dumps(function(*args)), False
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return STARVED if of_machine(error) else RAISED, text, any(sign in text for sign in _FATAL)


def of_machine(error: Exception) -> bool:
    """Whether the machine is at fault (disk, memory, permissions), whatever the job."""
    from fuseplan.kernels.ir.backend import MachineError  # imports torch, which may bind this process to one core

    return isinstance(error, (OSError, MemoryError, MachineError))


def main(handle: int, threads: int, background: int, preload: Sequence[str], turn: str | None) -> None:
    """Serve the parent behind the socket ``handle``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cores = os.sched_getaffinity(0)
    gc.disable()  # what is imported stays: looking for garbage among it takes a quarter of the time
    import fuseplan.search.workers.jobs  # noqa: F401  # pulls in torch before any fork

    for entry in preload:
        module, _, function = entry.partition(":")
        with contextlib.suppress(ImportError):
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
    gc.freeze()  # a worker that looked there would copy the memory that it shares with this process
    gc.enable()
    Supervisor(Connection(handle), threads, cores, background, turn=turn).run()
