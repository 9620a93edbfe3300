"""A tune by a fleet: graphs as they are captured, their regions each once, and plans of what workers have stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from distributed import Client

from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.probe.probe import MachineLoad
from fuseplan.planner.api.request import Asked, TuneRequest
from fuseplan.planner.api.run import doubts
from fuseplan.planner.capture.cache import graphs_of_text
from fuseplan.planner.cost.prices import part_shares
from fuseplan.planner.errors import CaptureError, DeviceError, PlanError
from fuseplan.planner.fleet import worker_state
from fuseplan.planner.fleet.cluster import ask_workers, workers_of
from fuseplan.planner.fleet.scheduler import RegionScheduler
from fuseplan.planner.fleet.terms import (
    Captured,
    RegionOutcome,
    RegionTask,
    Terms,
    WorkerDevice,
    checked_step,
    stored_plan,
)
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.graph.serialize import graph_to_json
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementations import implementations_for
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.partition.plan_record import located_label
from fuseplan.planner.tuning.graph_stream import left_out, named_graphs
from fuseplan.planner.tuning.plans import GraphPlan, PlanSettings, RegionPlan
from fuseplan.planner.tuning.progress import Progress
from fuseplan.planner.tuning.recheck import longest_shipped, rechecked
from fuseplan.planner.tuning.session import Session, session_on
from fuseplan.planner.tuning.tune import Batch, RegionFailure, TuneResult, WorkloadPlan
from fuseplan.planner.work.extract import region_data
from fuseplan.search.store.database import Database
from fuseplan.search.tune.time_account import TimeAccount

#: What an op of a part counts that takes too little of the model's time for an elaborate search.
_MINOR_OP = 0.1
#: A region that is asked for: a device's key, what for, and the region's key.
_Asked: TypeAlias = tuple[str, Terms, str]


@dataclass(eq=False)
class _Planned:
    """A graph of an order. ``place`` is that of its workload; ``open`` are regions that are not done.

    ``untimed`` says why its whole step is not timed; "" where it is, or nobody asked for it.
    """

    order: Order
    place: int
    name: str
    graph: DataflowGraph
    regions: Sequence[Region]
    open: set[str] = field(default_factory=set)
    plan: GraphPlan = field(default_factory=lambda: GraphPlan(()))
    elapsed_s: float = 0.0
    untimed: str = ""

    @property
    def at(self) -> tuple[str, Terms]:
        return self.order.device, self.order.terms

    def done(self) -> WorkloadPlan:
        return WorkloadPlan(self.name, self.graph, self.plan, self.elapsed_s)


@dataclass(eq=False)
class Order:
    """Graphs to be tuned on a device, by its key: those of the batch, and those that :meth:`Fleet.arrive` later."""

    device: str
    terms: Terms
    batch: Batch
    planned: list[_Planned] = field(default_factory=list)


@dataclass(eq=False)
class _Region:
    """A region that was asked for, in the graph that had it first: which graphs wait for it, and what came of it."""

    graph: DataflowGraph
    region: Region
    waiting: list[_Planned] = field(default_factory=list)
    outcome: RegionOutcome | None = None
    plan: RegionPlan | None = None


class Fleet:
    """Workers that are connected, their ``devices`` (each key once), and a database that all of them reach, by its
    ``location``.

    Raises:
        DatabaseError: The database cannot be opened for writing.
    """

    def __init__(
        self, client: Client, devices: Sequence[WorkerDevice], location: str, request: TuneRequest, progress: Progress
    ) -> None:
        self.devices = {one.device: one for one in devices}
        self.progress = progress
        #: Of all tunes of this run; each adds its settings.
        self.terms = Terms(uuid.uuid4().hex[:8], request.kind, location, PlanSettings(), request.how)
        self._client, self._kind = client, request.kind
        self._scheduler = RegionScheduler(client, request.kind, self.terms.run, tell=self._tell, note=progress.note)
        self._databases = {key: Database(location, versions=one.versions) for key, one in self.devices.items()}
        self._sessions: dict[tuple[str, Terms], Session] = {}
        self._regions: dict[_Asked, _Region] = {}
        #: Whole steps that are not asked for yet, and how many are under way.
        self._steps: list[_Planned] = []
        self._timing = 0
        self._say: Callable[[str], None] = lambda text: None

    @property
    def load(self) -> MachineLoad:
        """How busy the busiest machine was when it began."""
        return max((one.load for one in self.devices.values()), key=lambda one: one.average / one.cores)

    def session(self, device: str, terms: Terms) -> Session:
        """A session to look plans up with, by the device's key."""
        found = self._sessions.get((device, terms))
        if found is None or found.spec is None:  # it may have been probed since
            there = session_on(device, self.devices[device].target, self._databases[device], terms.settings)
            found = self._sessions[device, terms] = terms.how.of(there, None, terms.run)
        return found

    def probe(self, devices: Iterable[str]) -> None:
        """Have those of these devices probed that are not known yet."""
        for device in devices:
            if self.session(device, self.terms).spec is None:
                self._scheduler.probe(device, self.terms)

    def capture(self, asked: Asked, then: Callable[[int, Captured], None]) -> None:
        """Have a model captured; ``then`` is told of each workload's number what came of it."""
        for place, workload in enumerate(asked.workloads):
            self._scheduler.capture(
                asked.source, workload, self._kind, asked.pack_weights, then=partial(then, place))

    def run(self, what: str) -> None:
        """Until all that was asked for is done, which progress calls ``what``.

        Raises:
            CaptureError: A workload cannot be captured.
            MachineFailureError: Several workers' machines fail what a tune needs.
            DatabaseError: Several workers cannot write the database.
        """
        with self.progress.status(what) as self._say:
            self._scheduler.run()

    def tune(self, orders: Sequence[Order], account: TimeAccount, what: str = "tuning on workers") -> list[TuneResult]:
        """What came of each order. What was finished when it raises (as :meth:`run`) is stored."""
        if not orders:
            return []
        began = self._scheduler.counts.began = time.monotonic()
        with account.spend("tuning on workers"):
            for order in orders:
                for place, (name, graph) in enumerate(order.batch.graphs):
                    self.arrive(order, place, name, graph)
            self.run(what)
            if self._steps:  # on a CPU, where they would disturb other measurements
                self._time_steps()
                self.run("timing whole steps")
            results = [self._result(order, began) for order in orders]
        for session in {result.session.device: result.session for result in results}.values():
            for doubt in doubts(session.spec) if session.spec is not None else ():
                self.progress.warn(f"{session.device}: {doubt}")
        with suppress(DeviceError):  # whoever does not answer ends it with the next tune
            ask_workers(self._client, worker_state.end, self.terms.run, workers=workers_of(self._client).keys())
        return results

    def arrive(self, order: Order, place: int, name: str, graph: DataflowGraph) -> None:
        """Ask for those regions of a graph that have no plan yet, and that nobody has asked for."""
        session, shares = self.session(order.device, order.terms), dict[str, float]()
        regions, _ = session.planner().look_up_regions(graph, order.batch.split(name))
        planned = _Planned(order, place, name, graph, regions)
        order.planned.append(planned)
        for region in session.planner().undecided(graph, planned.regions):
            asked = order.device, order.terms, region.key
            if asked not in self._regions:
                if not shares:
                    ways = implementations_for(session.settings.regime, session.backends, session.target)
                    table = GroupTable(graph, session.settings.numerics, session.target.device_type)
                    shares = dict(part_shares(table, ways.aten))
                self._regions[asked] = _Region(graph, region)
                try:
                    task = region_task(graph, region, shares, order.terms.settings.minor)
                    self._scheduler.region(order.device, order.terms, task, partial(self._done, asked))
                except PlanError as error:
                    self._regions[asked].outcome = RegionOutcome(failure=error)
            if self._regions[asked].outcome is None:
                planned.open.add(region.key)
                self._regions[asked].waiting.append(planned)
        if not planned.open:
            self._complete(planned)

    def _done(self, asked: _Asked, outcome: RegionOutcome) -> None:
        found = self._regions[asked]
        found.outcome = outcome
        if outcome.stored:
            try:
                found.plan = stored_plan(self.session(*asked[:2]), found.graph, found.region, outcome)
            except PlanError as error:
                found.outcome = RegionOutcome(failure=error)
        found.waiting[0].elapsed_s += outcome.elapsed_s
        for planned in found.waiting:
            planned.open.discard(asked[2])
            if not planned.open:
                self._complete(planned)

    def _complete(self, planned: _Planned) -> None:
        """All regions of a graph are done."""
        session, regions = self.session(*planned.at), planned.regions
        asked = {one.key: self._regions[*planned.at, one.key] for one in regions
                 if (*planned.at, one.key) in self._regions}
        stored = session.planner().plan_graph(planned.graph, regions=[one for one in regions if one.key not in asked])
        plans = {one.region.key: one for one in stored.regions}
        plans |= {key: one.plan for key, one in asked.items() if one.plan is not None}
        planned.plan = GraphPlan(
            tuple(replace(plans[one.key], region=one) for one in regions if one.key in plans), stored.lookup_us)
        planned.order.batch.keep_summary(session, planned.done())
        if planned.order.batch.timed(planned.name):
            self._steps.append(planned)
        if not is_cpu(self._kind):
            self._time_steps()

    def _time_steps(self) -> None:
        """Have the whole steps timed that wait for it."""
        for planned in self._steps:
            def timed(found: object, planned: _Planned = planned) -> None:
                planned.untimed, elapsed_s = checked_step(planned.name, found)
                planned.elapsed_s += elapsed_s
                self._timing -= 1

            self._scheduler.call(
                worker_state.time_step, *planned.at, planned.name, planned.graph, planned.plan, then=timed)
        self._timing += len(self._steps)
        self._steps.clear()

    def _result(self, order: Order, began: float) -> TuneResult:
        session = self.session(order.device, order.terms)
        order.planned.sort(key=lambda one: one.place)
        plans = tuple(one.done() for one in order.planned)
        kernels = longest_shipped(session, [(one.graph, one.plan) for one in plans])
        if len(rechecked(session, kernels)) < len(kernels):
            self._scheduler.call(worker_state.time_again, order.device, order.terms, kernels, then=lambda found: None)
            self.run("checking shipped times")
        checked = rechecked(session, kernels)
        if len(checked) < len(kernels):
            self.progress.note(f"whether shipped times hold on {order.device} is not known")
        failures: dict[str, RegionFailure] = {}
        for planned in order.planned:
            for region in planned.regions:
                found = self._regions.get((*planned.at, region.key))
                if found is not None and found.outcome is not None and found.outcome.failure is not None:
                    label = located_label(planned.graph, region)
                    failures.setdefault(region.key, RegionFailure(planned.name, label, found.outcome.failure))
        result = TuneResult(
            plans, session, time.monotonic() - began, checked, tuple(failures.values()),
            tuple(one.untimed for one in order.planned if one.untimed))
        return replace(result, session=session.recalibrated()) if result.measured else result

    def _tell(self) -> None:
        counts = self._scheduler.counts
        if self._timing and counts.regions_done == counts.regions:
            return self._say(f"timing {self._timing} whole steps")
        left_s = counts.left_s()
        left = f", {_clock(left_s)} left" if left_s == left_s else ""
        devices = f"{counts.devices} device{'s' * (counts.devices != 1)}"
        return self._say(f"tuning on {devices}: {counts.regions_done} of {counts.regions} regions{left}")


def graphs_of(
    workload: Workload, captured: Captured, pack_weights: bool, note: Callable[[str], None]
) -> list[tuple[str, DataflowGraph]]:
    """A captured workload's graphs by name; none of a call that nobody asked for and that the model does not take.

    Raises:
        FuseplanError: It cannot be captured.
    """
    failure = captured.failure
    if failure is None:
        try:
            return named_graphs(workload, graphs_of_text(captured.text), pack_weights)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            failure = CaptureError(f"{workload.label}: what a worker sent back is no capture")
    if not isinstance(failure, CaptureError):
        raise failure
    note(left_out(workload, failure))
    return []


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



def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
