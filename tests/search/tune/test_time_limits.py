"""Time limits of jobs: signs between calls, and limits that grow with what a call does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from inline_executor import InlineExecutor
from search_fakes import CLOCK, CPU, OPERANDS, FakeBackend, FakeSubject, VirtualTimer, taking

from fuseplan.costmodel.work import Work
from fuseplan.search.errors import SubjectError
from fuseplan.search.store.database import Database
from fuseplan.search.timing import contest as contest_module
from fuseplan.search.timing import signs
from fuseplan.search.timing.contest import Contest, contest, decisive
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.resources import call_limit_s
from fuseplan.search.tune.tuner import Budget, Tuner
from fuseplan.search.workers import jobs
from fuseplan.search.workers.worker import Outcome

BENCH = jobs.Bench(CPU, VirtualTimer(), 0, 0.08, 0.5)
#: Seconds of one call.
CALL_S = 20.0
SLOW = FakeSubject(eager_us=CALL_S * 1e6)


@pytest.fixture
def sign_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When a job of this process gave a sign, on the virtual clock."""
    times = [CLOCK.now]
    monkeypatch.setattr(signs.time, "monotonic", lambda: CLOCK.now)
    signs.listen(lambda: times.append(CLOCK.now))
    yield times
    signs.listen(None)


@pytest.mark.parametrize(
    "job", [
        lambda: jobs.time_unfused(BENCH, SLOW),
        lambda: jobs.decide_finalists(BENCH, SLOW, ()),
        lambda: jobs.contest_calls(BENCH, SLOW, {"same": replace(SLOW, key="same")}),
        lambda: jobs.decide_sides(BENCH, {"a": Part(SLOW)}, {"one": ["a"], "other": ["a"]}, ()),
        lambda: jobs.time_sides(BENCH, {"a": Part(SLOW)}, {"one": ["a"], "other": ["a", "a"]}, ()),
    ],
    ids=["an op", "a decision", "calls of libraries", "a play-off", "a step"],
)
def test_a_job_gives_signs_between_its_calls_however_many_there_are(
    sign_times: list[float], job: Callable[[], object]
) -> None:
    """A sequence is one call of all its parts, and a run is warmed up by two calls."""
    job()
    jobs.release()
    gaps_s = [b - a for a, b in pairwise([*sign_times, CLOCK.now])]
    assert max(gaps_s) <= 6 * CALL_S and max(gaps_s) < sum(gaps_s)


def test_signs_are_few(sign_times: list[float]) -> None:
    """Each wakes up another process, beside what is timed."""
    began = CLOCK.now
    contest(VirtualTimer(), {"x": taking(100.0)}, [()], seconds=5.0)
    assert 1 <= len(sign_times) - 1 <= 2 + CLOCK.now - began


def test_long_samples_are_not_repeated_for_ever_on_a_busy_machine() -> None:
    """Each is disturbed: within the planned time they are repeated, after it they are taken as they are."""
    calls: list[tuple[torch.Tensor, ...]] = []

    def run(*inputs: torch.Tensor) -> None:
        calls.append(inputs)
        CLOCK.disturbances += 1
        CLOCK.advance(1e6)

    found = contest(VirtualTimer(), {"x": run}, OPERANDS, seconds=0.1)
    assert len(calls) <= 2 * len(found.samples["x"]) + 20  # with what warms up, and the first round


@pytest.mark.parametrize(("call_us", "runs"), [(1e3, 3), (1e6, 1)])
def test_a_decision_of_long_calls_is_not_repeated_for_no_more_rounds(
    call_us: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise hides the answer each time."""
    asked = []

    def noisy(*args: Any) -> Contest:
        asked.append(args)
        return Contest({"a": (call_us,) * 7, "b": (1.3 * call_us,) * 7}, 0.9, "eager")

    monkeypatch.setattr(contest_module, "contest", noisy)
    decisive(VirtualTimer(), {"a": taking(1.0), "b": taking(1.0)}, OPERANDS, 0.5, "a")
    assert len(asked) == runs


def work(nbytes: float = 0.0, **flops: float) -> Work:
    return Work(flops, nbytes, launches=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_limit_grows_with_what_a_call_does(device: str) -> None:
    small, large = work(4e2, fp32=1e2), work(4e9, fp32=1e9, sfu=1e9)
    assert call_limit_s(7.0, [small], device) == pytest.approx(7.0, rel=0.01)
    one = call_limit_s(7.0, [large], device)
    assert one > call_limit_s(7.0, [small], device)
    assert call_limit_s(7.0, [large] * 3, device) == pytest.approx(7.0 + 3 * (one - 7.0))
    assert call_limit_s(70.0, [large], device) == pytest.approx(63.0 + one)
    matmul = call_limit_s(0.0, [work(1e6, fp32_matmul=1e13)], device)
    assert matmul > call_limit_s(0.0, [work(1e6, fp32_matmul=1e12)], device)


@dataclass
class TimesOut(InlineExecutor):
    """Ends jobs of the measuring process that ``function`` names, as a pool does at their limit; notes all limits."""

    function: Callable[..., Any] | None = None
    limits_s: dict[str, float] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> Outcome:
        self.limits_s[function.__name__] = limit_s
        if function is self.function:
            return Outcome(failure=f"no result within {limit_s:g} s", timed_out=True)
        return super().call(function, *args, limit_s=limit_s)


def tuner(executor: InlineExecutor, **budget: Any) -> Tuner:
    backend = FakeBackend(tiles=(16, 32), unrolls=(1,), best=(1, 0))
    return Tuner(Database("sqlite://"), CPU, (backend,), "dev", Budget(**budget), executor=executor,  # type: ignore[arg-type]
                 timer=VirtualTimer())


def test_every_measuring_job_has_the_limit_of_its_subject() -> None:
    found = []
    for nbytes in (1e3, 1e10):
        executor = TimesOut()
        subject = FakeSubject(work=work(nbytes))
        made = tuner(executor, job_limit_s=9.0)
        made.tune(subject)
        made.time_unfused(replace(subject, key="other"))
        made.contest_calls(replace(subject, key="third"), {})()
        made.play_off({"a": Part(subject)}, {"one": ["a"]})
        made.time_sides({"a": Part(subject)}, {"one": ["a"]}, ())
        found.append(executor.limits_s)
    small, large = found
    timed = set(small) - {"release", "prepare"}
    assert timed >= {"open_subject", "screen_config", "decide_finalists", "time_unfused", "contest_calls",
                     "decide_sides", "time_sides"}
    assert {name for name in timed if not 9.0 <= small[name] < 10.0 < large[name]} == set()


@pytest.mark.parametrize("function", [jobs.open_subject, jobs.time_unfused])
def test_what_times_out_is_said_with_its_size_and_with_what_allows_more(function: Callable[..., Any]) -> None:
    made = tuner(TimesOut(function=function), job_limit_s=9.0)
    subject = FakeSubject(work=work(4e7, fp32=2.5e9))
    with pytest.raises(SubjectError, match=r"muladd 3x127: .*40 MB and 2\.5 Gflop.*--job-limit (\d+)") as raised:
        (made.tune if function is jobs.open_subject else made.time_unfused)(subject)
    assert int(str(raised.value).split("--job-limit ")[1].split("`")[0]) > 9.0
    assert made.time_sides({"a": Part(subject)}, {"one": ["a"]}, ()).ok


def test_a_decision_that_times_out_names_the_option_too() -> None:
    made = tuner(TimesOut(function=jobs.decide_finalists))
    with pytest.raises(SubjectError, match="--job-limit"):
        made.tune(FakeSubject())
