"""``plan fleet``: this host's part of a fleet, and how a fleet is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

import typer
from typer import Argument

from fuseplan.planner.api.device import device_kind
from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.models.manifest import ModelArguments

app = typer.Typer(no_args_is_help=True, help="Be part of a fleet that tunes together, and see what it does.")
_ADDRESS = "Address of a Dask scheduler, tcp://HOST:8786 or tls://HOST:8786; `dask scheduler` starts one."


@app.command()
@answers(tables=False)
def worker(
    context: typer.Context,
    scheduler: Annotated[str, Argument(metavar="URL", help=_ADDRESS)],
    host: Annotated[str | None, typer.Option(
        "--host", metavar="ADDRESS",
        help="Address of this machine to listen on. By default the one that reaches the scheduler.")] = None,
    interface: Annotated[str | None, typer.Option(
        "--interface", metavar="NAME", help="Network interface to listen on, such as eth0.")] = None,
    tls: opt.TlsFiles = opt.NO_TLS,
    device: opt.DeviceOption = "auto",
) -> None:
    """Offer this host's devices: up to three workers for each GPU, or one for the CPU. A lost one is started again.

    Ends with Ctrl-C. A scheduler that goes away is waited for. The workers run what is sent to their ports.
    """
    from fuseplan.planner.fleet.terms import needs_dask

    needs_dask()
    kind = device_kind(device)
    opt.use_tls(context, scheduler, tls)
    from fuseplan.planner.fleet.cluster import scheduler_client, serve
    from fuseplan.planner.fleet.security import listening_host

    with scheduler_client(scheduler) as client:
        here = listening_host(client, host, interface)
    asyncio.run(serve(scheduler, kind, here))


@app.command()
@answers("the devices, or without a scheduler what is missing")
def status(
    context: typer.Context,
    given: ModelArguments,
    scheduler: Annotated[
        str | None, Argument(metavar="URL", help=f"{_ADDRESS} Leave it out to read the database alone.")
    ] = None,
    manifest: opt.ManifestOption = None,
    tls: opt.TlsFiles = opt.NO_TLS,
    device: opt.DeviceOption = "auto",
    db: opt.DbOption = None,
) -> None:
    """Say what each device does, who holds which lease, and what has no plan yet for which device.

    Of a model or a manifest, if one is named; else the regions that torch.compile missed.
    """
    from fuseplan.costmodel.identity import current_identity
    from fuseplan.planner.api.request import TuneRequest
    from fuseplan.planner.fleet.overview import fleet_status, wanted_by

    opt.use_tls(context, scheduler, tls)
    if given.regime == "eager":  # the default, which a manifest's models do not contradict
        given = replace(given, regime=None)
    screen, wanted, here = current(), None, ""
    if given.given() or manifest is not None:
        of_fleet = scheduler is not None and manifest is None
        kind = opt.fleet_kind(str(scheduler), device) if of_fleet else device_kind(device)
        wanted = wanted_by(TuneRequest(kind, given, manifest, db=db), screen)
        here = current_identity(kind).key() if scheduler is None else ""
    found = fleet_status(scheduler, db, wanted, here)
    if found.devices is not None:
        screen.table(found.devices, "devices", "Devices", keep=("device", "doing"))
    for title, frame, what_else in (
        ("Leases", found.leases, f"nobody tunes into {found.where}"),
        ("Missing", found.missing, f"nothing is missing in {found.where}"),
    ):
        if len(frame):
            screen.table(frame, title.lower(), title, keep=("label", "owner", "device"),
                         spare=("key", "numerics", "regime", "place", "workload"))
        else:
            screen.say(what_else)
