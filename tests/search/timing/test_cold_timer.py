"""Cold calls: what they find in the cache, where results lie, and what a sample says where single calls differ."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from fuseplan.search.timing.timers import ColdTimer


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


def test_calls_meet_an_overwritten_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseplan.search.timing.timers.MIN_FLUSH_BYTES", 4096)
    clock = _Clock([0.25, 0.25, 8.0])
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
    assert sample() == 250.0  # the slow one is the largest
    calls = seen[warm:]
    assert all(flushed for _, flushed in calls)
    assert [number for number, _ in calls] == [0, 1, 2, 0]  # a millisecond of calls of 250 us


@pytest.mark.parametrize(("held_bytes", "most"), [(2**20, 10), (3 * 4096, 4), (100, 1)])
def test_the_calls_of_a_sample_write_to_several_blocks(
    held_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many results as the limit allows are alive at once, beside the one that is being made; none afterwards."""
    monkeypatch.setattr("fuseplan.search.timing.timers.MIN_FLUSH_BYTES", 4096)
    monkeypatch.setattr("fuseplan.search.timing.timers.HELD_BYTES", held_bytes)
    clock, alive, peak = _Clock([0.01]), 0, 0

    def dropped() -> None:
        nonlocal alive
        alive -= 1

    def run(operand: torch.Tensor) -> list[object]:
        nonlocal alive, peak
        alive, result = alive + 1, operand + 1
        weakref.finalize(result, dropped)
        peak = max(peak, alive)
        clock.run(operand)
        return [(result,), None]

    sample = ColdTimer(l2_bytes=1024, device="cpu", event=clock.event).prepare(run, [(torch.zeros(1024),)])
    peak = 0
    sample()
    assert (peak, alive) == (most, 0)


@pytest.mark.parametrize("room", [0, 1, 3])
def test_what_is_held_leaves_room_for_the_next_call(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small device, where ``room`` results fit beside the inputs. Nobody's samples count the call that failed."""
    monkeypatch.setattr("fuseplan.search.timing.timers.MIN_FLUSH_BYTES", 4096)
    clock, alive, failures = _Clock([0.01]), 0, 0

    def dropped() -> None:
        nonlocal alive
        alive -= 1

    def run(operand: torch.Tensor) -> torch.Tensor:
        nonlocal alive, failures
        if alive >= room:
            failures += 1
            clock.now_ms += 5.0  # the allocator gives everything back to the device, and asks again
            raise torch.OutOfMemoryError("no memory")
        alive, result = alive + 1, operand + 1
        weakref.finalize(result, dropped)
        clock.run(operand)
        return result

    timer, operands = ColdTimer(l2_bytes=1024, device="cpu", event=clock.event), [(torch.zeros(1024),)]
    if not room:
        with pytest.raises(torch.OutOfMemoryError):
            timer.prepare(run, operands)
        return
    samples = [timer.prepare(run, operands) for _ in range(2)]
    assert [sample() for sample in samples] == pytest.approx([10.0, 10.0])
    assert (failures, alive) == (1, 0)


def sample_of(calls_ms: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("fuseplan.search.timing.timers.MIN_FLUSH_BYTES", 4096)
    clock = _Clock(calls_ms)
    return ColdTimer(l2_bytes=1024, device="cpu", event=clock.event).prepare(clock.run, [(torch.zeros(1),)])()


@pytest.mark.parametrize("slow", [4, 5, 6])
def test_two_clusters_of_times_count_by_their_shares(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median would be 0.040, 0.042 or 0.044; whatever the share, it cannot jump by more than that of one call."""
    calls = [0.040] * (10 - slow) + [0.044] * slow
    inner = sorted(calls)[1:-1]
    assert sample_of(calls, monkeypatch) == pytest.approx(1000 * sum(inner) / 8)


def test_one_call_that_something_else_held_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_of([0.040] * 9 + [5.0], monkeypatch) == pytest.approx(40.0)
