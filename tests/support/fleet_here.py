"""A fleet of this machine's CPU in this process: real tunes without searching, timing or processes of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from distributed import Client, LocalCluster, Security
from fast_tunes import count_instead_of_timing
from inline_executor import InlineExecutor

from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.fleet import run, worker_state
from fuseplan.search import policy


def tune_quickly(patch: pytest.MonkeyPatch) -> None:
    """Every tune, by a fleet or not, measures what does not depend on the machine."""
    count_instead_of_timing(patch)
    # What is measured next would depend on what else the same worker has measured.
    patch.setattr(RunningCalibration, "update", lambda self, final=False: None)
    # TorchInductor would trace in one thread what another one captures.
    patch.setattr(policy, "LEFT_TO_ATEN_SHARE", math.inf)


@contextmanager
def workers_here(patch: pytest.MonkeyPatch, number: int, security: Security | None = None) -> Iterator[Client]:
    """A client of workers that all own this CPU; they are reached over loopback, and capture in this process."""
    protocol = "tcp" if security is None else "tls"
    patch.setattr(worker_state, "WorkerPool", lambda compilers, preload: InlineExecutor())
    patch.setattr(torch, "set_num_threads", lambda _: None)  # a capture's, in a process of its own
    with (
        LocalCluster(n_workers=number, processes=False, protocol=protocol, security=security, host="127.0.0.1",
                     dashboard_address=None, threads_per_worker=1, memory_limit=None,
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
        with workers_here(patch, number) as client:
            yield client

    patch.setattr(run, "connected", connected)
