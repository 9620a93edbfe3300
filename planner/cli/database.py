"""``plan db``: look into the tuning database and move records between databases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from fuseplan.planner.cli.common import (
    DbOption,
    Device,
    DeviceOption,
    device_type,
    open_database,
    print_frame,
    print_text,
)

app = typer.Typer(no_args_is_help=True, help="List, show, export, import, verify and prune stored records.")


@app.command("ls")
def list_records(db: DbOption = None) -> None:
    """One line per stored tuning record and plan."""
    from fuseplan.search.store.maintenance import ls

    database = open_database(db, write=False)
    frame = ls(database)
    if frame.empty:
        typer.echo(f"no records in {database.where}; `plan tune --model llama` makes some")
        return
    frame["workload"] = frame["workload"].str.slice(0, 12)
    frame["gain"] = frame["gain"].map("{:.0%}".format)
    spare = ("regime", "created", "device", "backend")
    print_frame(frame.drop(columns="numerics"), title=database.where, digits=1, spare=spare)


@app.command("misses")
def list_misses(
    device: DeviceOption = Device.AUTO,
    device_key: Annotated[str | None, Option("--device-key", help="Another device, by its whole key.")] = None,
    db: DbOption = None,
) -> None:
    """What torch.compile looked up in vain, most frequent first, and whether `plan tune --misses` can tune it."""
    from fuseplan.planner.api.misses import listed

    frame = listed(db, device_type(device), device_key)
    if frame.empty:
        typer.echo(f"no misses are logged for this device in {open_database(db, write=False).where}")
        return
    spare = ("numerics", "regime", "first_seen", "last_seen", "place")
    print_frame(frame.drop(columns="key"), title="Look-ups without a plan", spare=spare)


@app.command()
def show(
    key: Annotated[str, Argument(help="Start of a workload key, or part of a label, as `plan db ls` prints.")],
    db: DbOption = None,
) -> None:
    """Print whole records as JSON, with their evidence."""
    import dataclasses
    import json

    from fuseplan.planner.errors import ConfigError, nearest
    from fuseplan.search.store import maintenance

    if not key.strip():
        raise ConfigError("the key to show is empty; list the records with `plan db ls`")
    database = open_database(db, write=False)
    found = maintenance.show_record(database, key)
    if not found:
        labels = [record.label for record in database.records()] + [plan.label for plan in database.plans()]
        close = nearest(key, labels)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "; list them with `plan db ls`"
        raise ConfigError(f"no record matches {key!r} in {database.where}{hint}")
    for record in found:
        typer.echo(json.dumps({type(record).__name__: dataclasses.asdict(record)}, indent=2))


@app.command("export")
def export_records(
    file: Annotated[Path, Argument(help="File to write (JSON lines with a checksum).")],
    device: Annotated[str | None, Option("--device-key", help="Only this device's records.")] = None,
    db: DbOption = None,
) -> None:
    """Write every record to a file that `plan db import` reads."""
    from fuseplan.search.store.transfer import export

    database = open_database(db, write=False)
    if device is not None and device not in {*database.devices(), *(one.key.device for one in database.records())}:
        from fuseplan.planner.errors import ConfigError

        raise ConfigError(f"--device-key {device!r}: {database.where} has no such device; list it with `plan db ls`")
    count = export(database, file, device)
    typer.echo(f"{count} entries of {database.where} written to {file}")


@app.command("import")
def import_records(
    file: Annotated[Path, Argument(help="File that `plan db export` wrote.")], db: DbOption = None
) -> None:
    """Read an export into the database: whole, or not at all."""
    from fuseplan.search.store.transfer import import_bundle, read_bundle

    read_bundle(file)  # one that is refused makes no database
    database = open_database(db)
    typer.echo(f"{import_bundle(database, file)} entries of {file} imported into {database.where}")


@app.command()
def verify(db: DbOption = None) -> None:
    """Check the file, its schema and every record; exit status 2 when something is wrong."""
    from fuseplan.search.store.maintenance import verify_database as check

    database = open_database(db, write=False)
    problems = check(database)
    for problem in problems:
        print_text(": ".join(filter(None, (problem.table, problem.row, problem.what))))
    if problems:
        rows = any(problem.row for problem in problems)
        hint = "; `plan db prune` deletes rows that cannot be read" if rows else ""
        typer.echo(f"{len(problems)} problems in {database.where}{hint}")
        raise typer.Exit(2)
    typer.echo(f"{database.where} is sound")


@app.command()
def prune(
    stale: Annotated[bool, Option("--stale", help="Also delete records of other software versions.")] = False,
    misses: Annotated[bool, Option("--misses", help="Also delete logged misses.")] = False,
    device: Annotated[str | None, Option("--device-key", help="Also delete this device's records.")] = None,
    db: DbOption = None,
) -> None:
    """Delete finished trials and damaged rows, and more where asked for."""
    from fuseplan.search.store.maintenance import prune_database as delete
    from fuseplan.search.store.record import Versions

    database = open_database(db)
    keep = Versions.current(device_type(Device.AUTO)) if stale else None
    removed = delete(database, keep_versions=keep, device=device, misses=misses)
    counts = ", ".join(f"{count} {table}" for table, count in removed.items() if count)
    typer.echo(f"{counts or 'nothing'} deleted from {database.where}")

