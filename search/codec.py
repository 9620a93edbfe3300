"""Frozen dataclasses to and from JSON, by field name; strict, so a foreign or damaged record is never half-read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from fuseplan.search.errors import RecordError

T = TypeVar("T")
#: Reads a value from what JSON holds.
Decoder: TypeAlias = Callable[[Any], Any]


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
    kind: Any = cls
    try:
        value: T = _decoder(kind)(data)
    except _Misfit as misfit:
        root = cls.__name__
        raise RecordError("; ".join(f"{root}{where}: {reason}" for where, reason in misfit.reasons)) from None
    return value


def checksum(text: str) -> str:
    """sha256 of a stored text."""
    return hashlib.sha256(text.encode()).hexdigest()


class _Misfit(Exception):
    """Data that does not fit its type: where below the record, and why; several where a union offers a choice."""

    def __init__(self, *reasons: tuple[str, str]) -> None:
        super().__init__()
        self.reasons = reasons

    def inside(self, where: str) -> _Misfit:
        return _Misfit(*((where + path, reason) for path, reason in self.reasons))


def _misfit(reason: str) -> _Misfit:
    return _Misfit(("", reason))


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """What reads a value of a type; made once per type, because a look-up reads hundreds of values."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    if origin in (Union, types.UnionType):
        return _union_decoder(args)
    if origin is tuple:
        return _sequence_decoder(args[0]) if len(args) == 2 and args[1] is Ellipsis else _tuple_decoder(args)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_decoder(args[1])
    if origin is Literal:
        return _literal_decoder(args)
    return _float if kind is float else _scalar_decoder(kind)


def _dataclass_decoder(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields}
    required = {
        field.name for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def decode(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _misfit(f"expected an object, found {type(data).__name__}")
        if not required <= data.keys() <= decoders.keys():
            unknown, missing = sorted(data.keys() - decoders.keys()), sorted(required - data.keys())
            raise _misfit(f"unknown fields {unknown}, missing fields {missing}")
        return kind(**_decode_values(decoders, data))

    return decode


def _decode_values(decoders: Mapping[str, Decoder], data: dict[str, Any]) -> dict[str, Any]:
    values = {}
    name = ""
    try:
        for name, value in data.items():
            values[name] = decoders[name](value)
    except _Misfit as misfit:
        raise misfit.inside(f".{name}") from None
    return values


def _mapping_decoder(kind: Any) -> Decoder:
    decode_value = _decoder(kind)

    def decode(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise _misfit(f"expected an object, found {type(data).__name__}")
        return _decode_values(dict.fromkeys(data, decode_value), data)

    return decode


def _union_decoder(choices: tuple[Any, ...]) -> Decoder:
    optional = type(None) in choices
    decoders = [_decoder(choice) for choice in choices if choice is not type(None)]

    def decode(data: Any) -> Any:
        if data is None and optional:
            return None
        reasons: list[tuple[str, str]] = []
        for decode_choice in decoders:
            try:
                return decode_choice(data)
            except _Misfit as misfit:
                reasons += misfit.reasons
        raise _Misfit(*reasons)

    return decode


def _sequence_decoder(kind: Any) -> Decoder:
    decode_item = _decoder(kind)

    def decode(data: Any) -> tuple[Any, ...]:
        return _decode_items(itertools.repeat(decode_item), _list(data))

    return decode


def _tuple_decoder(kinds: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(kind) for kind in kinds]

    def decode(data: Any) -> tuple[Any, ...]:
        if len(_list(data)) != len(decoders):
            raise _misfit(f"expected {len(decoders)} items, found {len(data)}")
        return _decode_items(decoders, data)

    return decode


def _decode_items(decoders: Iterable[Decoder], data: list[Any]) -> tuple[Any, ...]:
    values: list[Any] = []
    try:
        for decode_item, item in zip(decoders, data, strict=False):
            values.append(decode_item(item))
    except _Misfit as misfit:
        raise misfit.inside(f"[{len(values)}]") from None
    return tuple(values)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise _misfit(f"expected a list, found {type(data).__name__}")
    return data


def _literal_decoder(allowed: tuple[Any, ...]) -> Decoder:
    def decode(data: Any) -> Any:
        if data not in allowed:
            raise _misfit(f"{data!r} is not one of {allowed}")
        return data

    return decode


def _float(data: Any) -> float:
    if isinstance(data, int | float) and not isinstance(data, bool):
        if not math.isfinite(data):
            raise _misfit(f"{data!r} is not finite")
        return float(data)
    raise _misfit(f"expected float, found {data!r}")


def _scalar_decoder(kind: Any) -> Decoder:
    readable = kind in (int, str, bool)

    def decode(data: Any) -> Any:
        if readable and type(data) is kind:
            return data
        raise _misfit(f"expected {getattr(kind, '__name__', kind)}, found {data!r}")

    return decode
