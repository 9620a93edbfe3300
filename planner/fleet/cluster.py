"""Where the workers are: behind a scheduler somewhere, or here, a few for each GPU; nannies start lost ones again."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster

from fuseplan.costmodel.devices import is_cpu
from fuseplan.planner.errors import Argument, DeviceError
from fuseplan.planner.fleet.security import is_open, own_security, security_for
from fuseplan.planner.fleet.terms import capturing, device_of, unit
from fuseplan.search.workers.worker import usable_cores

LOCAL = "local"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What is done beside a measurement has threads and processes of its own. Dask steals only what is more than a worker
#: has threads for.
_THREADS = 1
_PRELOAD = "fuseplan.planner.fleet.worker_state"
#: Workers that share a GPU: while one plans and compiles, another measures, of all of them one at a time. Each needs so
#: many cores.
_SHARE_A_GPU, _CORES_A_WORKER = 3, 4
#: A region may cost so many workers before it is held to be at fault itself.
_LOST_WORKERS = 4
#: Seconds until a scheduler has to answer, and until the first worker has to be there.
CONNECT_S, _FIRST_WORKER_S = 10, 120
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
    owned: set[str] = set()
    for address, worker in workers_of(client).items():
        if any((device_of(one) or "").startswith(f"{kind}-") for one in worker["resources"]):
            owned.update([one for one in worker["resources"] if one.startswith(unit(""))] or [address])
    return len(owned)


def captures_at_once(client: Client, kind: str) -> int:
    """How many captures all workers together make at once; at least one."""
    workers = workers_of(client).values()
    return max(1, int(sum(worker["resources"].get(capturing(kind), 0) for worker in workers)))


@contextmanager
def connected(workers: str, kind: str) -> Iterator[Client]:
    """A client of the scheduler at this address, or of workers that live here as long as the context (``local``).

    Raises:
        DeviceError: No scheduler answers, or none of its workers owns such a device.
    """
    with ExitStack() as stack:
        if workers == LOCAL:
            stack.enter_context(dask.config.set(_SETTINGS))
            cluster = stack.enter_context(local_cluster(kind))
            client = stack.enter_context(Client(cluster))
        else:
            client = stack.enter_context(scheduler_client(workers))
        _wait(client, workers, kind)
        yield client


def scheduler_client(address: str) -> Client:
    """A client of the scheduler at this address. Warns of one that anybody can command.

    Raises:
        DeviceError: None answers.
        ConfigError: Its address does not go with the settings for TLS.
    """
    for name in ("distributed.comm", "distributed.client"):  # what they say is said here in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    security = security_for(address)
    try:
        client = Client(address, timeout=CONNECT_S, security=security)
    except (OSError, ValueError, TimeoutError):
        keys = " that takes these certificates" if address.startswith("tls://") else " without TLS"
        raise DeviceError("{} {}: no scheduler answers there{}; start one with `dask scheduler`, or give local",
                          Argument("workers"), address, keys) from None
    if is_open(address):
        warnings.warn(f"{address} has no key: whoever reaches that port, or a worker's, can run code there; "
                      "docs/fleet.md says how to use TLS and a firewall", stacklevel=1)
    return client


def _wait(client: Client, workers: str, kind: str) -> None:
    """Until a worker owns a device."""
    end = time.monotonic() + _FIRST_WORKER_S
    while not device_workers(client, kind):
        known = len(workers_of(client))
        if time.monotonic() > end or (workers != LOCAL and known):
            others = f"none of its {known} workers owns" if known else "it has no worker that owns"
            raise DeviceError("{} {}: {} a device of type {}; start one on each host with `plan fleet worker {}`",
                              Argument("workers"), workers, others, kind, workers)
        time.sleep(0.1)


def local_cluster(kind: str) -> SpecCluster:
    """A scheduler in this process, and a worker for each device of this host; whoever has not their key is refused.

    Raises:
        DeviceError, ConfigError: There is no such device, or ``cryptography`` is not installed.
    """
    common = {"host": "127.0.0.1", "security": own_security()}
    scheduler = {"cls": Scheduler, "options": {
        "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0", **common,
    }}
    options = nannies(kind, silence_logs=logging.CRITICAL, **common)
    workers = {number: {"cls": Nanny, "options": one} for number, one in enumerate(options)}
    return SpecCluster(workers, scheduler, security=common["security"], silence_logs=logging.CRITICAL)


def nannies(kind: str, **options: Any) -> list[dict[str, Any]]:
    """How the nannies of this host's devices are started: one for the CPU, a few a GPU, which is all that their workers
    see.
    """
    places: list[tuple[dict[str, str], int]] = [({}, 0)]
    if not is_cpu(kind):
        gpus = visible_gpus()
        each = workers_each(usable_cores(), len(gpus))
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


def workers_each(cores: int, gpus: int) -> int:
    """How many workers share a GPU on a host of so many cores and GPUs."""
    return max(1, min(_SHARE_A_GPU, cores // gpus // _CORES_A_WORKER))


def visible_gpus() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` has to say for each GPU that this process sees; none of them is touched.

    Raises:
        DeviceError: It sees none.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise DeviceError("PyTorch sees no CUDA GPU on this host; use {} cpu, or check with nvidia-smi",
                          Argument("device"))
    # What the variable says here, as PyTorch reads it: numbers, or names where it has names; all numbers without it.
    return list(map(str, torch.cuda._parse_visible_devices()[:count]))


async def serve(address: str, kind: str, host: str) -> None:
    """Be this host's part of a fleet until the process is interrupted. A scheduler that goes away is waited for.

    ``host`` is where nannies and workers listen, and nowhere else.
    """
    with dask.config.set(_SETTINGS):
        started = [Nanny(address, host=host, security=security_for(address), **options) for options in nannies(kind)]
        try:
            await asyncio.gather(*started)
            await asyncio.gather(*(nanny.finished() for nanny in started))
        finally:
            await asyncio.gather(*(nanny.close() for nanny in started), return_exceptions=True)
