"""The misses that a database has, for a list of them. Needs no PyTorch, so that listing is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuseplan.costmodel.devices import is_cpu, kind_of_key
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.record import RecordKey
from fuseplan.search.store.rows import DROPPED, MISSED, dropped_misses

TUNED_SINCE = "tuned since then"
MISS_COLUMNS = ("label", "count", "place", "tunable", "first_seen", "last_seen", "regime", "numerics", "key")


@dataclass(frozen=True)
class Miss:
    """A logged miss.

    Attributes:
        place: Where in the model it is; "" where that is not known.
        first_seen, last_seen: ISO 8601 UTC times; ``last_seen`` is "" where an older version logged it.
        region: Key of the region that is tuned for it; "" without a graph.
        why: Why it cannot be tuned, or need not be; "" where it can.
    """

    key: RecordKey
    label: str
    count: int
    place: str
    first_seen: str
    last_seen: str
    region: str
    why: str

    def row(self) -> tuple[str | int, ...]:
        """What a table has of it (:data:`MISS_COLUMNS`). ``tunable`` is yes, or the reason why not."""
        return (self.label, self.count, self.place, self.why or "yes", self.first_seen, self.last_seen,
                self.key.regime, self.key.numerics, self.key.workload)


def logged_misses(database: Database | LayeredDatabase, device: str) -> tuple[Miss, ...]:
    """The misses of a device, most frequent first."""
    rows = [row for row in database.misses() if row["device"] == device]
    keys = [RecordKey(row["workload"], row["device"], row["regime"], row["numerics"]) for row in rows]
    plans = database.get_plans(keys)
    graphs = database.capture_names(MISSED)
    found = []
    for key, row in zip(keys, rows, strict=True):
        names = ("place", "last_seen", "region", "untunable")
        place, seen, region, why = (stored_text(row["payload"], name) for name in names)
        if plans[key].hit is not None:
            why = TUNED_SINCE
        elif key.regime == "graph" and is_cpu(kind_of_key(device)):
            why = "it is for CUDA graphs, which a CPU does not have"
        elif f"{MISSED}{region}" in graphs:
            why = ""
        elif not why:
            why = "its graph is not stored; run the model again"
        found.append(Miss(key, row["label"], row["count"], place, row["first_seen"], seen, region, why))
    return tuple(found)


def dropped(database: Database | LayeredDatabase) -> int:
    """How many misses the database has dropped, for they came least."""
    return dropped_misses(database.captures(DROPPED).get(DROPPED, {}))


def stored_text(payload: Mapping[str, Any], name: str) -> str:
    """Text of a payload, which may hold anything."""
    value = payload.get(name, "")
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 1000 else ""
