"""The tuner's answers on fakes: which config and back end win, by how much, and when not to fuse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_tuner import BUDGET, SUBJECT, tuner
from inline_executor import InlineExecutor
from search_fakes import CPU, FakeBackend, FakeSubject, OtherBackend, ShortTimer, VirtualClock

from fuseplan.kernels.ir.backend import config_key
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import Versions
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer
from fuseplan.search.tune import group_search
from fuseplan.search.tune.space import enumerate_space
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import ProgressEvent, Tuner
from fuseplan.search.workers import jobs
from fuseplan.search.workers.jobs import Entrant
from fuseplan.search.workers.worker import Outcome


@pytest.fixture
def db() -> Database:
    return Database("sqlite://")


def test_the_best_config_wins_and_is_stored(db: Database) -> None:
    record = tuner(db).tune(SUBJECT)
    assert record.fuse
    assert (record.backend, dict(record.config)) == ("fake", {"tile": 128, "unroll": 4})
    assert record.fused is not None
    assert record.fused.median_us == pytest.approx(10.0)
    assert record.unfused.median_us == pytest.approx(100.0)
    assert record.gain == pytest.approx(0.9)
    assert record.default_gain == pytest.approx(1 - 10 / 35)
    assert record.threshold == 0.01
    assert (record.enumerated, record.compiled, record.measured) == (19, 19, 19)
    assert [f.name for f in record.finalists] == ["unfused", "default", "challenger 1", "challenger 2", "challenger 3"]
    assert dict(record.finalists[1].config) == {"tile": 16, "unroll": 1}
    assert "90.0% less time" in record.evidence.reason
    assert record.evidence.versions == Versions.current("cpu")
    assert dict(record.resources) == {"registers": 32, "spill_bytes": 0}
    assert 0 < record.error < 1e-6
    assert db.get_record(record.key).hit == record


def test_do_not_fuse_is_an_answer(db: Database) -> None:
    record = tuner(db).tune(FakeSubject(eager_us=8.0))
    assert not record.fuse
    assert record.backend == "fake"
    assert record.gain == pytest.approx(-0.25)
    assert record.best_us == pytest.approx(8.0)
    assert "25.0% slower" in record.evidence.reason
    assert db.get_record(record.key).hit == record


def test_a_gain_within_the_threshold_keeps_the_incumbents(db: Database) -> None:
    record = tuner(db).tune(FakeSubject(eager_us=10.05))
    assert not record.fuse
    assert "within the threshold of 1.0%" in record.evidence.reason
    flat = FakeBackend(slope_us=0.02)
    kept = tuner(db, flat).tune(FakeSubject(key="flat"))
    assert kept.fuse
    assert dict(kept.config) == {"tile": 16, "unroll": 1}
    assert kept.default_gain == 0.0


def test_the_back_end_is_one_of_the_choices(db: Database) -> None:
    record = tuner(db, FakeBackend(), OtherBackend(floor_us=3.0)).tune(SUBJECT)
    assert record.backend == "other"
    assert record.enumerated == 38
    tied = tuner(db, FakeBackend(), OtherBackend()).tune(FakeSubject(key="tied"))
    assert tied.backend == "fake"


def test_back_ends_that_cannot_take_part_are_named(db: Database) -> None:
    class Cuda(FakeBackend):
        name = "cudafake"
        device_type = "cuda"

    class Absent(FakeBackend):
        name = "absent"

    backends = (FakeBackend(refusal="cannot express it"), Absent(absent="no compiler"), Cuda())
    record = tuner(db, *backends).tune(SUBJECT)
    assert not record.fuse
    assert dict(record.refusals) == {
        "fake": "cannot express it", "absent": "no compiler", "cudafake": "is for cuda, not cpu"
    }
    assert "fake: cannot express it; absent: no compiler" in record.evidence.reason
    nothing = Tuner(db, CPU, (), "cpu-test", executor=InlineExecutor(), timer=ShortTimer())
    assert "no back end was given" in nothing.tune(FakeSubject(key="x")).evidence.reason


def test_two_fresh_tunes_agree_under_jitter() -> None:
    answers = []
    for _ in range(3):
        backend = FakeBackend(jitter=0.2, slope_us=4.0)
        record = tuner(Database("sqlite://"), backend).tune(replace(SUBJECT, jitter=0.2))
        answers.append((record.fuse, record.backend, dict(record.config)))
    assert answers == [(True, "fake", {"tile": 128, "unroll": 4})] * 3


def test_a_play_off_runs_fused_kernels_and_unfused_chains(db: Database) -> None:
    backend = FakeBackend()
    tuned = tuner(db, backend)
    record = tuned.tune(SUBJECT)
    parts = {"fused": Part(SUBJECT, backend, record.config), "chain": Part(SUBJECT)}
    found = tuned.play_off(parts, {"chain": ["chain"], "fused": ["fused"], "both": ["fused", "chain"]})
    assert found is not None
    assert record.fused is not None
    assert found.time("fused").median_us == pytest.approx(record.fused.median_us, rel=0.05)
    assert found.time("chain").median_us == pytest.approx(record.unfused.median_us, rel=0.05)
    assert found.time("both").median_us == pytest.approx(record.fused.median_us + record.unfused.median_us, rel=0.05)
    broken = Part(SUBJECT, backend, {"tile": "none"})
    assert tuned.play_off({"a": broken, "b": Part(SUBJECT)}, {"a": ["a"], "b": ["b"]}) is None


def test_a_play_off_without_a_clear_winner_runs_again_on_other_operands(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = iter((-0.02, 0.08, 0.01))
    seen: list[list[torch.Tensor]] = []

    def close(_timer: object, runs: object, operands: Operands, *_: object) -> Contest:
        seen.append([one for inputs in operands for one in inputs])
        return Contest({"a": (10.0,) * 7, "b": (10.0 * (1 - next(gains)),) * 7}, 0.05, "eager")

    monkeypatch.setattr(jobs, "decisive", close)
    found = tuner(db).play_off({"one": Part(SUBJECT)}, {"a": ["one"], "b": ["one"]})
    assert found is not None and found.gain("b", "a") == pytest.approx(0.01)
    assert len(seen) == 3
    assert not {id(one) for one in seen[0]} & {id(one) for one in seen[1]}


def test_a_play_off_times_sequences_on_the_same_operands_in_turn(db: Database) -> None:
    """Weights rotate, as in every other measurement; activations are shared by all parts that name them."""
    seen: list[tuple[int, ...]] = []

    @dataclass(frozen=True)
    class Noting(FakeSubject):
        def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
            seen.append(tuple(map(id, inputs)))
            return super().eager(*inputs)

    first = Part(Noting(key="first"), reads=("a", "b", "w"), makes=("c",))
    second = Part(Noting(key="second"), reads=("c", "b", "v"), makes=("d",))
    sides = {"one": ["first", "second"], "other": ["first"]}
    assert tuner(db).play_off({"first": first, "second": second}, sides, {"c"}) is not None
    hot, shared, weights = (set(column) for column in zip(*seen, strict=True))
    assert len(shared) == 1
    assert len(weights) > 2
    assert len(hot) > 1  # an operand, and what the first part made each time


def test_progress_tells_every_trial(db: Database) -> None:
    events: list[ProgressEvent] = []
    tuner(db, budget=replace(BUDGET, trials=5), progress=events.append).tune(SUBJECT)
    assert [event.phase for event in events][:2] == ["open", "compile"]
    assert [event.trial for event in events if event.phase == "screen"] == [1, 2, 3, 4, 5]
    assert {event.of for event in events} == {5}
    assert events[-1].phase == "done"
    best = [event.best_us for event in events[1:]]
    assert best == sorted(best, reverse=True)
    assert {event.label for event in events} == {SUBJECT.label}


def test_the_time_of_a_tune_is_accounted_for(db: Database) -> None:
    clock = VirtualClock()

    class Costly(InlineExecutor):
        """Every job takes a second of the account's clock."""

        def call(self, function: Any, *args: Any, limit_s: float) -> Outcome:
            clock.now += 1.0
            return super().call(function, *args, limit_s=limit_s)

    account = TimeAccount(clock=lambda: clock.now)
    booked = tuner(db, executor=Costly(), account=account, budget=replace(BUDGET, trials=5))
    with account.spend("planning"):
        clock.now += 2.0
        booked.time_unfused(FakeSubject(key="other"))
        record = booked.tune(SUBJECT)
        booked.play_off({"a": Part(SUBJECT)}, {"a": ["a"]})
    assert record.measured == 5
    assert account.spent() == {
        "planning": (2.0, 1), "timing unfused ops": (1.0, 1), "making references": (2.0, 2),
        "waiting for compilers": (5.0, 5), "screening": (5.0, 5), "deciding": (1.0, 1), "playing off": (1.0, 1),
        "storing": (0.0, 7), "other": (0.0, 0),
    }


