"""Which trials a tune makes on fakes: seeds, budgets, and nothing twice; what is ranked and compiled ahead of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_tuner import BUDGET, SUBJECT, tuner
from inline_executor import InlineExecutor
from search_fakes import CPU, FakeBackend, FakeSubject, OtherBackend, ShortTimer

from fuseplan.kernels.ir.backend import Config, Target, config_key
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.search.errors import SubjectError
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import ATEN, RecordKey, Versions
from fuseplan.search.tune import group_search
from fuseplan.search.tune import tuner as tuner_module
from fuseplan.search.tune.group_search import GroupSearch
from fuseplan.search.tune.resources import TuningResources
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import Budget, Tuner
from fuseplan.search.workers.jobs import Bench
from fuseplan.search.workers.worker import Outcome


@pytest.fixture
def db() -> Database:
    return Database("sqlite://")


def test_a_second_tune_measures_nothing(db: Database, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    backend = FakeBackend(journal=str(journal))
    first = tuner(db, backend).tune(SUBJECT)
    size = journal.stat().st_size
    assert tuner(db, backend).tune(SUBJECT) == first
    assert journal.stat().st_size == size


@pytest.mark.parametrize("created", ["2020-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"])
def test_a_tune_that_measures_anew_takes_what_it_wrote_alone(db: Database, tmp_path: Path, created: str) -> None:
    """Records, trials and times of plain chains, by any clock; killed and started again, it is another tune."""
    journal = tmp_path / "journal"
    backend = FakeBackend(journal=str(journal))
    with pytest.MonkeyPatch.context() as patch:
        for module in (group_search, tuner_module):
            patch.setattr(module, "now", lambda: created)
        first = tuner(db, backend).tune(SUBJECT)
        other = FakeSubject(key="subject-2")
        tuner(db, backend).time_unfused(other)
        tuner(db, backend).screen(FakeSubject(key="subject-3"))
    sizes = [journal.stat().st_size]
    for run in ("a", "a", "b", ""):
        own = tuner(db, backend, run=run)
        assert own.tune(SUBJECT).config == first.config
        own.time_unfused(other)
        own.screen(FakeSubject(key="subject-3"))
        sizes.append(journal.stat().st_size)
        assert db.get_record(first.key).record.evidence.run == (run or "b")  # type: ignore[union-attr]
        assert {trial.run for trial in db.trials(own.key(other))} == {run or "b"}
    grew = [after > before for before, after in itertools.pairwise(sizes)]
    assert grew == [True, False, True, False]


def test_a_stale_record_is_measured_again_and_seeds_the_search(db: Database) -> None:
    record = tuner(db).tune(SUBJECT)
    stale = replace(record, evidence=replace(record.evidence, versions=Versions("0", "0")))
    db.put_record(stale)
    renewed = tuner(db, budget=replace(BUDGET, trials=2)).tune(SUBJECT)
    assert renewed.evidence.versions == Versions.current("cpu")
    assert dict(renewed.config) == dict(record.config)
    assert renewed.measured == 2


def test_neighbours_are_tried_early(db: Database) -> None:
    record = tuner(db).tune(SUBJECT)
    other = tuner(db, budget=replace(BUDGET, trials=2)).tune(FakeSubject(key="subject-2"), neighbours=[record])
    assert dict(other.config) == dict(record.config)


def test_a_minor_subject_has_two_trials_of_one_back_end_until_it_counts(db: Database) -> None:
    tune = tuner(db, FakeBackend(), OtherBackend(), budget=replace(BUDGET, trials=8))
    minor = tune.tune(SUBJECT, minor=True)
    assert minor.measured <= 2 and {trial.backend for trial in db.trials(tune.key(SUBJECT))} <= {"", minor.backend}
    assert tune.tune(SUBJECT, minor=True) == minor
    full = tune.tune(SUBJECT)
    assert full.measured == 8 and full.best_us <= minor.best_us
    assert tune.tune(SUBJECT, minor=True) == full == tuner(db, FakeBackend(), OtherBackend()).tune(SUBJECT)


@pytest.mark.parametrize("limits", [{"trials": 2}, {"trials": 1}])
def test_a_minor_answer_stays_where_no_search_would_do_more(db: Database, limits: dict[str, int]) -> None:
    tune = tuner(db, budget=replace(BUDGET, **limits))
    minor = tune.tune(SUBJECT, minor=True)
    assert tune.tune(SUBJECT) == minor


class Alike(FakeBackend):
    """Kernels with as many columns are alike."""

    def likeness(self, ir: KernelIR) -> Hashable | None:
        return ir.buffers[0].shape[1]


@pytest.mark.parametrize(("trials", "measured", "then"), [(96, 19, 7), (10, 10, 7), (9, 9, 9)])
def test_of_kernels_alike_one_is_searched(db: Database, trials: int, measured: int, then: int) -> None:
    shared = tuner(db, Alike(), budget=replace(BUDGET, steep_trials=trials))
    first = shared.tune(SUBJECT)
    assert first.measured == measured
    second = shared.tune(FakeSubject(key="alike", rows=SUBJECT.rows + 1))
    assert second.measured == then
    assert trials < first.enumerated or dict(second.config) == dict(first.config) == {"tile": 128, "unroll": 4}
    assert shared.tune(FakeSubject(key="wider", cols=SUBJECT.cols + 1)).measured == first.measured


def test_all_that_a_whole_search_tries_is_compiled_ahead(db: Database) -> None:
    run = GroupSearch(tuner(db, Alike())._resources, SUBJECT, RecordKey("w", "cpu-test", "eager", "fp32"), ())
    configs = [config_key(config) for _, _, config, _ in run.ahead()]
    assert len(set(configs)) == len(configs) == 19


def test_many_neighbours_leave_trials_for_the_search(db: Database) -> None:
    record = tuner(db).tune(SUBJECT)
    rows = [replace(record, config={"tile": t, "unroll": u}) for t in (16, 32, 64) for u in (1, 2, 4, 8)]
    found = tuner(db, budget=replace(BUDGET, trials=12)).tune(FakeSubject(key="other"), neighbours=rows)
    assert dict(found.config) == {"tile": 128, "unroll": 4}


def test_suggestions_of_the_back_end_are_tried_early(db: Database) -> None:
    class Knowing(FakeBackend):
        def suggestions(self, ir: object, target: object) -> tuple[dict[str, int | str], ...]:
            return ({"tile": 128, "unroll": 4},)

    record = tuner(db, Knowing(), budget=replace(BUDGET, trials=2)).tune(SUBJECT)
    assert dict(record.config) == {"tile": 128, "unroll": 4}


def test_guided_search_finds_the_bowls_bottom_in_a_large_space(db: Database) -> None:
    large = FakeBackend(best=(9, 3), tiles=tuple(range(4, 68, 4)), unrolls=tuple(range(1, 17)))
    record = tuner(db, large, budget=replace(BUDGET, trials=60)).tune(SUBJECT)
    assert record.enumerated == 256 - sum(t * u > 1024 for t in large.tiles for u in large.unrolls)
    assert record.measured <= 60
    assert dict(record.config) == {"tile": large.tiles[9], "unroll": large.unrolls[3]}


@pytest.mark.parametrize("trials", [1, 2, 3, 8, 12])
def test_the_preferred_back_end_has_most_of_the_trials_and_each_has_one(db: Database, trials: int) -> None:
    budget = replace(BUDGET, trials=trials)
    first, second = FakeBackend(), OtherBackend()
    record = tuner(db, first, second, budget=budget).tune(SUBJECT)
    by_backend = Counter(trial.backend for trial in db.trials(record.key, record.evidence.versions, only_open=False))
    assert by_backend["other"] == max(1, trials // 4)
    assert by_backend["fake"] == max(1, trials - by_backend["other"])


def test_a_gpu_gets_fewer_trials_unless_told_otherwise() -> None:
    assert Budget.on("cuda").trials < Budget.on("cpu").trials == Budget().trials
    assert Budget.on("cuda", trials=50).trials == Budget.on("cpu", trials=50).trials == 50
    assert Budget.on("cuda", seconds=0.5).seconds == 0.5
    assert Budget.on("cpu") == Budget()


def test_nothing_is_compiled_or_screened_twice(db: Database, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    tuner(db, FakeBackend(journal=str(journal)), budget=replace(BUDGET, finalists=0)).tune(SUBJECT)
    counts = Counter(journal.read_text().splitlines())
    assert {n for line, n in counts.items() if line.startswith("compile")} == {1}
    # Screening loads once, to check and to call; the default alone is loaded again to decide.
    loads = {line: n for line, n in counts.items() if line.startswith("load")}
    assert loads.pop("load tile=16,unroll=1") == 2
    assert set(loads.values()) == {1}


def test_the_time_budget_ends_the_search_after_a_first_batch(db: Database) -> None:
    record = tuner(db, budget=replace(BUDGET, seconds=0.0)).tune(SUBJECT)
    assert record.measured == 1
    assert dict(record.config) == {"tile": 16, "unroll": 1}


# -- ranking before a tune --------------------------------------------------------------------------------


class Counting(InlineExecutor):
    """Names the jobs that it ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def call(self, function: Any, *args: Any, limit_s: float) -> Outcome:
        self.ran.append(function.__name__)
        return super().call(function, *args, limit_s=limit_s)


