"""Database files for tests: opened without a warning, damaged, exported."""

from __future__ import annotations

import warnings
from pathlib import Path

from search_records import HERE, SPEC, plan, tuning

from fuseplan.search.store import transfer
from fuseplan.search.store.database import Database


def quiet(path: Path) -> Database:
    """Open for dispatch, where a warning would be a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Database(path, mode="read", versions=HERE)


def damage_pages(path: Path) -> None:
    """Overwrite everything after the first page, as a failing disk would."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


def export_sample(db: Database, target: Path) -> Path:
    """Tunings of two devices, a plan and a device's facts, in an export file of six lines."""
    for n in range(3):
        db.put_record(tuning(f"w{n}"))
    db.put_record(tuning("w9", device="gpu-b"))
    db.put_plan(plan())
    db.put_device("cpu-a", SPEC)
    assert transfer.export(db, target) == 6
    return target
