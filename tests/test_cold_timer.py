"""What a sample of cold calls says where single calls differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from fuseplan.search.timers import ColdTimer


class _Clock:
    """Time that passes with each call, as listed in milliseconds; and events that read it."""

    def __init__(self, calls_ms: Sequence[float]) -> None:
        self.now_ms, self._calls = 0.0, cycle(calls_ms)

    def run(self, operand: torch.Tensor) -> None:
        self.now_ms += next(self._calls)

    def event(self) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                self.at_ms = clock.now_ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return float(end.at_ms - self.at_ms)

        return Event()


def sample_of(calls_ms: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("fuseplan.search.timers._MIN_FLUSH_BYTES", 4096)
    clock = _Clock(calls_ms)
    return ColdTimer(l2_bytes=1024, device="cpu", event=clock.event).prepare(clock.run, [(torch.zeros(1),)])(0)


@pytest.mark.parametrize("slow", [4, 5, 6])
def test_two_clusters_of_times_count_by_their_shares(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median would be 0.040, 0.042 or 0.044; whatever the share, it cannot jump by more than that of one call."""
    calls = [0.040] * (10 - slow) + [0.044] * slow
    inner = sorted(calls)[1:-1]
    assert sample_of(calls, monkeypatch) == pytest.approx(1000 * sum(inner) / 8)


def test_one_call_that_something_else_held_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_of([0.040] * 9 + [5.0], monkeypatch) == pytest.approx(40.0)
