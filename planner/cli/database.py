"""``plan db``: look into the tuning database and move records between databases."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fuseplan.costmodel.devices import kind_of_key
from fuseplan.planner.api.device import check_device_key, device_kind
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.source import DbOption, Device
from fuseplan.planner.reports.document import Table
from fuseplan.search.errors import counted

if TYPE_CHECKING:
    from fuseplan.search.store.database import Database

#: What ``-`` stands for.
_INPUT, _OUTPUT = Path("/dev/stdin"), Path("/dev/stdout")

app = typer.Typer(no_args_is_help=True, help="List, show, export, import, verify and prune stored records.")


def open_database(url: str | None) -> Database:
    """The tuning database, to look into. One that cannot be used, or was asked for and is not there, is an error."""
    from fuseplan.search.store.database import Database

    return Database(url, mode="inspect")


@app.command("ls")
@answers("the records", torch=False)
def list_records(db: DbOption = None) -> None:
    """One line per stored tuning record and plan."""
    from fuseplan.search.store.maintenance import LS_COLUMNS, ls_rows, of_other_versions

    screen = current()
    for file in of_other_versions() if db is None else ():
        screen.say(f"{file} is a database of another fuseplan, whose plans are not read here: use them with that "
                   "fuseplan, or tune again and delete the file")
    database = open_database(db)
    rows = ls_rows(database)
    if not rows:
        screen.say(f"no records in {database.where}; `plan tune --model llama` makes some")
    elif screen.is_terminal:
        screen.say(database.where)
    if rows or not screen.at_once:
        screen.add(Table("records", LS_COLUMNS, tuple(map(tuple, rows)), keep=("label", "answer"), spare=(
            "numerics", "regime", "created", "backend", "device", "kind", "workload", "gain", "best_us", "unfused_us")))


@app.command("misses")
@answers("the misses", torch=False)
def list_misses(
    device: Annotated[Device | None, Option(help="Only this machine's device. Default: all that have misses.")] = None,
    device_key: Annotated[str | None, Option("--device-key", help="Only this device, by its whole key.")] = None,
    db: DbOption = None,
) -> None:
    """List regions without a tuned plan, most frequent first, and whether `plan tune --misses` can tune them."""
    from fuseplan.planner.tuning.miss_list import MISS_COLUMNS, dropped, logged_misses
    from fuseplan.search.store.database import Database
    from fuseplan.search.store.layered import LayeredDatabase, shipped_files
    from fuseplan.search.store.record import Versions
    from fuseplan.search.store.rows import MOST_MISSES

    with open_database(db) as database:
        where, found = database.where, {str(one["device"]) for one in database.misses()}
        gone = dropped(database)
        if device_key is not None:
            check_device_key(device_key, database.device_keys())
    if device is not None and device_key is None:
        from fuseplan.costmodel.identity import current_identity

        device_key = current_identity(device_kind(device)).key()
    rows: list[tuple[str | int, ...]] = []
    for key in sorted(found if device_key is None else found & {device_key}):
        with Database(db, mode="inspect", versions=Versions.current(kind_of_key(key))) as database:
            logged = logged_misses(LayeredDatabase(database, shipped_files(key)), key)
        rows += [(*one.row(), key) for one in logged]
    if gone:
        dropped_ones = counted(gone, "miss that came least was", "misses that came least were")
        current().say(f"{dropped_ones} dropped from {where}: it keeps {MOST_MISSES} at most")
    if not rows:
        current().say(f"no misses are logged {'' if device_key is None else 'for this device '}in {where}")
    if rows or not current().at_once:
        rows.sort(key=lambda row: -int(row[1]))
        current().add(Table(
            "misses", (*MISS_COLUMNS, "device"), tuple(rows), keep=("label", "count", "tunable"),
            spare=("key", "device", "numerics", "regime", "first_seen", "last_seen", "place")))


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
    database = open_database(db)
    found = maintenance.show_record(database, key)
    if not found:
        labels = [record.label for record in database.records()] + [plan.label for plan in database.plans()]
        close = nearest(key, labels)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "; list them with `plan db ls`"
        raise ConfigError(f"no record matches {key!r} in {database.where}{hint}")
    for record in found:
        typer.echo(json.dumps({type(record).__name__: dataclasses.asdict(record)}, indent=2))


@app.command("export")
@answers(tables=False, torch=False)
def export_records(
    file: Annotated[Path, Argument(help="File to write (JSON lines with a checksum); - is standard output.")],
    device: Annotated[str | None, Option("--device-key", help="Only this device's records.")] = None,
    db: DbOption = None,
) -> None:
    """Write every record to a file that `plan db import` reads."""
    from fuseplan.search.store.transfer import export

    database = open_database(db)
    if device is not None:
        check_device_key(device, database.device_keys())
    is_output = str(file) in ("-", str(_OUTPUT), "/dev/fd/1")
    count = export(database, file := _OUTPUT if is_output else file, device)
    current().say(f"{counted(count, 'entry', 'entries')} of {database.where} written to {file}", aside=is_output)


@app.command("import")
@answers(tables=False, torch=False)
def import_records(
    file: Annotated[Path, Argument(help="File that `plan db export` wrote; - is standard input.")], db: DbOption = None
) -> None:
    """Read an export into the database: whole, or not at all."""
    from fuseplan.search.store.database import Database
    from fuseplan.search.store.transfer import merge_entries, read_bundle

    entries = read_bundle(file := _INPUT if str(file) == "-" else file)  # one that is refused makes no database
    database = Database(db)
    found = merge_entries(database, entries)
    left = ", ".join(f"{count} {why}" for why, count in found.left.items())
    current().say(
        f"{counted(found.taken, 'entry', 'entries')} of {file} imported into {database.where}"
        + (f"; not taken: {left}" if left else ""))


@app.command()
@answers(tables=False, torch=False)
def pull(
    server: Annotated[str, Argument(metavar="[URL]", help="The database on a server. Default: that of --db.")] = "",
    db: DbOption = None,
) -> None:
    """Copy a server's database into your data folder: dispatch reads that while the server cannot be reached."""
    from fuseplan.planner.errors import ConfigError
    from fuseplan.search.store.location import location_name, resolve_url
    from fuseplan.search.store.snapshot import pull as copy

    if bool(server) == bool(db):
        raise ConfigError("two servers are given; pull one" if server else "give the URL of a server")
    where = server or str(db)
    file, count = copy(where)
    current().say(f"{counted(count, 'row')} of {location_name(resolve_url(where))} written to {file}")


