"""What a worker process keeps from one region to the next, how it joins, and the tasks of Dask's that it runs.

``dask worker --preload fuseplan.planner.fleet.worker_state`` does what ``plan fleet worker`` does for one worker.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import click
import torch
from distributed import Worker, WorkerPlugin, get_worker, secede

from fuseplan.costmodel.devices import is_gpu, local_kind
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.kernels.registry import local_target
from fuseplan.planner.api.device import DEVICES
from fuseplan.planner.api.run import ready
from fuseplan.planner.capture.cache import cached_capture
from fuseplan.planner.capture.trace import Graphs
from fuseplan.planner.errors import FuseplanError, PlanError
from fuseplan.planner.fleet.terms import (
    PLENTY,
    Prepared,
    Rankings,
    RegionOutcome,
    RegionTask,
    Terms,
    WorkerDevice,
    capturing,
    carried,
    measuring,
    preparing,
    unit,
)
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.plans import GraphPlan, RegionPlan
from fuseplan.planner.tuning.recheck import recheck
from fuseplan.planner.tuning.session import open_session
from fuseplan.planner.tuning.whole_step import measure_step, step_problem
from fuseplan.planner.work.extract import find_region
from fuseplan.search.errors import OWN_FAULTS, DatabaseError, MachineFailureError
from fuseplan.search.store.record import TuningRecord, Versions
from fuseplan.search.timing.subject import Subject
from fuseplan.search.tune import tuner
from fuseplan.search.workers.worker import WorkerPool, usable_cores

_NAME = "fuseplan"
#: What a capture imports.
_CAPTURING = ("fuseplan.planner.capture.cache", "transformers.modeling_utils")
#: A GPU's memory for each worker that measures on it: their contexts, and what they hold between measurements.
_GPU_BYTES_EACH = 7 * 2**30
#: Seconds after which a capture counts as hanging.
_CAPTURE_S = 1800.0
#: Of kernels alike, so many configurations are told: others are tried with fewer.
_FASTEST = 12
#: Cores for each process that captures: a second one is busy with what it imports.
_CORES_EACH = 2


@click.command()
@click.option("--device", default="auto", type=click.Choice(DEVICES))
@click.option("--compilers", default=0)
@click.option("--beside", default=0)
async def dask_setup(worker: Worker, device: str, compilers: int, beside: int) -> None:
    """Offer the device that this process owns, before the scheduler knows of the worker.

    ``compilers`` are compilers at once, 0 for one a core; ``beside`` are workers that have the same GPU and come first:
    where its memory is too small for one more, this one only captures.
    """
    if threading.current_thread() is threading.main_thread():
        # A Ctrl-C reaches the whole process group; the nanny ends this process in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind = device if device != "auto" else local_kind()
    key = current_identity(kind).key()
    captures = max(1, (compilers or usable_cores()) // _CORES_EACH)
    offered: dict[str, float] = {capturing(kind): captures}
    here, has_room = socket.gethostname(), True
    if is_gpu(kind):
        gpu = torch.cuda.get_device_properties(0)
        here, has_room = str(gpu.uuid), beside == 0 or (beside + 1) * _GPU_BYTES_EACH <= gpu.total_memory
    if has_room:
        offered |= {measuring(key): 1, preparing(key): PLENTY, unit(here): 1}
    for resource, amount in offered.items():
        worker.state.total_resources[resource] = worker.state.available_resources[resource] = amount
    pool = tuner.make_pool(kind)
    if compilers:
        pool.compilers = compilers
    if is_gpu(kind):
        pool.start()  # it imports what it needs meanwhile
    await worker.plugin_add(plugin=WorkerState(pool), name=_NAME)


def state(worker: Worker | None = None) -> WorkerState:
    """What a worker keeps, by default the one that runs this task."""
    found = (worker or get_worker()).plugins[_NAME]
    assert isinstance(found, WorkerState)
    return found


class WorkerState(WorkerPlugin):
    """The ``pool`` where the jobs of all tunes run, idle processes that capture, and a tuner for each tune."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.capturing: list[WorkerPool] = []
        self._lock = threading.RLock()
        self._tuners: dict[Terms, RegionTuner] = {}

    def region_tuner(self, terms: Terms) -> RegionTuner:
        """The tuner for these terms, made when the first region comes. Those of other tunes end, except the last."""
        with self._lock:
            if terms not in self._tuners:
                runs = list(dict.fromkeys(known.run for known in self._tuners if known.run != terms.run))
                for run in runs[:-1]:  # whoever asked for them is gone
                    self.end(run)
                self._tuners[terms] = RegionTuner(terms, self._pool)
            return self._tuners[terms]

    def end(self, run: str) -> None:
        """Close what was made for a tune."""
        with self._lock:
            for terms in [one for one in self._tuners if one.run == run]:
                self._tuners.pop(terms).stack.close()

    def teardown(self, worker: Worker) -> None:
        """The worker ends."""
        for run in {terms.run for terms in self._tuners}:
            self.end(run)
        for pool in (self._pool, *self.capturing):
            pool.close()


