"""The time that a probe may take: counted down, handed on in parts, and a word on what it was too short for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: How many times its even share of what is left one of several jobs may take: what short ones leave, long ones use.
_GENEROUS = 3.0


@dataclass(frozen=True)
class TimeBudget:
    """Time that may be spent until a fixed moment.

    Attributes:
        end_s: That moment, by ``clock``; infinite where nothing hurries.
        short: What the time was too short for, in words; a budget and its parts share it.
    """

    end_s: float
    clock: Callable[[], float] = time.monotonic
    purpose: str = ""
    short: list[str] = field(default_factory=list)

    @staticmethod
    def of(seconds: float, clock: Callable[[], float] = time.monotonic) -> TimeBudget:
        """``seconds`` from now on."""
        return TimeBudget(clock() + seconds, clock)

    def left_us(self) -> float:
        """Microseconds until the end, at least 0."""
        return max(0.0, (self.end_s - self.clock()) * 1e6)

    def share_us(self, jobs: int) -> float:
        """Microseconds that the next of so many jobs may take."""
        return self.left_us() * min(1.0, _GENEROUS / jobs)

    def part(self, share: float, purpose: str = "") -> TimeBudget:
        """That share of what is left, from now on."""
        end_s = self.clock() + share * self.left_us() * 1e-6
        return TimeBudget(end_s, self.clock, purpose or self.purpose, self.short)

    def note(self) -> None:
        """Remember that the time was too short for :attr:`purpose`."""
        if self.purpose not in self.short:
            self.short.append(self.purpose)


#: For whoever has all the time in the world.
UNLIMITED = TimeBudget(math.inf)
