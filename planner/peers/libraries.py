"""Kernels that a peer library builds when an op of it is first called, built beforehand beside each other.

FlashInfer compiles CUDA sources with ``nvcc``, a minute for some ops, into a cache on disk. Called when its first cell
is measured, each op would stop the bench for that long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from fuseplan.kernels.registry import local_target
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import Case
from fuseplan.planner.peers.inputs import make_inputs, trace_cell
from fuseplan.planner.peers.peers import FLASHINFER, PEERS
from fuseplan.search.workers.worker import WorkerPool

#: Peers that build on first use.
BUILDERS = (FLASHINFER,)
_LIMIT_S = 300.0


class LibraryBuilds:
    """Builds in the background; a context manager. A pattern that no such peer computes costs nothing to wait for.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; on CPUs nothing is built.
        peers: Names of the peers in the bench.
        processes: Patterns to build at a time; 0 for none beforehand.
        build: ``(name of the peer, cell)``: builds in a process of its own.
    """

    def __init__(
        self, device_type: str, peers: Sequence[str], processes: int, build: Callable[[str, Cell], object] | None = None
    ) -> None:
        self._names = [name for name in peers if name in BUILDERS and device_type in PEERS[name].devices]
        self._build = build if build is not None else self._in_a_process
        self._pools: list[WorkerPool] = []
        self._threads = ThreadPoolExecutor(max(1, processes), thread_name_prefix="library")
        self._begun: dict[str, list[Future[object]]] = {}
        self._active = processes > 0

    def __enter__(self) -> LibraryBuilds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pool in list(self._pools):  # nobody waits for what is still being built
            pool.close()
        self._threads.shutdown(wait=True)

    def start(self, cells: Sequence[Cell]) -> None:
        """Begin to build what the patterns of ``cells`` need, each with its first cell, in their order."""
        for cell in cells if self._active else ():
            if cell.pattern not in self._begun:
                self._begun[cell.pattern] = [self._threads.submit(self._build, name, cell) for name in self._names]

    def wait(self, pattern: str) -> None:
        """Return when a pattern's kernels are built, or cannot be: the bench will meet the reason again."""
        for future in self._begun.get(pattern, ()):
            future.exception()

    def _in_a_process(self, name: str, cell: Cell) -> object:
        pool = WorkerPool(1)
        self._pools.append(pool)
        try:
            return pool.call(build_cell, name, cell, limit_s=_LIMIT_S)
        finally:
            self._pools.remove(pool)
            pool.close()


def build_cell(name: str, cell: Cell) -> None:
    """Call a peer's op once for a cell (runs in a worker)."""
    target = local_target("cuda")
    traced, specs = trace_cell(cell, target.device_type)
    with torch.no_grad():
        inputs = make_inputs(traced, specs, target.device_type)
        case = Case(cell.pattern, cell.shape, cell.dtype, traced, tuple(specs), inputs, (), target)
        contestant = PEERS[name].build(case)
        contestant.run(*contestant.operands(inputs))
        torch.cuda.synchronize()
