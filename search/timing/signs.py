"""Signs that a job goes on: one after each call that it has timed or checked. Its time limit begins again with each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds between two signs that are passed on: each wakes up the process that supervises, beside what is timed.
_EVERY_S = 1.0

_tell: Callable[[], None] | None = None
_told_s = float("-inf")


def listen(tell: Callable[[], None] | None) -> None:
    """Have ``tell`` called when a job of this process goes on; None for nobody."""
    global _tell, _told_s
    _tell, _told_s = tell, float("-inf")


def goes_on() -> None:
    """Say so; a job calls this between what it times, never within."""
    global _told_s
    if _tell is not None and (now_s := time.monotonic()) - _told_s >= _EVERY_S:
        _told_s = now_s
        _tell()


@contextmanager
def going_on(limit_s: float) -> Iterator[None]:
    """Signs while something is done that gives none, such as a compiler's work; for at most ``limit_s``."""
    if _tell is None:
        yield
        return
    done, ends_s = threading.Event(), time.monotonic() + limit_s

    def tell() -> None:
        while not done.wait(_EVERY_S) and time.monotonic() < ends_s:
            goes_on()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
