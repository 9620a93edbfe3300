"""What dispatch missed: written down with its graph, listed, and tuned from that.

A miss is a region, or a part of one, without a tuned plan. The graph of its region is kept, in few bytes and for few
regions, so that ``plan tune --misses`` needs no model. Dispatch waits for none of this.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.tuning.miss_list import TUNED_SINCE, Miss, logged_misses, stored_text
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.work.extract import find_region, region_data, region_graph
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.record import RecordKey, now
from fuseplan.search.store.rows import MISSED, MOST_GRAPHS

#: Bytes of a graph that is kept; a transformer's layer takes 15 kB.
MOST_BYTES = 256 * 1024

logger = logging.getLogger(__name__)


def log_missed(
    database: Database, graph: DataflowGraph, regions: Iterable[Region],
    missed: Sequence[tuple[RecordKey, Region, str]],
) -> None:
    """Count misses of a static graph by key and place, and keep their regions' graphs. Never raises: a model runs
    without.
    """
    if not database.logs_misses:
        return
    try:
        homes = [(region, frozenset(region.ops)) for region in regions]
        known = {name.removeprefix(MISSED) for name in database.capture_names(MISSED)}
        graphs: dict[str, Mapping[str, Any]] = {}
        misses = []
        for key, part, place in missed:
            found: dict[str, str] = {}
            around = [home for home, ops in homes if ops.issuperset(part.ops)]
            for region in dict.fromkeys((*around, part)):  # the part alone where its region depends on more
                if region.key not in known and region.key not in graphs:
                    try:
                        graphs[region.key] = _written(graph, region, len(graphs))
                    except ValueError as error:
                        found = {"untunable": str(error)}
                        continue
                found = {"region": region.key}
                break
            specs = [graph.specs[value] for value in part.inputs]
            misses.append(Missed(key, region_label(graph, part), {
                "ops": [graph.op(name).op for name in part.ops],
                "inputs": [{"shape": list(spec.shape), "dtype": spec.dtype} for spec in specs],
                "place": place, "last_seen": now(), **found,
            }))
        database.log_misses(misses, {f"{MISSED}{key}": data for key, data in graphs.items()})
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        logger.warning("misses are not logged: %s: %s", type(error).__name__, error)


def _written(graph: DataflowGraph, region: Region, others: int) -> Mapping[str, Any]:
    """A region as data, beside ``others`` that this graph missed; ValueError, with the reason, where it cannot be kept.
    """
    if others >= MOST_GRAPHS:
        raise ValueError(f"graphs of {MOST_GRAPHS} other missed regions are kept; tune those first")
    try:
        data = region_data(graph, region)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"its graph cannot be written down: {error}") from None
    if (size := len(json.dumps(data))) > MOST_BYTES:
        raise ValueError(f"its graph takes {size // 1024} kB, more than the {MOST_BYTES // 1024} kB that are kept")
    return data


@dataclass(frozen=True)
class MissedRegion:
    """What is tuned for some misses, the most frequent first: a region, for one way to launch kernels and to round."""

    region: str
    regime: str
    numerics: str
    misses: tuple[Miss, ...]

    @property
    def count(self) -> int:
        return sum(miss.count for miss in self.misses)

    @property
    def label(self) -> str:
        """What the misses compute."""
        more = f" and {len(self.misses) - 1} more" if len(self.misses) > 1 else ""
        return f"{self.misses[0].label}{more}"

    @property
    def place(self) -> str:
        """Where in the model the most frequent of them is."""
        return self.misses[0].place


def missed_regions(misses: Iterable[Miss]) -> list[MissedRegion]:
    """The regions of ``misses``, most frequent first, that can be tuned: each once, those missed most first."""
    found: defaultdict[tuple[str, str, str], list[Miss]] = defaultdict(list)
    for miss in misses:
        if not miss.why:
            found[miss.region, miss.key.regime, miss.key.numerics].append(miss)
    regions = [MissedRegion(*of, tuple(each)) for of, each in found.items()]
    return sorted(regions, key=lambda one: (-one.count, one.region, one.regime, one.numerics))


def missed_graph(database: Database, missed: MissedRegion) -> DataflowGraph:
    """The stored graph of a missed region. PlanError where it is damaged; the model's next miss writes it anew."""
    name = f"{MISSED}{missed.region}"
    data = database.captures(name).get(name)
    try:
        if data is None:
            raise ValueError("it is damaged")
        graph, _ = region_graph(data, missed.region)
    except Exception as error:  # stored data may be anything
        database.forget_misses((), (name,))
        raise PlanError(f"the stored graph of {missed.label} cannot be used: {error}; run the model again") from None
    return graph


def to_tune(session: Session, missed: MissedRegion, graph: DataflowGraph) -> list[Region]:
    """What to plan of a missed region's graph: all, or missed parts where it has a plan that dynamic sizes cannot use.
    """
    planner = session.planner()
    whole = find_region(graph, missed.region)
    assert whole is not None
    if not planner.look_up_all(graph, [whole]):
        return [whole]
    keys = {miss.key.workload for miss in missed.misses}
    return [part for part in region_parts(graph, whole) if part.key in keys]


def forget_tuned(database: Database, store: LayeredDatabase, device: str) -> int:
    """Delete the misses of a device that have a plan by now, and graphs that no miss needs; how many misses went."""
    tuned = [miss.key for miss in logged_misses(store, device) if miss.why == TUNED_SINCE]
    gone = set(tuned)
    left = {
        stored_text(row["payload"], "region") for row in database.misses()
        if RecordKey(row["workload"], row["device"], row["regime"], row["numerics"]) not in gone
    }
    unneeded = [name for name in database.capture_names(MISSED) if name.removeprefix(MISSED) not in left]
    database.forget_misses(tuned, unneeded)
    return len(tuned)
