"""Tuning by a fleet: the same answers as a tune here, of models that workers tune, each for every device they own."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from distributed import Client

from fuseplan.costmodel.devices import Kind, kind_of_key
from fuseplan.costmodel.probe.probe import MachineLoad
from fuseplan.planner.api.asked import Asked
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.job import HowToTune, doubts, keep_summary
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.api.tune import Tuned, tuned
from fuseplan.planner.errors import Argument, ConfigError, DeviceError
from fuseplan.planner.fleet import received, work
from fuseplan.planner.fleet.cluster import LOCAL, connected, device_workers, scheduler_client, workers_of
from fuseplan.planner.fleet.terms import Terms, WorkerDevice
from fuseplan.planner.fleet.tune import FleetTune, Order
from fuseplan.planner.fleet.watch import ask_workers
from fuseplan.planner.tuning.settings import PlanSettings
from fuseplan.planner.tuning.tune import TuneResult
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


@dataclass(frozen=True)
class Fleet:
    """Workers that are connected, their devices (each key once), and a database that all of them reach."""

    client: Client
    kind: Kind
    devices: tuple[WorkerDevice, ...]
    location: str
    progress: Progress

    @property
    def load(self) -> MachineLoad:
        """How busy the busiest machine was when it began."""
        return max((one.load for one in self.devices), key=lambda one: one.average / one.cores)

    def tune(self, orders: Sequence[Order], account: TimeAccount) -> list[tuple[Order, TuneResult]]:
        """What came of each order on each device that it is for."""
        with account.spend("tuning on workers"), self.progress.status(
            "capturing" if any(order.workloads for order in orders) else "tuning on workers"
        ) as say:
            found = FleetTune(self.client, self.devices, orders, self.location, say, self.progress.note).run()
        for session in {result.session.device: result.session for _, result in found}.values():
            for doubt in doubts(session.spec) if session.spec is not None else ():
                self.progress.warn(f"{session.device}: {doubt}")
        with suppress(DeviceError):  # whoever does not answer ends it with the next tune
            ask_workers(self.client, work.end, orders[0].terms.run, workers=workers_of(self.client).keys())
        return found


@contextmanager
def fleet(
    workers: str, kind: Kind, db: str | Path | None, progress: Progress, account: TimeAccount
) -> Iterator[Fleet]:
    """Connect to workers (``local``, or a scheduler's address) that own devices of this type.

    Raises:
        FuseplanError: There are none, they do not agree on the software, or one does not see the database.
        DatabaseError: The database cannot be opened for writing.
    """
    location, file = shared_location(db)
    Database(location).close()  # a file is there before workers look for it
    with ExitStack() as stack:
        with account.spend("starting workers"), progress.status("waiting for workers"):
            client = stack.enter_context(connected(workers, kind))
            devices = _devices(client, kind, file, progress)
        yield Fleet(client, kind, devices, location, progress)


def terms_of(fleet: Fleet, how: HowToTune) -> Terms:
    """What every tune of this run is for, but for the settings."""
    return Terms(
        uuid.uuid4().hex[:8], fleet.kind, fleet.location, PlanSettings(),
        how.budget(fleet.kind), how.seed, how.shipped, how.again, how.study,
    )


def tune_by_fleet(
    asked: Asked, settings: PlanSettings, workers: str, db: str | Path | None, how: HowToTune,
    progress: Progress = SILENT, account: TimeAccount | None = None,
) -> list[Tuned]:
    """As :func:`~fuseplan.planner.api.tune.tune_asked`, on each kind of device that ``workers`` own.

    Raises:
        FuseplanError, SearchError: As of a tune here; what was finished is stored.
    """
    account = account if account is not None else TimeAccount()
    with fleet(workers, asked.kind, db, progress, account) as found:
        order = _order(asked, replace(terms_of(found, how), settings=settings), progress, account)
        results = found.tune([order], account)
        load = found.load
    with account.spend("reporting"):
        return [tuned(result, asked.label, asked.is_asked_for, load) for _, result in results]


def _order(asked: Asked, terms: Terms, progress: Progress, account: TimeAccount) -> Order:
    """What is asked for as workers get it. A user's own module is captured here: they may not have its code."""
    order = Order(
        asked.label, terms, times_step=asked.is_asked_for,
        on_plan=lambda session, planned: keep_summary(session, asked.label, planned.workload, planned))
    if asked.source is not None and asked.source.kind != "module":
        return replace(order, source=asked.source, workloads=asked.workloads, pack_weights=asked.pack_weights)
    with account.spend("capturing"):
        return replace(order, graphs=tuple(asked.graphs(progress)))


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
