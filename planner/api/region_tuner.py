"""Tunes regions that come one by one, each as data: what a fleet's workers do, and the processes that share a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.api.request import HowToTune
from fuseplan.planner.cost.prices import part_shares
from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.graph.serialize import graph_to_json
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementations import implementations_for
from fuseplan.planner.partition.plan_record import located_label
from fuseplan.planner.tuning.plans import PlanSettings, RegionPlan
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.planner.work.extract import region_data, region_graph
from fuseplan.search.tune.resources import Alike, ProgressEvent
from fuseplan.search.tune.study import Studies
from fuseplan.search.workers.worker import WorkerPool

#: What an op of a part counts that takes too little of the model's time for an elaborate search.
_MINOR_OP = 0.1
#: Of kernels alike, so many configurations are told: others are tried with fewer.
_FASTEST = 12
#: See :attr:`~fuseplan.search.tune.tuner.Tuner.rankings`.
Rankings: TypeAlias = Mapping[Alike, Sequence[Config]]


@dataclass(frozen=True)
class Terms:
    """What regions are tuned for, and how.

    Attributes:
        run: Name of the tune: workers keep what they made for it until it ends.
        kind: Type of the devices.
        db: The database as all workers reach it; it may hold a password.
        settings: What plans are made for.
    """

    run: str
    kind: str
    db: str = field(repr=False)
    settings: PlanSettings
    how: HowToTune

    def session(self, session: Session, studies: Studies | None = None) -> Session:
        """A session as it is searched with."""
        return self.how.of(session, studies, self.run)


@dataclass(frozen=True)
class RegionTask:
    """A region to be tuned, by itself.

    Attributes:
        key: Its workload key.
        label: What it computes, and where it is, for people.
        data: Its graph (:func:`~fuseplan.planner.work.extract.region_data`).
        shares: Of the model's time, by the key of each of its parts.
        ops: Its compute ops and matmuls, those that are searched: what the time of its tune grows with.
        waits: Whether it waits for another tuner that is at work on it.
    """

    key: str
    label: str
    data: Mapping[str, Any] = field(repr=False)
    shares: Mapping[str, float] = field(repr=False)
    ops: float
    waits: bool = False


def opened(terms: Terms) -> Session:
    """The session of this worker's device, for these terms."""
    studies = terms.how.studies()
    return terms.session(open_session(terms.kind, terms.db, terms.settings), studies)


def region_task(graph: DataflowGraph, region: Region, shares: Mapping[str, float], minor: float) -> RegionTask:
    """A region of a static graph as it travels.

    Raises:
        PlanError: Its graph cannot be written down.
    """
    try:
        data = region_data(graph, region)
    except ValueError:  # it depends on more of the graph, or cannot be written at all
        try:
            data = {"graph": graph_to_json(graph), "fresh": sorted(graph.fresh)}
        except ValueError as error:
            raise PlanError(f"{located_label(graph, region)}: its graph cannot be sent to a worker: {error}") from None
    flow = compute_graph_of(graph)
    parts = region_parts(graph, region)
    ops = sum(
        (1.0 if shares.get(part.key, 1.0) >= minor else _MINOR_OP)
        for part in parts for name in part.ops if flow.is_member(flow.position[name])
    )
    its_shares = {one.key: shares[one.key] for one in parts if one.key in shares}
    return RegionTask(region.key, located_label(graph, region), data, its_shares, ops)


def graph_shares(session: Session, graph: DataflowGraph) -> Mapping[str, float]:
    """Of the graph's time unfused, by the key of each part of its regions."""
    ways = implementations_for(session.settings.regime, session.backends, session.target)
    return part_shares(GroupTable(graph, session.settings.numerics, session.target.device_type), ways.aten)


class RegionTuner:
    """Tunes regions that come one by one, as :func:`fuseplan.planner.tuning.tune.tune` does those of a graph."""

    def __init__(
        self, terms: Terms, pool: WorkerPool, progress: Callable[[ProgressEvent], None] | None = None
    ) -> None:
        with ExitStack() as stack:
            self.session = session = opened(terms)
            stack.callback(session.database.close)
            self.tuner = stack.enter_context(
                session.tuner(terms.how.budget(terms.kind), terms.how.seed, progress, executor=pool))
            self.planner = session.planner(self.tuner)
            stack.enter_context(self.planner.lookahead() or nullcontext())
            self._stack = stack.pop_all()
        self._graphs: dict[str, tuple[DataflowGraph, Region]] = {}
        self._told: set[Alike] = set()

    def prepare(self, task: RegionTask, rankings: Rankings) -> None:
        """Begin to enumerate a region and to compile its kernels, where that disturbs no measurement; at once returns.

        ``rankings`` are those that others have :meth:`learnt`.
        """
        self.tuner.take_rankings(rankings)
        self._told.update(rankings)
        if self.session.target.is_gpu and task.key not in self._graphs:
            graph, region = self._graph(task)
            self.planner.prepare(graph, [region])

    def measure(self, task: RegionTask) -> RegionPlan | None:
        """The region's plan: the stored one, else measured now and stored; None where another tuner is at work on it,
        and the task does not wait.
        """
        graph, region = self._graph(task)
        taken: list[Region] = []
        plans = self.planner.plan_graph(
            graph, regions=[region], on_taken=None if task.waits else taken.append).regions
        return plans[0] if plans else None

    def learnt(self) -> Rankings:
        """Of kernels alike, the fastest configurations of those that were searched since it was asked last."""
        new = {alike: ranking[:_FASTEST] for alike, ranking in self.tuner.rankings.items() if alike not in self._told}
        self._told.update(new)
        return new

    def close(self) -> None:
        self._stack.close()

    def _graph(self, task: RegionTask) -> tuple[DataflowGraph, Region]:
        if task.key not in self._graphs:
            graph, region = region_graph(task.data, task.key)
            graph.shares = task.shares
            self._graphs[task.key] = graph, region
        return self._graphs[task.key]
