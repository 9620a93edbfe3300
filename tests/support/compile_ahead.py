"""What peers compile for many cells, compiled beforehand in parallel processes into their own caches on disk.

TorchInductor compiles each cell, with max-autotune for seconds, of which the device is busy for few. FlashInfer
compiles each op once, with ``nvcc`` for up to a minute. Processes compile beside each other, and take turns on the
device: whoever times a configuration holds a lock.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.kernels.registry import local_target
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import INDUCTOR, MAX_AUTOTUNE, make_case
from fuseplan.planner.peers.peers import FLASHINFER, PEERS
from fuseplan.search import policy
from fuseplan.search.workers.worker import WorkerPool


@contextmanager
def compile_ahead(
    device_type: str, peers: Sequence[str], processes: int
) -> Iterator[Callable[[Sequence[Cell]], list[str]]]:
    """A function that has ``peers`` compile what they need for the cells of one pattern.

    It returns where TorchInductor failed; the bench meets every failure again. Without ``processes`` it does nothing:
    each cell is compiled when its turn comes.
    """
    names = [
        name for name in (FLASHINFER, INDUCTOR, MAX_AUTOTUNE)
        if name in peers and processes and PEERS[name].runs_on(device_type)
    ]
    with tempfile.TemporaryDirectory(prefix="fuseplan-bench-") as folder, WorkerPool(processes) as pool:
        lock = str(Path(folder) / "device.lock")

        def compile_cells(cells: Sequence[Cell]) -> list[str]:
            jobs = [
                (cell, device_type, name, lock)
                for name in names for cell in (cells[:1] if name == FLASHINFER else cells)
            ]
            outcomes = pool.map(compile_cell, jobs, policy.PEER_LIMIT_S)
            return [
                f"{cell.key}: {outcome.failure}" for (cell, _, name, _), outcome in zip(jobs, outcomes, strict=True)
                if name != FLASHINFER and not outcome.ok
            ]

        yield compile_cells


def compile_cell(cell: Cell, device_type: str, name: str, lock: str) -> None:
    """Have a peer compile what it needs for one cell, and choose its configurations (runs in a worker)."""
    from torch._inductor import config

    config.compile_threads = 1  # the pool's processes are the parallelism
    if is_gpu(device_type):
        _take_turns(lock)
    with torch.no_grad():
        case = make_case(cell, local_target(device_type))
        contestant = PEERS[name].build(case)
        contestant.run(*contestant.prepare(*case.inputs))
    if is_gpu(device_type):
        torch.cuda.synchronize()
        del case, contestant
        torch.cuda.empty_cache()  # the process stays, its memory is needed elsewhere


@cache
def _take_turns(lock: str) -> None:
    """Make TorchInductor's timing of a configuration wait for its turn on the device."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    bench: Any = CachingAutotuner.bench

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Path(lock).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return bench(self, *args, **kwargs)

    CachingAutotuner.bench = alone  # type: ignore[method-assign]
