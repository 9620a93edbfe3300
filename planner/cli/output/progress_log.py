"""What is told on the standard error: on a terminal, and to who reads it as a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fuseplan.search.errors import plain

if TYPE_CHECKING:
    from rich.console import Console

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


def stderr_console() -> Console:
    """A rich console on the standard error; wide where that is no terminal."""
    from rich.console import Console

    screen = Console(stderr=True, highlight=False)
    return screen if screen.is_terminal else Console(stderr=True, highlight=False, width=220)
