"""``plan probe`` and ``plan backends``: what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from fuseplan.planner.cli.common import DbOption, Device, DeviceOption, console, device_type, print_frame

if TYPE_CHECKING:
    from fuseplan.costmodel.device import DeviceSpec


def probe(
    full: Annotated[bool, Option("--full", help="More sizes and repetitions: about a minute.")] = False,
    force: Annotated[bool, Option(
        "--force", help="Store what is found even where a better probe is stored already.",
    )] = False,
    plot: Annotated[Path | None, Option(metavar="FILE.png", help="Also draw the bandwidth.")] = None,
    device: DeviceOption = Device.AUTO,
    db: DbOption = None,
) -> None:
    """Measure this device's bandwidth, launch latency and peaks, and store them for the cost model.

    Takes seconds, half a minute where caches are large, more where something disturbs it; nothing else should run
    meanwhile. A stored probe is not replaced by one that is clearly worse. No device setting is changed.
    """
    from fuseplan.costmodel.device_report import bandwidth_figure, spec_table
    from fuseplan.costmodel.probe.probe import losses
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.tuning.session import open_session

    if plot is not None:
        # Before the device is measured.
        if plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ConfigError(f"--plot {plot}: its ending says the format; give a .png, .pdf or .svg file")
        plot = plot.expanduser()
        plot.parent.mkdir(parents=True, exist_ok=True)
    session = open_session(device_type(device), db)
    with console(stderr=True).status("probing") as status:
        found = session.measure_device(
            not full, lambda fraction, step: status.update(f"probing: {step}, {fraction:.0%}")
        )
    print_frame(spec_table(found), title=f"{found.identity.name} ({session.device})")
    warn_of_problems(found)
    if plot is not None:
        bandwidth_figure(found).savefig(plot, dpi=150)
        typer.echo(f"plot written to {plot}")
    known = session.spec
    lost = losses(found, known) if known is not None and not force else []
    if known is None or not lost:
        session.with_spec(found).recalibrated()
        typer.echo(f"stored in {session.database.where}")
        return
    typer.echo(
        f"plan: warning: not stored, for the probe of {known.measured_at} is better ({'; '.join(lost)}); "
        "`plan probe --force` replaces it", err=True,
    )


def warn_of_problems(spec: DeviceSpec) -> None:
    """Say what makes a probe's numbers doubtful."""
    from fuseplan.planner.api.job import doubts

    for doubt in doubts(spec):
        typer.echo(f"plan: warning: {doubt}", err=True)


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
