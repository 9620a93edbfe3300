"""Fixtures that tests of several rooms ask for by name; which cases are slow, and in what order workers take files."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Before PyTorch is imported: OpenMP's threads otherwise spin while they wait, on cores that other test processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Those of NumPy's BLAS know no such policy: an interpreted kernel's products of tiles took three times the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Neither the processes that tests start nor the next run need compile our code again (for the latter: below).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent / "support" / "children"), os.environ.get("PYTHONPATH"))))

import hypothesis
import pytest
import torch
from postgres_server import server as server

from fuseplan.costmodel.devices import ByDevice
from fuseplan.planner.dispatch_stats import reset_stats
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS

sys.dont_write_bytecode = False
if not torch.cuda.is_available():
    # Each seed would be kept for the GPUs, with the lines of code that led to it: most of the time of seeding.
    torch.cuda.random._lazy_call = torch.xpu.random._lazy_call = lambda *_, **__: None
#: Seconds and name of each slow case, or of a function whose cases are slow; ``tests/checks/list_slow.py`` writes it.
SLOW = Path(__file__).with_name("slow.txt")
#: Seconds of one of the others in the mean: some files have hundreds.
QUICK_S = 0.05
#: Which cases of a function run with coverage, which takes as long again: what one runs, most of the others run, too.
COVERED = {0, *(4**power for power in range(8))}


def pytest_sessionstart() -> None:
    """Nobody listens to the log that tlparse reads: PyTorch would write it for the handlers that pytest gives loggers
    that do not propagate.
    """
    logging.getLogger("torch.__trace").propagate = True


def pytest_configure() -> None:
    """Let a wide ``except`` hide no fault of our own; let Ctrl-C work in the tests that send it: a shell's background
    job begins with it ignored. Hypothesis fails no example for its time: the machine may be busy.
    """
    # What is collected stays: looking for garbage among it would take a third of the time.
    gc.set_threshold(100_000, 50, 50)
    OWN_FAULTS.raised = True
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, and what is not covered.

    A worker of pytest-xdist takes long files first, so that none runs alone at the end.
    """
    rows = (line.split(maxsplit=1) for line in SLOW.read_text().splitlines())
    slow_s, file_s, cases = {name: float(seconds) for seconds, name in rows}, Counter[str](), Counter[str]()
    for name, seconds in slow_s.items():
        file_s[name.partition("::")[0]] += seconds
    for item in items:
        function = item.nodeid.partition("[")[0]
        slow = item.nodeid in slow_s or function in slow_s
        if slow:
            item.add_marker("slow")
        else:
            file_s[item.nodeid.partition("::")[0]] += QUICK_S
        if slow or cases[function] not in COVERED:
            item.add_marker("uncovered")  # its time would double, and others cover the same code
        cases[function] += 1
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -file_s[item.nodeid.partition("::")[0]])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Take the trace function away from what is not covered. pytest-cov's own mark for that leaves a worker of
    pytest-xdist the one that it began with.
    """
    if item.get_closest_marker("uncovered") is None:
        return (yield)
    here, in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        return (yield)
    finally:
        sys.settrace(here)
        threading.settrace(in_threads)  # type: ignore[arg-type]


#: What restored the dispatcher's state, and is never left again.
_GUARDS: list[Any] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is none.

    Spare each ``torch.compile`` a fifth of its time: PyTorch times guards with cold caches for its debug log, and
    pytest listens to the log that tlparse reads, which PyTorch writes only for somebody who listens.
    """
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.PreDispatch):
        # PyTorch's own fault, which a garbage collection brings back (see capture/modules.py): Dynamo fails then, too.
        from fuseplan.planner.capture.modules import excluded_in_new_threads

        included = torch._C._dispatch_tls_local_include_set()
        guard = torch._C._ForceDispatchKeyGuard(included, excluded_in_new_threads())
        guard.__enter__()
        _GUARDS.append(guard)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0
    if convert := sys.modules.get("torch._dynamo.symbolic_convert"):
        convert.get_funcname = lambda *_: None  # of lines of that log: every file that is traced would be read for it
    logging.getLogger("torch.__trace").propagate = True  # pytest listens to those that do not


@pytest.fixture(autouse=True)
def counts_of_this_test_only() -> None:
    """Dispatch counts for the whole process: what an earlier test compiled would be in this test's ``stats()``."""
    reset_stats()


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """``gc.collect()`` looks only at what this file's tests make, not at what hundreds of files have left behind."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def any_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions are searched to the end, and taken for any gain."""
    monkeypatch.setattr(policy, "GAP_TOLERANCE", 0.0)
    monkeypatch.setattr(policy, "PARTITION_MARGIN", ByDevice(0.0, 0.0))
    monkeypatch.setattr(policy, "MEASURED_LIMIT", ByDevice(100, 100))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lives to the end: a worker holds PyTorch and ten thousand tests. What little of
    it is garbage is not worth two seconds of looking for it.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
