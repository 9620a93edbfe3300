"""Frozen dataclasses to and from JSON, by field name; strict, so a foreign or damaged record is never half-read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from fuseplan.search.errors import RecordError, brief, plain
from fuseplan.search.store.limits import Limit

T = TypeVar("T")
#: Reads a value from what JSON holds; ValueError where it does not fit.
_Decoder: TypeAlias = Callable[[Any], Any]
#: Half of a surrogate pair, as JSON writes it.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
#: Characters of a stored name in a message.
_LONGEST = 60


class CaptureStore(Protocol):
    """Where the planner keeps dataclasses beside records and plans: a database, or a layered one."""

    def captures(self, prefix: str) -> Mapping[str, Mapping[str, Any]]: ...

    def capture_names(self, prefix: str) -> set[str]: ...


def stored(database: CaptureStore, kind: type[T], prefix: str, name: str = "") -> dict[str, T]:
    """Captures of one kind under ``prefix`` whose names begin with ``name``; what cannot be read is left out."""
    found = {}
    for key, data in database.captures(f"{prefix}/{name}").items():
        with contextlib.suppress(RecordError):
            found[key.removeprefix(f"{prefix}/")] = from_data(kind, data)
    return found


def dumps(record: Any) -> str:
    """Canonical JSON of a dataclass: sorted keys, no spaces, finite numbers only."""
    try:
        data = dataclasses.asdict(record, dict_factory=_written)
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{type(record).__name__} cannot be stored as JSON: {error}") from error


def _written(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """An empty ``run`` is left out: older versions read no field that they do not know."""
    return {name: value for name, value in fields if name != "run" or value}


def loads(cls: type[T], text: str) -> T:
    """The ``cls`` that :func:`dumps` wrote; :class:`RecordError` where ``text`` is no JSON of one."""
    return from_data(cls, parse(text, cls.__name__))


def from_data(cls: type[T], data: Any) -> T:
    """The ``cls`` that parsed JSON describes; :class:`RecordError` where a field is missing, unknown or impossible."""
    kind: Any = cls
    try:
        value: T = _decoder(kind)(data)
    except ValueError as error:
        raise RecordError(plain(str(_inside(cls.__name__, error)))) from None
    return value


def parse(text: object, what: str) -> Any:
    """What stored JSON text, called ``what`` in a :class:`RecordError`, holds.

    Refused, though Python reads them: numbers that JSON does not have, a name twice in one object, half a character.
    """
    if not isinstance(text, str):
        raise RecordError(f"{what}: expected text, found {type(text).__name__}")
    collects = gc.isenabled()
    gc.disable()  # deep in nested text, what a collection calls would have no stack left, and Python prints that
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        if _HALF.search(text):  # perhaps half a character, which no file and no terminal can hold
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise RecordError(f"{what} is not JSON (nested too deeply)") from None
    except ValueError as error:  # not JSON, or a number of more digits than Python reads
        raise RecordError(f"{what} is not JSON ({error})") from None
    finally:
        if collects:
            gc.enable()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name stands twice in {brief(found)}")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def checksum(text: str) -> str:
    """sha256 of a stored text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class _Misfit(ValueError):
    """Data that does not fit its type: where below the record, and why (``.config.tile: expected int, found 'x'``)."""


def _inside(where: str, error: ValueError) -> _Misfit:
    return _Misfit(f"{where}{error}" if isinstance(error, _Misfit) else f"{where}: {error}")


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    """What reads a value of a type; made once per type, because a look-up reads hundreds of values."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return functools.partial(_limited, _decoder(args[0]), *args)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    if origin in (Union, types.UnionType):
        return functools.partial(_one_of_kinds, [_decoder(one) for one in args if one is not type(None)], args)
    if origin is tuple:
        repeated = args[1:] == (Ellipsis,)
        return functools.partial(_items, [_decoder(one) for one in (args[:1] if repeated else args)], repeated)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return functools.partial(_mapping, *map(_decoder, args))
    if origin is Literal:
        return functools.partial(_one_of, args)
    if kind is Any:
        return lambda data: data
    return _float if kind is float else functools.partial(_scalar, kind)


def _dataclass_decoder(kind: Any) -> _Decoder:
    hints = get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields}
    missing = dataclasses.MISSING
    required = {field.name for field in fields if field.default is missing and field.default_factory is missing}
    find_flaw: Callable[[Any], str] = getattr(kind, "flaw", lambda value: "")
    retired: frozenset[str] = getattr(kind, "RETIRED", frozenset())  # what older versions wrote

    def decode(data: Any) -> Any:
        _expect(data, dict, "an object")
        if retired and not retired.isdisjoint(data):
            data = {name: value for name, value in data.items() if name not in retired}
        if not required <= data.keys() <= decoders.keys():
            unknown, left_out = sorted(data.keys() - decoders.keys()), sorted(required - data.keys())
            raise ValueError(f"unknown fields {brief(unknown)}, missing fields {left_out}")
        value = kind(**_values(decoders, data))
        if reason := find_flaw(value):
            raise ValueError(reason)
        return value

    return decode


def _expect(data: Any, kind: type, what: str) -> None:
    if not isinstance(data, kind):
        raise ValueError(f"expected {what}, found {type(data).__name__}")


def _values(decoders: Mapping[str, _Decoder], data: dict[str, Any]) -> dict[str, Any]:
    found = {}
    name = ""
    try:
        for name, value in data.items():
            found[name] = decoders[name](value)
    except ValueError as error:
        raise _inside(f".{name}"[:_LONGEST], error) from None
    return found


def _mapping(decode_name: _Decoder, decode_value: _Decoder, data: Any) -> dict[str, Any]:
    _expect(data, dict, "an object")
    for name in data:
        decode_name(name)
    return _values(dict.fromkeys(data, decode_value), data)


def _items(decoders: list[_Decoder], repeated: bool, data: Any) -> tuple[Any, ...]:
    """A list, all of one kind or one item of each kind."""
    _expect(data, list, "a list")
    if not repeated and len(data) != len(decoders):
        raise ValueError(f"expected {len(decoders)} items, found {len(data)}")
    found: list[Any] = []
    try:
        for decode, item in zip(itertools.cycle(decoders), data, strict=False):
            found.append(decode(item))
    except ValueError as error:
        raise _inside(f"[{len(found)}]", error) from None
    return tuple(found)


def _one_of_kinds(decoders: list[_Decoder], kinds: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in kinds:
        return None
    reasons = []
    for decode in decoders:
        try:
            return decode(data)
        except ValueError as error:
            reasons.append(error)
    raise reasons[0] if len(reasons) == 1 else ValueError("; ".join(map(str, reasons)))


def _limited(decode: _Decoder, kind: Any, limit: Limit, data: Any) -> Any:
    value = data if type(data) is kind else decode(data)
    if reason := limit(value):
        raise ValueError(reason)
    return value


def _one_of(allowed: tuple[Any, ...], data: Any) -> Any:
    if data not in allowed:
        raise ValueError(f"{brief(data)} is not one of {allowed}")
    return data


def _float(data: Any) -> float:
    if type(data) is not float and type(data) is not int:
        raise ValueError(f"expected float, found {brief(data)}")
    if not abs(data) <= sys.float_info.max:
        raise ValueError(f"{brief(data)} is not finite")
    return float(data)


def _scalar(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {brief(data)}")
    return data