@app.command()
@answers("the problems")
def verify(db: DbOption = None) -> None:
    """Check the file, its schema and every record; exit status 2 when something is wrong."""
    from fuseplan.search.store.maintenance import verify_database as check

    database = open_database(db)
    problems = check(database)
    if problems:
        rows = tuple((one.table, one.row, one.what) for one in problems)
        current().add(Table("problems", ("table", "row", "what"), rows))
        cures = dict.fromkeys(one.cure for one in problems if one.cure)
        current().tell("; ".join((f"{counted(len(problems), 'problem')} in {database.where}", *cures)))
        raise typer.Exit(2)
    current().tell(f"{database.where} is sound")


@app.command()
@answers(tables=False)
def prune(
    stale: Annotated[bool, Option("--stale", help="Also delete records of other software versions.")] = False,
    misses: Annotated[bool, Option("--misses", help="Also delete logged misses.")] = False,
    device: Annotated[str | None, Option("--device-key", help="Also delete this device's records.")] = None,
    db: DbOption = None,
) -> None:
    """Delete finished trials and damaged rows, and more where asked for."""
    from fuseplan.search.errors import CorruptDatabaseError
    from fuseplan.search.store.database import Database
    from fuseplan.search.store.maintenance import prune_database as delete
    from fuseplan.search.store.record import Versions

    screen, aside = current(), list[str]()
    with suppress(CorruptDatabaseError), open_database(db) as found:  # a corrupt one is set aside below
        if device is not None:
            check_device_key(device, found.device_keys())
        if found.engine is None:
            screen.say(f"nothing to delete: there is no tuning database at {found.where} yet")
            return
    database = Database(db, tell=aside.append)
    keep = Versions.current(device_kind("auto")) if stale else None
    removed = delete(database, keep_versions=keep, device=device, misses=misses)
    for line in aside:
        screen.warn(line)
    counts = ", ".join(f"{count} {table}" for table, count in removed.items() if count)
    screen.say(f"the damaged file was set aside whole; {database.where} is new and empty" if aside else
               f"{counts or 'nothing'} deleted from {database.where}")
