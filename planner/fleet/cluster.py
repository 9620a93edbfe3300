"""Where the workers are, behind a scheduler somewhere, or here, a few for each GPU; and whether they still answer.

Nannies start lost workers again. A worker that does not answer is started again, and a tune that nobody goes on with
ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

from fuseplan.costmodel.devices import is_cpu
from fuseplan.planner.errors import Argument, DeviceError, FuseplanError
from fuseplan.planner.fleet.security import is_open, own_security, security_for
from fuseplan.planner.fleet.terms import device_of, unit
from fuseplan.search.errors import MachineFailureError, SearchError, counted
from fuseplan.search.workers.worker import usable_cores

LOCAL = "local"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What is done beside a measurement has threads of its own, and Dask steals only what a worker has no thread for.
_THREADS = 1
_PRELOAD = "fuseplan.planner.fleet.worker_state"
#: Workers that share a GPU, of which one measures while the others plan and compile, and cores that each needs.
_SHARE_A_GPU, _CORES_A_WORKER = 3, 4
#: A region may cost so many workers before it is held to be at fault itself.
_LOST_WORKERS = 4
#: Seconds until a scheduler has to answer, and until the first worker has to be there.
CONNECT_S, _FIRST_WORKER_S = 10, 120
#: Seconds from one look at the fleet to the next.
LOOK_S = 5.0
#: Seconds in which a scheduler answers, and a nanny ends a worker that hangs, for which the scheduler waits.
ANSWER_S, RESTART_S = 20.0, 10.0
#: Seconds after which a worker without a heartbeat is started again; Dask itself waits for five minutes.
SILENT_S = 30.0
#: Seconds for which a device may have no worker: a new one imports PyTorch first.
GONE_S = 120.0
#: Of Dask's own settings, what does not fit: one thread of OpenMP would make a CPU another device, a daemon could not
#: start processes of its own, and a profiler that looks a hundred times a second would slow planning down.
_SETTINGS = {
    "distributed.worker.profile.enabled": False,
    "distributed.nanny.pre-spawn-environ": {},
    "distributed.worker.daemon": False,
    "distributed.scheduler.allowed-failures": _LOST_WORKERS,
    # Pages about the tasks, which need no key: the ports of the HTTP servers stay without any.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}


def workers_of(client: Client) -> Mapping[str, Mapping[str, Any]]:
    """What the scheduler says of all its workers, by address; nothing once it is lost."""
    found: Mapping[str, Mapping[str, Any]] = client.scheduler_info(n_workers=-1).get("workers", {})
    return found


def device_workers(client: Client, kind: str) -> dict[str, list[str]]:
    """Addresses of the workers that own a device of this type, by the device's key."""
    found: dict[str, list[str]] = {}
    for address, worker in workers_of(client).items():
        for resource in worker["resources"]:
            device = device_of(resource)
            if device is not None and device.startswith(f"{kind}-"):
                found.setdefault(device, []).append(address)
    return found


def devices_here(client: Client, kind: str) -> int:
    """How many devices of this type all workers together own: one that workers share counts once."""
    offers = [set(worker["resources"]) for worker in workers_of(client).values()]
    owned = [one for one in offers if any((device_of(name) or "").startswith(f"{kind}-") for name in one)]
    return len({name for one in owned for name in one if name.startswith(unit(""))})


@contextmanager
def connected(workers: str, kind: str) -> Iterator[Client]:
    """A client of the scheduler at this address, or of workers that live here as long as the context (``local``).

    :class:`DeviceError` where no scheduler answers, or nobody owns such a device; ConfigError as of its keys.
    """
    with ExitStack() as stack:
        if workers == LOCAL:
            # A scheduler in this process, and a worker for each device of this host; only their key opens them.
            common = {"host": "127.0.0.1", "security": own_security()}
            scheduler = {"cls": Scheduler, "options": {
                "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0", **common,
            }}
            stack.enter_context(dask.config.set(_SETTINGS))
            started = {number: {"cls": Nanny, "options": one}
                       for number, one in enumerate(nannies(kind, silence_logs=logging.CRITICAL, **common))}
            client = stack.enter_context(Client(stack.enter_context(SpecCluster(
                started, scheduler, security=common["security"], silence_logs=logging.CRITICAL))))
        else:
            client = stack.enter_context(fleet_client(workers))
        end = time.monotonic() + _FIRST_WORKER_S
        while not device_workers(client, kind):  # until a worker owns one
            known = len(workers_of(client))
            if time.monotonic() > end or (workers != LOCAL and known):
                others = f"none of its {counted(known, 'worker')} owns" if known else "it has no worker that owns"
                raise DeviceError("{} {}: {} a device of type {}; start one on each host with `plan fleet worker {}`",
                                  Argument("workers"), workers, others, kind, workers)
            time.sleep(0.1)
        yield client


