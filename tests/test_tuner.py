"""The tuner end to end on fakes: the right answer, failures that cost one config, resuming after kill -9."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from search_fakes import CPU, FakeBackend, FakeSubject, OtherBackend, ShortTimer, VirtualClock

from fuseplan.kernels.backend import Backend, Config, Target, config_key
from fuseplan.kernels.ir import KernelIR
from fuseplan.search import maintenance
from fuseplan.search.account import TimeAccount
from fuseplan.search.database import Database
from fuseplan.search.errors import SubjectError
from fuseplan.search.jobs import Part
from fuseplan.search.record import TuningRecord, Versions
from fuseplan.search.timers import Operands, Run, Sampler, Timer
from fuseplan.search.tuner import Budget, ProgressEvent, Tuner
from fuseplan.search.worker import InlineExecutor, Outcome, WorkerPool

SUBJECT = FakeSubject()
BUDGET = Budget(trials=30, seconds=60.0, decide_s=0.002, job_limit_s=20.0)


@pytest.fixture
def db() -> Database:
    return Database("sqlite://")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(compilers=2) as pool:
        yield pool


def tuner(db: Database, *backends: Backend, **options: Any) -> Tuner:
    fields: dict[str, Any] = {"budget": BUDGET, "executor": InlineExecutor(), "timer": ShortTimer()}
    return Tuner(db, CPU, backends or (FakeBackend(),), "cpu-test", **(fields | options))


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


class HostBoundTimer(ShortTimer):
    """No call takes the host less than 40 us, whatever the kernel takes."""

    def of_device(self) -> Timer | None:
        return ShortTimer()

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        sample = super().prepare(run, operands)
        return lambda number: max(40.0, sample(number))


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

    class Cold(ShortTimer):
        def prepare(self, run: Run, operands: Operands) -> Sampler:
            sample = super().prepare(run, operands)
            return lambda number: 200.0 if sample(number) < 20.0 else 50.0

    def from_memory(self, l2_bytes: int) -> Timer | None:
        return ColdLosesTimer.Cold()


def test_a_config_has_to_be_good_with_a_cold_cache_too(db: Database) -> None:
    record = tuner(db, timer=ColdLosesTimer()).tune(SUBJECT)
    # The fastest has 10 us hot and 200 cold; the default 35 and 50, a smaller mean.
    assert record.fuse and record.fused is not None
    assert dict(record.config) != {"tile": 128, "unroll": 4}
    assert record.fused.median_us >= 20.0


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


def test_a_second_tune_measures_nothing(db: Database, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    backend = FakeBackend(journal=str(journal))
    first = tuner(db, backend).tune(SUBJECT)
    size = journal.stat().st_size
    assert tuner(db, backend).tune(SUBJECT) == first
    assert journal.stat().st_size == size
    again = tuner(db, backend).tune(SUBJECT, force=True)
    assert journal.stat().st_size > size
    assert again.config == first.config


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


def test_every_finished_trial_is_checked_and_failures_cost_only_themselves(db: Database) -> None:
    faults = {
        "tile=128,unroll=4": "nan",
        "tile=128,unroll=2": "wrong",
        "tile=64,unroll=4": "raise",
        "tile=256,unroll=4": "build",
        "tile=64,unroll=2": "spill",
        "tile=16,unroll=8": "after",
    }
    record = tuner(db, FakeBackend(faults=faults)).tune(SUBJECT)
    assert record.fuse
    assert record.fused is not None
    assert record.fused.median_us == pytest.approx(15.0)
    assert dict(record.config) == {"tile": 128, "unroll": 8}
    reasons = {config_key(r.config): r.reason for r in record.rejected}
    assert set(reasons) == set(faults)
    assert "NaN" in reasons["tile=128,unroll=4"]
    assert "wrong result: output 0" in reasons["tile=128,unroll=2"]
    assert reasons["tile=64,unroll=4"] == "RuntimeError: launch failed"
    assert "does not compile: BuildError: fake: syntax error" in reasons["tile=256,unroll=4"]
    assert reasons["tile=64,unroll=2"] == "spills 64 bytes of registers"
    assert "written outside" in reasons["tile=16,unroll=8"]
    assert record.compiled == 18
    assert record.measured == 13


def test_spilling_no_more_than_the_default_is_no_reason(db: Database) -> None:
    faults = {"tile=16,unroll=1": "spill", "tile=128,unroll=4": "spill"}
    record = tuner(db, FakeBackend(faults=faults)).tune(SUBJECT)
    assert dict(record.config) == {"tile": 128, "unroll": 4}
    assert record.rejected == ()


def test_a_failing_default_leaves_the_challengers(db: Database) -> None:
    record = tuner(db, FakeBackend(faults={"tile=16,unroll=1": "wrong"})).tune(SUBJECT)
    assert dict(record.config) == {"tile": 128, "unroll": 4}
    assert "default" not in [finalist.name for finalist in record.finalists]
    assert record.default_gain == 0.0


def test_no_working_kernel_means_do_not_fuse(db: Database) -> None:
    tiles = {"tiles": (16,), "unrolls": (1, 2)}
    record = tuner(db, FakeBackend(faults={"tile=16,unroll=1": "nan", "tile=16,unroll=2": "nan"}, best=(0, 0), **tiles)
                   ).tune(SUBJECT)
    assert not record.fuse
    assert (record.backend, record.fused, record.gain) == ("", None, 0.0)
    assert record.unfused.median_us == pytest.approx(100.0)
    assert "no kernel works: wrong result" in record.evidence.reason


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


def test_the_back_end_is_one_of_the_choices(db: Database) -> None:
    record = tuner(db, FakeBackend(), OtherBackend(floor_us=4.0)).tune(SUBJECT)
    assert record.backend == "other"
    assert record.enumerated == 38
    tied = tuner(db, FakeBackend(), OtherBackend()).tune(FakeSubject(key="tied"))
    assert tied.backend == "fake"


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


def test_configs_that_run_the_same_are_measured_once(db: Database, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    record = tuner(db, FakeBackend(same_runs=True, journal=str(journal))).tune(SUBJECT)
    loads = Counter(line for line in journal.read_text().splitlines() if line.startswith("load"))
    # One screening per tile; finalists are loaded once more.
    assert len(loads) == 5
    assert record.measured == 5
    assert record.compiled == 19


def test_nothing_is_compiled_or_screened_twice(db: Database, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    tuner(db, FakeBackend(journal=str(journal)), budget=replace(BUDGET, finalists=0)).tune(SUBJECT)
    counts = Counter(journal.read_text().splitlines())
    assert {n for line, n in counts.items() if line.startswith("compile")} == {1}
    # Screening loads once to check and once to call; the default alone is loaded so again to decide.
    loads = {line: n for line, n in counts.items() if line.startswith("load")}
    assert loads.pop("load tile=16,unroll=1") == 4
    assert set(loads.values()) == {2}


def test_a_subject_whose_chain_fails_is_an_error(db: Database) -> None:
    with pytest.raises(SubjectError, match=r"muladd 3x127: cannot be tuned: .*the chain does not run"):
        tuner(db).tune(FakeSubject(broken="eager"))


def test_the_time_budget_ends_the_search_after_a_first_batch(db: Database) -> None:
    record = tuner(db, budget=replace(BUDGET, seconds=0.0)).tune(SUBJECT)
    assert record.measured == 1
    assert dict(record.config) == {"tile": 16, "unroll": 1}


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


def test_a_decisive_run_that_fails_is_repeated_with_less(db: Database) -> None:
    class Fragile(InlineExecutor):
        """Fails to decide between more than ``most`` kernels."""

        def __init__(self, most: int) -> None:
            self.most = most

        def call(self, function: Any, *args: Any, limit_s: float) -> Outcome:
            if function.__name__ == "decide" and len(args[2]) > self.most:
                return Outcome(failure="crashed: killed by SIGSEGV")
            return super().call(function, *args, limit_s=limit_s)

    record = tuner(db, executor=Fragile(1)).tune(SUBJECT)
    assert record.fuse
    assert dict(record.config) == {"tile": 16, "unroll": 1}
    assert "the decisive run failed: crashed" in record.rejected[0].reason
    record = tuner(db, executor=Fragile(0)).tune(FakeSubject(key="b"))
    assert not record.fuse
    assert len(record.finalists) == 1
    with pytest.raises(SubjectError, match="cannot be timed"):
        tuner(db, executor=Fragile(-1)).tune(FakeSubject(key="c"))


def test_a_kernel_that_is_wrong_on_fresh_inputs_loses_its_place(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuseplan.search import jobs
    from fuseplan.search.verify import Verdict, verify

    def only_first_seed(kernel: Any, subject: Any, oracle: Any, device: str) -> Verdict:
        verdict = verify(kernel, subject, oracle, device)
        fresh = oracle.inputs[0][0, 0] != subject.make_inputs(0, device)[0][0, 0]
        return replace(verdict, ok=False, reason="differs") if fresh and kernel._us == 10.0 else verdict

    monkeypatch.setattr(jobs, "verify", only_first_seed)
    record = tuner(db).tune(SUBJECT)
    assert record.fused is not None
    assert record.fused.median_us == pytest.approx(15.0)
    assert [r.reason for r in record.rejected] == ["differs"]


# -- in worker processes ----------------------------------------------------------------------------------


def test_hanging_and_crashing_kernels_cost_only_their_config(db: Database, pool: WorkerPool) -> None:
    faults = {"tile=16,unroll=1": "hang", "tile=32,unroll=1": "crash", "tile=32,unroll=2": "exit"}
    backend = FakeBackend(faults=faults, tiles=(16, 32, 64), unrolls=(1, 2), best=(2, 1))
    record = tuner(db, backend, executor=pool, budget=replace(BUDGET, job_limit_s=3.0)).tune(SUBJECT)
    assert dict(record.config) == {"tile": 64, "unroll": 2}
    reasons = {config_key(r.config): r.reason for r in record.rejected}
    assert reasons["tile=16,unroll=1"] == "no result within 3 s"
    assert "SIGSEGV" in reasons["tile=32,unroll=1"]
    assert "status 3" in reasons["tile=32,unroll=2"]
    assert record.measured == 3


def test_one_pool_serves_many_subjects(db: Database, pool: WorkerPool) -> None:
    backend = FakeBackend(tiles=(16, 32), unrolls=(1, 2), best=(1, 1))
    with tuner(db, backend, executor=pool) as shared:
        records = shared.tune_all([FakeSubject(key=f"s{n}", cols=n) for n in (1, 3, 4097)])
    assert [record.fuse for record in records] == [True] * 3
    assert pool.call(os.getpid, limit_s=20).ok


TUNE = """
import sys
sys.path.insert(0, sys.argv[1])
from search_fakes import CPU, FakeBackend, FakeSubject, ShortTimer
from fuseplan.search.database import Database
from fuseplan.search.tuner import Budget, Tuner
from fuseplan.search.worker import InlineExecutor
backend = FakeBackend(journal=sys.argv[3], pause_s=0.02)
budget = Budget(trials=30, seconds=600, decide_s=0.002)
tuner = Tuner(Database(sys.argv[2]), CPU, (backend,), "cpu-test", budget, executor=InlineExecutor(), timer=ShortTimer())
print("ready", flush=True)
for number in range(3):
    tuner.tune(FakeSubject(key=f"subject-{number}"))
