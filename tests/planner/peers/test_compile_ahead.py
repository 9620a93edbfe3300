"""Compiling the cells of a bench beforehand."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from fuseplan.planner.patterns.cells import Cell, cell
from fuseplan.planner.peers import compile_ahead
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE
from fuseplan.planner.peers.peers import FLASHINFER, LIGER
from fuseplan.search.workers.worker import Outcome, WorkerPool


def test_without_inductor_nothing_is_compiled_beforehand() -> None:
    with compile_ahead.CompilePool("cpu", (EAGER, "liger"), 4) as pool:
        assert pool.compile([cell("swiglu", "3x8")]) == [] and pool._pool._process is None
    with compile_ahead.CompilePool("cpu", (EAGER, INDUCTOR), 0) as pool:
        assert pool.compile([cell("swiglu", "3x8")]) == [] and pool._pool._process is None


def test_what_fails_beforehand_is_said() -> None:
    with compile_ahead.CompilePool("cpu", (MAX_AUTOTUNE,), 1) as pool:
        (said,) = pool.compile([Cell("no_such_pattern", (3, 8), "float32")])
    assert said.startswith("no_such_pattern 3x8 float32: UnknownPatternError")


def test_a_library_builds_each_pattern_once_with_its_first_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[Cell, str]] = []

    def run(self: WorkerPool, function: object, arguments: list[tuple[Any, ...]], limit_s: float) -> list[Outcome]:
        jobs.extend((cell, name) for cell, _, name, _ in arguments)
        return [Outcome(failure="no nvcc")] * len(arguments)

    monkeypatch.setattr(WorkerPool, "map", run)
    cells = [cell("swiglu", "1x64"), cell("swiglu", "8x64"), cell("rms_norm", "1x64")]
    with compile_ahead.CompilePool("cuda", (LIGER, FLASHINFER, INDUCTOR), 1) as pool:
        assert pool.compile(cells) == [f"{one.key}: no nvcc" for one in cells]  # the library's failures are the bench's
        assert jobs == [*((one, FLASHINFER) for one in (cells[0], cells[2])), *((one, INDUCTOR) for one in cells)]
        jobs.clear()
        pool.compile(cells[:1])
    assert jobs == [(cells[0], INDUCTOR)]
    with compile_ahead.CompilePool("cpu", (FLASHINFER,), 1) as pool:  # it has no kernels for CPUs
        assert pool.compile(cells) == [] and len(jobs) == 1


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
