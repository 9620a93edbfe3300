"""What workers of a fleet do: each function is a task of Dask's."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

from distributed import Worker

from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.kernels.registry import local_target
from fuseplan.planner.api.run import ready
from fuseplan.planner.errors import FuseplanError
from fuseplan.planner.fleet.terms import (
    Captured,
    Prepared,
    Rankings,
    RegionOutcome,
    RegionTask,
    Terms,
    WorkerDevice,
    carried,
)
from fuseplan.planner.fleet.worker_state import opened, state, state_of
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.plans import RegionPlan
from fuseplan.search.errors import OWN_FAULTS, DatabaseError, MachineFailureError
from fuseplan.search.store.record import Versions


def describe(kind: str, database: str) -> WorkerDevice:
    """Which device this worker owns, and whether it sees a database that is a file; "" for a server's."""
    return WorkerDevice(
        current_identity(kind).key(), local_target(kind), Versions.current(kind), socket.gethostname(),
        probe.machine_load(), not database or Path(database).is_file(),
    )


def probe_device(terms: Terms) -> None:
    """Measure the device, and store what is found, unless it is stored."""
    session = opened(terms)
    with session.database:
        ready(session)


def capture(source: ModelSource, workload: Workload, kind: str, pack_weights: bool) -> Captured:
    """A workload's graphs, or why it cannot be captured."""
    began = time.monotonic()
    text, failure = "", None
    try:
        text = state().capture(source, workload, kind, pack_weights)
    except FuseplanError as error:
        failure = error
    return Captured(text, failure, time.monotonic() - began)


def prepare(terms: Terms, task: RegionTask, rankings: Rankings) -> Prepared:
    """Begin what can be done of a region beside the measurement of another. Other workers have learnt ``rankings``."""
    state().region_tuner(terms).prepare(task, rankings)
    return Prepared(task.ops)


def measure(terms: Terms, task: RegionTask, prepared: Prepared) -> RegionOutcome:
    """Tune a region and store its plan. A fault of the machine's or the database's is raised: another may do better."""
    tuner = state().region_tuner(terms)
    began = time.monotonic()
    plan: RegionPlan | None = None
    failure = None
    try:
        plan = tuner.measure(task)
    except (MachineFailureError, DatabaseError):
        raise
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        failure = carried(error)
    tuned, decided = plan is not None and plan.source == "tuned", plan.decided if plan is not None else ()
    keys = tuple(one.key.workload for one in decided)
    return RegionOutcome(plan is not None, tuned, keys, failure, time.monotonic() - began, tuner.learnt())


def time_sides(terms: Terms, *args: Any) -> Any:
    """:meth:`~fuseplan.search.tune.tuner.Tuner.time_sides`, where the device is."""
    return state().region_tuner(terms).tuner.time_sides(*args)


def time_again(terms: Terms, *args: Any) -> Any:
    """:meth:`~fuseplan.search.tune.tuner.Tuner.time_again`, where the device is."""
    return state().region_tuner(terms).tuner.time_again(*args)


async def end(run: str, dask_worker: Worker) -> None:
    """A tune has ended: forget what was made for it."""
    await asyncio.to_thread(state_of(dask_worker).end, run)