# -- timers that see more than the regime's time ----------------------------------------------------------


class HostBoundTimer(ShortTimer):
    """No call takes the host less than 40 us, whatever the kernel takes."""

    def of_device(self) -> Timer | None:
        return ShortTimer()

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        sample = super().prepare(run, operands)
        return lambda: max(40.0, sample())


class BlindTimer(HostBoundTimer):
    """The same without a way to look past the host."""

    def of_device(self) -> Timer | None:
        return None


def test_configs_that_tie_on_the_host_are_told_apart_on_the_device(db: Database) -> None:
    blind = tuner(Database("sqlite://"), timer=BlindTimer()).tune(SUBJECT)
    assert dict(blind.config) == {"tile": 16, "unroll": 1}  # a tie keeps the default
    record = tuner(db, timer=HostBoundTimer()).tune(SUBJECT)
    assert dict(record.config) == {"tile": 128, "unroll": 4}
    assert record.default_gain == pytest.approx(1 - 10 / 35)
    # Whether to fuse is still a question of the regime's time.
    assert record.fuse and record.fused is not None
    assert record.fused.median_us == pytest.approx(40.0)
    assert record.gain == pytest.approx(0.6)
    trials = {config_key(trial.config): trial for trial in db.trials(record.key)}
    best = trials[config_key(record.config)]
    assert (best.median_us, best.device_us) == (pytest.approx(40.0), pytest.approx(10.0))


