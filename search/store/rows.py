"""Records as database rows, and rows as JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, Table, and_, bindparam, select

from fuseplan.costmodel.device import SCHEMA_VERSION as SPEC_VERSION
from fuseplan.costmodel.device import DeviceSpec
from fuseplan.kernels.ir.backend import config_key
from fuseplan.search.errors import RecordError, brief
from fuseplan.search.store import codec, tables
from fuseplan.search.store.limits import Count, Label, Time, form
from fuseplan.search.store.record import PlanRecord, RecordKey, Trial, TuningRecord, Versions, now

R = TypeVar("R", TuningRecord, PlanRecord)
#: What a device or a capture is called: ``cpu-...``, ``summary/...``.
_NAME = form(r"[A-Za-z0-9_.+/-]{1,255}", "a name")


def same_key(table: Table, key: RecordKey) -> ColumnElement[bool]:
    """The condition that a row of ``table`` has exactly this key."""
    return and_(*(table.c[name] == value for name, value in asdict(key).items()))


@functools.cache
def records_of(table: Table) -> Select[Any]:
    """The records of some workloads in one context: ``:workloads``, ``:device``, ``:regime``, ``:numerics``.

    Made once per table: to build a statement costs more than to run it.
    """
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
    """The record in a row with its key columns; :class:`RecordError` where the row is damaged, or holds what cannot
    have been written here.
    """
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
