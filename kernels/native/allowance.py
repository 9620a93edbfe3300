"""Running compilers within limits that hold for everything they start, and that a busy machine does not use up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: Seconds between two looks at what a command does.
SLICE_S = 1.0
#: How many times its seconds an allowance lasts where a command only waits for the machine.
_PATIENCE = 10


class Allowance:
    """Seconds that commands may take together, and ten times as many that they may wait for a processor or a disk."""

    def __init__(self, total_s: float) -> None:
        self.total_s = self.left_s = total_s
        self._patience_s = total_s * _PATIENCE

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, or kill it with all its descendants, and raise ``subprocess.TimeoutExpired``.

        They stay in this process's group, so that whoever kills the group (a tune's supervisor, a terminal) ends them.
        In a thread of :func:`in_threads` whose caller was interrupted they are killed: ``KeyboardInterrupt``.
        """
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
        ) as process:
            try:
                out, err = self._wait(process)
            except BaseException:
                kill_tree(process.pid)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _wait(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        computed_s, called_off = 0.0, getattr(_HERE, "called_off", threading.Event())
        while self.left_s > 0 and self._patience_s > 0:
            if called_off.is_set():
                raise KeyboardInterrupt
            slice_s = min(SLICE_S, self.left_s)
            try:
                return process.communicate(timeout=slice_s)
            except subprocess.TimeoutExpired:
                before_s = computed_s
                computed_s, awake = activity(process.pid)
                self.left_s -= max(0.0, computed_s - before_s) if awake else slice_s
                self._patience_s -= slice_s
        raise subprocess.TimeoutExpired(process.args, self.total_s)


#: ``called_off``: the event that ends the commands of a thread of :func:`in_threads`.
_HERE = threading.local()


def in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """``function`` of each item, in order. What interrupts the caller ends all threads' commands, and is raised."""
    if threads <= 1:
        return list(map(function, items))
    called_off = threading.Event()
    with ThreadPoolExecutor(threads, initializer=setattr, initargs=(_HERE, "called_off", called_off)) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            called_off.set()
            raise


def activity(root: int) -> tuple[float, bool]:
    """Processor seconds of a process tree, and whether it computes or waits for a core or disk; 0, no without /proc."""
    stats = _stats()
    tree = [stats[pid] for pid in _descendants(root, stats) if pid in stats]
    # R: it runs or is ready to; D: it waits for a disk.
    return sum(stat.computed_s for stat in tree), any(stat.state in "RD" for stat in tree)


def kill_tree(root: int) -> None:
    """Stop a process and its descendants one by one until none is left that could start another; then kill them."""
    found: set[int] = set()
    while new := _descendants(root, _stats()) - found:
        _send(new, signal.SIGSTOP)
        found |= new
    _send(found, signal.SIGKILL)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class _Stat(NamedTuple):
    state: str
    parent: int
    #: With that of the children it waited for.
    computed_s: float


def _descendants(root: int, stats: dict[int, _Stat]) -> set[int]:
    """``root`` and every process below it."""
    found = {root}
    while new := {pid for pid, stat in stats.items() if stat.parent in found} - found:
        found |= new
    return found


def _stats() -> dict[int, _Stat]:
    """Every process; {} where the system has no ``/proc``."""
    found = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "12 (a name) S 1 ...": the name may hold anything, parentheses too.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = _Stat(fields[0], int(fields[1]), sum(map(int, fields[11:15])) / ticks)
    return found
