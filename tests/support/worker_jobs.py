"""Jobs for worker processes, which import them by name; and ways to wait for what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fuseplan.search.timing.signs import goes_on

#: Seconds until a test gives up on what always comes, on a busy machine a while later: no measure of anything.
PATIENCE_S = 600.0
#: Of jobs that are not to run into their limit.
LIMIT = PATIENCE_S


def add(a: int, b: int) -> int:
    return a + b


def whoami() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def where() -> set[int]:
    torch.ones(1 << 20).sum()
    return os.sched_getaffinity(0)


def meet(folder: str, name: str, other: str) -> bool:
    """Only returns True when both parties are there at the same time."""
    Path(folder, name).touch()
    wait_for(Path(folder, other).exists)
    return True


def touch(path: str) -> None:
    Path(path).touch()


def journal(folder: str, name: str, gate: str = "") -> str:
    """Note that this ran, once ``gate`` is open."""
    while gate and not Path(folder, gate).exists():
        time.sleep(0.005)
    with Path(folder, "journal").open("a") as file:
        file.write(f"{name}\n")
    return name


def fail(text: str) -> None:
    raise ValueError(text)


def go_on_then_hang(folder: str) -> None:
    """Give a sign of going on when a file says so, and none after that."""
    wait_for(Path(folder, "go on").exists)
    goes_on()
    Path(folder, "went on").touch()
    hang()


def unpicklable() -> object:
    return lambda: None


def crash() -> None:
    sys.stderr.write("double free or corruption\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(status: int) -> None:
    os._exit(status)


def leave_or_add(number: int) -> int:
    if number % 2:
        os._exit(9)
    return number


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


def kill_parent_once(path: str) -> None:
    """Kill the supervisor as soon as there is a file."""
    while not Path(path).exists():
        time.sleep(0.01)
    kill_parent()


def interrupt_and_hang(pid: int) -> None:
    """Send ``pid`` a SIGALRM, and then never end."""
    os.kill(pid, signal.SIGALRM)
    hang()


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def child_that_hangs(path: str, apart: bool = False) -> None:
    """As a compiler would: a process of the worker's own, which must not outlive it; ``apart``: in another session."""
    process = subprocess.Popen(["sleep", "3600"], start_new_session=apart)
    Path(f"{path}.part").write_text(str(process.pid))
    Path(f"{path}.part").rename(path)
    process.wait()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def wait_until_dead(*pids: int) -> None:
    wait_for(lambda: not any(alive(pid) for pid in pids))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
