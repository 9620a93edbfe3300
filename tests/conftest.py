"""Fixtures that tests of several rooms ask for by name."""

from __future__ import annotations

import signal

from postgres_server import server as server


def pytest_configure() -> None:
    """Let Ctrl-C work in the tests that send it: a shell's background job begins with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
