"""Tuning by a fleet: the same answers as a tune here, of models that workers tune, each for every device they own."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fuseplan.planner.api.asked import Asked
from fuseplan.planner.api.device import Kind, device_kind
from fuseplan.planner.api.job import HowToTune, doubts, keep_summaries
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.api.tune import Tuned, tuned
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.fleet.terms import Terms, needs_dask
from fuseplan.planner.tuning.settings import PlanSettings
from fuseplan.search.store.database import Database
from fuseplan.search.store.location import location_name, resolve_url, sqlite_file
from fuseplan.search.store.record import Versions, now
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import Budget

if TYPE_CHECKING:
    from distributed import Client

    from fuseplan.planner.fleet.terms import WorkerDevice
    from fuseplan.planner.fleet.tune import Order

LOCAL = "local"


def fleet_kind(workers: str, device: str) -> Kind:
    """The type of the devices that are tuned for: with ``auto`` CUDA where the fleet has a GPU.

    Raises:
        FuseplanError: Dask is not installed, no scheduler answers, or there is no such device here (``local``).
    """
    needs_dask()
    if workers == LOCAL:
        return device_kind(device)
    if device != "auto":
        return "cpu" if device == "cpu" else "cuda"
    from fuseplan.planner.fleet.cluster import device_workers, scheduler_client

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
        raise ConfigError(f"{location_name(url)} is of one process alone; give a fleet a file or a server with --db")
    return url.render_as_string(hide_password=False), ""


def tune_by_fleet(
    asked: Sequence[tuple[Asked, PlanSettings]], workers: str, db: str | Path | None, how: HowToTune,
    progress: Progress = SILENT, account: TimeAccount | None = None,
) -> list[Tuned]:
    """Tune models for their settings, on each kind of device that ``workers`` own (``local``, or a scheduler's
    address); all of them are of one type. What came of each model on each device.

    Raises:
        FuseplanError, SearchError: As of a tune here; what was finished is stored.
    """
    needs_dask()
    from fuseplan.planner.fleet.cluster import connected
    from fuseplan.planner.fleet.tune import FleetTune

    account = account if account is not None else TimeAccount()
    kind = asked[0][0].kind
    location, file = shared_location(db)
    Database(location).close()  # a file is there before workers look for it
    run, since, budget = uuid.uuid4().hex[:8], now() if how.again else "", Budget.on(kind, how.trials, how.seconds)
    orders = [
        _order(one, Terms(run, kind, location, settings, budget, how.seed, how.shipped, since, how.study), progress,
               account)
        for one, settings in asked
    ]
    with ExitStack() as stack:
        with account.spend("starting workers"), progress.status("waiting for workers"):
            client = stack.enter_context(connected(workers, kind))
            devices = _devices(client, kind, file, progress)
        with account.spend("tuning on workers"), progress.status("capturing") as say:
            found = FleetTune(client, devices, orders, location, say, progress.note).run()
    load = max((one.load for one in devices), key=lambda one: one.average / one.cores)
    for session in {result.session.device: result.session for _, result in found}.values():
        for doubt in doubts(session.spec) if session.spec is not None else ():
            progress.warn(f"{session.device}: {doubt}")
    with account.spend("reporting"):
        for order, result in found:
            keep_summaries(result, order.label)
        return [tuned(result, order.label, order.times_step, load) for order, result in found]


def _order(asked: Asked, terms: Terms, progress: Progress, account: TimeAccount) -> Order:
    """What is asked for as workers get it. A user's own module is captured here: they may not have its code."""
    from fuseplan.planner.fleet.tune import Order

    if asked.source is not None and asked.source.kind != "module":
        return Order(asked.label, terms, asked.source, asked.workloads, asked.pack_weights,
                     times_step=asked.is_asked_for)
    with account.spend("capturing"):
        return Order(asked.label, terms, graphs=tuple(asked.graphs(progress)), times_step=asked.is_asked_for)


def _devices(client: Client, kind: Kind, file: str, progress: Progress) -> list[WorkerDevice]:
    """The fleet's devices of this type, each key once.

    Raises:
        ConfigError: Workers do not agree on the software, or one does not see the database.
    """
    from fuseplan.planner.fleet import work
    from fuseplan.planner.fleet.cluster import device_workers

    addresses = [one for each in device_workers(client, kind).values() for one in each]
    found: list[WorkerDevice] = list(client.run(work.describe, kind, file, workers=addresses).values())
    blind = sorted({one.host for one in found if not one.sees_database})
    if blind:
        raise ConfigError(
            f"{file} is not there on {', '.join(blind)}; give --db a file on a disk that all hosts share, or a server"
        )
    ours = Versions.current("cpu")
    for one in found:
        for name in ("fuseplan", "torch"):
            if getattr(one.versions, name) != getattr(ours, name):
                raise ConfigError(f"the worker on {one.host} has {name} {getattr(one.versions, name)}, and here is "
                                  f"{getattr(ours, name)}; install the same on all hosts")
    if file and {one.host for one in found} != {socket.gethostname()}:
        progress.note(f"{file} is a file that several hosts write; a server is safer: --db postgresql://...")
    return list({one.device: one for one in found}.values())
