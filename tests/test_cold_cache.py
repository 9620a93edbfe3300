"""What a timer of cold calls finds in the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseplan.search.timers import ColdTimer


class _Clock:
    """Events on a clock that moves only when the timed call says so."""

    now_ms = 0.0

    def event(self) -> Any:
        clock = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = clock.now_ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        return Event()


def test_cold_calls_meet_an_overwritten_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseplan.search.timers._MIN_FLUSH_BYTES", 4096)
    clock = _Clock()
    timer = ColdTimer(l2_bytes=2048, device="cpu", event=clock.event)
    assert timer._buffer.numel() * 4 == 4 * 2048
    seen: list[tuple[int, bool]] = []

    def run(operand: torch.Tensor) -> None:
        seen.append((int(operand), not bool(timer._buffer.any())))
        timer._buffer.fill_(1)  # what was in the cache is used up
        clock.now_ms += 8.0 if int(operand) == 2 else 0.25

    operands = [(torch.tensor(number),) for number in range(3)]
    sample = timer.prepare(run, operands)
    warm = len(seen)
    assert sample(0) == 250.0  # the median
    calls = seen[warm:]
    assert all(flushed for _, flushed in calls)
    assert [number for number, _ in calls] == [0, 1, 2, 0]  # a millisecond of calls of 250 us
