"""Taking turns in a bench: one cell is timed, or the next one is tuned, never both."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from fuseplan.costmodel.device import current_identity
from fuseplan.planner.bench.cells import Cell, cell
from fuseplan.planner.bench.compile_ahead import InductorPool
from fuseplan.planner.bench.tune_cells import CellTuner
from fuseplan.planner.bench.turns import PacedBench, Turns
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, OURS
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.store.database import Database
from fuseplan.search.tune.tuner import Budget

_PATIENCE_S = 20.0


@pytest.fixture
def session(tmp_path: Path) -> Session:
    path = tmp_path / "tuning.db"
    identity = current_identity("cpu")
    with Database(path) as database:
        known = json.loads(samples.SPEC.to_json())
        database.put_device(identity.key(), {**known, "identity": json.loads(json.dumps(identity.__dict__))})
    return open_session("cpu", path)


def test_closing_waits_for_the_end_of_a_step() -> None:
    turns, steps = Turns(), list[str]()
    in_step, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        turns.begin()
        in_step.set()
        go_on.wait(_PATIENCE_S)
        steps.append("first")
        turns.check()
        steps.append("second")
        turns.end()

    def shut() -> None:
        turns.close()
        closed.set()

    worker, closer = threading.Thread(target=work), threading.Thread(target=shut)
    worker.start()
    assert in_step.wait(_PATIENCE_S)
    closer.start()
    assert not closed.wait(0.05)  # the step is not over
    go_on.set()
    assert closed.wait(_PATIENCE_S)
    assert steps == ["first"]
    late = threading.Thread(target=lambda: (turns.begin(), steps.append("late"), turns.end()))
    late.start()
    late.join(0.05)
    assert steps == ["first"]
    turns.open()
    for thread in (worker, closer, late):
        thread.join(_PATIENCE_S)
    assert sorted(steps) == ["first", "late", "second"]


def test_a_bench_times_behind_a_closed_gate_and_opens_it_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = list[str]()
    turns = Turns()
    monkeypatch.setattr(turns, "close", lambda: gates.append("closed"))
    monkeypatch.setattr(turns, "open", lambda: gates.append("open"))
    rows = PacedBench(session, (EAGER,), ("eager",), 0.0, turns=turns).rows(cell("swiglu", "3x8", "float32"))
    assert {row.contestant for row in rows if row.median_us is not None} >= {EAGER, OURS}
    assert gates == ["closed", "open"]


class _Scripted(CellTuner):
    """Tunes in two steps, and remembers them."""

    def __init__(self, session: Any) -> None:
        super().__init__(session, Budget())
        self.steps = list[str]()

    def _graph(self, cell: Cell) -> Any:
        return None

    def _tune(self, cell: Cell) -> bool:
        for step in ("open", "decide"):
            self._step(None)
            if cell.shape[0] == 13 and step == "decide":
                raise ValueError("cannot be tuned")
            self.steps.append(f"{cell.size} {step}")
        return True


class _Gpu:
    spec = None

    class target:  # noqa: N801  # stands for a session's attribute
        device_type = "cuda"


def test_a_tune_ahead_is_waited_for_and_its_error_raised() -> None:
    first, second, bad = (cell("swiglu", size, "float32") for size in ("3x8", "5x8", "13x8"))
    with _Scripted(_Gpu()) as tuner:
        assert tuner.tune(first)
        tuner.turns.close()
        tuner.ahead(second)
        tuner.ahead(second)  # once is enough
        assert tuner.steps == ["3x8 open", "3x8 decide"]
        tuner.turns.open()
        assert tuner.tune(second)
        assert tuner.steps[2:] == ["5x8 open", "5x8 decide"]
        tuner.ahead(bad)
        with pytest.raises(ValueError, match="cannot be tuned"):
            tuner.tune(bad)
        tuner.turns.close()
        tuner.ahead(first)  # left behind: leaving opens the gate
    assert tuner.steps.count("3x8 decide") <= 2


def test_nothing_is_tuned_ahead_on_a_cpu(session: Session) -> None:
    with CellTuner(session, Budget()) as tuner:
        tuner.ahead(cell("swiglu", "3x8", "float32"))
        assert tuner._ahead == {}


def test_what_is_compiled_in_the_background_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def compile_all(self: InductorPool, cells: Sequence[Cell]) -> list[str]:
        assert go_on.wait(_PATIENCE_S)
        return [one.key for one in cells]

    monkeypatch.setattr(InductorPool, "compile", compile_all)
    one, other = cell("swiglu", "3x8", "float32"), cell("swiglu", "5x8", "float32")
    with InductorPool("cpu", (INDUCTOR,), 1) as pool:
        assert pool.finish() == []
        pool.start([one])
        go_on.set()
        assert pool.finish() == [one.key]
        pool.start([other])
        assert pool.finish() == [other.key]


def test_who_times_has_the_device_alone() -> None:
    with InductorPool("cpu", (INDUCTOR,), 1) as pool:
        with pool.device(), pool._lock.open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pool._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
