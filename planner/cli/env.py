"""``plan env``: what is installed and found here, for a bug report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from fuseplan.costmodel.devices import KINDS
from fuseplan.planner.cli.common import DbOption, Device, DeviceOption, device_type
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.search.errors import OWN_FAULTS

_PACKAGES = ("fuseplan", "torch", "triton", "ninetoothed", "transformers")


@answers()
def env(device: DeviceOption = Device.AUTO, db: DbOption = None) -> None:
    """Say what is installed and found here: paste it into a bug report.

    Has versions, the device and its key, compilers, back ends, the database and what it holds of this device, caches,
    and the records that ship for it. Nothing private: your home folder is shown as ~.
    """
    facts = {name: _without_home(value) for name, value in _facts(device, db)}
    current().facts("environment", facts)


def _facts(device: Device, db: str | None) -> Iterator[tuple[str, object]]:
    for package in _PACKAGES:
        yield package, _known(lambda package=package: _version(package))  # type: ignore[misc]
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "cuda", _known(_cuda)
    yield "driver", _known(_driver)
    kind = _known(lambda: device_type(device))
    yield "device", _known(lambda: _identity(kind)[0])
    yield "device key", (key := _known(lambda: _identity(kind)[1]))
    yield "compiler", _known(_compiler)
    for at in KINDS:
        for name, state in _backends(at):
            yield f"back end {name}", state
    yield from _database(db, str(key))
    yield "kernel cache", _known(_cache)
    yield "shipped records", _known(lambda: _shipped(str(key)))


def _known(find: Callable[[], object]) -> object:
    """What is found, or why it is not: a report of what is broken is worth more than none."""
    try:
        return find()
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        from fuseplan.planner.errors import in_words

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


def _cuda() -> str:
    import torch

    return torch.version.cuda or "none: this torch is built without it"


def _driver() -> str:
    from fuseplan.search.store.record import Versions

    return Versions.current("cuda").driver or "none"


def _identity(kind: object) -> tuple[str, str]:
    from fuseplan.costmodel.identity import current_identity

    found = current_identity(str(kind))
    unit = "multiprocessors" if found.is_gpu else "threads"
    return f"{found.name}, {found.cores} {unit}, {found.l2_bytes / 2**20:.1f} MiB of cache", found.key()


def _compiler() -> str:
    from fuseplan.kernels.native.build import required_compiler

    found = required_compiler()
    return f"{found.path}: {found.version}"


def _backends(kind: str) -> Iterator[tuple[str, object]]:
    from fuseplan.planner.cli.device import backend_rows

    rows = _known(lambda: list(backend_rows(kind)))
    if isinstance(rows, str):
        yield f"of {kind}", rows
    else:
        for name, _, usable, why in rows:  # type: ignore[attr-defined]
            yield name, "usable" if usable == "yes" else why


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


def _cache() -> str:
    import platformdirs

    return platformdirs.user_cache_dir("fuseplan")


def _shipped(key: str) -> str:
    from fuseplan.search.store.layered import shipped_files

    return ", ".join(one.name for one in shipped_files(key)) or "none for this device"
