"""``plan fleet``: this host's part of a fleet, and how a fleet is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from fuseplan.planner.cli import common
from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.output.options import answers

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
    tls_ca: opt.TlsCaOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    device: common.DeviceOption = common.Device.AUTO,
) -> None:
    """Offer this host's devices: up to three workers for each GPU, or one for the CPU. A lost one is started again.

    Ends with Ctrl-C. A scheduler that goes away is waited for. The workers run what is sent to their ports.
    """
    from fuseplan.planner.fleet.terms import needs_dask

    needs_dask()
    kind = common.device_type(device)
    opt.use_tls(context, scheduler, tls_ca, tls_cert, tls_key)
    from fuseplan.planner.fleet.cluster import scheduler_client, serve
    from fuseplan.planner.fleet.security import listening_host

    with scheduler_client(scheduler) as client:
        here = listening_host(client, host, interface)
    asyncio.run(serve(scheduler, kind, here))


@app.command()
@answers("the devices, or without a scheduler what is missing")
def status(
    context: typer.Context,
    scheduler: Annotated[
        str | None, Argument(metavar="URL", help=f"{_ADDRESS} Leave it out to read the database alone.")
    ] = None,
    model: opt.ModelOption = None,
    config: opt.ConfigOption = None,
    module: opt.ModuleOption = None,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", metavar="FILE", help="Models of a TOML file, as `plan tune` has it.")
    ] = None,
    pattern: opt.PatternOption = None,
    shape: opt.ShapeOption = None,
    decode: opt.DecodeOption = None,
    kv_len: opt.KvLenOption = None,
    prefill: opt.PrefillOption = None,
    dtype: opt.DtypeOption = None,
    layers: opt.LayersOption = None,
    calls: Annotated[
        bool, typer.Option("--calls/--no-calls", help="With the calls that `plan tune` adds to these sizes.")
    ] = True,
    pack_weights: opt.PackWeightsOption = False,
    numerics: opt.NumericsOption = opt.NumericsChoice.FP32,
    regime: opt.RegimeOption = opt.RegimeChoice.EAGER,
    tls_ca: opt.TlsCaOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    device: common.DeviceOption = common.Device.AUTO,
    db: common.DbOption = None,
) -> None:
    """Say what each device does, who holds which lease, and what has no plan yet for which device.

    Of a model or a manifest, if one is named; else what torch.compile looked up in vain.
    """
    from fuseplan.costmodel.identity import current_identity
    from fuseplan.planner.api.request import TuneRequest
    from fuseplan.planner.fleet.overview import fleet_status, wanted_by
    from fuseplan.planner.models.manifest import ModelArguments

    opt.use_tls(context, scheduler, tls_ca, tls_cert, tls_key)
    given = ModelArguments(
        model, config, module, pattern=pattern, shape=shape, decode=decode, kv_len=kv_len, prefill=prefill, dtype=dtype,
        layers=layers, calls=calls, pack_weights=pack_weights, numerics=numerics.value,
        regime=None if regime is opt.RegimeChoice.EAGER else regime.value)
    wanted, here = None, ""
    if given.given() or manifest is not None:
        of_fleet = scheduler is not None and manifest is None
        kind = opt.fleet_kind(str(scheduler), device.value) if of_fleet else common.device_type(device)
        wanted = wanted_by(TuneRequest(kind, given, manifest, db=db), opt.Terminal())
        here = current_identity(kind).key() if scheduler is None else ""
    found = fleet_status(scheduler, db, wanted, here)
    if found.devices is not None:
        common.print_frame(found.devices, "Devices", name="devices", keep=("device", "doing"))
    for title, frame, what_else in (
        ("Leases", found.leases, f"nobody tunes into {found.where}"),
        ("Missing", found.missing, f"nothing is missing in {found.where}"),
    ):
        if len(frame):
            common.print_frame(frame, title, name=title.lower(), keep=("label", "owner", "device"), spare=(
                "key", "numerics", "regime", "place", "workload"))
        else:
            common.say(what_else)
