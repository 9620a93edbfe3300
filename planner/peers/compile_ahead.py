"""What peers compile for many cells, compiled beforehand in parallel processes into their own caches on disk.

TorchInductor compiles each cell, with max-autotune for seconds, of which the device is busy for few. FlashInfer
compiles each op once, with ``nvcc`` for up to a minute. Processes compile beside each other, and take turns on the
device: whoever times a configuration holds a lock.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fuseplan.kernels.registry import local_target
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import INDUCTOR, MAX_AUTOTUNE, Case
from fuseplan.planner.peers.inputs import make_inputs, trace_cell
from fuseplan.planner.peers.peers import FLASHINFER, PEERS
from fuseplan.search.workers.worker import WorkerPool

#: Longer than the slowest program takes, max-autotune and a queue for the device included.
_LIMIT_S = 300.0


class CompilePool:
    """Processes that compile; a context manager. Without any, each cell is compiled when its turn comes.

    Of ``peers``, names of those in the bench, the ones that compile nothing play no part.
    """

    def __init__(self, device_type: str, peers: Sequence[str], processes: int) -> None:
        self._device_type = device_type
        self._names = [
            name for name in (FLASHINFER, INDUCTOR, MAX_AUTOTUNE)
            if name in peers and processes and device_type in PEERS[name].devices
        ]
        self._pool = WorkerPool(max(1, processes))
        self._built: set[str] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="fuseplan-bench-")

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()
        self._folder.cleanup()

    def compile(self, cells: Sequence[Cell]) -> list[str]:
        """Fill the caches for ``cells``; returns where TorchInductor failed (the bench meets every failure again)."""
        jobs = []
        for name in self._names:
            for cell in cells:
                if name != FLASHINFER or cell.pattern not in self._built:
                    jobs.append((cell, self._device_type, name, str(Path(self._folder.name) / "device.lock")))
                    self._built.add(cell.pattern)
        outcomes = self._pool.map(compile_cell, jobs, _LIMIT_S) if jobs else []
        return [
            f"{cell.key}: {outcome.failure}"
            for (cell, _, name, _), outcome in zip(jobs, outcomes, strict=True) if name != FLASHINFER and not outcome.ok
        ]


def compile_cell(cell: Cell, device_type: str, name: str, lock: str) -> None:
    """Have a peer compile what it needs for one cell, and choose its configurations (runs in a worker)."""
    from torch._inductor import config

    config.compile_threads = 1  # the pool's processes are the parallelism
    if device_type == "cuda":
        _take_turns(lock)
    traced, specs = trace_cell(cell, device_type)
    inputs = make_inputs(traced, specs, device_type)
    with torch.no_grad():
        case = Case(cell.pattern, cell.shape, cell.dtype, traced, tuple(specs), inputs, (), local_target(device_type))
        contestant = PEERS[name].build(case)
        contestant.run(*contestant.operands(inputs))
    if device_type == "cuda":
        torch.cuda.synchronize()
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
