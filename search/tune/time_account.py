"""Where the wall time of a long job went: exclusive categories of one thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: What is in no category.
OTHER = "other"


class TimeAccount:
    """Books the time of the thread that made it; other threads may use it too, and nothing is booked.

    Categories nest: while an inner one is open, the outer one's time stands still. So all of them add up to the time
    since the account was opened, and ``before_s`` seconds that are booked as ``"starting"``.
    """

    def __init__(self, before_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._owner = threading.get_ident()
        self._open = [OTHER]
        self._since = clock()
        self._seconds: dict[str, float] = {"starting": before_s} if before_s > 0 else {}
        self._times: dict[str, int] = {}

    @contextmanager
    def spend(self, category: str) -> Iterator[None]:
        """Book what happens inside under ``category``."""
        if threading.get_ident() != self._owner:
            yield
            return
        self._book()
        self._times[category] = self._times.get(category, 0) + 1
        self._open.append(category)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def spent(self) -> dict[str, tuple[float, int]]:
        """What was booked until now by category, in the order of first use; :data:`OTHER` comes last.

        Seconds, without those of others entered meanwhile, and how often it was entered.
        """
        if threading.get_ident() == self._owner:
            self._book()
        seconds = {name: value for name, value in self._seconds.items() if name != OTHER}
        seconds[OTHER] = self._seconds.get(OTHER, 0.0)
        return {name: (value, self._times.get(name, 0)) for name, value in seconds.items()}

    def line(self) -> str:
        """All of it in one line: ``where the time went: 12.3 s = starting 4.0 s, timing ops 2.1 s (40x), ...``."""
        spent = self.spent()
        parts = [f"{name} {own_s:.1f} s" + (f" ({times}x)" if times > 1 else "")
                 for name, (own_s, times) in spent.items() if own_s >= 0.05]
        total_s = sum(own_s for own_s, _ in spent.values())
        return f"where the time went: {total_s:.1f} s = {', '.join(parts) or f'{OTHER} 0.0 s'}"

    def _book(self) -> None:
        now, name = self._clock(), self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def process_age_s() -> float:
    """Seconds since this process was started, interpreter and imports included; 0 where that cannot be read (Linux)."""
    try:
        # The name in parentheses may hold spaces; what follows it is field 3. Field 22 counts ticks since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
