"""What workers of a fleet do: each function is a task of Dask's."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.kernels.registry import local_target
from fuseplan.planner.errors import FuseplanError
from fuseplan.planner.fleet.terms import Prepared, RegionOutcome, RegionTask, Terms, WorkerDevice, carried
from fuseplan.planner.fleet.worker_state import opened, state
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.search.errors import DatabaseError, MachineFailureError
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
        if session.spec is None:
            session.probed()


def capture(source: ModelSource, workload: Workload, kind: str, pack_weights: bool) -> str | FuseplanError:
    """A workload's graphs (:func:`~fuseplan.planner.capture.cache.graphs_of_text`), or why it cannot be captured."""
    try:
        return state().capture(source, workload, kind, pack_weights)
    except FuseplanError as error:
        return error


def prepare(terms: Terms, task: RegionTask) -> Prepared:
    """Begin what can be done of a region beside the measurement of another."""
    state().region_tuner(terms).prepare(task)
    return Prepared(task.ops)


def measure(terms: Terms, task: RegionTask, prepared: Prepared) -> RegionOutcome:
    """Tune a region and store its plan. A fault of the machine's or the database's is raised: another may do better."""
    try:
        return RegionOutcome(state().region_tuner(terms).measure(task))
    except (MachineFailureError, DatabaseError):
        raise
    except Exception as error:
        return RegionOutcome(None, carried(error))


def time_sides(terms: Terms, *args: Any) -> Any:
    """:meth:`~fuseplan.search.tune.tuner.Tuner.time_sides`, where the device is."""
    return state().region_tuner(terms).tuner.time_sides(*args)


def time_again(terms: Terms, *args: Any) -> Any:
    """:meth:`~fuseplan.search.tune.tuner.Tuner.time_again`, where the device is."""
    return state().region_tuner(terms).tuner.time_again(*args)


def end(run: str) -> None:
    """A tune has ended."""
    state().end(run)
