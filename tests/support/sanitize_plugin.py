"""The pytest side of ``sanitize.py``, for the process that pytest-xdist's workers report to and for the workers.

Loaded with ``-p sanitize_plugin``. ``SANITIZE_TESTS`` names a file with the ids to run, in order; outcomes are added to
``SANITIZE_RESULTS``, a line of JSON a report. A test that is stuck ends its worker after ``SANITIZE_SECONDS``, and so
does one that leaves the device unusable: pytest-xdist starts another worker.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS, RESULTS, SECONDS = "SANITIZE_TESTS", "SANITIZE_RESULTS", "SANITIZE_SECONDS"
#: What a worker's log of memcheck is called.
PROCESS = "SANITIZE_PROCESS"
#: After these errors a CUDA context is of no further use.
_FATAL = ("CUDA error", "AcceleratorError", "illegal memory access", "unspecified launch failure")
#: Lines of a traceback that are kept: the last ones.
_LINES = 30


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        config.pluginmanager.register(Watch(os.dup(2)))  # output is not captured yet
    else:
        import xdist.workermanage

        xdist.workermanage.NodeManager.EXIT_TIMEOUT = 60  # memcheck's summary comes when a worker exits


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(Path(os.environ[TESTS]).read_text().splitlines())}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


class Watch:
    """Ends a worker that is stuck, with a traceback to the file descriptor ``stderr``."""

    def __init__(self, stderr: int) -> None:
        self._stderr = stderr

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        faulthandler.dump_traceback_later(float(os.environ[SECONDS]), exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    report.process = int(os.environ.get(PROCESS, os.getpid()))  # type: ignore[attr-defined]
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # which has sent the report on by now
        if report.failed and any(sign in report.longreprtext for sign in _FATAL):
            os._exit(1)
        return
    xfail = hasattr(report, "wasxfail")
    if report.when == "teardown" and report.passed:
        return
    if report.skipped and not xfail:
        text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    else:
        text = "\n".join(report.longreprtext.splitlines()[-_LINES:]) if report.failed else ""
    outcome = "passed" if xfail and report.skipped else report.outcome
    if outcome == "passed" and report.when == "setup":
        return
    found = (report.nodeid, outcome, report.duration, text, getattr(report, "process", 0))
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(found) + "\n")
