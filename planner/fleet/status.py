"""What the workers of a fleet are doing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Client, Worker

from fuseplan.planner.fleet.cluster import workers_of
from fuseplan.planner.fleet.terms import device_of
from fuseplan.planner.fleet.watch import ask_workers, silences_s

#: Names of tasks that are not of a region, in words.
_WORDS = {"time_step": "timing a whole step", "time_again": "checking shipped times", "probe_device": "probing",
          "probe": "probing", "capture": "capturing", "prepare": "preparing"}
#: Seconds without a heartbeat after which nothing is asked of a worker any more; hundreds of workers send one in five.
_SILENT_S = 15.0


def device_statuses(client: Client) -> list[tuple[str, str, str, str, int]]:
    """Each worker of a fleet: its device's key, its name, its host, what it does, and how many regions it has beside
    that.
    """
    found = []
    workers = workers_of(client)
    silent = {address: seconds for address, seconds in silences_s(client).items() if seconds > _SILENT_S}
    running: Mapping[str, Sequence[Any]] = ask_workers(client, _under_way, workers=workers.keys() - silent.keys())
    given = client.processing()
    for address, worker in workers.items():
        under_way = running.get(address, ())
        measured = [one for one in map(region_of, under_way) if one is not None]
        waiting = {one for one in map(region_of, given.get(address, ())) if one is not None} - set(measured)
        words = [f"measuring {label}" for _, label in measured]
        if address in silent:
            words = [f"has not answered for {silent[address]:.0f} s"]
        words = words or [_WORDS.get(name, name) for name in dict.fromkeys(map(_name, under_way))]
        found += [
            (device, str(worker["name"]), worker["host"], ", ".join(words) or "idle", len(waiting))
            for resource in worker["resources"] if (device := device_of(resource)) is not None
        ]
    return sorted(found)


def known_labels(client: Client) -> dict[str, str]:
    """By key: the regions that workers have."""
    keys = (key for given in client.processing().values() for key in given)
    return dict(one for one in map(region_of, keys) if one is not None)


def region_of(key: Any) -> tuple[str, str] | None:
    """Key and label of the region that a task measures; None of another task."""
    if isinstance(key, tuple) and str(key[0]).startswith("measure-"):
        return str(key[-3]), str(key[-1])
    return None


def _name(key: Any) -> str:
    return str(key[0] if isinstance(key, tuple) else key).partition("-")[0]


def _under_way(dask_worker: Worker) -> list[Any]:
    """Keys of the tasks that a worker executes at the moment."""
    return [task.key for task in dask_worker.state.executing]
