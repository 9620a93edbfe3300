"""What a worker process keeps from one region to the next, and how it joins: a preload module of Dask's workers.

``dask worker --preload fuseplan.planner.fleet.worker_state`` does what ``plan fleet worker`` does for one worker.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import click
from distributed import Worker, WorkerPlugin, get_worker, secede

from fuseplan.costmodel.devices import is_gpu, local_kind
from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.api.device import DEVICES
from fuseplan.planner.api.region_tuner import RegionTuner, Terms
from fuseplan.planner.capture.cache import capture_as_text
from fuseplan.planner.errors import FuseplanError
from fuseplan.planner.fleet.terms import PLENTY, Captured, capturing, carried, measuring, preparing, unit
from fuseplan.search import policy
from fuseplan.search.errors import MachineFailureError
from fuseplan.search.tune import tuner
from fuseplan.search.workers.worker import WorkerPool, usable_cores

_NAME = "fuseplan"
#: What a capture imports.
_CAPTURING = ("fuseplan.planner.capture.cache", "transformers.modeling_utils")
#: So many processes that capture are started before there is anything to capture.
_WAITING = 2
#: Seconds after which a capture counts as hanging.
_CAPTURE_S = 1800.0
#: Cores for each process that captures: a second one is busy with what it imports.
_CORES_EACH = 2


@click.command()
@click.option("--device", default="auto", type=click.Choice(DEVICES))
@click.option("--compilers", default=0)
@click.option("--beside", default=0)
async def dask_setup(worker: Worker, device: str, compilers: int, beside: int) -> None:
    """Find out which device this process owns, and offer it, before the scheduler knows of the worker.

    ``compilers`` are compilers at once, 0 for one a core; ``beside`` are workers that have the same GPU and come first:
    where its memory is too small for one more, this one only captures.
    """
    import torch

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
        here, has_room = str(gpu.uuid), beside == 0 or (beside + 1) * policy.GPU_BYTES_A_PROCESS <= gpu.total_memory
    if has_room:
        offered |= {measuring(key): 1, preparing(key): PLENTY, unit(here): 1}
    for resource, amount in offered.items():
        worker.state.total_resources[resource] = worker.state.available_resources[resource] = amount
    state = WorkerState(compilers)
    await worker.plugin_add(plugin=state, name=_NAME)
    if is_gpu(kind):
        state.start(kind, captures)


def state() -> WorkerState:
    """That of the worker that runs this task."""
    return state_of(get_worker())


def state_of(worker: Worker) -> WorkerState:
    """What a worker keeps."""
    found = worker.plugins[_NAME]
    assert isinstance(found, WorkerState)
    return found


class WorkerState(WorkerPlugin):
    """The processes of a worker, and a tuner for each tune that it takes part in; closed with the worker."""

    def __init__(self, compilers: int = 0) -> None:
        self._compilers = compilers
        self._lock = threading.RLock()
        self._pools: dict[str, WorkerPool] = {}
        self._tuners: dict[Terms, RegionTuner] = {}
        #: Those that captured before, and wait for more.
        self._capturing: list[WorkerPool] = []

    def pool(self, kind: str) -> WorkerPool:
        """Where the jobs of all tunes run."""
        with self._lock:
            if kind not in self._pools:
                pool = self._pools[kind] = tuner.make_pool(kind)
                if self._compilers:
                    pool.compilers = self._compilers
            return self._pools[kind]

    def start(self, kind: str, captures: int) -> None:
        """Have the processes that measure and capture import what they need, which takes a while; at once returns."""
        self.pool(kind).start()
        self._capturing = [WorkerPool(compilers=1, preload=_CAPTURING) for _ in range(min(captures, _WAITING))]
        for pool in self._capturing:
            pool.start()

    def region_tuner(self, terms: Terms) -> RegionTuner:
        """The tuner for these terms, made when the first region comes. Those of other tunes end but for the last."""
        with self._lock:
            if terms not in self._tuners:
                runs = list(dict.fromkeys(known.run for known in self._tuners if known.run != terms.run))
                for run in runs[:-1]:  # whoever asked for them is gone
                    self.end(run)
                self._tuners[terms] = RegionTuner(terms, self.pool(terms.kind))
            return self._tuners[terms]

    def capture(self, *args: Any) -> Captured:
        """What :func:`~fuseplan.planner.capture.cache.capture_as_text` gives in a process that does nothing else.

        Raises:
            MachineFailureError: The process failed.
        """
        secede()  # regions are measured and prepared meanwhile
        began = time.monotonic()
        pool = self._capturing.pop() if self._capturing else WorkerPool(compilers=1, preload=_CAPTURING)
        try:
            outcome = pool.call(_captured, *args, limit_s=_CAPTURE_S)
        finally:
            self._capturing.append(pool)
        if not outcome.ok:
            raise MachineFailureError(f"a capture failed: {outcome.failure}")
        text, failure = outcome.value
        return Captured(text, failure, time.monotonic() - began)

    def end(self, run: str) -> None:
        """Close what was made for a tune."""
        with self._lock:
            for terms in [one for one in self._tuners if one.run == run]:
                self._tuners.pop(terms).close()

    def teardown(self, worker: Worker) -> None:
        """The worker ends."""
        for run in {terms.run for terms in self._tuners}:
            self.end(run)
        for pool in (*self._pools.values(), *self._capturing):
            pool.close()


def _captured(*args: Any) -> tuple[str, Exception | None]:
    """A job: the text, or the error."""
    try:
        return capture_as_text(*args), None
    except FuseplanError as error:
        return "", carried(error)
