"""``plan env``: what is installed and found here, for a bug report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from fuseplan.costmodel.devices import KINDS
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.cli.device import backend_rows
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.source import DbOption, Device, DeviceOption
from fuseplan.planner.errors import in_words
from fuseplan.planner.reports.document import Facts
from fuseplan.search.errors import OWN_FAULTS

_PACKAGES = ("fuseplan", "torch", "triton", "ninetoothed", "transformers")


@answers()
def env(device: DeviceOption = "auto", db: DbOption = None) -> None:
    """Say what is installed and found here: paste it into a bug report.

    Has versions, the device and its key, compilers, back ends, the database and what it holds of this device, caches,
    and the records that ship for it. Nothing private: your home folder is shown as ~.
    """
    facts = {name: _without_home(value) for name, value in _facts(device, db)}
    current().add(Facts("environment", facts))


def _facts(device: Device, db: str | None) -> Iterator[tuple[str, object]]:
    import platformdirs
    import torch

    from fuseplan.kernels.native.build import required_compiler
    from fuseplan.search.store.layered import shipped_files
    from fuseplan.search.store.record import Versions

    for package in _PACKAGES:
        yield package, _known(lambda package=package: _version(package))  # type: ignore[misc]
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "cuda", _known(lambda: torch.version.cuda or "none: this torch is built without it")
    yield "driver", _known(lambda: Versions.current("cuda").driver or "none")
    found = _known(lambda: _identity(device))
    words, key = found if isinstance(found, tuple) else (found, str(found))
    yield "device", words
    yield "device key", key
    yield "compiler", _known(lambda: "{0.path}: {0.version}".format(required_compiler()))
    for kind in KINDS:
        yield from _backends(kind)
    yield from _database(db, key)
    yield "kernel cache", _known(lambda: platformdirs.user_cache_dir("fuseplan"))
    yield "shipped records", _known(
        lambda: ", ".join(one.name for one in shipped_files(key)) or "none for this device")


def _known(find: Callable[[], object]) -> object:
    """What is found, or why it is not: a report of what is broken is worth more than none."""
    try:
        return find()
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        return f"not known: {in_words(error)}"


def _without_home(value: object) -> object:
    home = str(Path.home())
    return value.replace(home, "~") if isinstance(value, str) and len(home) > 1 else value


def _version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _identity(device: Device) -> tuple[str, str]:
    from fuseplan.costmodel.identity import current_identity

    found = current_identity(device_kind(device))
    unit = "multiprocessors" if found.is_gpu else "threads"
    return f"{found.name}, {found.cores} {unit}, {found.l2_bytes / 2**20:.1f} MiB of cache", found.key()


def _backends(kind: str) -> Iterator[tuple[str, object]]:
    rows = _known(lambda: list(backend_rows(kind)))
    if isinstance(rows, str):
        yield f"back end of {kind}", rows
    else:
        for name, _, usable, why in rows:  # type: ignore[attr-defined]
            yield f"back end {name}", "usable" if usable == "yes" else why


def _database(db: str | None, key: str) -> Iterator[tuple[str, object]]:
    held = _known(lambda: _held(db, key))
    if isinstance(held, dict):
        yield from held.items()
    elif "://" in str(db):  # its address, and who asks it, are nobody else's business
        yield "database", f"not known: the {str(db).split(':', 1)[0]} server cannot be used from here"
    else:
        yield "database", held


def _held(db: str | None, key: str) -> dict[str, object]:
    from fuseplan.search.store.database import Database

    with Database(db, mode="inspect") as database:
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
