"""A fleet that does not answer: a hanging worker is started again or given up; a tune that nobody goes on with ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import fleet_samples as samples
import pytest
from distributed import Client, Worker
from fleet_samples import DEVICE, TERMS, Log, fleet, region, resources

from fuseplan.planner.fleet import cluster
from fuseplan.planner.fleet.cluster import Watch, device_statuses
from fuseplan.planner.fleet.scheduler import RegionScheduler
from fuseplan.planner.fleet.terms import RegionOutcome, RegionTask
from fuseplan.search.errors import MachineFailureError


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is silent for so long but whom a test makes so."""
    for name, seconds in {"LOOK": 0.05, "ANSWER": 60.0, "SILENT": 3600.0, "RESTART": 30.0, "GONE": 3600.0}.items():
        monkeypatch.setattr(cluster, f"{name}_S", seconds)


@pytest.fixture
def log() -> Log:
    return samples.fresh_log()


def spread(client: Client, notes: list[str], tell: Callable[[], object] = lambda: None) -> RegionScheduler:
    return RegionScheduler(client, "cpu", "run", samples.TASKS, tell, notes.append)


def hang(client: Client, address: str) -> None:
    """As a worker that is stopped: no heartbeat is heard any more, the last one was long ago."""
    scheduler = client.cluster.scheduler
    beat = scheduler.handlers["heartbeat_worker"]

    def unheard(**beats: Any) -> Any:
        found = beat(**beats)
        silence()
        return found

    def silence() -> None:
        if address in scheduler.workers:
            scheduler.workers[address].last_seen = 0.0

    async def hush() -> None:
        scheduler.handlers["heartbeat_worker"] = unheard
        silence()

    client.sync(hush)


def test_a_worker_that_hangs_is_given_up_and_another_does_its_region(log: Log) -> None:
    over, notes, hung = threading.Event(), list[str](), list[str]()
    with fleet(2) as client:
        tune = spread(client, notes)

        def first(key: str) -> None:
            if key == "first" and not hung:
                hung.append(log.measured[-1][0])
                hang(client, hung[0])
                over.wait(120)

        log.meanwhile = first
        for key in ("first", *map(str, range(6))):
            tune.region(DEVICE, TERMS, region(key, 2 if key == "first" else 1), lambda outcome: None)
        tune.run()
        workers = {worker for worker, key in log.measured if key == "first"}
        over.set()
    assert tune.counts.regions_done == 7 and len(workers) == 2
    (told,) = notes
    assert hung[0] in told and "given up" in told


@pytest.mark.parametrize("how", ["region", "call"])
def test_a_device_whose_only_worker_hangs_ends_the_tune_in_words(how: str, log: Log) -> None:
    one_done, over = threading.Event(), threading.Event()
    with fleet(1) as client:
        (address,) = client.scheduler_info()["workers"]
        tune = spread(client, [], tell=one_done.set)

        def second(key: str) -> None:
            if key == "b":
                assert how == "call" or one_done.wait(120)
                hang(client, address)
                over.wait(120)

        log.meanwhile = second
        if how == "region":
            for key in "ab":
                tune.region(DEVICE, TERMS, region(key, ord("z") - ord(key)), lambda outcome: None)
        else:
            tune.call(samples.measure, DEVICE, TERMS, region("b"), None, then=lambda outcome: None)
        with pytest.raises(MachineFailureError) as ended:
            tune.run()
        over.set()
    words = str(ended.value)
    assert DEVICE in words and ("1 of 2" if how == "region" else "0 of 0") in words and "same command" in words


def test_a_device_that_has_no_worker_for_too_long_ends_the_tune(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(cluster, "GONE_S", 0.0)
    with fleet(1) as client:
        (address,) = client.scheduler_info()["workers"]

        def lose(key: str) -> None:
            client.sync(client.cluster.scheduler.remove_worker, address, stimulus_id="lost", close=False)
            over.wait(120)

        log.meanwhile = lose
        tune = spread(client, [])
        tune.region(DEVICE, TERMS, region("a"), lambda outcome: None)
        with pytest.raises(MachineFailureError, match=f"no worker of {DEVICE}"):
            tune.run()
        over.set()


@contextmanager
def scheduler_elsewhere() -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """A client, with a worker in this process, of a scheduler in a process of its own."""
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0",
               "--dashboard-address", "127.0.0.1:0"]
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # it reads what it passes on
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=there) as scheduler:
        assert scheduler.stderr is not None
        lines = iter(scheduler.stderr.readline, "")
        address = next(line.split()[-1] for line in lines if "Scheduler at:" in line)
        threading.Thread(target=lambda: list(lines), daemon=True).start()
        try:
            with Client(address, timeout=60) as client:
                worker: Any = client.sync(_worker, address)
                client.wait_for_workers(1, timeout=120)
                yield client, scheduler
                scheduler.send_signal(signal.SIGCONT)
                scheduler.kill()
                client.sync(worker.close, executor_wait=False)
        finally:
            scheduler.kill()


async def _worker(address: str) -> Worker:
    return await Worker(address, nthreads=1, resources=resources(DEVICE), host="127.0.0.1", dashboard_address=None)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_scheduler_that_dies_or_hangs_ends_the_tune_in_words(
    sent: signal.Signals, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LOOK_S", 1.0)  # few looks are under way when it is sent
    one_done, over = threading.Event(), threading.Event()
    with scheduler_elsewhere() as (client, scheduler):
        address = client.scheduler.address
        tune = spread(client, [], one_done.set)

        def second(key: str) -> None:
            if key == "b":
                assert one_done.wait(120)
                scheduler.send_signal(sent)
                monkeypatch.setattr(cluster, "ANSWER_S", 1.0)  # from now on it answers never
                over.wait(120)

        log.meanwhile = second
        for key in "abc":
            tune.region(DEVICE, TERMS, region(key, ord("z") - ord(key)), lambda outcome: None)
        with pytest.raises(MachineFailureError) as ended:
            tune.run()
        over.set()
    assert address in str(ended.value) and "1 of 3" in str(ended.value) and "same command" in str(ended.value)


def test_a_scheduler_that_was_started_again_has_forgotten_the_tune(log: Log) -> None:
    """Dask connects to it, and then says no more than that the tasks are cancelled."""
    with fleet(1) as client:
        watch = Watch(client, lambda text: None, lambda: "3 of 5 regions are stored")
        with pytest.raises(MachineFailureError, match="3 of 5"), watch.in_words():
            raise CancelledError


def test_what_a_task_raises_is_not_taken_for_a_lost_scheduler(log: Log) -> None:
    def fail(task: RegionTask) -> RegionOutcome:
        raise OSError("no space left on the disk")

    log.outcome = fail
    with fleet(1) as client:
        tune = spread(client, [])
        tune.region(DEVICE, TERMS, region("a"), lambda outcome: None)
        with pytest.raises(OSError, match="no space"):
            tune.run()


def test_the_status_of_a_fleet_says_which_worker_hangs(log: Log) -> None:
    with fleet(2) as client:
        hung, _ = client.scheduler_info()["workers"]
        hang(client, hung)
        doing = sorted(doing for *_, doing, _ in device_statuses(client))
    assert doing[1] == "idle" and "not answered" in doing[0]
