"""What is told to who reads the standard error as a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from fuseplan.search.errors import plain

#: Seconds between lines of one phase in a log.
EVERY_S = 10.0


class ProgressLog:
    """Progress for who reads the standard error as a log, with seconds: ``plan: [12 s] capturing llama-3.2-1b``."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._began = self._last = clock()

    def phase(self, text: str) -> None:
        """Something else begins: always a line."""
        self._last = self._clock()
        self._write(f"plan: [{self._last - self._began:.0f} s] {plain(text)}")

    def update(self, text: str) -> None:
        """How far it is: a line where the last one is ten seconds old."""
        if self._clock() - self._last >= EVERY_S:
            self.phase(text)
