"""``plan probe`` and ``plan backends``: what this machine can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Option

from fuseplan.costmodel.devices import KINDS, is_gpu, local_kind
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.output.screen import check_writable
from fuseplan.planner.cli.source import DbOption, DeviceOption
from fuseplan.planner.reports.document import Table


@answers()
def probe(
    full: Annotated[bool, Option("--full", help="More sizes and repetitions: about a minute.")] = False,
    force: Annotated[bool, Option(
        "--force", help="Store what is found even where a better probe is stored already.",
    )] = False,
    plot: Annotated[Path | None, Option(metavar="FILE.png", help="Also draw the bandwidth.")] = None,
    device: DeviceOption = "auto",
    db: DbOption = None,
) -> None:
    """Measure this device's bandwidth, launch latency and peaks, and store them for the cost model.

    Takes seconds, half a minute where caches are large, more where something disturbs it; nothing else should run
    meanwhile. A stored probe is not replaced by one that is clearly worse. No device setting is changed.
    """
    from fuseplan.costmodel.device_report import bandwidth_figure, spec_table
    from fuseplan.costmodel.probe.probe import losses
    from fuseplan.planner.api.run import doubts
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.tuning.session import open_session

    if plot is not None:
        # Before the device is measured.
        if plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ConfigError(f"--plot {plot}: its ending says the format; give a .png, .pdf or .svg file")
        plot = plot.expanduser()
        check_writable(plot, "--plot")
    session, screen = open_session(device_kind(device), db), current()
    with screen.status("probing") as say:
        found = session.measure_device(
            not full, lambda fraction, step: say(f"probing: {step}, {fraction:.0%}")
        )
    screen.table(spec_table(found), "probe", spare=("detail", "best"), keep=("quantity", "typical", "unit"))
    screen.say(f"{found.identity.name} ({session.device})")
    for doubt in doubts(found):
        screen.warn(doubt)
    if plot is not None:
        bandwidth_figure(found).savefig(plot, dpi=150)
        screen.say(f"plot written to {plot}")
    known = session.spec
    lost = losses(found, known) if known is not None and not force else []
    if known is None or not lost:
        session.with_spec(found).recalibrated()
        screen.say(f"stored in {session.database.where}")
        return
    screen.warn(f"not stored, for the probe of {known.measured_at} is better ({'; '.join(lost)}); "
                "`plan probe --force` replaces it")


@answers()
def backends() -> None:
    """Say which kernel back ends can be used here, and why the others cannot."""
    import torch

    rows = tuple(row for kind in KINDS for row in backend_rows(kind))
    current().add(Table("backends", ("back end", "device", "usable here", "why not"), rows))
    if torch.cuda.is_available():
        current().tell(f"CUDA device: {torch.cuda.get_device_name()} (the default; use --device cpu for the processor)")
    else:
        current().tell("no CUDA device: commands use the CPU")


def backend_rows(kind: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, device, whether it can be used here, and why not, of each back end for a device type."""
    from fuseplan.kernels.registry import backends_for

    no_device = "PyTorch sees no CUDA GPU" if is_gpu(kind) and not is_gpu(local_kind()) else None
    for backend in backends_for(kind):
        reason = backend.unavailable() or no_device
        yield backend.name, kind, "no" if reason else "yes", reason or ""
