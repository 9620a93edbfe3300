"""What workers of a fleet do: each function is a task of Dask's."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from distributed import Worker

from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.kernels.registry import local_target
from fuseplan.planner.api.run import ready
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
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.plans import GraphPlan, RegionPlan
from fuseplan.planner.tuning.recheck import recheck
from fuseplan.planner.tuning.whole_step import measure_step, step_problem
from fuseplan.search.errors import OWN_FAULTS, DatabaseError, MachineFailureError
from fuseplan.search.store.record import TuningRecord, Versions
from fuseplan.search.timing.subject import Subject


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
    return state().capture(source, workload, kind, pack_weights)


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


def time_step(terms: Terms, workload: str, graph: DataflowGraph, plan: GraphPlan) -> tuple[str, float]:
    """Time a workload's whole step, and store its times: why it is not timed, and how many seconds that took."""
    began = time.monotonic()
    tuner = state().region_tuner(terms)
    limit_s = terms.how.budget(terms.kind).job_limit_s
    found = measure_step(tuner.session, graph, plan, tuner.tuner, limit_s)
    return step_problem(workload, found), time.monotonic() - began


def time_again(terms: Terms, kernels: Sequence[tuple[Subject, TuningRecord]]) -> None:
    """Measure shipped kernels, and store what they take here."""
    tuner = state().region_tuner(terms)
    recheck(tuner.session, kernels, tuner.tuner)


async def end(run: str, dask_worker: Worker) -> None:
    """A tune has ended: forget what was made for it."""
    await asyncio.to_thread(state_of(dask_worker).end, run)
