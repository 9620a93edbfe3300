"""What is decided on a GPU: by launches from Python and by the device's own time, both together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from search_fakes import CLOCK, CPU, FakeSubject, ShortTimer

from fuseplan.search.store.record import ATEN
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part
from fuseplan.search.timing.timers import Run, Sampler, Timer
from fuseplan.search.workers import jobs
from fuseplan.search.workers.jobs import Bench


class Clockwork:
    """Whether calls are on the device alone at the moment."""

    alone = False


class AloneTimer(ShortTimer):
    """The device's own time."""

    regime = "graph"

    def prepare(self, run: Run, operands: Sequence[Any]) -> Sampler:
        def alone(*inputs: torch.Tensor) -> object:
            Clockwork.alone = True
            try:
                return run(*inputs)
            finally:
                Clockwork.alone = False

        return super().prepare(alone, operands)


class LaunchingTimer(ShortTimer):
    def of_device(self) -> Timer | None:
        return AloneTimer()


@dataclass(frozen=True)
class Launched(FakeSubject):
    """Takes ``eager_us`` with the host that launches it, ``alone_us`` without; negative: it cannot be recorded."""

    alone_us: float = 0.0

    def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if Clockwork.alone and self.alone_us < 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        CLOCK.advance(self.alone_us if Clockwork.alone else self.eager_us)
        return super(Launched, replace(self, eager_us=0.0)).eager(*inputs)


BENCH = Bench(CPU, LaunchingTimer(), decide_s=0.02)
PLAN = Launched(key="plan", eager_us=100.0, alone_us=80.0)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    jobs.release()


@pytest.mark.parametrize(("launched_us", "alone_us", "wins"), [
    (100.0, 40.0, True),  # the host hides it
    (120.0, 40.0, True),  # the host takes longer, the device half
    (150.0, 40.0, False),  # who launches from Python would lose too much
    (120.0, 76.0, False),
    (60.0, 80.0, True),
    (90.0, 120.0, False),
])
def test_who_wins_is_best_in_both_together(launched_us: float, alone_us: float, wins: bool) -> None:
    other = Launched(key="other", eager_us=launched_us, alone_us=alone_us)
    found = jobs.decide_sides(BENCH, {"a": Part(PLAN), "b": Part(other)}, {"plan": ["a"], "other": ["b"]}, ())
    assert found.accepts("other", "plan") is wins
    called = jobs.contest_calls(BENCH, PLAN, {"other": other}).contest
    assert called.accepts("other", ATEN) is wins


def test_times_are_those_of_the_regime() -> None:
    other = Launched(key="other", eager_us=120.0, alone_us=40.0)
    found: Contest = jobs.contest_calls(BENCH, PLAN, {"other": other}).contest
    assert found.regime == "eager"
    assert [found.time(name).median_us for name in (ATEN, "other")] == pytest.approx([100.0, 120.0])


def test_what_no_graph_records_is_judged_as_launched() -> None:
    other = Launched(key="other", eager_us=60.0, alone_us=-1.0)
    found = jobs.contest_calls(BENCH, PLAN, {"other": other}).contest
    assert not found.conditions and found.accepts("other", ATEN)
