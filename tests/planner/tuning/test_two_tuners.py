"""Tuners on one database share the work: nothing is measured twice, and all end with the plans of a tune alone."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_tuner import SUBJECT
from fake_tuner import tuner as real_tuner
from scripted_sessions import OPS, Session, Waits, covers, graph_of, session_on, tuned
from search_fakes import FakeBackend

from fuseplan.kernels.ir.backend import Config, Resources, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.planner.tuning.tune import TuneResult
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import listed
from fuseplan.search.store.record import TuningRecord

pytestmark = pytest.mark.usefixtures("any_gain")


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matmuls are ATen's."""
    monkeypatch.setattr("fuseplan.planner.implementations.choices.LIBRARY_CALLS", ())


def test_what_another_is_at_work_on_comes_last(tmp_path: Path) -> None:
    graph = graph_of((OPS[0:2],), (OPS[2:4],), (OPS[4:6],))
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(120)

    slow, quick = session_on(tmp_path / "t.db", wait), session_on(tmp_path / "t.db")
    results: list[TuneResult] = []
    thread = threading.Thread(target=lambda: results.append(tuned(slow, graph)))
    thread.start()
    assert begun.wait(120)
    quick.scripted.at_work = lambda: go_on.set() if len(quick.scripted.tuned) == 1 else None  # type: ignore[method-assign]
    mine = tuned(quick, graph)
    thread.join(120)
    (theirs,) = results
    assert len(slow.scripted.tuned) >= 1 and len(quick.scripted.tuned) >= 2
    assert not set(slow.scripted.tuned) & set(quick.scripted.tuned)
    assert covers(mine) == covers(theirs)
    assert listed(slow.database) == []
    sources = {plan.region.key: plan.source for plan in mine.plans[0].plan.regions}
    assert set(sources.values()) == {"database", "tuned"}


@pytest.mark.parametrize("seed", range(6))
def test_tuners_together_measure_what_one_alone_does(tmp_path: Path, seed: int) -> None:
    """Random graphs with shared islands; each tuner has its own order of them."""
    rng = random.Random(seed)
    islands = [tuple(OPS[number : number + rng.randint(1, 3)]) for number in range(0, 9, 3)]
    graphs = [
        graph_of(*(tuple(rng.choices(islands, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))))
        for _ in range(4)
    ]
    alone = session_on(tmp_path / "alone.db")
    expected = tuned(alone, *graphs)
    together = [session_on(tmp_path / "t.db") for _ in range(3)]
    ready = threading.Barrier(3)
    found: dict[int, list[Any]] = {}

    def run(number: int) -> None:
        order = random.Random(seed * 7 + number).sample(range(4), 4)
        ready.wait(120)
        result = tuned(together[number], *(graphs[one] for one in order))
        found[number] = [covers(result)[order.index(one)] for one in range(4)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert list(found.values()) == [covers(expected)] * 3
    everything = [label for one in together for label in one.scripted.tuned]
    assert sorted(everything) == sorted(alone.scripted.tuned)


def test_a_tuner_that_fails_lets_go(tmp_path: Path) -> None:
    graph = graph_of((OPS[0:2], OPS[2:4]), (OPS[4:6],))

    def fail() -> None:
        raise KeyboardInterrupt

    broken, sound = session_on(tmp_path / "t.db", fail), session_on(tmp_path / "t.db")
    with pytest.raises(KeyboardInterrupt):
        tuned(broken, graph)
    assert listed(broken.database) == []
    assert len(covers(tuned(sound, graph))[0]) == 2


def test_one_group_is_searched_once_by_two_tuners(tmp_path: Path) -> None:
    """The second one comes while the first compiles."""
    compiling, second_waits = threading.Event(), threading.Event()

    class Slow(FakeBackend):
        def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
            compiling.set()
            assert second_waits.wait(120)
            return super().prepare(ir, config, target)

    class Never(FakeBackend):
        def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
            raise AssertionError("the other tuner has searched it")

    first = real_tuner(Database(tmp_path / "t.db"), Slow())
    second = real_tuner(Database(tmp_path / "t.db"), Never())
    records: list[TuningRecord] = []
    threads = [threading.Thread(target=lambda: records.append(first.tune(SUBJECT)))]
    threads[0].start()
    assert compiling.wait(120)
    real_take = second.leases.take

    def take(keys: Any) -> Any:
        taken = real_take(keys)
        second_waits.set()
        return taken

    second.leases.take = take  # type: ignore[method-assign]
    record = second.tune(SUBJECT)
    threads[0].join(120)
    assert replace(record, evidence=records[0].evidence) == records[0]


def test_what_one_tuner_fails_at_or_cannot_tell_is_not_tried_again_for_its_next_workload(tmp_path: Path) -> None:
    """Neither is stored: the next tune tries both again."""
    hidden, failing, sound = (OPS[0:2],), (OPS[2:4],), (OPS[4:6],)
    graphs = graph_of(hidden, failing), graph_of(failing, sound, hidden)

    class Odd(Waits):
        def tune(self, subject: TunableGroup, neighbours: Any = (), minor: bool = False) -> TuningRecord:
            record = super().tune(subject, neighbours, minor)
            if OPS[2] in subject.label:
                raise ValueError("it is odd")
            return replace(record, fuse=False, undecided=True) if OPS[0] in subject.label else record

    def odd() -> Session:
        session = session_on(tmp_path / "t.db")
        return replace(session, scripted=Odd(session.database, session.scripted.fused_us))

    for _ in range(2):
        session = odd()
        result = tuned(session, *graphs)
        searched = session.scripted.tuned
        assert len(searched) == len(set(searched))
        assert {op for op in OPS[:4:2] if any(op in label for label in searched)} == {OPS[0], OPS[2]}
        assert [failure.workload for failure in result.failures] == ["w0", "w1"]
        assert all("it is odd" in str(failure) for failure in result.failures)
        assert [len(one.plan.regions) for one in result.plans] == [1, 2]
        first, again = (next(plan for plan in one.plan.regions if plan.record.undecided) for one in result.plans)
        assert first.record == again.record and first.region != again.region
    assert [one.plan.regions[0].source for one in result.plans] == ["tuned", "database"]  # the sound one
