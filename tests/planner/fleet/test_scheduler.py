"""Who measures what: each region once for each device, one at a time on each, the longest first, whatever happens."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import fleet_samples as samples
import pytest
from fleet_samples import DEVICE, TERMS, Log, fleet, region, spread

from fuseplan.planner.api.request import HowToTune
from fuseplan.planner.fleet.scheduler import AHEAD
from fuseplan.planner.fleet.terms import RegionOutcome, RegionTask
from fuseplan.search.errors import MachineFailureError


@pytest.fixture
def log() -> Log:
    return samples.fresh_log()


def test_each_region_is_measured_once_and_one_at_a_time_on_a_device(log: Log) -> None:
    found: dict[str, RegionOutcome] = {}
    with fleet(4) as client:
        tune = spread(client)
        for number in range(40):
            key = str(number)
            tune.region(DEVICE, TERMS, region(key, number % 7), lambda outcome, key=key: found.update({key: outcome}))
        tune.run()
    assert sorted(key for _, key in log.measured) == sorted(map(str, range(40))) == sorted(log.prepared)
    assert log.most_at_once == 1 and len({worker for worker, _ in log.measured}) == 4
    assert {key: str(outcome.failure) for key, outcome in found.items()} == {key: key for key in found}
    assert len(found) == 40 and (tune.counts.regions_done, tune.counts.devices) == (40, 4)


def test_the_longest_that_are_known_come_first(log: Log) -> None:
    """But for those few that a worker has already, which begin in the order in which they are prepared."""
    there, early, late = threading.Event(), range(10, 110, 10), (5, 95, 105)
    log.meanwhile = lambda key: there.wait(60)
    with fleet(1, threads=2) as client:
        tune = spread(client)

        def captured(found: object) -> None:
            for ops in late:
                tune.region(DEVICE, TERMS, region(f"late {ops}", ops), lambda outcome: None)
            there.set()

        for ops in early:
            tune.region(DEVICE, TERMS, region(f"early {ops}", ops), lambda outcome: None)
        tune.capture("a workload", then=captured)  # while the first is measured
        tune.run()
    measured = [int(key.split()[1]) for _, key in log.measured]
    assert sorted(measured) == sorted([*early, *late]) and {105, 95} <= set(measured[:2 * AHEAD])
    for few in (early, late):
        order = [ops for ops in measured if ops in few]
        assert all(sum(one < ops for one in order[:at]) < AHEAD for at, ops in enumerate(order))


def test_a_region_is_measured_on_the_devices_that_it_was_asked_for_on(log: Log) -> None:
    devices = ("cpu-a-1", "cpu-b-2")
    with fleet(4, devices) as client:
        owner = {address: name for address, worker in client.scheduler_info()["workers"].items()
                 for name in devices if f"fuseplan {name}" in worker["resources"]}
        tune = spread(client)
        for number in range(12):
            for device in devices if number % 2 else devices[:1]:
                tune.region(device, TERMS, region(f"{number} {device}"), lambda outcome: None)
        tune.run()
    assert Counter(key for _, key in log.measured).total() == 18
    assert all(key.endswith(owner[worker]) for worker, key in log.measured)


def test_what_another_tuner_is_at_work_on_comes_last_and_is_then_waited_for(log: Log) -> None:
    waited: list[str] = []

    def outcome(task: RegionTask) -> RegionOutcome:
        if task.key == "theirs" and not task.waits:
            return RegionOutcome()
        waited.extend([task.key] * task.waits)
        return RegionOutcome(failure=ValueError(task.key))

    log.outcome = outcome
    with fleet(1) as client:
        tune = spread(client)
        for key, ops in (("theirs", 9), ("a", 3), ("b", 2), ("c", 1)):
            tune.region(DEVICE, TERMS, region(key, ops), lambda outcome: None)
        tune.run()
    assert [key for _, key in log.measured] == ["theirs", "a", "b", "c", "theirs"] and waited == ["theirs"]
    assert tune.counts.regions_done == tune.counts.regions == 4


def test_workers_are_told_what_others_have_learnt_of_kernels_alike(log: Log) -> None:
    learnt = {("triton", "tiles"): [{"block": 64}]}
    log.outcome = lambda task: RegionOutcome(failure=ValueError(), rankings=learnt if task.key == "0" else {})
    with fleet(1) as client:
        tune = spread(client)
        for number in range(8):
            tune.region(DEVICE, TERMS, region(str(number), 8 - number), lambda outcome: None)
        tune.run()
    assert log.prepared == list(map(str, range(8))) and log.told[0] == {} and log.told[-1] == learnt


def test_a_lost_worker_is_replaced_by_another_that_does_its_region(log: Log) -> None:
    begun, over = threading.Event(), threading.Event()
    log.meanwhile = lambda key: (begun.set(), over.wait(60)) if key == "first" and not begun.is_set() else None
    with fleet(2) as client:
        tune = spread(client)
        for key in ("first", *map(str, range(10))):
            tune.region(DEVICE, TERMS, region(key, 2 if key == "first" else 1), lambda outcome: None)

        def lose() -> None:
            assert begun.wait(60)
            victim = next(worker for worker, key in log.measured if key == "first")
            client.sync(client.cluster.scheduler.remove_worker, victim, stimulus_id="lost", close=False)

        thread = threading.Thread(target=lose)
        thread.start()
        tune.run()
        measured = list(log.measured)
        over.set()  # the lost one was in the middle of it for as long as it mattered
        thread.join(60)
    workers = [worker for worker, key in measured if key == "first"]
    assert len(set(workers)) == 2, "another one does it again"
    assert Counter(key for _, key in measured if key != "first") == Counter(map(str, range(10)))
    assert tune.counts.regions_done == 11


def test_a_machine_that_fails_is_tried_again_and_then_ends_the_tune(log: Log) -> None:
    def fail(task: RegionTask) -> RegionOutcome:
        raise MachineFailureError("no space left on the disk")

    log.outcome = fail
    with fleet(2) as client:
        tune = spread(client)
        tune.region(DEVICE, TERMS, region("a"), lambda outcome: None)
        with pytest.raises(MachineFailureError, match="no space"):
            tune.run()
    assert len(log.measured) == 3


def test_an_interrupted_tune_measures_no_more(log: Log) -> None:
    def interrupt() -> None:
        if tune.counts.regions_done == 2:
            raise KeyboardInterrupt

    with fleet(1) as client:
        tune = samples.RegionScheduler(client, "cpu", "run", samples.TASKS, interrupt)
        for number in range(30):
            tune.region(DEVICE, TERMS, region(str(number)), lambda outcome: None)
        with pytest.raises(KeyboardInterrupt):
            tune.run()
    assert 2 <= len(log.measured) < 30


def test_a_password_is_in_no_words_of_a_task() -> None:
    terms = replace(TERMS, db="postgresql://me:geheim@host/db", how=HowToTune(study="postgresql://me:geheim@host/s"))
    assert "geheim" not in repr(terms)
