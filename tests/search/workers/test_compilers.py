"""The workers that compile ahead for one process: when they start, what they are given, when they end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ir_samples as samples
import pytest
from worker_jobs import PATIENCE_S, wait_for

from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.search import policy
from fuseplan.search.workers import jobs
from fuseplan.search.workers.compilers import Compilation, Compilers
from fuseplan.search.workers.worker import WorkerPool


class Pool:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.started, self.closed, self.sent = 0, 0, list[Compilation]()

    def start(self) -> None:
        self.started += 1

    def close(self) -> None:
        self.closed += 1

    def prefetch(self, function: object, arguments: Sequence[Any], limit_s: float) -> None:
        assert function is jobs.prepare
        self.sent += arguments


@pytest.fixture
def pools() -> list[Pool]:
    return []


def compilers(pools: list[Pool], idle_s: float = PATIENCE_S) -> Compilers:
    def make() -> Any:
        pools.append(Pool())
        return pools[-1]

    return Compilers(make, idle_s)


def kernels(folder: Path, count: int) -> list[Compilation]:
    backend = TritonBackend(folder)
    ir = samples.static_samples()[0].ir
    return [(backend, ir, {**backend.default_config(ir, SM90), "num_warps": 1 << at % 4}, SM90) for at in range(count)]


def test_few_kernels_start_no_processes_and_many_do(pools: list[Pool], tmp_path: Path) -> None:
    made = compilers(pools)
    few = kernels(tmp_path, policy.KERNELS_FOR_WORKERS - 1)
    made.compile_ahead(few)
    assert not pools
    made.compile_ahead(many := [*few, few[0]])
    assert [pool.sent for pool in pools] == [many]
    made.close()


def test_those_that_were_expected_get_all_in_order(pools: list[Pool], tmp_path: Path) -> None:
    made = compilers(pools)
    made.expect()
    made.expect()
    made.compile_ahead(few := kernels(tmp_path, 3))
    assert [pool.started for pool in pools] == [2] and pools[0].sent == few
    made.close()
    assert pools[0].closed == 1


def test_they_end_when_nothing_comes_and_start_again(pools: list[Pool]) -> None:
    made = compilers(pools, idle_s=0.01)
    made.expect()
    wait_for(lambda: pools[0].closed == 1)
    made.expect()
    wait_for(lambda: len(pools) == 2 and pools[1].closed == 1)


def test_a_kernel_compiled_ahead_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (backend, ir, config, target), = wanted = kernels(tmp_path, 1)
    assert not backend.is_compiled(ir, config, target)
    made = Compilers(lambda: WorkerPool(compilers=1))
    made.expect()
    made.compile_ahead(wanted)
    wait_for(lambda: backend.is_compiled(ir, config, target))
    made.close()
    assert backend.prepare(ir, config, target).registers


def test_a_machine_that_starts_no_more_processes_compiles_in_this_one(tmp_path: Path) -> None:
    def make() -> Any:
        raise BlockingIOError("no more processes")

    made = Compilers(make)
    made.expect()
    made.compile_ahead(kernels(tmp_path, policy.KERNELS_FOR_WORKERS))
    made.close()