def test_a_kernel_that_is_only_faster_on_the_device_is_not_fused(db: Database) -> None:
    record = tuner(db, timer=HostBoundTimer()).tune(FakeSubject(eager_us=30.0))
    assert not record.fuse  # 10 us against 30 on the device, but 40 against 40 as a user meets it


def test_ranking_groups_takes_the_regimes_time_and_a_tune_measures_the_default_again(db: Database) -> None:
    tune = tuner(db, timer=HostBoundTimer())
    trial = tune.screen(SUBJECT)
    assert (trial.median_us, trial.device_us) == (pytest.approx(40.0), None)
    assert dict(tune.tune(SUBJECT).config) == {"tile": 128, "unroll": 4}
    again = tune.screen(SUBJECT)
    assert (again.median_us, again.device_us) == (pytest.approx(40.0), pytest.approx(35.0))


class ColdLosesTimer(ShortTimer):
    """Among calls that find nothing in the cache, those that take less than 20 us otherwise take 200."""

    has_cold = True

    class Cold(ShortTimer):
        def prepare(self, run: Run, operands: Operands) -> Sampler:
            sample = super().prepare(run, operands)
            return lambda: 200.0 if sample() < 20.0 else 50.0

    def from_memory(self, l2_bytes: int) -> Timer | None:
        return ColdLosesTimer.Cold()


def test_a_config_has_to_be_good_with_a_cold_cache_too(db: Database) -> None:
    record = tuner(db, timer=ColdLosesTimer()).tune(SUBJECT)
    # The fastest has 10 us hot and 200 cold; the default 35 and 50, a smaller mean.
    assert record.fuse and record.fused is not None
    assert dict(record.config) != {"tile": 128, "unroll": 4}
    assert record.fused.median_us >= 20.0


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"tile": 48, "unroll": 1}}, {"config": {"tile": "128", "unroll": 4}}, {"config": {}},
        {"config": {"tile": 256, "unroll": 8}}, {"config": {"tile": 16, "unroll": 1, "import os": 1}},
        {"backend": "gone"}, {"backend": ""},
    ],
)
def test_a_stored_answer_that_cannot_be_one_is_measured_anew(
    db: Database, changes: dict[str, Any], tmp_path: Path
) -> None:
    first = tuner(db).tune(SUBJECT)
    db.put_record(replace(first, **changes))
    journal = tmp_path / "journal"
    again = tuner(db, FakeBackend(journal=str(journal))).tune(SUBJECT)
    assert (again.backend, dict(again.config)) == ("fake", {"tile": 128, "unroll": 4})
    space = enumerate_space(FakeBackend(), SUBJECT.ir, CPU)
    built = {line.split(" ")[1] for line in journal.read_text().splitlines()}
    assert built <= {config_key(config) for config in space.configs}
    assert db.get_record(first.key).hit == again


@pytest.mark.parametrize(("theirs", "own", "winner"), [
    (91.0, 100.0, "challenger 1"),  # the next run might have it otherwise
    (89.0, 100.0, "challenger 2"), (89.0, 99.5, "challenger 2"), (104.0, 100.0, "challenger 1"),
])
def test_another_back_end_has_to_be_clearly_better(theirs: float, own: float, winner: str) -> None:
    times = {"default": 120.0, "challenger 1": own, "challenger 2": theirs, "unfused": 300.0}
    contest = Contest({name: (time_us,) * 9 for name, time_us in times.items()}, 0.0, "eager")
    standing = [
        Entrant(name, backend, {})
        for name, backend in zip(times, (FakeBackend(), FakeBackend(), OtherBackend()), strict=False)
    ]
    assert group_search._winner(standing, contest).name == winner
