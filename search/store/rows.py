"""Records as database rows, and rows as JSON; and which misses are kept of too many."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, bindparam, func, select

from fuseplan.costmodel.device import SCHEMA_VERSION as SPEC_VERSION
from fuseplan.costmodel.device import DeviceSpec
from fuseplan.kernels.ir.backend import config_key
from fuseplan.search.errors import RecordError, brief
from fuseplan.search.store import codec, tables
from fuseplan.search.store.limits import Count, Label, Time, form
from fuseplan.search.store.record import PlanRecord, RecordKey, Trial, TuningRecord, Versions, now

R = TypeVar("R", TuningRecord, PlanRecord)
_T = TypeVar("_T")
#: What the captures of regions that were missed are called, before their keys; and that of how many were dropped.
MISSED, DROPPED = "missed/", "dropped-misses"
#: Misses and graphs of missed regions that a database keeps. Of more it keeps seven eighths of that, so that what comes
#: next is counted for a while before it has to be among the most frequent.
MOST_MISSES, MOST_GRAPHS = 4096, 256
_IS_GRAPH = tables.CAPTURES.c.name.startswith(MISSED, autoescape=True)
#: What a device or a capture is called: ``cpu-...``, ``summary/...``.
_NAME = form(r"[A-Za-z0-9_.+/-]{1,255}", "a name")


def same_key(table: Table, key: RecordKey) -> ColumnElement[bool]:
    """The condition that a row of ``table`` has exactly this key."""
    return and_(*(table.c[name] == value for name, value in asdict(key).items()))


@functools.cache
def records_of(table: Table) -> Select[Any]:
    """Records of some ``:workloads`` in one context. Made once: to build a statement costs more than to run it."""
    columns = table.c
    return select(columns.workload, columns.label, columns.payload, columns.checksum).where(
        columns.workload.in_(bindparam("workloads", expanding=True)),
        *(columns[name] == bindparam(name) for name in ("device", "regime", "numerics")),
    )


def record_row(record: TuningRecord | PlanRecord) -> dict[str, Any]:
    """The row that stores a record."""
    payload = codec.dumps(record)
    return asdict(record.key) | {
        "label": record.label,
        "versions": codec.dumps(record.evidence.versions),
        "payload": payload,
        "checksum": codec.checksum(payload),
        "created": record.evidence.created,
    }


def trial_row(trial: Trial, versions: Versions) -> dict[str, Any]:
    """The row that stores a trial."""
    return asdict(trial.key) | {
        "backend": trial.backend,
        "config_hash": codec.checksum(config_key(trial.config)),
        "versions": codec.dumps(versions),
        "payload": codec.dumps(trial),
        "created": now(),
        "open": 1,
        "median_us": trial.median_us,
    }


def json_row(key: Mapping[str, str], value: Mapping[str, Any]) -> dict[str, Any]:
    """The row that stores a JSON object."""
    try:
        payload = json.dumps(dict(value), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{dict(key)}: cannot be stored as JSON: {error}") from error
    return {**key, "payload": payload, "checksum": codec.checksum(payload), "created": now()}


# -- reading: rows may hold anything, whatever their columns were declared to hold -----------------------------


def read_record(cls: type[R], row: Mapping[str, Any]) -> R:
    """The record in a row; :class:`RecordError` where it cannot have been written here, or was damaged since."""
    record = codec.loads(cls, _payload(row))
    _check_key(row, record.key)
    return record


def read_trial(row: Mapping[str, Any]) -> Trial:
    """The trial in a row; errors as :func:`read_record`."""
    trial = codec.loads(Trial, row["payload"])
    _check_key(row, trial.key)
    if (row["backend"], row["config_hash"]) != (trial.backend, codec.checksum(config_key(trial.config))):
        raise RecordError("is stored under another configuration")
    codec.loads(Versions, row["versions"])
    return trial


def read_miss(row: Mapping[str, Any]) -> dict[str, Any]:
    """A miss's columns, its payload decoded; errors as :func:`read_record`."""
    miss = {name: row[name] for name in tables.MISSES.c.keys()}  # noqa: SIM118
    return asdict(codec.from_data(_Miss, miss | {"payload": codec.parse(row["payload"], "payload")}))


