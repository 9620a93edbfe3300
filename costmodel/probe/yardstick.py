"""Tells whether the processor runs at its full speed at this moment.

A neighbour on the same core, or a hypervisor, slows everything several times for tenths of a second, now and then, and
no counter of the operating system shows it. A small job of known cost does.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

#: A reading within this of the reference counts as full speed.
_TOLERANCE = 0.10
#: Readings taken before the first answer, so that there is a reference.
_FIRST = 100
#: Readings the reference is taken from: where a slow spell outlasts them, slow is what this machine is.
_WINDOW = 20_000
#: The reference is the reading at this share of the sorted window: the fastest few may be freaks.
_SHARE = 0.01
#: Readings after which the reference is looked up again.
_REFRESH = 256
#: Readings of one answer at most: the first may be slow, for it wakes the threads; a slow spell outlasts them all.
_TRIES = 3
#: Numbers in the job's array: some ten microseconds on two cores, enough to involve every thread of the pool.
_NUMBERS = 65_536
#: By the number of threads.
_YARDSTICKS: dict[int, Yardstick] = {}


class Yardstick:
    """Repeats one job and compares; by default exponentials on all threads of torch's pool, out of the cache."""

    def __init__(self, job: Callable[[], object] | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        numbers = torch.linspace(0.0, 1.0, _NUMBERS)
        self._job = job if job is not None else partial(torch.exp, numbers, out=torch.empty_like(numbers))
        self._clock = clock
        self._readings: deque[float] = deque(maxlen=_WINDOW)
        self._reference_s = 0.0
        self._age = 0

    def steady(self, limit_s: float = math.inf) -> bool:
        """Whether the job is as fast as when undisturbed; False where ``limit_s`` leaves too few readings to tell."""
        while len(self._readings) < _FIRST and limit_s > 0:
            limit_s -= self._read()
        for _ in range(_TRIES):
            if limit_s <= 0:
                return False
            found = self._read()
            limit_s -= found
            if found <= self._reference() * (1 + _TOLERANCE):
                return True
        return False

    def _read(self) -> float:
        self._job()  # brings its own data and code back into the caches, and wakes the threads
        start = self._clock()
        self._job()
        self._job()
        found = self._clock() - start
        self._readings.append(found)
        return found

    def _reference(self) -> float:
        if self._age == 0:
            self._reference_s = sorted(self._readings)[int(len(self._readings) * _SHARE)]
        self._age = (self._age + 1) % _REFRESH
        return self._reference_s


def processor_yardstick() -> Yardstick:
    """This process's yardstick for the number of threads that torch uses now."""
    threads = torch.get_num_threads()
    return _YARDSTICKS.get(threads) or _YARDSTICKS.setdefault(threads, Yardstick())
