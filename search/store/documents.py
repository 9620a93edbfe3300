"""What the planner keeps in the tuning database beside records and plans: dataclasses under keys with a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from fuseplan.search.errors import RecordError
from fuseplan.search.store import codec

_T = TypeVar("_T")


class CaptureStore(Protocol):
    """Where they are kept: a database, or a layered one."""

    def captures(self, prefix: str) -> Mapping[str, Mapping[str, Any]]: ...


def stored(database: CaptureStore, kind: type[_T], prefix: str) -> list[_T]:
    """Everything of one kind that is kept under ``prefix``; what cannot be read is left out."""
    found = []
    for data in database.captures(f"{prefix}/").values():
        try:
            found.append(codec.from_data(kind, data))
        except RecordError:
            continue
    return found
