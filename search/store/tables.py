"""Tables of the tuning database, and opening one safely: schema check, quarantine, read-only access."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError, ProgrammingError

from fuseplan.search import errors
from fuseplan.search.errors import Argument, brief, plain
from fuseplan.search.store import connections, location
from fuseplan.search.store.connections import connected, database_error, insist, transaction
from fuseplan.search.store.location import location_name, sqlite_file
from fuseplan.search.store.record import SCHEMA_VERSION, now

#: Dialects that have INSERT ... ON CONFLICT.
DIALECTS = {"sqlite": sqlite, "postgresql": postgresql}
METADATA = sa.MetaData()
#: How often a corrupt file is replaced before giving up.
_ATTEMPTS = 3


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.String(255), primary_key=True)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, default="")


META = sa.Table("fuseplan_meta", METADATA, _key("name"), _text("value"))
#: Measured device specs, as JSON.
DEVICES = sa.Table("devices", METADATA, _key("device"), _text("payload"), _text("checksum"), _text("created"))


def _record_table(name: str) -> sa.Table:
    return sa.Table(
        name, METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"),
        _text("label"), _text("versions"), _text("payload"), _text("checksum"), _text("created"),
    )


TUNINGS = _record_table("tuning_records")
PLANS = _record_table("plan_records")
#: Trials of tunes under way (``open``) or finished; separate from what dispatch reads.
TRIALS = sa.Table(
    "trials", METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"), _key("backend"),
    sa.Column("config_hash", sa.String(64), primary_key=True), _text("versions"), _text("payload"), _text("created"),
    sa.Column("open", sa.Integer, nullable=False, default=1), sa.Column("median_us", sa.Float),
)
MISSES = sa.Table(
    "misses", METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"),
    _text("label"), _text("payload"), _text("first_seen"), sa.Column("count", sa.Integer, nullable=False, default=1),
)
#: Keys that a tuner is at work on: by whom, and until when unless renewed (seconds since 1970 by the database's clock).
LEASES = sa.Table(
    "leases", METADATA, _key("workload"), _key("device"), _key("regime"), _key("numerics"),
    sa.Column("owner", sa.String(255), nullable=False), sa.Column("expires", sa.Float, nullable=False), _text("taken"),
)
#: Captured graphs, as JSON, so that a second tune need not trace the model again.
CAPTURES = sa.Table("captures", METADATA, _key("name"), _text("payload"), _text("checksum"), _text("created"))
# A server that sorts as people do cannot use the key's own index for names that begin alike.
sa.Index(
    "captures_by_prefix", CAPTURES.c.name, postgresql_ops={"name": "varchar_pattern_ops"}
).ddl_if(dialect="postgresql")
#: Every revision of these tables, in order. One only adds tables and indexes, so that an older fuseplan still reads
#: what a newer one made; what it cannot read is of another schema version. The first one is not written down.
REVISIONS = ("1", "2")
REVISION = sa.Table(
    "fuseplan_revision", sa.MetaData(), sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="fuseplan_revision_pkc"),
)
#: What is known of a database before anything is asked of it: its facts by name, and its revision as that of "".
_FACTS = sa.select(META.c.name, META.c.value)
_FACTS_AND_REVISION = _FACTS.union_all(sa.select(sa.literal(""), REVISION.c.version_num))


def open_for_writing(
    url: sa.URL, set_aside: int = _ATTEMPTS, patience_s: float = connections.BUSY_S,
    tell: Callable[[str], None] | None = None,
) -> sa.Engine:
    """An engine whose tables exist; :class:`DatabaseError` where that cannot be, or it is not ours to change.

    A corrupt database of ours is kept beside a fresh one, at most ``set_aside`` times; ``tell`` takes the sentence that
    names both files, None warns. A statement waits up to ``patience_s`` seconds for what another process holds.
    """
    file = location.make_folder(url)
    with location.locked(file):
        found = None if file is None else location.identity(file)
        engine = connections.engine_of(url, patience_s=patience_s)
        try:
            _create_or_upgrade(engine)
            return engine
        except errors.CorruptDatabaseError as error:
            engine.dispose()  # now: SQLite removes the companions that lie there when it closes the file
            if file is None or found is None or not set_aside:
                raise
            why = str(error)
    # None: another process has been quicker, and what lies there now is fresh.
    if (moved := location.move_aside(file, found, why)) is not None:
        (tell or partial(warnings.warn, stacklevel=3))(f"{why}; kept as {plain(str(moved))}, started afresh")
    return open_for_writing(url, set_aside - 1, patience_s, tell)


def open_for_reading(url: sa.URL, patience_s: float = connections.BUSY_S) -> sa.Engine | None:
    """An engine that never writes, with the errors of :func:`open_for_writing`; None if there is nothing to read."""
    file = sqlite_file(url)
    if file is not None and not location.file_size(file):
        return None
    engine = connections.engine_of(url, "" if file is None else "mode=ro", patience_s)
    try:
        with location.locked(file):
            return _unless_empty(engine)
    except errors.CorruptDatabaseError as error:
        if file is not None:
            location.check_ours(file, str(error))
        raise
    except errors.DatabaseError as error:
        foreign = isinstance(error, errors.SchemaVersionError | errors.ForeignDatabaseError)
        if file is None or foreign or isinstance(error, errors.BusyDatabaseError):
            raise
        # A read-only folder has no room for the shared-memory file that WAL readers need.
        engine = connections.engine_of(url, connections.FIXED)
        return _unless_empty(engine)


def _unless_empty(engine: sa.Engine) -> sa.Engine | None:
    if check_schema(engine) is not None:
        return engine
    engine.dispose()
    return None


def _create_or_upgrade(engine: sa.Engine) -> None:
    found, name = check_schema(engine), location_name(engine.url)
    if found is not None and found not in REVISIONS:
        raise errors.SchemaVersionError(
            "{} was written by a newer fuseplan (its tables are of revision {}, this one knows {}); it was left as it "
            "is: use that one, or pass another file with {}", name, brief(found), REVISIONS[-1], Argument("db"),
        )
    lite = engine.dialect.name == "sqlite"
    if found is not None and lite:
        with connected(engine) as connection:
            flaws = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA quick_check(3)")]
        if flaws != ["ok"]:
            raise connections.corrupt(engine, "; ".join(flaws))
    if found == REVISIONS[-1]:
        with connected(engine) as connection:
            check_columns(connection)
            may_write = sa.select(sa.func.has_table_privilege(PLANS.name, "insert"))
            if engine.dialect.name == "postgresql" and not connection.scalar(may_write):
                raise errors.ReadOnlyDatabaseError(f"{name}: this role may only read; use one that may write")
        return
    with transaction(engine) as connection:
        if engine.dialect.name == "postgresql":  # two that create a table together: the second would fail
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({location.APPLICATION_ID})")
        is_new = not sa.inspect(connection).has_table(META.name)
        METADATA.create_all(connection)  # what is missing: of an older database, what was added since
        for index in CAPTURES.indexes:  # which goes with the table only where that is new
            index.create(connection, checkfirst=True)
        REVISION.create(connection, checkfirst=True)
        connection.execute(REVISION.delete())
        connection.execute(REVISION.insert().values(version_num=REVISIONS[-1]))
        if is_new:
            if lite:
                connection.exec_driver_sql(f"PRAGMA application_id={location.APPLICATION_ID}")
            facts = {"application": "fuseplan", "schema_version": str(SCHEMA_VERSION), "created": now()}
            for name, value in facts.items():
                upsert(connection, META, {"name": name, "value": value})
        check_columns(connection)


def check_schema(engine: sa.Engine) -> str | None:
    """Revision of the tables, None of an empty database; DatabaseError: unreadable, foreign, or of another schema."""

    def ask() -> dict[str, str] | None:
        with connected(engine) as connection:
            return _facts(connection)

    facts = insist(engine.url, ask, patient=False)
    if facts is not None and facts.get("schema_version") != str(SCHEMA_VERSION):
        raise errors.SchemaVersionError(
            "{} has schema version {}, this fuseplan reads {}; it was left as it is: use the fuseplan that wrote it, "
            "or pass another file with {}", location_name(engine.url), brief(facts.get("schema_version")),
            SCHEMA_VERSION, Argument("db"),
        )
    return None if facts is None else facts.get("", REVISIONS[0])


def _facts(connection: sa.Connection) -> dict[str, str] | None:
    """What META says, in one round trip where the database is up to date; None where there are no tables."""
    try:
        return {str(name): str(value) for name, value in connection.execute(_FACTS_AND_REVISION)}
    except (OperationalError, ProgrammingError) as error:  # a table is missing
        is_busy = isinstance(database_error(error, connection.engine), errors.BusyDatabaseError)
        if error.connection_invalidated or is_busy:
            raise
        connection.rollback()
    names = set(sa.inspect(connection).get_table_names())
    if META.name in names:
        return {str(name): str(value) for name, value in connection.execute(_FACTS)}
    if names and connection.dialect.name == "sqlite":
        listed = plain(", ".join(sorted(names)[:3]))
        raise errors.ForeignDatabaseError(
            "{} holds tables of another application ({}); pass another file with {}",
            location_name(connection.engine.url), listed, Argument("db"),
        )
    return None


def check_columns(connection: sa.Connection, wanted: Iterable[sa.Table] = METADATA.tables.values()) -> None:
    """Raise :class:`ForeignDatabaseError` unless every table is there with the columns that this version writes."""
    found = sa.inspect(connection).get_multi_columns()
    there = {table: {column["name"] for column in columns} for (_schema, table), columns in found.items()}
    for table in wanted:
        if missing := {column.name for column in table.columns} - there.get(table.name, set()):
            raise errors.ForeignDatabaseError(
                "{}: table {} has no {}, so this fuseplan did not write it; it was left as it is: pass another file "
                "with {}", location_name(connection.engine.url), table.name, ", ".join(sorted(missing)), Argument("db"),
            )


def upsert(
    connection: sa.Connection, table: sa.Table, row: Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> None:
    """Insert ``row``, or make ``changes`` to the row of the same primary key; by default it is replaced."""
    keys = [column.name for column in table.primary_key]
    if changes is None:
        changes = {name: value for name, value in row.items() if name not in keys}
    if dialect := DIALECTS.get(connection.dialect.name):
        insert = dialect.insert(table).values(**row)
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=dict(changes)))
        return
    same = [table.c[name] == row[name] for name in keys]
    if connection.execute(table.update().where(*same).values(**changes)).rowcount == 0:
        connection.execute(table.insert().values(**row))
