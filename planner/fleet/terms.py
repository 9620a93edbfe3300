"""What travels to the workers and back: regions, what they are tuned for, and what came of it.

Workers have the same software, and Dask unpickles what they send: their answers are taken as they are. Workers store
plans themselves, and send back no more than that they have. Plans are read from the database, where they are checked
as at every look-up.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sqlalchemy import or_

from fuseplan.costmodel.probe.probe import MachineLoad
from fuseplan.kernels.ir.backend import Config, Target
from fuseplan.planner.api.request import HowToTune
from fuseplan.planner.errors import ConfigError, PlanError, failure_reason
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.partition.plan_record import located_label
from fuseplan.planner.tuning.plans import PlanSettings, RegionPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.work.extract import extract
from fuseplan.search import policy
from fuseplan.search.store import rows, tables
from fuseplan.search.store.database import Lookup
from fuseplan.search.store.record import Versions
from fuseplan.search.tune.resources import Alike

#: What a measurement on a device asks for, and what prepares one, by the device's key; a capture, by the type of the
#: devices. A worker has one of the first, :data:`PLENTY` of the second, of the third as many as it captures at once.
measuring, preparing, capturing = "fuseplan {}".format, "fuseplan beside {}".format, "fuseplan capture {}".format
#: Names a worker's GPU or host among all of a device's key; workers that share one have it in common.
unit = "fuseplan unit {}".format
#: As many regions as anybody likes may be prepared at once.
PLENTY = 1000
#: About how long an op of a region takes to be prepared.
_PREPARING_S = 0.03
#: What an op of a part counts that takes too little of the model's time for an elaborate search.
_MINOR_OP = 0.1

#: See :attr:`~fuseplan.search.tune.tuner.Tuner.rankings`.
Rankings: TypeAlias = Mapping[Alike, Sequence[Config]]


def needs_dask() -> None:
    """Raise :class:`ConfigError` where the extra is not installed."""
    try:
        import distributed  # noqa: F401
    except ImportError:
        raise ConfigError("a fleet needs Dask; install it with: pip install 'fuseplan[fleet]'") from None


def device_of(resource: str) -> str | None:
    """The device's key, of a :func:`measuring` resource; None of any other."""
    words = resource.split(" ")
    return words[1] if len(words) == 2 and resource == measuring(words[1]) else None


@dataclass(frozen=True)
class Terms:
    """What regions are tuned for, and how.

    ``run`` names the tune: workers keep what they made for it until it ends. ``kind`` is the type of the devices.
    ``db`` is the database as all workers reach it, perhaps with a password.
    """

    run: str
    kind: str
    db: str = field(repr=False)
    settings: PlanSettings
    how: HowToTune


@dataclass(frozen=True)
class RegionTask:
    """A region to be tuned.

    Attributes:
        key: Its workload key.
        label: What it computes, and where it is, for people.
        graph: The region alone, with its ``shares`` of the model's time; the whole graph where it depends on more.
        ops: How many ops of it are searched: what the time of its tune grows with.
        waits: Whether it waits for another tuner that is at work on it.
    """

    key: str
    label: str
    graph: DataflowGraph = field(repr=False)
    ops: float
    waits: bool = False


def region_task(graph: DataflowGraph, region: Region, shares: Mapping[str, float]) -> RegionTask:
    """A region of a static graph; ``shares`` are those of all its parts, by their keys."""
    parts, flow = region_parts(graph, region), compute_graph_of(graph)
    ops = sum((1.0 if shares.get(part.key, 1.0) >= policy.MINOR_SHARE else _MINOR_OP)
              for part in parts for name in part.ops if flow.is_member(flow.position[name]))
    try:
        alone = extract(graph, region)
        alone.shares = {one.key: shares[one.key] for one in parts if one.key in shares}
    except ValueError:
        alone = graph
    return RegionTask(region.key, located_label(graph, region), alone, ops)


@dataclass(frozen=True)
class Prepared:
    """A region is being prepared in one worker, which takes the longer the more ops it has."""

    ops: float

    def __sizeof__(self) -> int:
        """Bytes that would take as long to send, at Dask's 100 MB/s, as preparing it anew in another worker."""
        return int(self.ops * _PREPARING_S * 1e8)


@dataclass(frozen=True)
class RegionOutcome:
    """What came of a region: its plan, or why it has none; neither where another tuner is at work on it.

    Attributes:
        stored: Whether its plan is in the database; ``tuned`` where this worker has measured it now.
        decided: Keys of its parts that were measured for it.
        rankings: What its worker has learnt of kernels that are alike, for the others.
    """

    stored: bool = False
    tuned: bool = False
    decided: tuple[str, ...] = ()
    failure: Exception | None = None
    elapsed_s: float = 0.0
    rankings: Rankings = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class WorkerDevice:
    """A worker's device: its identity key, what kernels are compiled for, and how busy its machine was."""

    device: str
    target: Target
    versions: Versions
    host: str
    load: MachineLoad
    sees_database: bool


def carried(error: Exception) -> Exception:
    """The error, if it says the same after a journey; else one that does."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever a class makes of its own arguments
        pass
    return PlanError(failure_reason(error))


def stored_plan(session: Session, graph: DataflowGraph, region: Region, found: RegionOutcome) -> RegionPlan:
    """The plan that a worker says it has stored. :class:`PlanError` where it is not there.

    One that is damaged, or cannot be the region's, is deleted, and counts as not there.
    """
    planner = session.planner()
    wanted = [region, *(part for part in region_parts(graph, region) if part.key in found.decided)]
    table = GroupTable(graph, session.settings.numerics, session.target.device_type)
    there = planner.stored.just_written(table, wanted)
    damaged = [rows.same_key(tables.PLANS, planner.key(one)) for one in there if there[one].record is None]
    if damaged:
        session.database.change(lambda connection: connection.execute(tables.PLANS.delete().where(or_(*damaged))))
    lookup = there.get(region.key, Lookup())
    if lookup.record is None:
        why = planner.refused.get(region.key, "it cannot be read from the database, or is of other software")
        raise PlanError(f"the plan of its worker is refused: {why}")
    parts = dict.fromkeys(part.key for part in wanted[1:])
    decided = tuple(record for key in parts if key in there and (record := there[key].record) is not None)
    return RegionPlan(region, lookup.record, "tuned" if found.tuned else "database", lookup.shipped, decided)
