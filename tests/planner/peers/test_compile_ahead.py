"""Compiling the cells of a bench beforehand."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from fuseplan.planner.patterns.cells import Cell, cell
from fuseplan.planner.peers import compile_ahead
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE


def test_without_inductor_nothing_is_compiled_beforehand() -> None:
    with compile_ahead.InductorPool("cpu", (EAGER, "liger"), 4) as pool:
        assert pool.compile([cell("swiglu", "3x8")]) == [] and pool._pool is None
    with compile_ahead.InductorPool("cpu", (EAGER, INDUCTOR), 0) as pool:
        assert pool.compile([cell("swiglu", "3x8")]) == [] and pool._pool is None


def test_what_fails_beforehand_is_said() -> None:
    with compile_ahead.InductorPool("cpu", (MAX_AUTOTUNE,), 1) as pool:
        (said,) = pool.compile([Cell("no_such_pattern", (3, 8), "float32")])
    assert said.startswith("no_such_pattern 3x8 float32: UnknownPatternError")


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
