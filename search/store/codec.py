"""Frozen dataclasses to and from JSON, by field name; strict, so a foreign or damaged record is never half-read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from fuseplan.search.errors import RecordError
from fuseplan.search.store.limits import Limit
from fuseplan.search.store.plain import brief, plain

T = TypeVar("T")
#: Reads a value from what JSON holds.
Decoder: TypeAlias = Callable[[Any], Any]
#: Half of a surrogate pair, as JSON writes it.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
#: Characters of a stored name in a message.
_LONGEST = 60


def dumps(record: Any) -> str:
    """Canonical JSON of a dataclass: sorted keys, no spaces, finite numbers only."""
    try:
        return json.dumps(dataclasses.asdict(record), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{type(record).__name__} cannot be stored as JSON: {error}") from error


def loads(cls: type[T], text: str) -> T:
    """The ``cls`` that :func:`dumps` wrote; :class:`RecordError` where ``text`` is no JSON of one."""
    return from_data(cls, parse(text, cls.__name__))


def from_data(cls: type[T], data: Any) -> T:
    """The ``cls`` that the parsed JSON ``data`` describes. :class:`RecordError` where a field is missing, unknown, of
    the wrong type or outside its limits (:mod:`.limits`).
    """
    kind: Any = cls
    try:
        value: T = _decoder(kind)(data)
    except _Misfit as misfit:
        reasons = "; ".join(f"{cls.__name__}{where}: {reason}" for where, reason in misfit.reasons)
        raise RecordError(plain(reasons)) from None
    return value


def parse(text: object, what: str) -> Any:
    """What stored JSON text holds: no number that JSON has not, no name twice in an object, no half of a character.

    Otherwise a :class:`RecordError` begins with ``what``.
    """
    if not isinstance(text, str):
        raise RecordError(f"{what}: expected text, found {type(text).__name__}")
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        if _HALF.search(text):  # perhaps half a character, which no file and no terminal can hold
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise RecordError(f"{what} is not JSON (nested too deeply)") from None
    except ValueError as error:  # not JSON, or a number of more digits than Python reads
        raise RecordError(f"{what} is not JSON ({error})") from None


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


class _Misfit(Exception):
    """Data that does not fit its type: where below the record, and why; several where a union offers a choice."""

    def __init__(self, *reasons: tuple[str, str]) -> None:
        super().__init__()
        self.reasons = reasons

    def inside(self, where: str) -> _Misfit:
        return _Misfit(*((where[:_LONGEST] + path, reason) for path, reason in self.reasons))


def _misfit(reason: str) -> _Misfit:
    return _Misfit(("", reason))


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """What reads a value of a type; made once per type, because a look-up reads hundreds of values."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _limited_decoder(*args)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    if origin in (Union, types.UnionType):
        return _union_decoder(args)
    if origin is tuple:
        return _tuple_decoder(args)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_decoder(*args)
    if origin is Literal:
        return _literal_decoder(args)
    if kind is Any:
        return lambda data: data
    if kind is float:
        return _float
    return _scalar_decoder(kind)


def _limited_decoder(kind: Any, limit: Limit) -> Decoder:
    decode_any = _decoder(kind)

    def decode(data: Any) -> Any:
        value = data if type(data) is kind else decode_any(data)
        if reason := limit(value):
            raise _misfit(reason)
        return value

    return decode


def _dataclass_decoder(kind: Any) -> Decoder:
    hints = get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields}
    find_flaw: Callable[[Any], str] | None = getattr(kind, "flaw", None)
    required = {
        field.name for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def decode(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _misfit(f"expected an object, found {type(data).__name__}")
        if not required <= data.keys() <= decoders.keys():
            unknown, missing = sorted(data.keys() - decoders.keys()), sorted(required - data.keys())
            raise _misfit(f"unknown fields {brief(unknown)}, missing fields {missing}")
        try:
            value = kind(**_decode_values(decoders, data))
        except ValueError as error:  # the class itself refuses them
            raise _misfit(str(error)) from None
        if find_flaw is not None and (reason := find_flaw(value)):
            raise _misfit(reason)
        return value

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


def _mapping_decoder(name_kind: Any, kind: Any) -> Decoder:
    decode_name, decode_value = _decoder(name_kind), _decoder(kind)

    def decode(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise _misfit(f"expected an object, found {type(data).__name__}")
        for name in data:
            decode_name(name)
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


def _tuple_decoder(kinds: tuple[Any, ...]) -> Decoder:
    """Reads a list, of one kind where the second is an ellipsis, else of one item of each kind."""
    repeated = len(kinds) == 2 and kinds[1] is Ellipsis
    decoders = [_decoder(kind) for kind in kinds[: 1 if repeated else None]]

    def decode(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _misfit(f"expected a list, found {type(data).__name__}")
        if not repeated and len(data) != len(decoders):
            raise _misfit(f"expected {len(decoders)} items, found {len(data)}")
        return _decode_items(itertools.repeat(decoders[0]) if repeated else decoders, data)

    return decode


def _decode_items(decoders: Iterable[Decoder], data: list[Any]) -> tuple[Any, ...]:
    values: list[Any] = []
    try:
        for decode_item, item in zip(decoders, data, strict=False):
            values.append(decode_item(item))
    except _Misfit as misfit:
        raise misfit.inside(f"[{len(values)}]") from None
    return tuple(values)


def _literal_decoder(allowed: tuple[Any, ...]) -> Decoder:
    def decode(data: Any) -> Any:
        if data not in allowed:
            raise _misfit(f"{brief(data)} is not one of {allowed}")
        return data

    return decode


def _float(data: Any) -> float:
    if type(data) is not float and type(data) is not int:
        raise _misfit(f"expected float, found {brief(data)}")
    try:
        value = float(data)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise _misfit(f"{brief(data)} is not finite")
    return value


def _scalar_decoder(kind: Any) -> Decoder:
    readable = kind in (int, str, bool)

    def decode(data: Any) -> Any:
        if readable and type(data) is kind:
            return data
        raise _misfit(f"expected {getattr(kind, '__name__', kind)}, found {brief(data)}")

    return decode
