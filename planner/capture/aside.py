"""Processes that capture beside this one. They can start before PyTorch is imported here: importing takes longest."""

from __future__ import annotations

import platformdirs

from fuseplan.search.workers.worker import WorkerPool, usable_cores

#: Cores that are left to this process and to what measures.
_SPARED = 2
#: What capturing imports, once for all of them.
_IMPORTS = ("fuseplan.planner.capture.cache:warm_up",)


class Capturers:
    """The processes that the next stream of graphs captures in; none are started yet."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def expect(self) -> None:
        """Have them import, at once returns: where there are cores for two, and no capture was ever kept."""
        kept = platformdirs.user_cache_path("fuseplan") / "captures"
        if self._pool is None and _places() > 1 and not kept.exists():
            self._pool = _made()

    def take(self, count: int) -> WorkerPool | None:
        """The processes for so many captures; None where there are no cores for two, or nothing for them to do."""
        pool, self._pool = self._pool, None
        if min(count, _places()) > 1:
            return pool or _made()
        if pool is not None:
            pool.close()
        return None


def _places() -> int:
    return usable_cores() - _SPARED


def _made() -> WorkerPool:
    pool = WorkerPool(_places(), preload=_IMPORTS, threads=1)
    pool.start()
    return pool


#: Those of this process.
CAPTURERS = Capturers()
