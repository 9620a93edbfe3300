"""A run by a fleet: its workers and devices, models that workers capture, and regions measured once for each device."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import metadata

from distributed import Client

from fuseplan.costmodel.devices import Kind, kind_of_key
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.many import Models
from fuseplan.planner.api.request import TuneRequest
from fuseplan.planner.api.run import Ran, Runner, Wanted
from fuseplan.planner.errors import Argument, ConfigError, NothingForDeviceError
from fuseplan.planner.fleet import worker_state
from fuseplan.planner.fleet.cluster import LOCAL, ask_workers, connected, device_workers, scheduler_client
from fuseplan.planner.fleet.terms import WorkerDevice, device_of_worker
from fuseplan.planner.fleet.tune import Fleet, Order
from fuseplan.planner.tuning.progress import Progress
from fuseplan.search.store.database import Database
from fuseplan.search.store.location import location_name, resolve_url, sqlite_file
from fuseplan.search.store.record import Versions
from fuseplan.search.tune.time_account import TimeAccount


def run_by(workers: str) -> Runner:
    """A run on each kind of device that ``workers`` own, with the answers of a run here.

    Raises:
        FuseplanError, SearchError: As of a run here; what was finished is stored.
    """

    def run(
        request: TuneRequest, wanted_on: Callable[[str], Wanted], progress: Progress, account: TimeAccount
    ) -> list[tuple[Wanted, Ran]]:
        with ExitStack() as stack:
            found = stack.enter_context(fleet(workers, request, progress, account))
            wanted = _wanted(found, wanted_on)
            with account.spend("probing"):
                found.probe(wanted)
            models = {asked: None for one in wanted.values() if isinstance(one, Models) for asked in one.models}
            for asked in models:  # all at once
                if asked.source is not None and asked.source.kind != "module":
                    for workload in asked.workloads:
                        found.capture(asked.source, workload, asked.kind, asked.pack_weights)
            orders: dict[str, list[Order]] = {}
            for device, one in wanted.items():
                if len(wanted) > 1:
                    progress.note(f"on {device}:")
                one.capture(stack, progress, account, found.capture)
                orders[device] = [Order(device, replace(found.terms, settings=batch.settings), batch)
                                  for batch in one.batches(found.session(device, found.terms), progress, account)]
            results = iter(found.tune([order for its in orders.values() for order in its], account))
            ran: list[tuple[Wanted, Ran]] = []
            for device, one in wanted.items():
                its = tuple((order.batch, next(results)) for order in orders[device])
                session = its[-1][1].session if its else found.session(device, found.terms)
                ran.append((one, Ran(its, session, found.load)))
            return ran

    return run


def _wanted(found: Fleet, wanted_on: Callable[[str], Wanted]) -> dict[str, Wanted]:
    """What is to do on each device that has anything to do; :class:`NothingForDeviceError` where none has."""
    wanted: dict[str, Wanted] = {}
    refused: list[NothingForDeviceError] = []
    for device in found.devices:
        try:
            wanted[device] = wanted_on(device)
        except NothingForDeviceError as error:
            refused.append(error)
    if not wanted:
        raise refused[0]
    return wanted


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



@contextmanager
def fleet(workers: str, request: TuneRequest, progress: Progress, account: TimeAccount) -> Iterator[Fleet]:
    """Connect to workers (``local``, or a scheduler's address) that own devices of a request's type.

    Raises:
        FuseplanError: There are none, they do not agree on the software, or one cannot open the database.
        DatabaseError: The database cannot be opened for writing.
    """
    url = resolve_url(request.db)
    file = str(there.absolute()) if (there := sqlite_file(url)) is not None else ""
    if not file and url.get_backend_name() == "sqlite":
        raise ConfigError("{} {} is of one process alone; give a fleet a file or a server", Argument("db"),
                          location_name(url))
    location = file or url.render_as_string(hide_password=False)  # as every worker reaches it
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
    found = ask_workers(client, worker_state.describe, kind, file, workers=owners.keys())
    return [device_of_worker(one, kind, owners.get(address, "")) for address, one in found.items()]


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