def test_the_unfused_chain_is_timed_once(db: Database) -> None:
    executor = Counting()
    shared = tuner(db, executor=executor)
    assert shared.time_unfused(SUBJECT).median_us == pytest.approx(100.0)
    assert shared.time_unfused(SUBJECT).median_us == pytest.approx(100.0)
    assert executor.ran.count("time_unfused") == 1
    tuned = FakeSubject(key="tuned", eager_us=70.0)
    shared.tune(tuned)
    before = len(executor.ran)
    assert shared.time_unfused(tuned).median_us == pytest.approx(70.0)
    assert len(executor.ran) == before
    with pytest.raises(SubjectError, match="cannot be timed"):
        shared.time_unfused(FakeSubject(key="broken", broken="eager"))


def test_an_op_timed_beside_all_calls_of_libraries_is_not_timed_again(db: Database) -> None:
    executor = Counting()
    tune = tuner(db, executor=executor)
    fast, slow = (FakeSubject(eager_us=us) for us in (50.0, 70.0))
    first = tune.contest_calls(SUBJECT, {"fast": fast, "slow": slow})()
    assert first is not None and first.contest.gain("fast", "slow") == pytest.approx(2 / 7)
    assert tune.contest_calls(SUBJECT, {"slow": slow})() == first
    assert tune.time_unfused(SUBJECT) == first.contest.time(ATEN)
    assert executor.ran == ["contest_calls"]
    assert tune.contest_calls(SUBJECT, {"slow": slow, "other": fast})() != first
    assert tune.time_unfused(FakeSubject(key="another", eager_us=30.0)).median_us == pytest.approx(30.0)
    assert executor.ran == ["contest_calls", "contest_calls", "time_unfused"]