def scheduler_client(address: str, named: str = "URL", otherwise: str = "") -> Client:
    """A client of the scheduler at this address, which is the argument ``named``; warns of an open one.

    The error ends with what else can be given, ``otherwise``.
    :class:`DeviceError` where none answers, ConfigError where the address does not go with TLS.
    """
    for name in ("distributed.comm", "distributed.client"):  # what they say is said here in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    security = security_for(address)
    try:
        client = Client(address, timeout=CONNECT_S, security=security)
    except (OSError, ValueError, TimeoutError):
        keys = " that takes these certificates" if address.startswith("tls://") else " without TLS"
        raise DeviceError("{} {!r}: no scheduler answers there{}; start one with `dask scheduler`{}", named, address,
                          keys, otherwise) from None
    if is_open(address):
        warnings.warn(f"{address} has no key: whoever reaches that port, or a worker's, can run code there; "
                      "docs/fleet.md says how to use TLS and a firewall", stacklevel=1)
    return client


def fleet_client(workers: str) -> Client:
    """A client of the scheduler whose workers tune; errors as :func:`scheduler_client`."""
    return scheduler_client(workers, Argument("workers"), f", or give {LOCAL}")


def nannies(kind: str, **options: Any) -> list[dict[str, Any]]:
    """Arguments of the nannies of this host's devices: one for the CPU, a few a GPU; their workers see that alone.

    :class:`DeviceError` where PyTorch sees no GPU. None of them is touched.
    """
    places: list[tuple[dict[str, str], int]] = [({}, 0)]
    if not is_cpu(kind):
        import torch

        if not (count := torch.cuda.device_count()):
            raise DeviceError("PyTorch sees no CUDA GPU on this host; use {} cpu, or check with nvidia-smi",
                              Argument("device"))
        # What the variable says here: numbers, or names where it has names; all numbers where it is not set.
        gpus = list(map(str, torch.cuda._parse_visible_devices()[:count]))
        each = max(1, min(_SHARE_A_GPU, usable_cores() // len(gpus) // _CORES_A_WORKER))
        places = [({_VISIBLE: gpu}, number) for gpu in gpus for number in range(each)]
    compilers = max(1, usable_cores() // len(places))
    host = f"{socket.gethostname()}-{os.getpid()}"
    return [
        {"name": f"{host}-{environment.get(_VISIBLE, kind)}-{number}", "nthreads": _THREADS, "memory_limit": None,
         "env": environment, "preload": _PRELOAD,
         "preload_argv": ["--device", kind, "--compilers", str(compilers), "--beside", str(number)],
         "dashboard": False, "dashboard_address": None, **options}
        for environment, number in places
    ]


async def serve(address: str, kind: str, host: str) -> None:
    """Be this host's part of a fleet until the process is interrupted, listening on ``host`` alone."""
    with dask.config.set(_SETTINGS):
        started = [Nanny(address, host=host, security=security_for(address), **options) for options in nannies(kind)]
        try:
            await asyncio.gather(*started)
            await asyncio.gather(*(nanny.finished() for nanny in started))
        finally:
            await asyncio.gather(*(nanny.close() for nanny in started), return_exceptions=True)


class Watch:
    """Looks at a fleet now and then: a scheduler or a worker that hangs is noticed within a minute.

    ``note`` is told of workers that are started again, ``stored`` says what the tune has stored so far.
    """

    def __init__(self, client: Client, note: Callable[[str], None], stored: Callable[[], str]) -> None:
        self._client, self._note, self._stored = client, note, stored
        scheduler: Any = client.scheduler
        self._scheduler, self._where = scheduler, str(scheduler.address)
        self._next = 0.0
        self._gone_since: dict[str, float] = {}

    def look(self, without_worker: Callable[[], set[str]]) -> None:
        """Start silent workers again. ``without_worker`` are devices that have none, but something to do.

        :class:`MachineFailureError` where the scheduler does not answer, or nobody is left for a device.
        """
        if time.monotonic() < self._next:
            return
        lost = False
        try:
            silences = silences_s(self._client)
            if silent := [address for address, seconds in silences.items() if seconds > SILENT_S]:
                found: Mapping[str, str] = self._client.sync(
                    self._scheduler.restart_workers, workers=silent, timeout=RESTART_S, wait_for_workers=False,
                    on_error="return", stimulus_id="fuseplan-silent", callback_timeout=ANSWER_S)
                for address, outcome in found.items():
                    lost = lost or outcome != "OK"
                    then = "it is started again" if outcome == "OK" else "it is given up"
                    self._note(f"the worker at {address} has not answered for {SILENT_S:.0f} s: {then}")
            devices = without_worker()
        except (OSError, TimeoutError):
            raise self._no_scheduler() from None
        now = time.monotonic()
        self._next = now + LOOK_S
        self._gone_since = {one: self._gone_since.get(one, now) for one in devices}
        for device, since in self._gone_since.items():
            if lost or now - since >= GONE_S:
                raise self._ended(f"no worker of {device} answers any more", "Start one with `plan fleet worker`")

    @contextmanager
    def in_words(self) -> Iterator[None]:
        """What Dask raises when its scheduler is lost comes out as :class:`MachineFailureError`."""
        try:
            yield
        except (FuseplanError, SearchError):
            raise
        except Exception as error:
            if isinstance(error, CancelledError) or self._client.status != "running":
                raise self._no_scheduler() from None
            raise

    def _no_scheduler(self) -> MachineFailureError:
        return self._ended(f"the scheduler at {self._where} does not answer any more", "Start it again")

    def _ended(self, why: str, advice: str) -> MachineFailureError:
        return MachineFailureError(f"{why}; {self._stored()}. {advice}, and the same command goes on")


def silences_s(client: Client) -> dict[str, float]:
    """Seconds since the last heartbeat of each worker that owns a device; OSError where the scheduler is silent."""
    now = client.run_on_scheduler(time.time, callback_timeout=ANSWER_S)  # by its clock: others differ
    return {address: now - one["last_seen"] for address, one in workers_of(client).items()
            if any(map(device_of, one["resources"]))}


def ask_workers(client: Client, function: Callable[..., Any], *args: Any, workers: Collection[str]) -> dict[str, Any]:
    """What each of these workers says, by its address; :class:`DeviceError` where not all of them answer."""
    try:
        found: dict[str, Any] = client.run(
            function, *args, workers=list(workers), callback_timeout=ANSWER_S) if workers else {}
        return found
    except (OSError, TimeoutError):
        raise DeviceError(f"not all of {len(workers)} workers answer; `plan fleet status` says which, and ended ones "
                          "are started again") from None


#: Names of tasks that are not of a region, in words.
_WORDS = {"time_step": "timing a whole step", "time_again": "checking shipped times", "probe_device": "probing",
          "capture": "capturing", "prepare": "preparing"}
#: Seconds without a heartbeat after which nothing is asked of a worker any more; hundreds of workers send one in five.
_UNASKED_S = 15.0


def device_statuses(client: Client) -> list[tuple[str, str, str, str, int]]:
    """Of each worker: its device's key, its name, its host, what it does, and how many regions wait there."""
    found = []
    workers = workers_of(client)
    silent = {address: seconds for address, seconds in silences_s(client).items() if seconds > _UNASKED_S}
    running: Mapping[str, Sequence[Any]] = ask_workers(client, _under_way, workers=workers.keys() - silent.keys())
    given = client.processing()
    for address, worker in workers.items():
        under_way = running.get(address, ())
        measured = [one for one in map(region_of, under_way) if one is not None]
        waiting = {one for one in map(region_of, given.get(address, ())) if one is not None} - set(measured)
        words = [f"measuring {label}" for _, label in measured]
        if address in silent:
            words = [f"has not answered for {silent[address]:.0f} s"]
        names = (str(key[0] if isinstance(key, tuple) else key).partition("-")[0] for key in under_way)
        words = words or [_WORDS.get(name, name) for name in dict.fromkeys(names)]
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


def _under_way(dask_worker: Worker) -> list[Any]:
    """Keys of the tasks that a worker executes at the moment."""
    return [task.key for task in dask_worker.state.executing]
