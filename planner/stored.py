"""What the planner keeps in the tuning database beside records and plans: dataclasses under keys with a prefix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from fuseplan.search import codec
from fuseplan.search.errors import RecordError

if TYPE_CHECKING:
    from fuseplan.search.database import Database

_T = TypeVar("_T")


def stored(database: Database, kind: type[_T], prefix: str) -> list[_T]:
    """Everything of one kind that is kept under ``prefix``; what cannot be read is left out."""
    found = []
    for data in database.captures(f"{prefix}/").values():
        try:
            found.append(codec.loads(kind, json.dumps(data)))
        except RecordError:
            continue
    return found
