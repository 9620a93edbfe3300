"""``plan probe`` and ``plan backends``: what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuseplan.planner.cli_common import DbOption, Device, DeviceOption, console, device_type, print_frame


def probe(
    full: Annotated[bool, typer.Option("--full", help="More sizes and repetitions: about a minute.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw the bandwidth.")] = None,
    device: DeviceOption = Device.AUTO,
    db: DbOption = None,
) -> None:
    """Measure this device's bandwidth, launch latency and peaks, and store them for the cost model.

    Takes a few seconds; nothing else should run meanwhile. No device setting is changed.
    """
    from fuseplan.costmodel.present import bandwidth_figure, spec_table
    from fuseplan.planner.session import open_session

    session = open_session(device_type(device), db)
    with console(stderr=True).status("probing") as status:
        session = session.probed(not full, lambda fraction, step: status.update(f"probing: {step}, {fraction:.0%}"))
    assert session.spec is not None
    print_frame(spec_table(session.spec), title=f"{session.spec.identity.name} ({session.device})")
    if plot is not None:
        plot.expanduser().parent.mkdir(parents=True, exist_ok=True)
        bandwidth_figure(session.spec).savefig(plot.expanduser(), dpi=150)
        typer.echo(f"plot written to {plot}")
    typer.echo(f"stored in {session.database.where}")


def backends() -> None:
    """Say which kernel back ends can be used here, and why the others cannot."""
    import pandas as pd
    import torch

    from fuseplan.kernels.registry import backends_for

    rows = []
    for kind in ("cpu", "cuda"):
        no_device = "PyTorch sees no CUDA GPU" if kind == "cuda" and not torch.cuda.is_available() else None
        for backend in backends_for(kind):
            reason = backend.unavailable() or no_device
            rows.append((backend.name, kind, "no" if reason else "yes", reason or ""))
    print_frame(pd.DataFrame(rows, columns=["back end", "device", "usable here", "why not"]))
    _say_device()


def _say_device() -> None:
    import torch

    if torch.cuda.is_available():
        typer.echo(f"CUDA device: {torch.cuda.get_device_name()} (the default; use --device cpu for the processor)")
    else:
        typer.echo("no CUDA device: commands use the CPU")