class RegionTuner:
    """Tunes regions that come one by one, as :func:`fuseplan.planner.tuning.tune.tune` does those of a graph."""

    def __init__(self, terms: Terms, pool: WorkerPool) -> None:
        with ExitStack() as stack:
            there = open_session(terms.kind, terms.db, terms.settings)
            stack.callback(there.database.close)
            # Whoever comes first probes the device.
            self.session = session = ready(terms.how.of(there, terms.how.studies(), terms.run))
            self.tuner = stack.enter_context(session.tuner(terms.how.budget(terms.kind), terms.how.seed, executor=pool))
            self._planner = session.planner(self.tuner)
            stack.enter_context(self._planner.lookahead() or nullcontext())
            #: Ends it when it is closed.
            self.stack = stack.pop_all()
        self._graphs: dict[str, tuple[DataflowGraph, Region]] = {}

    def prepare(self, task: RegionTask, rankings: Rankings) -> None:
        """Begin to enumerate a region and compile its kernels, unless that disturbs a measurement; returns at once.

        ``rankings`` are those of similar kernels.
        """
        self.tuner.take_rankings(rankings)
        if self.session.target.is_gpu:
            graph, region = self._graph(task)
            self._planner.prepare(graph, [region])

    def measure(self, task: RegionTask) -> RegionPlan | None:
        """The region's plan, stored or measured now; None if another tuner has it and the task does not wait."""
        graph, region = self._graph(task)
        taken: list[Region] = []
        plans = self._planner.plan_graph(
            graph, regions=[region], on_taken=None if task.waits else taken.append).regions
        return plans[0] if plans else None

    def _graph(self, task: RegionTask) -> tuple[DataflowGraph, Region]:
        """The same objects for what prepares a region and what measures it."""
        if task.key not in self._graphs:
            region = find_region(task.graph, task.key)
            if region is None:
                raise PlanError("its graph has no such region")
            self._graphs[task.key] = task.graph, region
        return self._graphs[task.key]


def _captured(source: ModelSource, workload: Workload, kind: str, pack_weights: bool) -> Graphs | Exception:
    """A job, in a process that does nothing else."""
    torch.set_num_threads(1)
    try:
        return cached_capture(source, workload, kind, pack_weights)
    except FuseplanError as error:
        return carried(error)


def describe(kind: str, database: str) -> WorkerDevice:
    """Which device this worker owns, and whether it sees a database that is a file; "" for a server's."""
    return WorkerDevice(
        current_identity(kind).key(), local_target(kind), Versions.current(kind), socket.gethostname(),
        probe.machine_load(), not database or Path(database).is_file(),
    )


def probe_device(terms: Terms) -> None:
    """Measure the device, and store what is found, unless it is stored."""
    state().region_tuner(terms)


def capture(source: ModelSource, workload: Workload, kind: str, pack_weights: bool) -> Graphs | Exception:
    """A workload's graphs, or why it cannot be captured; :class:`MachineFailureError` where the process fails."""
    secede()  # regions are measured and prepared meanwhile
    idle = state().capturing
    pool = idle.pop() if idle else WorkerPool(compilers=1, preload=_CAPTURING)
    try:
        outcome = pool.call(_captured, source, workload, kind, pack_weights, limit_s=_CAPTURE_S)
    finally:
        idle.append(pool)
    if not outcome.ok:
        raise MachineFailureError(f"a capture failed: {outcome.failure}")
    found: Graphs | Exception = outcome.value
    return found


def prepare(terms: Terms, task: RegionTask, rankings: Rankings) -> Prepared:
    """Begin what can be done of a region beside the measurement of another. Other workers have learnt ``rankings``."""
    state().region_tuner(terms).prepare(task, rankings)
    return Prepared(task.ops)


def measure(terms: Terms, task: RegionTask, prepared: Prepared) -> RegionOutcome:
    """Tune a region and store its plan. A fault of the machine's or the database's is raised: another may do better."""
    tuner, began, found = state().region_tuner(terms), time.monotonic(), RegionOutcome()
    try:
        if (plan := tuner.measure(task)) is not None:
            keys = tuple(one.key.workload for one in plan.decided)
            found = RegionOutcome(True, plan.source == "tuned", keys)
    except (MachineFailureError, DatabaseError):
        raise
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        found = RegionOutcome(failure=carried(error))
    learnt = {alike: ranking[:_FASTEST] for alike, ranking in tuner.tuner.rankings.items()}
    return replace(found, elapsed_s=time.monotonic() - began, rankings=learnt)


def time_step(terms: Terms, workload: str, graph: DataflowGraph, plan: GraphPlan) -> tuple[str, float]:
    """Time a workload's whole step, and store its times: why it is not timed, and how many seconds that took."""
    began = time.monotonic()
    tuner = state().region_tuner(terms)
    found = measure_step(tuner.session, graph, plan, tuner.tuner)
    return step_problem(workload, found), time.monotonic() - began


def time_again(terms: Terms, kernels: Sequence[tuple[Subject, TuningRecord]]) -> None:
    """Measure shipped kernels, and store what they take here."""
    tuner = state().region_tuner(terms)
    recheck(tuner.session, kernels, tuner.tuner)


async def end(run: str, dask_worker: Worker) -> None:
    """A tune has ended: forget what was made for it."""
    await asyncio.to_thread(state(dask_worker).end, run)
