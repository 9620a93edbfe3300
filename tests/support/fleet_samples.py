"""Fleets in this process: workers that own devices which are none, and tasks that only say what was done."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

from distributed import Client, LocalCluster, get_worker

from fuseplan.planner.api.request import HowToTune
from fuseplan.planner.fleet.scheduler import RegionScheduler
from fuseplan.planner.fleet.terms import (
    PLENTY,
    Prepared,
    Rankings,
    RegionOutcome,
    RegionTask,
    Terms,
    capturing,
    measuring,
    preparing,
    unit,
)
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.tuning.plans import PlanSettings

DEVICE = "cpu-sample-0"
TERMS = Terms("run", "cpu", "nowhere", PlanSettings(), HowToTune())


@contextmanager
def fleet(
    workers: int, devices: Sequence[str] = (DEVICE,), threads: int = 1, units: Sequence[str] = ("",)
) -> Iterator[Client]:
    """A client of that many workers, threads of this process, which own the devices in turn; ``units`` tell which of
    those are the same.
    """
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=None, threads_per_worker=threads,
                     memory_limit=None) as cluster,
        Client(cluster) as client,
    ):
        for number in range(workers):
            device, shared = devices[number % len(devices)], units[number % len(units)] or str(number)
            cluster.worker_spec[number] = {**cluster.new_spec, "options": {
                **cluster.new_spec["options"], "resources": resources(device, shared)}}
        cluster.sync(cluster._correct_state)
        client.wait_for_workers(workers)
        yield client


def resources(device: str, shared: str = "") -> dict[str, float]:
    """What a worker offers that owns this device, with those that have the same ``shared``."""
    kind = device.partition("-")[0]
    return {unit(shared): 1.0, measuring(device): 1, preparing(device): PLENTY, capturing(kind): 1}


def region(key: str, ops: float = 1.0) -> RegionTask:
    return RegionTask(key, f"region {key}", DataflowGraph([], {}, (), ()), ops)


@dataclass
class Log:
    """What the tasks of this module have done: each measurement as (worker, key), in the order in which they began."""

    measured: list[tuple[str, str]] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)
    #: What the worker that prepared was told of kernels alike.
    told: list[dict[object, object]] = field(default_factory=list)
    at_once: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    #: Called in a measurement, with the key.
    meanwhile: Callable[[str], object] = lambda key: None
    outcome: Callable[[RegionTask], RegionOutcome] = lambda task: RegionOutcome(failure=ValueError(task.key))
    lock: threading.Lock = field(default_factory=threading.Lock)


LOG = Log()


def fresh_log() -> Log:
    global LOG
    LOG = Log()
    return LOG


def prepare(terms: Terms, task: RegionTask, rankings: Rankings) -> Prepared:
    LOG.prepared.append(task.key)
    LOG.told.append(dict(rankings))
    return Prepared(task.ops)


def measure(terms: Terms, task: RegionTask, prepared: Prepared) -> RegionOutcome:
    worker, log = get_worker().address, LOG
    with log.lock:
        log.at_once[worker] += 1
        log.most_at_once = max(log.most_at_once, log.at_once[worker])
        log.measured.append((worker, task.key))
    try:
        log.meanwhile(task.key)
        time.sleep(log.seconds.get(task.key, 0.0))
        return log.outcome(task)
    finally:
        with log.lock:
            log.at_once[worker] -= 1


def capture(*args: object) -> object:
    return args


TASKS = SimpleNamespace(capture=capture, prepare=prepare, measure=measure)


def spread(client: Client, kind: str = "cpu") -> RegionScheduler:
    return RegionScheduler(client, kind, "run", TASKS)