def read_json(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the JSON object of a row that :func:`json_row` made; errors as :func:`read_record`."""
    name = next(iter(row.values()))
    value = codec.parse(_payload(row), "payload")
    if not isinstance(value, dict):
        raise RecordError("payload: expected an object")
    check_name(name)
    return name, value


def check_name(name: object) -> None:
    """RecordError where ``name`` is not what a device or a capture may be called."""
    if not isinstance(name, str) or _NAME(name):
        raise RecordError(f"name: {brief(name)} is not a name")


def read_device(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key of a device and its spec, as the JSON object it was stored from; errors as :func:`read_record`."""
    name, spec = read_json(row)
    device_spec(spec)
    return name, spec


def device_spec(data: Mapping[str, Any]) -> DeviceSpec:
    """The device spec that was stored as a JSON object; errors as :func:`read_record`."""
    version = data.get("schema_version")
    if version != SPEC_VERSION:
        raise RecordError(f"DeviceSpec: has schema version {brief(version)}, this fuseplan reads {SPEC_VERSION}")
    return codec.from_data(DeviceSpec, {name: value for name, value in data.items() if name != "schema_version"})


@dataclass(frozen=True, kw_only=True)
class _Miss(RecordKey):
    """The columns of a miss."""

    label: Label
    payload: Mapping[str, Any]
    first_seen: Time
    count: Count


def _payload(row: Mapping[str, Any]) -> str:
    payload = row["payload"]
    if not isinstance(payload, str):
        raise RecordError(f"payload: expected text, found {type(payload).__name__}")
    if codec.checksum(payload) != row["checksum"]:
        raise RecordError("checksum does not match")
    return payload


def _check_key(row: Mapping[str, Any], key: RecordKey) -> None:
    if any(row[name] != value for name, value in asdict(key).items()):
        raise RecordError("is stored under another key")


#: What reads a row of each table, and raises :class:`RecordError` where nobody can.
READERS: Mapping[Table, Callable[[Mapping[str, Any]], Any]] = {
    tables.TUNINGS: functools.partial(read_record, TuningRecord),
    tables.PLANS: functools.partial(read_record, PlanRecord),
    tables.DEVICES: read_device,
    tables.CAPTURES: read_json,
    tables.TRIALS: read_trial,
    tables.MISSES: read_miss,
}


# -- misses -----------------------------------------------------------------------------------------------------


def too_many_misses(connection: Connection) -> bool:
    """Whether there is something for :func:`trim_misses` to drop."""
    graphs = select(func.count()).select_from(tables.CAPTURES).where(_IS_GRAPH).scalar_subquery()
    found = connection.execute(select(func.count(), graphs).select_from(tables.MISSES)).one()
    return bool(found[0] > MOST_MISSES or found[1] > MOST_GRAPHS)


def trim_misses(connection: Connection) -> None:
    """Drop the misses and graphs that came least, of these the oldest, and add up how many misses went.

    Rows are changed in the order in which they are logged: two processes would else wait for each other.
    """
    table, captures = tables.MISSES, tables.CAPTURES
    found = [row._asdict() for row in connection.execute(select(table))]
    rows = sorted(((_counted(row), row) for row in found), key=lambda one: one[0])
    kept = _most(rows, MOST_MISSES)
    keys = [tuple(row[column.name] for column in table.primary_key) for _, row in rows[: len(rows) - len(kept)]]
    dropped = 0
    for key in sorted(keys):
        same = (column == value for column, value in zip(table.primary_key, key, strict=True))
        dropped += connection.execute(table.delete().where(*same)).rowcount
    counts: Counter[str] = Counter()
    for (count, _, region), _ in kept:
        counts[MISSED + region] += count
    stored = connection.execute(select(captures.c.name, captures.c.created).where(_IS_GRAPH)).all()
    needed = sorted((counts[name], created, name) for name, created in stored if counts[name])
    graphs = {name for *_, name in _most(needed, MOST_GRAPHS)}
    for gone in sorted({name for name, _ in stored} - graphs):
        connection.execute(captures.delete().where(captures.c.name == gone))
    if dropped:
        name = {"name": DROPPED}
        tables.upsert(connection, captures, json_row(name, {}), name)  # its row is there, and nobody else's to change
        with contextlib.suppress(RecordError):
            for row in connection.execute(select(captures).where(captures.c.name == DROPPED)):
                dropped += dropped_misses(read_json(row._asdict())[1])
        tables.upsert(connection, captures, json_row(name, {"misses": dropped}))


def _most(ascending: list[_T], limit: int) -> list[_T]:
    return ascending if len(ascending) <= limit else ascending[-(limit - limit // 8):]


def _counted(row: Mapping[str, Any]) -> tuple[int, str, str]:
    """How often a miss came, when first, and the region of its graph; nothing of one that cannot be read."""
    try:
        miss = read_miss(row)
    except RecordError:
        return 0, "", ""
    return miss["count"], miss["first_seen"], str(miss["payload"].get("region", ""))


def dropped_misses(capture: Mapping[str, Any]) -> int:
    """How many misses were dropped, as the capture :data:`DROPPED` has it."""
    count = capture.get("misses")
    return count if type(count) is int and count > 0 else 0
