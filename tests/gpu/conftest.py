"""Tests that need the device for themselves get it, beside other test processes too (``pytest -n``).

A kernel that never ends, a fault on purpose or a comparison of times would disturb, or be disturbed by, whatever else
runs on the device. So a test marked ``faulty`` or ``timed`` waits until the tests of other processes have ended, and
those that come later wait for it. ``faulty(alone=False)``: the fault ends a process of its own, and disturbs nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ALONE = ("faulty", "timed")


@contextlib.contextmanager
def turn(name: str, alone: bool) -> Iterator[None]:
    """Holds the device: alone, or together with others that share it.

    Whoever waits for the device stands at the gate, so that others do not pass forever. The operating system opens both
    locks when a process dies.
    """
    with (
        Path(tempfile.gettempdir(), f"{name}.gate").open("w") as gate,
        Path(tempfile.gettempdir(), f"{name}.device").open("w") as device,
    ):
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield
        finally:
            # By name: processes forked meanwhile hold the files open.
            fcntl.flock(gate, fcntl.LOCK_UN)
            fcntl.flock(device, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or item.get_closest_marker("gpu") is None:  # called for tests of other folders, too
        return (yield)
    marks = [mark for name in ALONE for mark in item.iter_markers(name)]
    with turn(f"gpu-tests-{run}", any(mark.kwargs.get("alone", True) for mark in marks)):
        return (yield)
