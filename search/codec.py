"""Frozen dataclasses to and from JSON, by field name; strict, so a foreign or damaged record is never half-read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fuseplan.search.errors import RecordError

T = TypeVar("T")


def dumps(record: Any) -> str:
    """Canonical JSON of a dataclass: sorted keys, no spaces, finite numbers only."""
    try:
        return json.dumps(dataclasses.asdict(record), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{type(record).__name__} cannot be stored as JSON: {error}") from error


def loads(cls: type[T], text: str) -> T:
    """The ``cls`` that :func:`dumps` wrote.

    Raises:
        RecordError: ``text`` is not JSON, or a field is missing, unknown or of the wrong type.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{cls.__name__}: not valid JSON ({error})") from error
    value: T = _decode(cls, data, cls.__name__)
    return value


def checksum(text: str) -> str:
    """sha256 of a stored text."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _fields(cls: type[Any]) -> Mapping[str, tuple[Any, bool]]:
    """Field name -> (type, required)."""
    hints = get_type_hints(cls)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    }


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), data, where)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, where)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise RecordError(f"{where}: expected an object, found {type(data).__name__}")
        return {name: _decode(get_args(kind)[1], value, f"{where}.{name}") for name, value in data.items()}
    if origin is Literal:
        if data not in get_args(kind):
            raise RecordError(f"{where}: {data!r} is not one of {get_args(kind)}")
        return data
    return _decode_scalar(kind, data, where)


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise RecordError(f"{where}: expected an object, found {type(data).__name__}")
    fields = _fields(kind)
    unknown = sorted(set(data) - set(fields))
    missing = sorted(name for name, (_, required) in fields.items() if required and name not in data)
    if unknown or missing:
        raise RecordError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    return kind(**{name: _decode(fields[name][0], value, f"{where}.{name}") for name, value in data.items()})


def _decode_union(choices: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in choices:
        return None
    reasons = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _decode(choice, data, where)
        except RecordError as error:
            reasons.append(str(error))
    raise RecordError("; ".join(reasons) or f"{where}: {data!r} fits no type")


def _decode_tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise RecordError(f"{where}: expected a list, found {type(data).__name__}")
    kinds = (args[0],) * len(data) if len(args) == 2 and args[1] is Ellipsis else args
    if len(kinds) != len(data):
        raise RecordError(f"{where}: expected {len(kinds)} items, found {len(data)}")
    return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        if not math.isfinite(data):
            raise RecordError(f"{where}: {data!r} is not finite")
        return float(data)
    if kind in (int, str, bool) and type(data) is kind:
        return data
    raise RecordError(f"{where}: expected {getattr(kind, '__name__', kind)}, found {data!r}")
