"""Worker processes that compile kernels into the cache while this process plans, or loads those that are there.

Compilers of GPU kernels hold the lock of the process that they run in for much of the time, so more than a few threads
gain nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from fuseplan.kernels.ir.backend import Backend, Config, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.native.build import COMPILE_LIMIT_S
from fuseplan.search import policy
from fuseplan.search.workers import jobs
from fuseplan.search.workers.worker import WorkerPool

#: What :func:`~fuseplan.search.workers.jobs.prepare` is given.
Compilation: TypeAlias = tuple[Backend, KernelIR, Config, Target]

#: What compiling for a GPU imports.
GPU_COMPILERS = ("fuseplan.kernels.gpu.targets:warm_up", "ninetoothed")


class Compilers:
    """The workers of one process. They start when kernels are expected, and end when none were for ``idle_s``."""

    def __init__(self, make_pool: Callable[[], WorkerPool], idle_s: float = policy.IDLE_COMPILERS_S) -> None:
        self._make_pool, self._idle_s = make_pool, idle_s
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._end: threading.Timer | None = None

    def expect(self) -> None:
        """Have the workers import what they need; at once returns. Where none can be started, this process compiles."""
        with self._lock, suppress(OSError):
            self._awake().start()

    def compile_ahead(self, wanted: Sequence[Compilation]) -> None:
        """Begin to compile what is not in the cache, in this order; at once returns. Few kernels start no workers."""
        with self._lock, suppress(OSError):
            if self._pool is None:  # running ones see at once what is there
                wanted = [one for one in wanted if not one[0].is_compiled(*one[1:])]
            if self._pool is not None or len(wanted) >= policy.KERNELS_FOR_WORKERS:
                self._awake().prefetch(jobs.prepare, wanted, COMPILE_LIMIT_S)

    def close(self) -> None:
        """End the workers; what comes next starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _awake(self) -> WorkerPool:
        if self._end is not None:
            self._end.cancel()
        self._end = threading.Timer(self._idle_s, self.close)
        self._end.daemon = True
        self._end.start()
        self._pool = self._pool or self._make_pool()
        return self._pool


#: Those of this process; none are started yet.
COMPILERS = Compilers(partial(WorkerPool, preload=GPU_COMPILERS))
