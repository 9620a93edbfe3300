"""Compiling the cells of a bench beforehand."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import compile_ahead
import pytest

from fuseplan.planner.patterns.cells import Cell, cell
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE
from fuseplan.planner.peers.peers import FLASHINFER, LIGER
from fuseplan.search.workers.worker import Outcome, WorkerPool


def test_without_inductor_nothing_is_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)  # no process is started
    for peers, processes in (((EAGER, "liger"), 4), ((EAGER, INDUCTOR), 0)):
        with compile_ahead.compile_ahead("cpu", peers, processes) as compile_cells:
            assert compile_cells([cell("swiglu", "3x8")]) == []


def test_what_fails_beforehand_is_said() -> None:
    with compile_ahead.compile_ahead("cpu", (MAX_AUTOTUNE,), 1) as compile_cells:
        (said,) = compile_cells([Cell("no_such_pattern", (3, 8), "float32")])
    assert said.startswith("no_such_pattern 3x8 float32: UnknownPatternError")


def test_a_library_builds_each_pattern_once_with_its_first_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[Cell, str]] = []

    def run(self: WorkerPool, function: object, arguments: list[tuple[Any, ...]], limit_s: float) -> list[Outcome]:
        jobs.extend((cell, name) for cell, _, name, _ in arguments)
        return [Outcome(failure="no nvcc")] * len(arguments)

    monkeypatch.setattr(WorkerPool, "map", run)
    cells = [cell("swiglu", "1x64"), cell("swiglu", "8x64")]
    with compile_ahead.compile_ahead("cuda", (LIGER, FLASHINFER, INDUCTOR), 1) as compile_cells:
        assert compile_cells(cells) == [f"{one.key}: no nvcc" for one in cells]  # the library's are the bench's
    assert jobs == [(cells[0], FLASHINFER), *((one, INDUCTOR) for one in cells)]
    with compile_ahead.compile_ahead("cpu", (FLASHINFER,), 1) as compile_cells:  # it has no kernels for CPUs
        assert compile_cells(cells) == [] and len(jobs) == 3


def test_timing_a_configuration_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    lock = tmp_path / "lock"

    def bench(self: Any, launcher: str) -> bool:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    monkeypatch.setattr(heuristics.CachingAutotuner, "bench", bench)
    assert heuristics.CachingAutotuner.bench(None, "x") is False
    compile_ahead._take_turns(str(lock))
    compile_ahead._take_turns(str(lock))  # a process compiles many cells
    assert heuristics.CachingAutotuner.bench(None, "x") is True
