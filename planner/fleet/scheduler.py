"""Gives tasks to the workers of a fleet: each region to a worker that owns a device for it, the longest first.

Dask decides who does what. Here is only decided what is asked for next: few regions ahead, so that the longest of all
that are known comes next whichever was captured first, and a worker that joins gets its share.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from distributed import Client, Future, KilledWorker

from fuseplan.costmodel.devices import is_cpu
from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.errors import PlanError
from fuseplan.planner.fleet import worker_state
from fuseplan.planner.fleet.cluster import Patience, Watch, device_workers, devices_here, workers_of
from fuseplan.planner.fleet.terms import (
    Captured,
    RegionOutcome,
    RegionTask,
    Terms,
    capturing,
    checked_capture,
    checked_outcome,
    measuring,
    preparing,
)
from fuseplan.search.tune.resources import Alike

#: Regions that a worker has: the one that it tunes, those whose kernels are compiled meanwhile, and one to be
#: prepared next. An idle worker may steal what is not begun; with more, a tune is spread less evenly over 32 devices.
AHEAD = 4
#: What is urgent: nothing can be prepared before it is captured, nor measured before it is prepared. Regions of equal
#: urgency come by their ops, fewer than a million.
_CAPTURE, _PREPARE, _MEASURE, _STEP = 3_000_000, 2_000_000, 1_000_000, 0
#: How often a task is given to a worker again whose machine or database failed it.
_RETRIES = 2


@dataclass(frozen=True)
class Tasks:
    """What workers run."""

    capture: Callable[..., Captured] = worker_state.capture
    probe: Callable[..., Any] = worker_state.probe_device
    prepare: Callable[..., Any] = worker_state.prepare
    measure: Callable[..., RegionOutcome] = worker_state.measure


@dataclass
class Counts:
    """How far a tune is: regions, and the ops in them, by which the time left is estimated."""

    regions: int = 0
    regions_done: int = 0
    ops: float = 0.0
    ops_done: float = 0.0
    devices: int = 0
    began: float = field(default_factory=time.monotonic)

    def stored(self) -> str:
        """In words, for the end of a tune."""
        return f"{self.regions_done} of {self.regions} regions are done and stored"

    def left_s(self) -> float:
        """Seconds until all regions that are known are done; NaN before the first is."""
        if not self.ops_done:
            return math.nan
        return (time.monotonic() - self.began) * (self.ops - self.ops_done) / self.ops_done


class RegionScheduler:
    """Tasks of one tune, whose results are told to whoever asked for them as they come.

    ``run`` names the tune; ``tell`` is called after each result, ``note`` of workers that do not answer.
    """

    def __init__(
        self, client: Client, kind: str, run: str, tasks: Tasks | None = None, tell: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda text: None, patience: Patience | None = None,
    ) -> None:
        self.counts = Counts()
        self._watch = Watch(client, note, self.counts.stored, patience)
        self._client, self._kind, self._run, self._tell = client, kind, run, tell
        self._tasks = tasks if tasks is not None else Tasks()
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        #: Futures by their keys, with the device that each needs, and who is told.
        self._coming: dict[Any, tuple[Future[Any], str, Callable[[Future[Any]], None]]] = {}
        self._captures: deque[tuple[tuple[Any, ...], Callable[[Captured], None]]] = deque()
        self._capturing = 0
        self._numbers = itertools.count()
        self._waiting: dict[str, list[tuple[float, int, Terms, RegionTask, Callable[[RegionOutcome], None]]]] = {}
        self._under_way: Counter[str] = Counter()
        #: By device and key: parts of the regions that are under way.
        self._parts: Counter[tuple[str, str]] = Counter()
        self._unprobed: set[str] = set()
        self._rankings: defaultdict[tuple[str, Terms], dict[Alike, Sequence[Config]]] = defaultdict(dict)

    def capture(self, *args: Any, then: Callable[[Captured], None]) -> None:
        """Ask for a capture; they are made in the order in which they are asked for."""
        self._captures.append((args, then))

    def probe(self, device: str, terms: Terms) -> None:
        """Ask for a probe of a device, whose regions wait for it."""
        self._unprobed.add(device)

        def probed(future: Future[Any]) -> None:
            self._unprobed.discard(device)
            self.counts.began = time.monotonic()
            future.result()

        self._submit(self._tasks.probe, (terms,), device, measuring(device), _CAPTURE,
                     ("probe", self._run, device), probed)

    def region(self, device: str, terms: Terms, task: RegionTask, then: Callable[[RegionOutcome], None]) -> None:
        """Ask for a region on a device."""
        self.counts.regions += 1
        self.counts.ops += task.ops
        self._waiting.setdefault(device, []).append((-task.ops, next(self._numbers), terms, task, then))

    def call(
        self, function: Callable[..., Any], device: str, terms: Terms, *args: Any, then: Callable[[Any], None]
    ) -> None:
        """Ask for something else on a device, for when no region wants it."""
        self._submit(function, (terms, *args), device, measuring(device), _STEP,
                     (function.__name__, self._run, next(self._numbers)), lambda future: then(future.result()))

    def run(self) -> None:
        """Until everything that was asked for is done, and what is asked for meanwhile.

        Raises:
            MachineFailureError: The scheduler is lost, or no worker is left for a device.
            Exception: Of a task that failed for no fault of its region. What has not begun is cancelled then.
        """
        try:
            with self._watch.in_words():
                self._ask()
                while self._coming:
                    with suppress(Empty):
                        future = self._done.get(timeout=self._watch.patience.look_s)
                        self._coming.pop(future.key)[-1](future)
                        self._ask()
                        self._tell()
                    self._watch.look(self._without_worker)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give up what is not done. What a worker measures at the moment is finished and stored."""
        if self._client.status == "running":
            self._client.cancel([future for future, *_ in self._coming.values()])

    def _without_worker(self) -> set[str]:
        """Devices that no worker owns at the moment, although something is to be done there."""
        owned = device_workers(self._client, self._kind)
        busy = {device for _, device, _ in self._coming.values()} - owned.keys()
        return busy - {""} or {self._kind for _ in busy if not owned}

    def _ask(self) -> None:
        """Submit what is next."""
        workers = device_workers(self._client, self._kind)
        self.counts.devices = devices_here(self._client, self._kind)
        if self._captures and not (is_cpu(self._kind) and self._unprobed):
            # As many as all workers together make at once; at least one.
            room = [one["resources"].get(capturing(self._kind), 0) for one in workers_of(self._client).values()]
            most = max(1, int(sum(room)))
            while self._captures and self._capturing < most:
                args, then = self._captures.popleft()
                self._capturing += 1
                self._submit(self._tasks.capture, args, "", capturing(self._kind), _CAPTURE,
                             ("capture", self._run, next(self._numbers)), partial(self._captured, then))
        if is_cpu(self._kind) and self._capturing:  # which would disturb what is measured
            return
        for device, waiting in self._waiting.items():
            most = AHEAD * max(1, len(workers.get(device, ())))
            while waiting and device not in self._unprobed and self._under_way[device] < most:
                # The longest, but rather one that has no part in common with those under way: a worker would wait for
                # another's part, which is measured once.
                apart = [one for one in waiting if not any(self._parts[device, key] for key in one[3].shares)]
                chosen = min(apart or waiting, key=lambda one: one[:2])
                waiting.remove(chosen)
                self._next_region(device, *chosen[2:])

    def _captured(self, then: Callable[[Captured], None], future: Future[Any]) -> None:
        self._capturing -= 1
        then(checked_capture(future.result()))

    def _next_region(
        self, device: str, terms: Terms, task: RegionTask, then: Callable[[RegionOutcome], None]
    ) -> None:
        self._under_way[device] += 1
        self._parts.update((device, key) for key in task.shares)

        def measured(future: Future[Any]) -> None:
            self._under_way[device] -= 1
            self._parts.subtract((device, key) for key in task.shares)
            try:
                outcome = checked_outcome(future.result())
            except KilledWorker as error:  # a region that costs every worker its life is at fault itself
                outcome = RegionOutcome(failure=PlanError(
                    f"{error.allowed_failures + 1} workers ended while they tuned it; their memory or a kernel may be "
                    "at fault"))
            self._rankings[device, terms] |= outcome.rankings
            if outcome.taken:  # last of all, when its plan may be there
                self._waiting[device].append((0.0, next(self._numbers), terms, replace(task, waits=True), then))
                return None
            self.counts.regions_done += 1
            self.counts.ops_done += task.ops
            return then(outcome)

        urgency = 0.0 if task.waits else task.ops  # a worker that waits for another tuner does nothing else
        # Dask learns by the first part of their names how long tasks take: regions of one size take equally long.
        size = "abcdefghijklmnopqrstuvwxyz"[min(25, max(0, int(math.log2(max(task.ops, 1.0)) * 2)))] * 3
        name = (self._run, device, hash(terms), task.key, int(task.waits), task.label)
        prepared = self._client.submit(
            self._tasks.prepare, terms, task, dict(self._rankings[device, terms]),
            key=(f"prepare-{size}", *name), resources={preparing(device): 1},
            priority=_PREPARE + urgency, retries=_RETRIES)
        self._submit(self._tasks.measure, (terms, task, prepared), device, measuring(device), _MEASURE + urgency,
                     (f"measure-{size}", *name), measured)

    def _submit(
        self, function: Callable[..., Any], args: tuple[Any, ...], device: str, resource: str, priority: float,
        key: tuple[Any, ...], then: Callable[[Future[Any]], None],
    ) -> None:
        """``device`` is the one that the task needs; "" for none."""
        future = self._client.submit(
            function, *args, key=key, resources={resource: 1}, priority=priority, retries=_RETRIES)
        self._coming[future.key] = future, device, then
        future.add_done_callback(self._done.put)

