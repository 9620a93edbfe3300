"""Gives tasks to the workers of a fleet: each region to a worker that owns a device for it, the longest first.

Dask decides who does what. Here is only decided what is asked for next: few regions ahead, so that the longest of all
that are known comes next whichever was captured first, and a worker that joins gets its share.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from distributed import Client, Future, KilledWorker

from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.errors import PlanError
from fuseplan.planner.fleet import cluster, worker_state
from fuseplan.planner.fleet.cluster import Watch, device_workers, devices_here, workers_of
from fuseplan.planner.fleet.terms import RegionOutcome, RegionTask, Terms, capturing, device_of, measuring, preparing
from fuseplan.search.errors import counted
from fuseplan.search.tune.resources import Alike

#: Regions that a worker has: the one that it tunes, those whose kernels are compiled meanwhile, and one to be
#: prepared next. An idle worker may steal what is not begun; with more, a tune is spread less evenly over 32 devices.
AHEAD = 4
#: What is urgent: nothing can be prepared before it is captured, nor measured before it is prepared. Regions of equal
#: urgency come by their ops, fewer than a million.
_CAPTURE, _PREPARE, _MEASURE, _STEP = 3_000_000, 2_000_000, 1_000_000, 0
#: How often a task is given to a worker again whose machine or database failed it.
_RETRIES = 2


@dataclass
class Counts:
    """How far a tune is: regions, and the ops in them, by which the time left is estimated."""

    regions: int = 0
    regions_done: int = 0
    ops: float = 0.0
    ops_done: float = 0.0
    devices: int = 0
    began: float = 0.0

    def stored(self) -> str:
        """In words, for the end of a tune."""
        return f"{self.regions_done} of {counted(self.regions, 'region')} done and stored"

    def __str__(self) -> str:
        left = ""
        if self.ops_done:
            left_s = (time.monotonic() - self.began) * (self.ops - self.ops_done) / self.ops_done
            left = f", {timedelta(seconds=round(left_s))} left"
        devices, regions = counted(self.devices, "device"), counted(self.regions, "region")
        return f"tuning on {devices}: {self.regions_done} of {regions}{left}"


@dataclass(frozen=True, eq=False)
class _Job:
    """Something that is asked for: which resource it takes, ``begin`` for when it is its turn, and who is told.

    Of all that take a resource the first by ``order`` comes next, if it has no part in common with what is under way.
    """

    resource: str
    order: tuple[float, int]
    begin: Callable[[], Future[Any]]
    then: Callable[[Future[Any]], None]
    parts: Collection[str] = ()


class RegionScheduler:
    """Tasks of one tune, whose results are told to whoever asked for them as they come.

    ``run`` names the tune; ``tasks`` has the functions that workers run; ``tell`` is called after each result, ``note``
    of workers that do not answer.
    """

    def __init__(
        self, client: Client, kind: str, run: str, tasks: Any = worker_state, tell: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.counts = Counts()
        self._watch = Watch(client, note, self.counts.stored)
        self._client, self._kind, self._run, self._tell = client, kind, run, tell
        self._tasks = tasks
        self._numbers = itertools.count()
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self._waiting: defaultdict[str, list[_Job]] = defaultdict(list)
        #: By the keys of their futures.
        self._coming: dict[Any, tuple[Future[Any], _Job]] = {}
        self._rankings: defaultdict[tuple[str, Terms], dict[Alike, Sequence[Config]]] = defaultdict(dict)

    def capture(self, *args: Any, then: Callable[[Any], None]) -> None:
        """Ask for a capture; they are made in the order in which they are asked for."""
        self._ask(self._tasks.capture, capturing(self._kind), _CAPTURE, args, then)

    def region(self, device: str, terms: Terms, task: RegionTask, then: Callable[[RegionOutcome], None]) -> None:
        """Ask for a region on a device."""
        if not task.waits:
            self.counts.began = self.counts.began or time.monotonic()
            self.counts.regions += 1
            self.counts.ops += task.ops
        urgency = 0.0 if task.waits else task.ops  # what another tuner is at work on comes last: its plan may be there
        # Dask learns by the first part of their names how long tasks take: regions of one size take equally long.
        size = "abcdefghijklmnopqrstuvwxyz"[min(25, max(0, int(math.log2(max(task.ops, 1.0)) * 2)))] * 3
        name = (self._run, device, hash(terms), task.key, int(task.waits), task.label)

        def begin() -> Future[Any]:
            known = dict(self._rankings[device, terms])
            prepared = self._submit(self._tasks.prepare, preparing(device), _PREPARE + urgency,
                                    (f"prepare-{size}", *name), terms, task, known)
            return self._submit(self._tasks.measure, measuring(device), _MEASURE + urgency,
                                (f"measure-{size}", *name), terms, task, prepared)

        def measured(future: Future[Any]) -> None:
            try:
                outcome: RegionOutcome = future.result()
            except KilledWorker as error:  # a region that costs every worker its life is at fault itself
                outcome = RegionOutcome(failure=PlanError(
                    f"{counted(error.allowed_failures + 1, 'worker')} ended while tuning it; memory or a kernel may be "
                    "at fault"))
            self._rankings[device, terms] |= outcome.rankings
            if not outcome.stored and outcome.failure is None:  # a worker that waits for it does nothing else
                return self.region(device, terms, replace(task, waits=True), then)
            self.counts.regions_done += 1
            self.counts.ops_done += task.ops
            return then(outcome)

        job = _Job(measuring(device), (-urgency, next(self._numbers)), begin, measured, tuple(task.graph.shares))
        self._waiting[job.resource].append(job)

    def call(
        self, function: Callable[..., Any], device: str, terms: Terms, *args: Any,
        then: Callable[[Any], None] = lambda found: None,
    ) -> None:
        """Ask for something else on a device, for when no region wants it."""
        self._ask(function, measuring(device), _STEP, (terms, *args), then)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until everything that was asked for is done, and what is asked for meanwhile; or until then.

        :class:`MachineFailureError` where the scheduler is lost, or no worker is left for a device. A task that fails
        for no fault of its region raises: what has not begun is cancelled, what is being measured is still stored.
        """
        try:
            with self._watch.in_words():
                self._begin_next()
                while self._coming and not until():
                    with suppress(Empty):
                        future = self._done.get(timeout=cluster.LOOK_S)
                        self._coming.pop(future.key)[1].then(future)
                        self._begin_next()
                        self._tell()
                    self._watch.look(self._without_worker)
        except BaseException:
            if self._client.status == "running":
                self._client.cancel([future for future, _ in self._coming.values()])
            raise

    def _without_worker(self) -> set[str]:
        """Devices that no worker owns at the moment, although something is to be done there."""
        owned = device_workers(self._client, self._kind)
        busy = {device_of(job.resource) for _, job in self._coming.values()} - owned.keys()
        return {one for one in busy if one} or {self._kind for _ in busy if not owned}

    def _begin_next(self) -> None:
        """Submit what is next: of regions few ahead, of captures as many as all workers together make at once."""
        offered = Counter[str]()
        for worker in workers_of(self._client).values():
            offered.update(worker["resources"])
        self.counts.devices = devices_here(self._client, self._kind)
        for resource, waiting in self._waiting.items():
            most = max(1.0, offered[resource]) * (AHEAD if device_of(resource) else 1)
            under_way = [job for _, job in self._coming.values() if job.resource == resource]
            while waiting and len(under_way) < most:
                # Of two regions with a common part, which is measured once, one worker would wait for the other.
                parts = {part for job in under_way for part in job.parts}
                job = min([one for one in waiting if parts.isdisjoint(one.parts)] or waiting, key=lambda one: one.order)
                waiting.remove(job)
                under_way.append(job)
                future = job.begin()
                self._coming[future.key] = future, job
                future.add_done_callback(self._done.put)

    def _ask(
        self, function: Callable[..., Any], resource: str, priority: int, args: tuple[Any, ...],
        then: Callable[[Any], None],
    ) -> None:
        """After all regions, in the order of these calls."""
        number = next(self._numbers)
        begin = partial(self._submit, function, resource, priority, (function.__name__, self._run, number), *args)
        self._waiting[resource].append(_Job(resource, (1.0, number), begin, lambda future: then(future.result())))

    def _submit(
        self, function: Callable[..., Any], resource: str, priority: float, key: tuple[Any, ...], *args: Any
    ) -> Future[Any]:
        return self._client.submit(
            function, *args, key=key, resources={resource: 1}, priority=priority, retries=_RETRIES)
