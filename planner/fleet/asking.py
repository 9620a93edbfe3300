"""A fleet that is asked: its workers, their devices, and the database that all of them reach."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

from distributed import Client

from fuseplan.costmodel.devices import Kind, kind_of_key
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.request import TuneRequest
from fuseplan.planner.errors import Argument, ConfigError
from fuseplan.planner.fleet import received, work
from fuseplan.planner.fleet.cluster import LOCAL, connected, device_workers, scheduler_client
from fuseplan.planner.fleet.terms import WorkerDevice
from fuseplan.planner.fleet.tune import Fleet
from fuseplan.planner.fleet.watch import ask_workers
from fuseplan.planner.tuning.progress import Progress
from fuseplan.search.store.database import Database
from fuseplan.search.store.location import location_name, resolve_url, sqlite_file
from fuseplan.search.store.record import Versions
from fuseplan.search.tune.time_account import TimeAccount


def fleet_kind(workers: str, device: str) -> Kind:
    """The type of the devices that are tuned for: with ``auto`` CUDA where the fleet has a GPU.

    Raises:
        DeviceError: No scheduler answers, or there is no such device here (``local``).
    """
    if workers == LOCAL:
        return device_kind(device)
    if device != "auto":
        return kind_of_key(device)
    with scheduler_client(workers) as client:
        return "cuda" if device_workers(client, "cuda") else "cpu"


def shared_location(db: str | Path | None) -> tuple[str, str]:
    """A database as every worker reaches it (with its password, if it has one), and its file; "" for a server.

    Raises:
        DatabaseError: It cannot be read.
        ConfigError: No other process can open it.
    """
    url = resolve_url(db)
    file = sqlite_file(url)
    if file is not None:
        return str(file.absolute()), str(file.absolute())
    if url.get_backend_name() == "sqlite":
        raise ConfigError("{} {} is of one process alone; give a fleet a file or a server", Argument("db"),
                          location_name(url))
    return url.render_as_string(hide_password=False), ""


@contextmanager
def fleet(workers: str, request: TuneRequest, progress: Progress, account: TimeAccount) -> Iterator[Fleet]:
    """Connect to workers (``local``, or a scheduler's address) that own devices of a request's type.

    Raises:
        FuseplanError: There are none, they do not agree on the software, or one does not see the database.
        DatabaseError: The database cannot be opened for writing.
    """
    location, file = shared_location(request.db)
    Database(location).close()  # a file is there before workers look for it
    with ExitStack() as stack:
        with account.spend("starting workers"), progress.status("waiting for workers"):
            client = stack.enter_context(connected(workers, request.kind))
            devices = _devices(client, request.kind, file, progress)
        yield Fleet(client, devices, location, request, progress)


def described(client: Client, kind: str, file: str = "") -> list[WorkerDevice]:
    """What the workers that own devices of this type say of them, and whether they see the database's ``file``.

    Raises:
        ConfigError: It is no description of what a worker has offered.
        DeviceError: Not all workers answer.
    """
    owners = {address: key for key, addresses in device_workers(client, kind).items() for address in addresses}
    found = ask_workers(client, work.describe, kind, file, workers=owners.keys())
    return [received.device_of_worker(one, kind, owners.get(address, "")) for address, one in found.items()]


def _devices(client: Client, kind: Kind, file: str, progress: Progress) -> tuple[WorkerDevice, ...]:
    """The fleet's devices of this type, each key once.

    Raises:
        ConfigError: Not all hosts have the same software, or a worker does not see the database.
    """
    found = described(client, kind, file)
    blind = sorted({one.host for one in found if not one.sees_database})
    if blind:
        raise ConfigError("{} {} is not there on {}; give a file on a disk that all hosts share, or a server",
                          Argument("db"), file, ", ".join(blind))
    ours = Versions.current("cpu")
    try:  # by a function that it has in any case
        client.run_on_scheduler(metadata.version, "fuseplan")
    except metadata.PackageNotFoundError:
        where = client.scheduler_info()["address"]
        raise ConfigError(f"fuseplan {ours.fuseplan} is not installed where the scheduler runs, at {where}; install it "
                          "there, and start the scheduler again") from None
    for one in found:
        for name in ("fuseplan", "torch"):
            if getattr(one.versions, name) != getattr(ours, name):
                raise ConfigError(f"the worker on {one.host} has {name} {getattr(one.versions, name)}, and here is "
                                  f"{getattr(ours, name)}; install the same on all hosts")
    if file and {one.host for one in found} != {socket.gethostname()}:
        progress.note(f"{file} is a file that several hosts write; a server is safer: postgresql://...")
    return tuple({one.device: one for one in found}.values())
