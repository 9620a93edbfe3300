"""Ending processes with whatever they started, and with whoever started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is gone, even in the middle of a job that hangs (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Every process that ``pid`` started, those that they started, and so on; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name, in brackets, may hold anything.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found, seen = [pid], set[int]()
    for one in found:
        found += [child for child in children.get(one, ()) if child not in seen]
        seen.update(found)
    return found[1:]


def end_family(pid: int) -> None:
    """Kill a process, its group, and all that it started, a compiler with a group of its own too."""
    family = descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for one in (pid, *family):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def reap(pid: int, patience_s: float) -> int | None:
    """Wait status of a child that ends by itself within ``patience_s``; None when it does not."""
    end = time.monotonic() + patience_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)
