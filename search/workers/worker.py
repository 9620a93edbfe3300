"""Running jobs where a crash, a hang or an illegal access costs one job and nothing else.

:class:`WorkerPool` keeps one supervisor process (:mod:`fuseplan.search.workers.supervisor`) for as long as it lives;
lane 0 measures, the other lanes compile. When this process ends, however it ends, the workers end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from fuseplan.search.errors import MachineFailureError
from fuseplan.search.workers.supervisor import BACKGROUND, CRASHED, MEASURING, OK, STARVED, TIMED_OUT, Request

#: OpenMP reads its settings when torch is loaded, so they are defaults of the new process, set before anything else.
_BOOT = (
    "import json, os, sys; sys.path[:], binding, options = json.loads(sys.argv[1]); "
    "[os.environ.setdefault(name, value) for name, value in binding.items()]; "
    "from fuseplan.search.workers.supervisor import main; main(*options)"
)
_CLOSE_S = 5.0
#: Submitted jobs at once: their results wait in the pipe, and while that is full nothing else is supervised.
_PROMISES = 8
_LOST = "the worker's supervisor ended"
#: Cores that background jobs leave to this process and to what is measured.
_SPARED = 2


@dataclass(frozen=True)
class Outcome:
    """A job's value (None without), or why there is none; ``of_machine`` when any job might fail so."""

    value: Any = None
    failure: str = ""
    of_machine: bool = False
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return not self.failure

    def checked(self) -> Outcome:
        """This outcome, where it is one of the job; :class:`MachineFailureError` where the machine fails."""
        if self.of_machine:
            again = "nothing was decided by that; mend it, and the same command goes on"
            raise MachineFailureError(f"{self.failure}; {again}")
        return self


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass
class _Promise:
    """A job that was sent: its limit, where the log was then, and its outcome once there is one."""

    limit_s: float
    log_start: int
    outcome: Outcome | None = None


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Worker processes with time limits; starts with the first job, restarts by itself, and is a context manager.

    Args:
        compilers: Parallel compile lanes; the usable cores by default.
        bind: Keep each thread of the measuring worker on a core of its own. Otherwise, beside one other busy process,
            the scheduler may leave two threads that wait for each other on one core, for time slices on end.
        preload: What every worker imports (``module``) or calls too (``module:function``), once, before the first fork.
        turn: A file that is locked while a job is measured, so that of the processes that name the same file one
            measures at a time; None for none.
        threads: PyTorch's threads in the measuring worker: as many as here by default.
    """

    def __init__(
        self, compilers: int | None = None, bind: bool = False, preload: Sequence[str] = (), turn: str | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is None:
            import torch

            threads = torch.get_num_threads()
        self._preload = list(preload)
        self._turn = turn
        self.compilers = max(1, compilers if compilers is not None else usable_cores())
        self._bind = bind
        self._threads = threads
        self._jobs = 0
        self._promised: dict[int, _Promise] = {}
        #: The last job that each compile lane was sent.
        self._lanes: dict[int, _Promise] = {}
        #: Another thread may prefetch while a job is sent.
        self._sending = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the pool
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._used = False

    def __exit__(self, *exc: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Outcome:
        """Run one job in the measuring process, alone: a module-level function and picklable arguments."""
        with self._closed_if_interrupted():
            return self._wait(self._send(MEASURING, function, args, limit_s))

    def submit(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Callable[[], Outcome]:
        """Run one job in the measuring process when it has nothing else to do; at once returns what waits for it."""
        while len(self._promised) >= _PROMISES:
            self._receive()
        return partial(self._wait, self._send(MEASURING, function, args, limit_s, spare=True))

    def map(
        self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], limit_s: float
    ) -> Iterator[Outcome]:
        """Run jobs beside each other (compiling), all sent now; outcomes in order, each as soon as it is there."""
        sent: list[_Promise] = []
        with self._closed_if_interrupted():
            for args in arguments:
                while not (free := self._free_lanes()):
                    self._receive()
                self._lanes[free[0]] = promise = self._send(free[0], function, args, limit_s)
                sent.append(promise)
        return map(self._wait, sent)

    def as_completed(
        self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], limit_s: float
    ) -> Iterator[tuple[int, Outcome]]:
        """As :meth:`map`, but in any order: number and outcome of each job as soon as it has ended."""
        running: dict[int, _Promise] = {}

        def ended() -> Iterator[tuple[int, Outcome]]:
            for number, promise in list(running.items()):
                if promise.outcome is not None:
                    del running[number]
                    yield number, promise.outcome

        for number, args in enumerate(arguments):
            while not (free := self._free_lanes()):
                self._receive()
                yield from ended()
            with self._closed_if_interrupted():
                self._lanes[free[0]] = running[number] = self._send(free[0], function, args, limit_s)
        while running:
            yield from ended()
            if running:
                self._receive()

    def _free_lanes(self) -> list[int]:
        """Compile lanes whose jobs have ended."""
        self._lanes = {lane: promise for lane, promise in self._lanes.items() if promise.outcome is None}
        return [lane for lane in range(1, self.compilers + 1) if lane not in self._lanes]

    def _send(
        self, lane: int, function: Callable[..., Any], args: tuple[Any, ...], limit_s: float, spare: bool = False
    ) -> _Promise:
        payload = pickle.dumps((function, args))
        with self._sending:
            if self._process is None or self._process.poll() is not None:  # or it has ended
                self.close()
            self._used = True
            pipe, job = self._pipe or self._start(), self._jobs
            self._jobs += 1
            promise = self._promised[job] = _Promise(limit_s, self._log.seek(0, os.SEEK_END))
            with contextlib.suppress(OSError):  # the end of its supervisor shows when somebody waits
                pipe.send(Request(lane, job, limit_s, payload, spare))
        return promise

    def _wait(self, promise: _Promise) -> Outcome:
        while promise.outcome is None:
            self._receive()
        return promise.outcome

    def _receive(self) -> None:
        """Wait for what came of one job; all are lost with the supervisor."""
        with self._closed_if_interrupted():
            try:
                assert self._pipe is not None
                job, state, payload = self._pipe.recv()
            except (EOFError, ConnectionError):
                self.close()
            else:
                promise = self._promised.pop(job)
                outcome = Outcome(failure=str(payload), of_machine=state == STARVED)
                if state == OK:
                    outcome = Outcome(pickle.loads(payload))
                elif state == TIMED_OUT:
                    outcome = Outcome(failure=f"no result within {promise.limit_s:.3g} s", timed_out=True)
                elif state == CRASHED:
                    outcome = Outcome(failure=f"crashed: {payload}{self._last_words(promise.log_start)}")
                promise.outcome = outcome

    @contextlib.contextmanager
    def _closed_if_interrupted(self) -> Iterator[None]:
        """Jobs that are interrupted keep their lanes busy, so the next job gets new ones."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def prefetch(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], limit_s: float, spare: bool = False
    ) -> None:
        """Run jobs beside all else, for what they leave in a cache, ``spare`` ones last; at once returns."""
        if not arguments:
            return
        with self._sending:
            pipe = self._pipe or self._start()
            self._used = True
            with contextlib.suppress(OSError):  # a pool that has just lost its supervisor has lost nothing that matters
                for args in arguments:
                    pipe.send(Request(BACKGROUND, -1, limit_s, pickle.dumps((function, args)), spare))

    def start(self) -> None:
        """Have the processes import what they need, while there is no job yet; at once returns."""
        with self._sending:
            if self._pipe is None:
                self._start()

    def close(self) -> None:
        """End every process of the pool; a later job starts a new one."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        for promise in self._promised.values():
            promise.outcome = Outcome(failure=f"{_LOST}{self._last_words(promise.log_start)}")
        self._promised.clear()
        if process is not None and not self._used:
            process.kill()  # it has no workers yet, and would finish its imports first
        self._used = False
        if pipe is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # closing alone tells nobody while another thread reads
            pipe.close()
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_S)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self) -> Connection:
        """Start the supervisor: not before there is work, for a pool that ends unused would wait for its imports."""
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [os.fspath(path) for path in sys.path]
            options = [theirs.fileno(), self._threads, max(1, self.compilers - _SPARED), self._preload, self._turn]
            binding = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"} if self._bind else {}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps([paths, binding, options])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Ctrl-C goes to this process alone, which then ends the others in order.
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        return self._pipe

    def _last_words(self, start: int) -> str:
        """The last line that the workers wrote since ``start``."""
        self._log.seek(start)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self._log.seek(0, os.SEEK_END)
        return f": {lines[-1][:200]}" if lines else ""
