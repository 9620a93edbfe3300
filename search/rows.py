"""Records as database rows, and rows as JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, bindparam, select

from fuseplan.kernels.backend import config_key
from fuseplan.search import codec
from fuseplan.search.errors import RecordError
from fuseplan.search.record import PlanRecord, RecordKey, Trial, TuningRecord, Versions, now

#: Keys in one statement; databases bound the number of parameters.
_BATCH = 500


def key_columns(key: RecordKey) -> dict[str, Any]:
    """The identity columns."""
    return {"workload": key.workload, "device": key.device, "regime": key.regime, "numerics": key.numerics}


def same_key(table: Table, key: RecordKey) -> ColumnElement[bool]:
    """The condition that a row of ``table`` has exactly this key."""
    return and_(*(table.c[name] == value for name, value in key_columns(key).items()))


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


def batches(keys: Iterable[RecordKey]) -> Iterator[dict[str, Any]]:
    """Parameters of :func:`records_of` that ask for all of ``keys`` in as few statements as may be."""
    contexts: dict[tuple[str, str, str], list[str]] = {}
    for key in keys:
        contexts.setdefault((key.device, key.regime, key.numerics), []).append(key.workload)
    for (device, regime, numerics), workloads in contexts.items():
        for start in range(0, len(workloads), _BATCH):
            chunk = workloads[start : start + _BATCH]
            yield {"workloads": chunk, "device": device, "regime": regime, "numerics": numerics}


def record_row(record: TuningRecord | PlanRecord) -> dict[str, Any]:
    """The row that stores a record."""
    payload = codec.dumps(record)
    return key_columns(record.key) | {
        "label": record.label,
        "versions": codec.dumps(record.evidence.versions),
        "payload": payload,
        "checksum": codec.checksum(payload),
        "created": record.evidence.created,
    }


def trial_row(trial: Trial, versions: Versions) -> dict[str, Any]:
    """The row that stores a trial."""
    return key_columns(trial.key) | {
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


def json_or_empty(text: str) -> dict[str, Any]:
    """The JSON object in ``text``; {} where there is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
