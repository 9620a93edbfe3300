"""Running a compiler within a limit that holds for everything it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


def run_limited(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or kill it with all its descendants.

    A compiler driver starts the compiler proper: to kill the driver alone would let that run on. They stay in this
    process's group, so that whoever kills the group (a tune's supervisor, a terminal) ends them too.

    Args:
        command: The program and its arguments.
        limit_s: Seconds it may take.

    Raises:
        OSError: It cannot be started.
        subprocess.TimeoutExpired: It took longer.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException:
            kill_tree(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_tree(root: int) -> None:
    """Stop a process and its descendants one by one until none is left that could start another; then kill them."""
    found: list[int] = []
    new = [root]
    while new:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        found += new
        new = [pid for pid, parent in _parents().items() if parent in found and pid not in found]
    for pid in found:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _parents() -> dict[int, int]:
    """Every process's parent; {} where the system has no ``/proc``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "12 (a name) S 1 ...": the name may hold anything, parentheses too.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[1])
    return found
