"""Checks of workers' answers before they are used, as of an import: a worker may be wrong, or hostile.

Workers store plans themselves, and send back no more than that they have. Plans are read from the database, where they
are checked as at every look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import or_

from fuseplan.planner.errors import CaptureError, ConfigError, FuseplanError, PlanError
from fuseplan.planner.fleet.terms import Captured, RegionOutcome, WorkerDevice
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.tuning.plans import RegionPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.search.errors import RecordError, plain
from fuseplan.search.store import codec, rows, tables
from fuseplan.search.store.database import Lookup

#: Microseconds that nothing takes which is measured.
_LONGEST_US = 1e12


def device_of_worker(found: object, kind: str, offered: str) -> WorkerDevice:
    """What a worker says of its device; ``offered`` is the key that it has told the scheduler.

    Raises:
        ConfigError: It is no description of such a device.
    """
    try:
        if not isinstance(found, WorkerDevice):
            raise RecordError("it is none")
        one = codec.from_data(WorkerDevice, asdict(found))
    except RecordError as error:
        raise ConfigError(f"a worker's description of its device is refused: {error}") from None
    if one.device != offered or one.target.device_type != kind:
        raise ConfigError(f"a worker on {one.host} describes another device than it has offered; start it again")
    return one


def captured(found: object) -> Captured:
    """A capture, or one that failed where it is none."""
    if (
        isinstance(found, Captured) and isinstance(found.text, str) and _is_time(found.elapsed_s)
        and isinstance(found.failure, FuseplanError | None)
    ):
        return found
    return Captured("", CaptureError("what a worker sent back is no capture"), 0.0)


def outcome(found: object) -> RegionOutcome:
    """The outcome of a region; a failure where the answer is no outcome."""
    if (
        isinstance(found, RegionOutcome) and isinstance(found.decided, tuple) and isinstance(found.rankings, Mapping)
        and isinstance(found.failure, Exception | None) and _is_time(found.elapsed_s)
    ):
        return found
    return RegionOutcome(failure=PlanError("what its worker sent back is no outcome"))


def stored_plan(session: Session, graph: DataflowGraph, region: Region, found: RegionOutcome) -> RegionPlan:
    """The plan that a worker says it has stored. One that is damaged, or cannot be the region's, is deleted.

    Raises:
        PlanError: It is not there, or cannot be the region's.
        DatabaseError: The database cannot be read.
    """
    planner = session.planner()
    wanted = [region, *(part for part in region_parts(graph, region) if part.key in found.decided)]
    table = GroupTable(graph, session.settings.numerics, session.target.device_type)
    there = planner.stored.just_written(table, wanted)
    damaged = [one for one in there if there[one].record is None]
    if damaged:
        rows_of = [rows.same_key(tables.PLANS, planner.key(one)) for one in damaged]
        session.database.change(lambda connection: connection.execute(tables.PLANS.delete().where(or_(*rows_of))))
    lookup = there.get(region.key, Lookup())
    if lookup.record is None:
        why = planner.refused.get(region.key, "it cannot be read from the database, or is of other software")
        raise PlanError(f"the plan of its worker is refused: {why}")
    parts = dict.fromkeys(part.key for part in wanted if part.key in found.decided)
    decided = tuple(record for key in parts if key in there and (record := there[key].record) is not None)
    return RegionPlan(region, lookup.record, "tuned" if found.tuned else "database", lookup.shipped, decided)


def step(workload: str, found: object) -> tuple[str, float]:
    """Why a whole step is not timed, "" where it is; and how many seconds that took."""
    match found:
        case (str(problem), float(elapsed_s)) if _is_time(elapsed_s):
            return plain(problem), elapsed_s
    return f"{workload}: whether its whole step is timed is not known: its worker sent back something else", 0.0


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0.0 <= value < _LONGEST_US
