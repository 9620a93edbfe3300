"""The graphs of a model's workloads, in order, as they are captured: a tune begins with the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self, TypeAlias

from fuseplan.planner.capture.aside import CAPTURERS
from fuseplan.planner.capture.cache import cached_capture, capture_path, capture_to_disk
from fuseplan.planner.capture.trace import Graphs
from fuseplan.planner.errors import CaptureError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.workers.worker import WorkerPool

#: Seconds until captures are ended once more.
_JOIN_S = 0.1
#: Begins to capture a workload of a source elsewhere: its type of device, and whether weights are packed.
CaptureElsewhere: TypeAlias = Callable[[ModelSource, Workload, str, bool], Future[Graphs]]


class GraphStream:
    """Name and graph of each workload, in order; a model that breaks into several graphs gives numbered names.

    Captures begin now, of all workloads that are not on disk, several beside each other where there are cores for
    them. A process that fails leaves its workload to this one, which then says why. A user's own module is captured
    here, when its turn comes. A context manager: leaving it ends the processes.

    Calls that were not asked for, but follow from those that were, are left out where a model does not take them;
    ``note`` is told. With ``pack_weights`` the names say so: reports then have both. With ``elsewhere`` no process is
    started: all but a user's own module is captured there.
    """

    def __init__(
        self, source: ModelSource, workloads: Sequence[Workload], device_type: str, pack_weights: bool = False,
        note: Callable[[str], None] = lambda text: None, elsewhere: CaptureElsewhere | None = None,
    ) -> None:
        self._source, self._device_type, self._pack_weights, self._note = source, device_type, pack_weights, note
        self._left = deque(workloads)
        self._jobs: dict[Workload, Future[Any]] = {}
        self._here: set[Workload] = set()
        self._is_elsewhere = False
        #: The first workload's label and graphs, where these are there already.
        self._held: tuple[str, list[tuple[str, DataflowGraph]]] | None = None
        if elsewhere is not None and source.kind != "module":
            self._pool, self._is_elsewhere = None, True
            self._jobs = {one: elsewhere(source, one, device_type, pack_weights) for one in workloads}
            return
        paths = {one: capture_path(source, one, device_type, pack_weights) for one in workloads}
        missing = {one: path for one, path in paths.items() if not path.exists()}
        self._here = set(missing)
        self._pool = CAPTURERS.take(len(missing) if source.kind != "module" else 0)
        if self._pool is None:
            return
        self._jobs = {one: Future() for one in missing}
        self._ended = Event()
        self._thread = Thread(target=self._capture, args=(self._pool, missing), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is None:
            return
        self._ended.set()
        while self._thread.is_alive():
            self._pool.close()
            self._thread.join(_JOIN_S)
        self._pool.close()

    def _capture(self, pool: WorkerPool, missing: Mapping[Workload, Path]) -> None:
        """Capture on other processes what is missing; each workload's future ends with that, whatever came of it."""
        # The first is waited for, and generate() takes longest: it traces several calls.
        first, *others = missing
        order = [first, *sorted(others, key=lambda one: one.regime != "generate")]
        asked = ((self._source, one, self._device_type, self._pack_weights, missing[one])
                 for one in order if not self._ended.is_set())
        try:
            for number, _ in pool.as_completed(capture_to_disk, asked, policy.CAPTURE_LIMIT_S):
                self._jobs[order[number]].set_result(None)
        except Exception as error:  # they were ended while this thread waited
            if not self._ended.is_set():
                OWN_FAULTS.tolerate(error)
        finally:
            for job in self._jobs.values():
                if not job.done():
                    job.set_result(None)
            pool.close()

    def __iter__(self) -> Iterator[tuple[str, DataflowGraph]]:
        while self.waiting:
            yield from self.take()

    def begin(self) -> None:
        """Capture the first workload now, so that what is wrong with a model is known before anything else is done."""
        self._held = self.waiting, self.take()

    @property
    def is_aside(self) -> bool:
        """Whether other processes capture meanwhile."""
        return self._pool is not None

    @property
    def waiting(self) -> str:
        """The workload whose turn it is; "" after the last."""
        if self._held is not None:
            return self._held[0]
        return self._left[0].label if self._left else ""

    def ready(self) -> list[tuple[str, DataflowGraph]]:
        """The next graphs that need no waiting; they are not given again."""
        found = self.take() if self._held is not None else []
        while self._left and (
            self._jobs[self._left[0]].done() if self._left[0] in self._jobs else self._left[0] not in self._here
        ):
            found += self.take()
        return found

    def take(self) -> list[tuple[str, DataflowGraph]]:
        """The graphs of the next workload, captured now unless they are there; [] where it is left out.

        Raises:
            CaptureError, ConfigError: It cannot be captured.
        """
        if self._held is not None:
            (_, found), self._held = self._held, None
            return found
        workload = self._left[0]
        try:
            if self._is_elsewhere:
                graphs: Graphs = self._jobs[workload].result()
            else:
                if workload in self._jobs:
                    wait([self._jobs[workload]])
                graphs = cached_capture(self._source, workload, self._device_type, self._pack_weights)
        except CaptureError as error:
            if not workload.derived:
                raise
            graphs = ()
            self._note(f"{workload.label} is left out: {error}")
        self._left.popleft()
        name = workload.label + (" packed" if self._pack_weights else "")
        if len(graphs) == 1:
            return [(name, graphs[0])]
        return [(f"{name} part {number}", graph) for number, graph in enumerate(graphs, 1)]