def test_an_unfused_chain_is_timed_without_a_reference(db: Database) -> None:
    # Its reference gives NaN, which only matters to what is checked against it.
    subject = FakeSubject(key="nan", broken="nan")
    assert tuner(db).time_unfused(subject).median_us == pytest.approx(100.0)
    with pytest.raises(SubjectError, match="NaN"):
        tuner(db).tune(subject)


class CountingBackend(FakeBackend):
    """Counts the configurations that it is asked about, beside those that it is asked to make."""

    asked: ClassVar[int] = 0

    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        CountingBackend.asked += 1
        return super().infeasible(ir, config, target)


def test_a_kernels_space_is_enumerated_once_and_not_to_rank_it(db: Database) -> None:
    CountingBackend.asked = 0
    shared = tuner(db, CountingBackend())
    shared.precompile([SUBJECT])
    shared.screen(SUBJECT)
    assert CountingBackend.asked == 0
    db.put_record(replace(shared.tune(SUBJECT), fuse=False, undecided=True))
    shared.tune(SUBJECT)
    assert CountingBackend.asked == 20
    shared.tune(FakeSubject(key="larger", cols=4097))
    assert CountingBackend.asked == 40


class GpuBackend(FakeBackend):
    device_type = "cuda"


class Recording(InlineExecutor):
    """Keeps what is to be compiled ahead."""

    def __init__(self) -> None:
        self.ahead: list[tuple[str, bool]] = []

    def prefetch(self, function: Any, arguments: Any, limit_s: float, spare: bool = False) -> None:
        self.ahead += [(config_key(config), spare) for _, _, config, _ in arguments]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_gpus_a_kernel_is_given_before_the_next_is_waited_for(db: Database, device: str) -> None:
    """Once something has compiled: until then all of a batch tell whether one that fails is at fault itself."""
    target = replace(CPU, device_type=device)
    executor = Counting()
    resources = TuningResources(db, (), Bench(target, ShortTimer()), executor, BUDGET, Versions("", ""), TimeAccount())
    works, fails = ((FakeBackend(faults=faults), SUBJECT.ir, {"tile": 16, "unroll": 1}, target)
                    for faults in ({}, {"tile=16,unroll=1": "build"}))
    first = resources.compile([fails, works])
    assert not next(first).ok and resources.compiles.is_set() and len(executor.ran) == 2
    assert [one.ok for one in first] == [True]
    executor.ran.clear()
    waited = [(outcome.ok, len(executor.ran)) for outcome in resources.compile([works, fails, works])]
    assert waited == ([(True, 1), (False, 2), (True, 3)] if device == "cuda" else [(True, 3), (False, 3), (True, 3)])
    assert list(resources.compile([])) == []


