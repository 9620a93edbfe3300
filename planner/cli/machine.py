"""``plan probe``, ``backends`` and ``env``: what this machine can do, and what is installed and found here."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from fuseplan.costmodel.devices import KINDS, is_gpu, local_kind
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.output.screen import check_writable
from fuseplan.planner.cli.source import DbOption, Device, DeviceOption
from fuseplan.planner.errors import in_words
from fuseplan.planner.reports.document import Facts, Table
from fuseplan.search.errors import OWN_FAULTS


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
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot: matplotlib is not installed; pip install 'fuseplan[plot]'")
        plot = plot.expanduser()
        check_writable(plot, "--plot")
    session, screen = open_session(device_kind(device), db), current()
    with screen.status("probing") as say:
        found = session.measure_device(not full, lambda fraction, step: say(f"probing: {step}, {fraction:.0%}"))
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


_PACKAGES = ("fuseplan", "torch", "triton", "ninetoothed", "transformers")


@answers()
def env(device: DeviceOption = "auto", db: DbOption = None) -> None:
    """Say what is installed and found here: paste it into a bug report.

    Has versions, the device and its key, compilers, back ends, the database and what it holds of this device, caches,
    and the records that ship for it. Nothing private: your home folder is shown as ~.
    """
    home = str(Path.home())
    current().add(Facts("environment", {
        name: value.replace(home, "~") if isinstance(value, str) and len(home) > 1 else value
        for name, value in _facts(device, db)
    }))


def _facts(device: Device, db: str | None) -> Iterator[tuple[str, object]]:
    import platformdirs
    import torch

    from fuseplan.costmodel.identity import current_identity
    from fuseplan.kernels.native.build import required_compiler
    from fuseplan.search.store.layered import shipped_files
    from fuseplan.search.store.record import Versions, package_version

    for package in _PACKAGES:
        yield package, package_version(package) or "not installed"
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "cuda", _known(lambda: torch.version.cuda or "none: this torch is built without it")
    yield "driver", _known(lambda: Versions.current("cuda").driver or "none")
    found = _known(lambda: current_identity(device_kind(device)))
    words, key = found, str(found)
    if not isinstance(found, str):
        unit = "multiprocessors" if found.is_gpu else "threads"
        words, key = f"{found.name}, {found.cores} {unit}, {found.l2_bytes / 2**20:.1f} MiB of cache", found.key()
    yield "device", words
    yield "device key", key
    yield "compiler", _known(lambda: "{0.path}: {0.version}".format(required_compiler()))
    for kind in KINDS:
        rows = _known(lambda kind=kind: list(backend_rows(kind)))  # type: ignore[misc]
        for name, _, usable, why in [(f"of {kind}", "", "no", rows)] if isinstance(rows, str) else rows:
            yield f"back end {name}", "usable" if usable == "yes" else why
    held = _known(lambda: _held(db, key))
    if isinstance(held, str) and "://" in str(db):  # its address, and who asks it, are nobody else's business
        held = f"not known: the {str(db).split(':', 1)[0]} server cannot be used from here"
    yield from held.items() if isinstance(held, dict) else [("database", held)]
    yield "kernel cache", _known(lambda: platformdirs.user_cache_dir("fuseplan"))
    yield "shipped records", _known(
        lambda: ", ".join(one.name for one in shipped_files(key)) or "none for this device")


def _known(find: Callable[[], Any]) -> Any:
    """What is found; where looking fails, the reason, so that a report of a broken machine is whole."""
    try:
        return find()
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        return f"not known: {in_words(error)}"


def _held(db: str | None, key: str) -> dict[str, object]:
    from fuseplan.search.store.database import Database

    with Database(db, mode="peek") as database:
        engine, spec = database.engine, database.get_device(key)
        where = database.where if engine is not None else f"{database.where} (not there yet)"
        if engine is not None and engine.dialect.name != "sqlite":
            where = f"a {engine.dialect.name} server"
        return {
            "database": where,
            "plans of this device": sum(one.key.device == key for one in database.plans()),
            "records of this device": sum(one.key.device == key for one in database.records()),
            "misses of this device": sum(one["device"] == key for one in database.misses()),
            "probe of this device": spec["measured_at"] if spec is not None else "none: `plan probe` measures it",
        }
