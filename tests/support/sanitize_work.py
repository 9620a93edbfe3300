"""Which test runs next, in what kind of process, and what its outcome means; for ``sanitize.py``.

A test runs in one kind of process after another until its outcome is known:

    warm tests      PLAIN (builds what it needs into shared caches), then as below
    other tests     SINGLE, or CACHING where nothing can be allocated one by one
    failed          SINGLE -> CACHING -> PLAIN, so that the report can say what the failure depends on
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

#: Without the tool; under it with PyTorch's caching allocator; under it, each tensor an allocation of its own.
PLAIN, CACHING, SINGLE = "plain", "caching", "one by one"
KINDS = (PLAIN, CACHING, SINGLE)
#: What a process costs before its first test and after its last one: no other is started for less work than this.
START_S = 15.0
#: How often a test that went down with its process through no fault of its own is run again.
_TRIES = 2

#: Tests that capture CUDA graphs or look at the allocator, by id: whole files, and single ones that say so. And those
#: with attention masks of odd lengths: cuDNN, as eager PyTorch calls it too, reads a mask four bytes at a time, up to
#: two bytes past its end.
CACHED = ("*test_cuda_graphs_gpu.py*", "*test_bench_gpu.py*", "*test_costmodel_gpu.py*", "*test_gpu_search.py*",
          "*test_overlap_gpu.py*", "*test_a_model_gives*", "*test_masked_attention*", "*allocator*", "*graph*",
          "*captur*")
#: Tests that have compilers build for long (FlashInfer's kernels with nvcc, TorchInductor's, a tune's).
WARM = ("*test_bench_gpu.py*", "*test_gpu_search.py*")
#: Roughly how long a test takes under memcheck, in seconds, by the first pattern that matches: the longest go first.
ESTIMATES_S = (
    ("*test_bench_gpu.py*rope*", 60.0), ("*test_bench_gpu.py*softmax*", 60.0), ("*test_bench_gpu.py*", 40.0),
    ("*test_gpu_search.py*", 50.0), ("*test_decode_steps*", 25.0), ("*test_offsets_beyond*", 20.0),
    ("*test_dispatch_gpu.py::test_[al]*", 20.0), ("*test_capture_gpu.py*", 12.0), ("*test_cuda_graphs_gpu.py*", 10.0),
    ("*test_in_place_gpu.py*", 8.0), ("*test_llama_sizes*", 8.0), ("*test_overlap_gpu.py*", 5.0), ("*", 3.0),
)


@dataclass(frozen=True)
class Attempt:
    """One run of a test.

    Attributes:
        kind: Of its process.
        process: Its name.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        seconds: How long it took.
        message: Why it failed or was skipped.
    """

    kind: str
    process: str
    outcome: str
    seconds: float
    message: str = ""


@dataclass
class Case:
    """A test.

    Attributes:
        id: As pytest names it.
        kind: Where it runs under memcheck.
        warm: Whether it is run without memcheck before.
        attempts: What became of it so far.
        lost: How often its process ended without a summary.
    """

    id: str
    kind: str
    warm: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    lost: int = 0

    @property
    def estimate_s(self) -> float:
        known_s = next(seconds for pattern, seconds in ESTIMATES_S if fnmatchcase(self.id, pattern))
        return known_s + (START_S if self.has_failed else 0.0)

    @property
    def has_failed(self) -> bool:
        """It may leave its process unusable: another attempt has one for itself."""
        return any(attempt.outcome == "failed" for attempt in self.attempts)

    @property
    def checked(self) -> list[Attempt]:
        """The attempts under memcheck."""
        return [attempt for attempt in self.attempts if attempt.kind != PLAIN]

    @property
    def outcome(self) -> str:
        """Of the last attempt under memcheck; ``"not reached"`` when there is none."""
        return self.checked[-1].outcome if self.checked else "not reached"

    @property
    def without(self) -> str:
        """Outcome without memcheck; empty when it was not tried."""
        plain = [attempt.outcome for attempt in self.attempts if attempt.kind == PLAIN]
        return plain[-1] if plain else ""

    def next_kind(self) -> str | None:
        """Where it has to run next."""
        tried = {attempt.kind for attempt in self.attempts}
        if self.warm and not tried:
            return PLAIN
        if not self.checked:
            return self.kind
        if self.outcome == "failed":
            return next((kind for kind in (CACHING, PLAIN) if kind not in tried), None)
        return None


def cases_of(ids: Iterable[str], cached: Sequence[str], warm: Sequence[str]) -> list[Case]:
    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [Case(name, CACHING if matches(name, cached) else SINGLE, matches(name, warm)) for name in ids]


class Queue:
    """The tests that have to run, for threads that each keep one process.

    Args:
        cases: The tests.
        end: Until when tests are handed out, on ``clock``.
        clock: Seconds.
    """

    def __init__(self, cases: Sequence[Case], end: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = end
        self._clock = clock
        self._cases = {case.id: case for case in cases}
        self._waiting: dict[str, list[Case]] = {kind: [] for kind in KINDS}
        #: Processes that still take tests, by kind; and all that have not said how theirs went.
        self._taking: Counter[str] = Counter()
        self._open = 0
        self._broken: Counter[str] = Counter()
        self._changed = threading.Condition()
        for case in cases:
            self._put(case)

    @property
    def over(self) -> bool:
        return self._clock() >= self.end

    def stop(self) -> None:
        """Hand out no more."""
        self.end = self._clock()

    def _put(self, case: Case) -> None:
        kind = case.next_kind()
        if kind is not None:
            self._waiting[kind].append(case)
            # Stable: tests of a file, which share what they build, stay together.
            self._waiting[kind].sort(key=lambda one: -one.estimate_s)

    def _share_s(self, kind: str) -> float:
        """Work for one more process of a kind; first comes what others wait for."""
        load = sum(case.estimate_s for case in self._waiting[kind])
        return load / (self._taking[kind] + 1) * (4.0 if kind == PLAIN else 1.0)

    def _worth(self, kind: str) -> bool:
        load = sum(case.estimate_s for case in self._waiting[kind])
        return load > 0 and self._broken[kind] < 3 and (
            not self._taking[kind] or load / self._taking[kind] > START_S
        )

    def choose(self) -> str | None:
        """The kind of process to start next, when there is something for it to do; None when there is no more."""
        with self._changed:
            while not self.over:
                kinds = [kind for kind in KINDS if self._worth(kind)]
                if kinds:
                    kind = max(kinds, key=self._share_s)
                    self._taking[kind] += 1
                    self._open += 1
                    return kind
                if not self._open:
                    break
                self._changed.wait(0.5)
            return None

    def take(self, kind: str) -> Case | None:
        """A test for a process of this kind; with None, the process takes no more."""
        with self._changed:
            if self.over or not self._waiting[kind]:
                self._leave(kind)
                return None
            return self._waiting[kind].pop(0)

    def leave(self, kind: str) -> None:
        """A process takes no more."""
        with self._changed:
            self._leave(kind)

    def _leave(self, kind: str) -> None:
        self._taking[kind] -= 1
        self._changed.notify_all()

    def settle(self, results: Iterable[tuple[Case, Attempt]]) -> None:
        """Keep outcomes; what they leave open goes on."""
        with self._changed:
            for case, attempt in results:
                case.attempts.append(attempt)
                self._put(case)
            self._changed.notify_all()

    def give_back(self, cases: Iterable[Case], lost: bool = False) -> None:
        """Tests that a process did not run; or did, but its summary was lost with it."""
        with self._changed:
            for case in cases:
                case.lost += lost
                if case.lost <= _TRIES:
                    self._put(case)
            self._changed.notify_all()

    def close(self, kind: str, useless: bool) -> None:
        """A process has ended and everything about it is settled; a ``useless`` one did not get to its first test."""
        with self._changed:
            self._open -= 1
            self._broken[kind] = self._broken[kind] + 1 if useless else 0
            self._changed.notify_all()

    def case(self, name: str) -> Case:
        return self._cases[name]
