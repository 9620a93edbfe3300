"""The pytest side of ``sanitize.py``: a process that runs the tests it is handed, one by one, and says how each went.

Loaded with ``-p sanitize_plugin``. With ``SANITIZE_COLLECT`` in the environment it writes ids and marks of the tests
there and runs none. With ``SANITIZE_SOCKET`` it asks behind that socket for the next test until there is none, and
tells results: so no process is left with more than its share, and each ends by itself, as memcheck's summary needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

COLLECT, SOCKET, TEST_SECONDS = "SANITIZE_COLLECT", "SANITIZE_SOCKET", "SANITIZE_TEST_SECONDS"
#: Lines of a traceback that are kept: the last ones.
_LINES = 30


def pytest_configure(config: pytest.Config) -> None:
    if COLLECT in os.environ:
        config.pluginmanager.register(Collector(Path(os.environ[COLLECT])))
    elif SOCKET in os.environ:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a test that hangs is ended by an abort
        # Processes that the tests start are not asked to serve.
        connection = Client(os.environ.pop(SOCKET), family="AF_UNIX")
        config.pluginmanager.register(Server(connection, float(os.environ.get(TEST_SECONDS, "120"))))


class Collector:
    """Writes what there is to run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        found = [(item.nodeid, sorted({mark.name for mark in item.iter_markers()})) for item in session.items]
        self._path.write_text(json.dumps(found))


class Server:
    """Runs what it is told to.

    Args:
        connection: Out go ``("ready", pid)``, ``("next",)``, ``("start", id)`` and
            ``("done", id, outcome, seconds, message)``; to ``next`` an id comes back, or None.
        limit_s: Of a test; one that is slower fails where it is, with its traceback.
    """

    def __init__(self, connection: Connection, limit_s: float) -> None:
        self._connection = connection
        self._limit_s = limit_s
        self._deadline = 0.0
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._connection.send(("ready", os.getpid()))
        current = self._next()
        while current is not None:
            following = self._next()  # known beforehand, so that what both need is kept
            if current not in items:
                self._connection.send(("done", current, "failed", 0.0, "this process did not collect it"))
            else:
                self._run(items[current], None if following is None else items.get(following))
            current = following
        return True

    def _next(self) -> str | None:
        self._connection.send(("next",))
        answer: str | None = self._connection.recv()
        return answer

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        self._reports = []
        start = time.monotonic()
        self._deadline = start + self._limit_s
        self._connection.send(("start", item.nodeid))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        outcome, message = summed_up(self._reports)
        self._connection.send(("done", item.nodeid, outcome, time.monotonic() - start, message))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with self._limited():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with self._limited():
            return (yield)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Interrupts Python code that runs past the test's deadline. Whoever started the process ends C code."""

        def stop(number: int, frame: Any) -> None:
            pytest.fail(f"no result within {self._limit_s:g} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, self._deadline - time.monotonic()))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def summed_up(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """Outcome of a test from those of its phases, and why."""
    wrong = [report for report in reports if report.failed]
    if wrong:
        return "failed", "\n".join(_text(report) for report in wrong)
    skipped = [report for report in reports if report.skipped]
    if skipped and not hasattr(skipped[0], "wasxfail"):
        reason = skipped[0].longrepr
        return "skipped", str(reason[2] if isinstance(reason, tuple) else reason)
    return "passed", ""


def _text(report: pytest.TestReport) -> str:
    lines = report.longreprtext.splitlines()
    cut = [f"... {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
    where = "" if report.when == "call" else f"in {report.when}:\n"
    return where + "\n".join([*cut, *lines[-_LINES:]])
