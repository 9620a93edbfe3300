"""TorchInductor's programs for many cells, compiled beforehand in parallel processes into its own cache.

Compiling one cell with max-autotune takes seconds, of which the device is busy for few. So the processes compile beside
each other, and take turns on the device: whoever times a configuration holds a lock.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import INDUCTOR, MAX_AUTOTUNE
from fuseplan.planner.peers.inductor import inductor_callable
from fuseplan.planner.peers.inputs import make_inputs, trace_cell
from fuseplan.search.workers.worker import WorkerPool

#: Longer than the slowest program takes, max-autotune and a queue for the device included.
_LIMIT_S = 300.0


class InductorPool:
    """Processes that compile; a context manager. Without any, each cell is compiled when its turn comes.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        peers: Names of the peers in the bench; those that are not TorchInductor play no part.
        processes: How many.
    """

    def __init__(self, device_type: str, peers: Sequence[str], processes: int) -> None:
        self._device_type = device_type
        self._wanted = [name == MAX_AUTOTUNE for name in peers if name in (INDUCTOR, MAX_AUTOTUNE)]
        self._processes = processes if self._wanted else 0
        self._pool: WorkerPool | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="fuseplan-bench-")
        self._lock = Path(self._folder.name) / "device.lock"

    def __enter__(self) -> InductorPool:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._folder.cleanup()

    def compile(self, cells: Sequence[Cell]) -> list[str]:
        """Fill TorchInductor's cache for ``cells``; returns what failed (the bench will meet it again)."""
        if not self._processes or not cells:
            return []
        if self._pool is None:
            self._pool = WorkerPool(self._processes)
        jobs = [(cell, self._device_type, slow, str(self._lock)) for cell in cells for slow in self._wanted]
        outcomes = self._pool.map(compile_cell, jobs, _LIMIT_S)
        return [
            f"{job[0].key}: {outcome.failure}"
            for job, outcome in zip(jobs, outcomes, strict=True) if not outcome.ok
        ]


def compile_cell(cell: Cell, device_type: str, max_autotune: bool, lock: str) -> None:
    """Compile one cell's program and let TorchInductor choose its configurations (runs in a worker)."""
    from torch._inductor import config

    config.compile_threads = 1  # the pool's processes are the parallelism
    if device_type == "cuda":
        _take_turns(lock)
    traced, specs = trace_cell(cell, device_type)
    with torch.no_grad():
        inductor_callable(traced.module, make_inputs(traced, specs, device_type), max_autotune)
    if device_type == "cuda":
        torch.cuda.empty_cache()  # the process stays, its memory is needed elsewhere


def _take_turns(lock: str) -> None:
    """Make TorchInductor's timing of a configuration wait for its turn on the device."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    bench: Any = CachingAutotuner.bench
    if getattr(bench, "takes_turns", False):
        return

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Path(lock).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return bench(self, *args, **kwargs)

    alone.takes_turns = True  # type: ignore[attr-defined]
    CachingAutotuner.bench = alone  # type: ignore[method-assign]
