"""Signs that a job goes on: one after each call that it has timed or checked, or with what it says of itself. Its time
limit begins again with each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds between two signs that are passed on: each wakes up the process that supervises, beside what is timed.
_EVERY_S = 1.0

_tell: Callable[[object], None] | None = None
_told_s = float("-inf")


def listen(tell: Callable[[object], None] | None) -> None:
    """Have ``tell`` called when a job of this process goes on, with what it says; None for nobody."""
    global _tell, _told_s
    _tell, _told_s = tell, float("-inf")


def goes_on(what: object = None, every_s: float = _EVERY_S) -> None:
    """Say so, and ``what`` is done, unless it was said just now. A job calls this between what it times, never within.
    """
    global _told_s
    if _tell is not None and (now_s := time.monotonic()) - _told_s >= every_s:
        _told_s = now_s
        _tell(what)