def test_looking_ahead_compiles_the_default_first_and_everything_once(db: Database) -> None:
    executor = Recording()
    ahead = Tuner(db, replace(CPU, device_type="cuda"), (GpuBackend(),), "gpu-test", BUDGET, executor=executor,
                  timer=ShortTimer())
    ahead.prefetch_default([SUBJECT])
    assert executor.ahead == [("tile=16,unroll=1", True)]
    for spare in (False, True):
        executor.ahead.clear()
        ahead.prefetch([SUBJECT], spare=spare)
        assert executor.ahead[0] == ("tile=16,unroll=1", spare) and {one for _, one in executor.ahead} == {spare}
        assert len({key for key, _ in executor.ahead}) == len(executor.ahead) >= 1
    on_cpu = Recording()
    alone = tuner(db, executor=on_cpu)
    alone.prefetch([SUBJECT])
    alone.prefetch_default([SUBJECT])
    assert not on_cpu.ahead


class AlikeOnGpu(Alike):
    device_type = "cuda"


def test_of_kernels_alike_the_first_is_compiled_ahead_and_others_once_it_was_searched(db: Database) -> None:
    executor, default = Recording(), "tile=16,unroll=1"
    ahead = Tuner(db, replace(CPU, device_type="cuda"), (AlikeOnGpu(),), "gpu-test", BUDGET, executor=executor,
                  timer=ShortTimer())
    first, second = SUBJECT, FakeSubject(key="alike", rows=SUBJECT.rows + 1)

    def sent(*subjects: FakeSubject) -> set[str]:
        executor.ahead.clear()
        ahead.prefetch(subjects)
        return {key for key, _ in executor.ahead}

    assert len(sent(first)) == 19 and sent(second) == {default}
    assert len(sent(second, first)) == 19
    ranked: list[Config] = [{"tile": tile, "unroll": 4} for tile in (256, 128, 64)]
    ahead._resources.rankings["fake", AlikeOnGpu().likeness(first.ir)] = ranked
    assert sent(second) == {default, *map(config_key, ranked)}


def test_screening_tries_the_default_once_and_a_tune_starts_from_it(db: Database, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    shared = tuner(db, FakeBackend(journal=str(journal)))
    trial = shared.screen(SUBJECT)
    assert trial.median_us == pytest.approx(35.0)
    assert shared.screen(SUBJECT) == trial
    record = shared.tune(SUBJECT)
    assert record.measured == 19
    compiles = Counter(line for line in journal.read_text().splitlines() if line.startswith("compile"))
    assert set(compiles.values()) == {1}


def test_screening_falls_to_the_next_back_end(db: Database) -> None:
    failing = FakeBackend(faults={"tile=16,unroll=1": "wrong"})
    assert tuner(db, failing, OtherBackend()).screen(SUBJECT).backend == "other"
    alone = tuner(db, failing).screen(FakeSubject(key="alone"))
    assert alone.median_us is None
    assert "wrong result" in alone.reason
    with pytest.raises(SubjectError, match=r"no back end takes part \(fake: cannot\)"):
        tuner(db, FakeBackend(refusal="cannot")).screen(FakeSubject(key="none"))


def test_precompiling_skips_what_is_known_and_who_cannot_take_part(db: Database, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    shared = tuner(db, FakeBackend(refusal="cannot"), OtherBackend(journal=str(journal)))
    known = FakeSubject(key="known")
    shared.screen(known)
    journal.unlink()
    shared.precompile([known, FakeSubject(key="new"), FakeSubject(key="newer")])
    assert journal.read_text() == "compile tile=16,unroll=1\n" * 2
    tuner(db, FakeBackend(refusal="cannot")).precompile([FakeSubject(key="new")])
