"""What a stored number or text may be: limits annotate fields, and :mod:`.codec` refuses what breaks them.

Stored data may have been written by anybody, so what could not have been written here is damage, whatever its checksum
says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, TypeAlias

from fuseplan.search.errors import brief

#: Why a value is impossible, "" when it is possible; its type has been checked.
Limit: TypeAlias = Callable[[Any], str]


def between(least: float, most: float) -> Limit:
    """Numbers from ``least`` to ``most``, both included."""

    def limit(value: Any) -> str:
        if least <= value <= most:
            return ""
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value!r} is not finite"
        return f"{brief(value)} is not between {least:g} and {most:g}"

    return limit


def form(pattern: str, what: str) -> Limit:
    """Text that matches ``pattern`` from end to end; ``what`` says in words what that is."""
    matches = re.compile(pattern).fullmatch
    return lambda value: "" if matches(value) else f"{brief(value)} is not {what}"


def _positions(value: Any) -> str:
    if len(set(value)) < len(value):
        return f"{brief(value)} names an op twice"
    return "" if not value or (min(value) >= 0 and max(value) < 2**31) else f"{brief(value)} are no positions"


def _short_line(value: Any) -> str:
    return "" if value.isprintable() and len(value) <= 500 else f"{brief(value)} is no label"


#: Far above what anybody measures, far below where sums and ratios overflow.
_MOST = 1e15
_AMOUNT = between(0.0, _MOST)
#: A time, a size or another amount.
Amount: TypeAlias = Annotated[float, _AMOUNT]
#: A relative error: that of a result which is infinite or NaN is stored as the largest.
WORST_ERROR = 1e300
Error: TypeAlias = Annotated[float, between(0.0, WORST_ERROR)]
#: A time that was measured: nothing takes none.
Measured: TypeAlias = Annotated[float, between(1e-9, _MOST)]
#: A part of a whole; below it by what rounding makes of none.
Fraction: TypeAlias = Annotated[float, between(-1e-9, 1.0)]
#: A relative gain or a difference: may be negative.
Signed: TypeAlias = Annotated[float, between(-_MOST, _MOST)]
Count: TypeAlias = Annotated[int, between(0, 2**62)]
#: A name of the project's own (a back end, a parameter, one of its values), or nothing.
Word: TypeAlias = Annotated[str, form(r"[A-Za-z0-9_.+-]{0,64}", "a word")]
#: A workload or a device, as keys have them (a hash of the one, a slug with a hash of the other).
Key: TypeAlias = Annotated[str, form(r"[A-Za-z0-9_.+-]{1,255}", "a key")]
OptionalKey: TypeAlias = Annotated[str, form(r"[A-Za-z0-9_.+-]{0,255}", "a key")]
RegimeName: TypeAlias = Annotated[str, form("eager|graph", "a regime")]
NumericsName: TypeAlias = Annotated[str, form("fp32|eager", "one of the numerics")]
Time: TypeAlias = Annotated[str, form(r"[0-9T:.+Z-]{0,40}", "a time")]
Seed: TypeAlias = Annotated[int, between(-(2**63), 2**64)]
#: What people read, made from names of ops and sizes.
Label: TypeAlias = Annotated[str, _short_line]
ParameterValue: TypeAlias = Annotated[int, between(-(2**31), 2**31 - 1)]
#: Positions of ops in a region.
Positions: TypeAlias = Annotated[tuple[int, ...], _positions]

_CALL = form(r"[A-Za-z0-9_.+-]{0,128}", "a name of a call")


def possible_work(value: Any) -> str:
    """The limit of a :class:`~fuseplan.costmodel.work.Work`: amounts, a call's name, and cold bytes that are moved."""
    found: list[Any] = [value]
    for one in found:
        if isinstance(one, tuple):
            found += one
        elif isinstance(one, Mapping) or is_dataclass(one):
            found += (one if isinstance(one, Mapping) else vars(one)).values()
        elif reason := (_CALL if isinstance(one, str) else _AMOUNT)(one):
            return reason
    return "" if value.cold_bytes <= value.dram_bytes else "cold_bytes is more than dram_bytes"
