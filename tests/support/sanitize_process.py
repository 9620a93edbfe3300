"""A pytest process, under compute-sanitizer or not, that is handed tests from a queue; for ``sanitize.py``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sanitize_plugin import SOCKET
from sanitize_tool import SUMMARY, Findings, Settings, pytest_command, read_logs
from sanitize_work import PLAIN, Attempt, Case, Queue

#: Seconds: for imports and collection, beyond the limits, for exit handlers, and for what memcheck has to say.
_READY_S, _EXIT_S, _WORDS_S = 240.0, 60.0, 10.0
#: After these errors a CUDA context is of no further use, and after an error that memcheck found.
_FATAL = ("CUDA error", "AcceleratorError", "illegal memory access", "unspecified launch failure")
_SHOWN = 30


def last_words(output: str) -> str:
    """The end of a process's output: from where Python says what killed it, its innermost frames first."""
    lines = output.splitlines()
    fatal = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    return "\n".join(lines[fatal[-1] :][:_SHOWN] if fatal else lines[-_SHOWN:])


@dataclass
class Process:
    """One process and what it did.

    Attributes:
        name: As the report names it.
        kind: What kind of process.
        settings: What it shares with others.
        queue: Where its tests come from.
        results: The tests that ended in it.
        findings: What memcheck wrote.
        seen: Errors that memcheck had reported when a test had ended and not before it, by the test's id.
        ended: How it ended, where not by itself.
        seconds: How long it took.
    """

    name: str
    kind: str
    settings: Settings
    queue: Queue
    results: list[tuple[Case, Attempt]] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    seen: dict[str, int] = field(default_factory=dict)
    ended: str = ""
    seconds: float = 0.0
    lost: int = 0
    _pid: int = 0
    _handed: list[Case] = field(default_factory=list)
    _current: Case | None = None
    _since: float = 0.0
    _taking: bool = True
    _asked: bool = False
    _spoilt: bool = False

    @property
    def silent(self) -> bool:
        """It ran tests under memcheck, and no summary says how they went."""
        if self.kind == PLAIN or not (self.results or self.lost):
            return False
        main = self._own / "logs" / f"{self._pid}.log"
        return not (SUMMARY.search(main.read_text(errors="replace")) if main.exists() else self.findings.summaries)

    @property
    def row(self) -> str:
        counts = [sum(attempt.outcome == one for _, attempt in self.results) for one in ("passed", "failed", "skipped")]
        errors = "-" if self.kind == PLAIN else "none read" if self.silent else str(self.findings.errors)
        row = f"{self.name:8} {self.kind:11} {counts[0]:6} {counts[1]:6} {counts[2]:7} {self.lost:4} {errors:>9}"
        return f"{row} {self.seconds:6.0f} s" + (f"  {self.ended}" if self.ended else "")

    @property
    def _own(self) -> Path:
        return self.settings.folder / self.name

    def run(self) -> None:
        """Start, serve until there are no more tests, and settle everything."""
        logs = self._own / "logs"
        logs.mkdir(parents=True)
        start = time.monotonic()
        address = str(self._own / "socket")
        prefix = [] if self.kind == PLAIN else self.settings.under_tool(logs)
        with socket.socket(socket.AF_UNIX) as listener, (self._own / "output.txt").open("w") as output:
            listener.bind(address)
            listener.listen(1)
            process = subprocess.Popen(
                [*prefix, *pytest_command(self.settings.tests)], stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env={**self.settings.environment(self.kind), SOCKET: address},
                start_new_session=True,
            )
            try:
                connection = self._accept(listener, process, start)
                if connection is not None:
                    with connection:
                        self._serve(connection, process, start)
                if not self.ended:
                    process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._stop(process, "did not exit")
            except BaseException:
                self._stop(process, "interrupted")
                raise
        self.seconds = time.monotonic() - start
        self.findings = read_logs(logs)
        self._settle(process.returncode)

    def _accept(self, listener: socket.socket, process: subprocess.Popen[bytes], start: float) -> Connection | None:
        listener.settimeout(0.5)
        while process.poll() is None:
            try:
                return Connection(listener.accept()[0].detach())
            except TimeoutError:
                if time.monotonic() > min(start + _READY_S, self.queue.end + self.settings.grace_s):
                    self._stop(process, "did not start")
                    return None
        return None

    def _serve(self, connection: Connection, process: subprocess.Popen[bytes], start: float) -> None:
        self._since = time.monotonic()
        while True:
            try:
                if connection.poll(0.5):
                    self._answer(connection, connection.recv(), start)
                    continue
            except (EOFError, OSError):
                return
            if process.poll() is not None:
                return
            now, busy = time.monotonic(), self._taking or self._handed
            if now > self._since + self._patience_s(bool(busy)):
                self._stop(process, "hung" if busy else "did not exit")
                return
            if busy and now > self.queue.end + self.settings.grace_s:
                self._stop(process, "time limit")
                return

    def _patience_s(self, busy: bool) -> float:
        """How long it may say nothing."""
        if self._current is not None:
            return self.settings.limit_s(self.kind) + self.settings.grace_s
        return _READY_S if busy else _EXIT_S

    def _answer(self, connection: Connection, message: Sequence[Any], start: float) -> None:
        what, *rest = message
        self._since = time.monotonic()
        if what == "ready":
            self._pid = rest[0]
        elif what == "next":
            self._asked = True
            case = None
            if self._taking and (self._spoilt or self._since > start + self.settings.retire_s):
                self._leave()
            elif self._taking:
                case = self.queue.take(self.kind)
                self._taking = case is not None
            if case is not None:
                self._handed.append(case)
                self._spoilt = self._spoilt or case.has_failed
            connection.send(case and case.id)
        elif what == "start":
            self._current = self.queue.case(rest[0])
        elif what == "done":
            name, outcome, seconds, text = rest
            case = self.queue.case(name)
            self._current = None
            self._handed.remove(case)
            self.results.append((case, Attempt(self.kind, self.name, outcome, seconds, text)))
            new = read_logs(self._own / "logs").errors - sum(self.seen.values()) if self.kind != PLAIN else 0
            if new > 0:
                self.seen[name] = new
            self._spoilt = self._spoilt or new > 0 or any(sign in text for sign in _FATAL)
            if self.kind == PLAIN:  # nothing can be lost with this process any more
                self.queue.settle([self.results[-1]])

    def _leave(self) -> None:
        if self._taking:
            self._taking = False
            self.queue.leave(self.kind)

    def _stop(self, process: subprocess.Popen[bytes], why: str) -> None:
        """End it: pytest alone at first, with a traceback of all threads, so that memcheck can write its summary."""
        self.ended = why
        if self._pid:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.kill(self._pid, signal.SIGABRT)
                process.wait(_WORDS_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _settle(self, status: int) -> None:
        self._leave()
        tail = last_words((self._own / "output.txt").read_text(errors="replace"))
        useless = not self._asked
        if not self.ended and (self._handed or useless):
            self.ended = f"ended with status {status}"
        if self.ended and useless and self.ended != "time limit":
            self.ended += f":\n{tail}"
        spoiled = bool(self.ended) and self.silent
        if self.kind != PLAIN and not spoiled:
            self.queue.settle(self.results)
        if self._current is not None and self.ended != "time limit":
            # Its own fault; beyond a limit or a crash there is nothing to find out by another attempt of this kind.
            self._handed.remove(self._current)
            seconds = time.monotonic() - self._since
            attempt = Attempt(self.kind, self.name, "failed", seconds, f"the process {self.ended}:\n{tail}")
            self.results.append((self._current, attempt))
            self.queue.settle([self.results[-1]])
        if spoiled:
            gone = [case for case, _ in self.results if case is not self._current]
            self.results = [(case, attempt) for case, attempt in self.results if case is self._current]
            self.lost = len(gone)
            self.queue.give_back(gone, lost=True)
        self.queue.give_back(self._handed)
        self.queue.close(self.kind, useless)
