"""A fleet of this machine's CPU in this process: real tunes without searching, timing or processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from distributed import Client, LocalCluster
from inline_executor import InlineExecutor
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.fleet import asking, worker_state
from fuseplan.planner.tuning.settings import PlanSettings
from fuseplan.search.timing.timers import CpuTimer, Operands, Run, Sampler
from fuseplan.search.tune import tuner

#: Hardly any search.
QUICK = tuner.Budget(trials=1, steep_trials=1, seconds=0.1, screen_s=0.002, decide_s=0.01, finalists=1)


def counted(self: CpuTimer, run: Run, operands: Operands) -> Sampler:
    """In the place of a timer: a microsecond, and five for each op that ATen runs."""
    ops = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal ops
            ops += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        run(*operands[0])
    return lambda: 1.0 + 5.0 * ops


def tune_quickly(patch: pytest.MonkeyPatch) -> None:
    """Every tune, by a fleet or not, measures what does not depend on the machine."""
    patch.setattr(tuner, "make_pool", lambda _: InlineExecutor())
    patch.setattr(tuner.Budget, "on", lambda *_: QUICK)
    patch.setattr(PlanSettings, "measured_on", lambda *_: 1)
    # What is measured next would depend on what else the same worker has measured.
    patch.setattr(RunningCalibration, "update", lambda self, final=False: None)
    patch.setattr(CpuTimer, "prepare", counted)
    patch.setattr(CpuTimer, "steady", lambda _: True)
    patch.setattr(CpuTimer, "disturbances", lambda _: 0)
    patch.setattr(worker_state, "WorkerPool", lambda compilers: InlineExecutor())
    patch.setattr(torch, "set_num_threads", lambda _: None)  # a capture's, in a process of its own


@contextmanager
def workers_here(number: int) -> Iterator[Client]:
    """A client of workers that all own this CPU."""
    with (
        LocalCluster(n_workers=number, processes=False, dashboard_address=None, threads_per_worker=1, memory_limit=None,
                     preload="fuseplan.planner.fleet.worker_state", preload_argv=["--device", "cpu"]) as local,
        Client(local) as client,
    ):
        client.wait_for_workers(number)
        yield client


def in_the_place_of_local(patch: pytest.MonkeyPatch, number: int) -> None:
    """``--workers local`` are workers of this process."""

    @contextmanager
    def connected(workers: str, kind: str) -> Iterator[Client]:
        assert (workers, kind) == ("local", "cpu")
        with workers_here(number) as client:
            yield client

    patch.setattr(asking, "connected", connected)
