"""Who may use the device, and the interpreter, while a pattern bench runs: the cell that is timed, or the next one's
tune.

While the contestants of a cell are built (traced, loaded, checked), the device has little to do, and the next cell can
be tuned. While they are timed, nothing else may run: the tune waits between two of its steps.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from fuseplan.planner.bench.cells import Cell
from fuseplan.planner.bench.patterns import PatternBench, PatternRow
from fuseplan.search.timing.timers import Timer


class Turns:
    """A gate between one thread that times, and threads that may work only while it does not.

    >>> turns = Turns()
    >>> turns.begin(), turns.check(), turns.end()
    (None, None, None)
    >>> turns.close()  # at once: nobody is at work
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._working = 0

    def open(self) -> None:
        """Let others work."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody work any more; returns when those at work have come to a step's end."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._working)

    def begin(self) -> None:
        """Start working, once the gate is open."""
        with self._changed:
            self._changed.wait_for(lambda: self._open)
            self._working += 1

    def end(self) -> None:
        """Stop working."""
        with self._changed:
            self._working -= 1
            self._changed.notify_all()

    def check(self, *_: object) -> None:
        """Between two steps of one's work: wait while the gate is closed."""
        with self._changed:
            if not self._open:
                self._working -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._open)
                self._working += 1


@dataclass(frozen=True)
class PacedBench(PatternBench):
    """A bench that has the device for itself while it times.

    Args:
        turns: Closed from a cell's first timing to its last.
    """

    turns: Turns = field(default_factory=Turns)

    def rows(self, cell: Cell) -> list[PatternRow]:
        try:
            return super().rows(cell)
        finally:
            self.turns.open()

    def _timer(self, mode: str) -> Timer:
        self.turns.close()
        return super()._timer(mode)