print("done", flush=True)
"""


def start_tune(path: Path, journal: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", TUNE, str(Path(__file__).parent), str(path), str(journal)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_kill_nine_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    path, journal = tmp_path / "tuning.db", tmp_path / "journal"
    chance = random.Random(5)
    seen: list[TuningRecord] = []
    kills = 4
    for _ in range(kills):
        process = start_tune(path, journal)
        time.sleep(chance.uniform(0.05, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        database = Database(path)
        assert maintenance.verify(database) == []
        records = list(database.records())
        assert [record for record in seen if record not in records] == []
        seen = records
    process = start_tune(path, journal)
    assert process.wait(60) == 0
    database = Database(path)
    records = list(database.records())
    assert [record for record in seen if record not in records] == []
    assert [dict(record.config) for record in records] == [{"tile": 128, "unroll": 4}] * 3
    assert maintenance.verify(database) == []
    assert all(len(database.trials(record.key)) == 19 for record in records)
    compiles = sum(line.startswith("compile") for line in journal.read_text().splitlines())
    # At most one compile per kill was under way and had to be repeated.
    assert 3 * 19 <= compiles <= 3 * 19 + kills


# -- ranking before a tune --------------------------------------------------------------------------------


def test_the_unfused_chain_is_timed_once(db: Database) -> None:
    calls: list[str] = []

    class Counting(InlineExecutor):
        def call(self, function: Any, *args: Any, limit_s: float) -> Outcome:
            calls.append(function.__name__)
            return super().call(function, *args, limit_s=limit_s)

    shared = tuner(db, executor=Counting())
    assert shared.time_unfused(SUBJECT).median_us == pytest.approx(100.0)
    assert shared.time_unfused(SUBJECT).median_us == pytest.approx(100.0)
    assert calls.count("time_unfused") == 1
    tuned = FakeSubject(key="tuned", eager_us=70.0)
    shared.tune(tuned)
    before = len(calls)
    assert shared.time_unfused(tuned).median_us == pytest.approx(70.0)
    assert len(calls) == before
    with pytest.raises(SubjectError, match="cannot be timed"):
        shared.time_unfused(FakeSubject(key="broken", broken="eager"))


def test_an_unfused_chain_is_timed_without_a_reference(db: Database) -> None:
    # Its reference gives NaN, which only matters to what is checked against it.
    subject = FakeSubject(key="nan", broken="nan")
    assert tuner(db).time_unfused(subject).median_us == pytest.approx(100.0)
    with pytest.raises(SubjectError, match="NaN"):
        tuner(db).tune(subject)


class CountingBackend(FakeBackend):
    """Counts what it is asked about, beside the configurations that it is asked to make."""

    asked: ClassVar[Counter[str]] = Counter()

    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        self.asked["refuse"] += 1
        return None

    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        self.asked["infeasible"] += 1
        return super().infeasible(ir, config, target)


def test_a_kernels_space_is_enumerated_once_and_not_to_rank_it(db: Database) -> None:
    CountingBackend.asked.clear()
    shared = tuner(db, CountingBackend())
    shared.precompile([SUBJECT])
    shared.screen(SUBJECT)
    assert dict(CountingBackend.asked) == {"refuse": 1}
    shared.tune(SUBJECT)
    shared.tune(SUBJECT, force=True)
    assert dict(CountingBackend.asked) == {"refuse": 1, "infeasible": 20}
    shared.tune(FakeSubject(key="larger", cols=4097))
    assert dict(CountingBackend.asked) == {"refuse": 2, "infeasible": 40}


class GpuBackend(FakeBackend):
    device_type = "cuda"


class Recording(InlineExecutor):
    """Keeps what is to be compiled ahead."""

    def __init__(self) -> None:
        self.ahead: list[tuple[str, bool]] = []

    def prefetch(self, function: Any, arguments: Any, limit_s: float, spare: bool = False) -> None:
        self.ahead += [(config_key(config), spare) for _, _, config, _ in arguments]


def test_looking_ahead_compiles_the_default_first_and_everything_once(db: Database) -> None:
    executor = Recording()
    ahead = Tuner(db, replace(CPU, device_type="cuda"), (GpuBackend(),), "gpu-test", BUDGET, executor=executor,
                  timer=ShortTimer())
    ahead.prefetch_default([SUBJECT])
    assert executor.ahead == [("tile=16,unroll=1", False)]
    ahead.prefetch([SUBJECT])
    listed = executor.ahead[1:]
    assert listed[0] == ("tile=16,unroll=1", False)
    assert len({key for key, _ in listed}) == len(listed) >= 1
    on_cpu = Recording()
    alone = tuner(db, executor=on_cpu)
    alone.prefetch([SUBJECT])
    alone.prefetch_default([SUBJECT])
    assert not on_cpu.ahead


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
    spent = {name: (one.seconds, one.times) for name, one in account.spent().items()}
    assert record.measured == 5
    assert spent == {
        "planning": (2.0, 1), "timing unfused ops": (1.0, 1), "making references": (2.0, 2),
        "waiting for compilers": (5.0, 5), "screening": (5.0, 5), "deciding": (1.0, 1), "playing off": (1.0, 1),
        "storing": (0.0, 7), "other": (0.0, 0),
    }


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


def test_many_neighbours_leave_trials_for_the_search(db: Database) -> None:
    record = tuner(db).tune(SUBJECT)
    rows = [replace(record, config={"tile": t, "unroll": u}) for t in (16, 32, 64) for u in (1, 2, 4, 8)]
    found = tuner(db, budget=replace(BUDGET, trials=12)).tune(FakeSubject(key="other"), neighbours=rows)
    assert dict(found.config) == {"tile": 128, "unroll": 4}
