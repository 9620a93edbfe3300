"""A tune by a fleet: graphs as they are captured, their regions each once, and plans of what workers have stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from distributed import Client

from fuseplan.costmodel.devices import is_cpu
from fuseplan.planner.capture.cache import graphs_of_text
from fuseplan.planner.cost.prices import part_shares
from fuseplan.planner.errors import CaptureError, PlanError
from fuseplan.planner.fleet import received, work
from fuseplan.planner.fleet.scheduler import RegionScheduler, Tasks
from fuseplan.planner.fleet.terms import Captured, RegionOutcome, RegionTask, Terms, WorkerDevice
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.graph.serialize import graph_to_json
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.places import place_of
from fuseplan.planner.groups.regions import find_regions, region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementations import implementations_for
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.module_paths import located
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.tuning.graph_stream import left_out, named_graphs
from fuseplan.planner.tuning.plans import GraphPlan, RegionPlan
from fuseplan.planner.tuning.recheck import Rechecked, recheck
from fuseplan.planner.tuning.session import Session, session_on
from fuseplan.planner.tuning.tune import Batch, RegionFailure, TuneResult, WorkloadPlan
from fuseplan.planner.tuning.whole_step import measure_step, step_problem
from fuseplan.planner.work.extract import region_data
from fuseplan.search.errors import RecordError
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import Trial, TuningRecord
from fuseplan.search.timing.sequence import Part
from fuseplan.search.timing.subject import Subject
from fuseplan.search.workers.worker import Outcome

#: Steps that are put together at once, each waiting for its device most of the time.
_STEPS = 8
#: What an op of a part counts that takes too little of the model's time for an elaborate search.
_MINOR_OP = 0.1


@dataclass(frozen=True, eq=False)
class Order:
    """Graphs to be tuned: captured ones, and those of a model that workers capture.

    Attributes:
        terms: What for.
        source, workloads, pack_weights: What workers capture; None and () for nothing.
        devices: Keys of those that it is tuned for; None for all there are.
    """

    terms: Terms
    batch: Batch
    source: ModelSource | None = None
    workloads: tuple[Workload, ...] = ()
    pack_weights: bool = False
    devices: frozenset[str] | None = None

    def is_for(self, device: str) -> bool:
        return self.devices is None or device in self.devices


@dataclass
class _Planned:
    """A graph of an order on a device. ``place`` is that of its workload; ``open`` are regions that are not done.

    ``untimed`` says why its whole step is not timed; "" where it is, or nobody asked for it.
    """

    order: Order
    device: str
    place: int
    name: str
    graph: DataflowGraph
    open: set[str] = field(default_factory=set)
    plan: GraphPlan | None = None
    elapsed_s: float = 0.0
    untimed: str = ""

    def done(self) -> WorkloadPlan:
        assert self.plan is not None
        return WorkloadPlan(self.name, self.graph, self.plan, self.elapsed_s)


class FleetTune:
    """Tunes orders on each of some devices, which workers of ``client`` own.

    ``database`` is the location that all workers reach. ``say`` is told how far it is, ``note`` what is left out.

    Raises:
        DatabaseError: The database cannot be opened for writing.
    """

    def __init__(
        self, client: Client, devices: Sequence[WorkerDevice], orders: Sequence[Order], database: str,
        say: Callable[[str], None], note: Callable[[str], None], tasks: Tasks | None = None,
    ) -> None:
        self._devices = {device.device: device for device in devices}
        self._databases = {key: Database(database, versions=one.versions) for key, one in self._devices.items()}
        self._leases = {key: Leases(database) for key, database in self._databases.items()}
        self._orders = orders
        self._say, self._note = say, note
        self._kind = devices[0].target.device_type
        self._scheduler = RegionScheduler(client, self._kind, orders[0].terms.run, tasks, self._tell, note)
        self._sessions: dict[tuple[str, Terms], Session] = {}
        self._planned: list[_Planned] = []
        self._waiting: dict[tuple[str, Terms, str], list[_Planned]] = {}
        self._outcomes: dict[tuple[str, Terms, str], RegionOutcome] = {}
        self._plans: dict[tuple[str, Terms, str], RegionPlan] = {}
        self._steps: list[Future[object]] = []

    def run(self) -> list[tuple[Order, TuneResult]]:
        """What came of each order on each device. What was finished when it raises is stored.

        Raises:
            CaptureError: A workload cannot be captured.
            MachineFailureError: Several workers' machines fail what a tune needs.
            DatabaseError: Several workers cannot write the database.
        """
        began = time.monotonic()
        for device in self._devices:
            if self._session(device, self._orders[0].terms).spec is None:
                self._scheduler.probe(device, self._orders[0].terms, then=partial(self._forget, device))
        for order in self._orders:
            for place, (name, graph) in enumerate(order.batch.graphs):
                self._arrive(order, place, name, graph)
            for place, workload in enumerate(order.workloads):
                self._capture(order, place, workload)
        # What is put together beside measurements on a CPU would disturb them.
        with ThreadPoolExecutor(1 if is_cpu(self._kind) else _STEPS, thread_name_prefix="steps") as self._timing:
            try:
                self._scheduler.run()
                if is_cpu(self._kind):
                    for planned in self._planned:
                        self._time_step(planned)
                self._say(f"timing {len(self._steps)} whole steps")
                for step in self._steps:
                    step.result()
            except BaseException:
                self._scheduler.cancel()
                self._timing.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                for leases in self._leases.values():
                    leases.close()
            return [(order, self._result(order, device, began)) for order in self._orders
                    for device in filter(order.is_for, self._devices)]

    def _session(self, device: str, terms: Terms) -> Session:
        """A session to look plans up with, and to time steps."""
        if (device, terms) not in self._sessions:
            found = session_on(device, self._devices[device].target, self._databases[device], terms.settings)
            self._sessions[device, terms] = terms.session(found)
        return self._sessions[device, terms]

    def _forget(self, device: str, probed: None) -> None:
        """Its sessions know nothing of a device that was probed since."""
        for at in [one for one in self._sessions if one[0] == device]:
            del self._sessions[at]

    def _capture(self, order: Order, place: int, workload: Workload) -> None:
        def captured(found: Captured) -> None:
            for name, graph in graphs_of(workload, found, order.pack_weights, self._note):
                self._arrive(order, place, name, graph)

        self._scheduler.capture(order.source, workload, self._kind, order.pack_weights, then=captured)

    def _arrive(self, order: Order, place: int, name: str, graph: DataflowGraph) -> None:
        """Ask for those regions of a graph that have no plan yet, and that nobody has asked for."""
        terms, shares = order.terms, dict[str, float]()
        for device in filter(order.is_for, self._devices):
            planned = _Planned(order, device, place, name, graph)
            self._planned.append(planned)
            session = self._session(device, terms)
            for region in session.planner().undecided(graph):
                asked = device, terms, region.key
                if asked not in self._outcomes and asked not in self._waiting:
                    shares = shares or dict(_shares(session, graph))
                    self._ask(asked, graph, region, shares)
                if asked not in self._outcomes:
                    planned.open.add(region.key)
                    self._waiting[asked].append(planned)
            if not planned.open:
                self._complete(planned)

    def _ask(
        self, asked: tuple[str, Terms, str], graph: DataflowGraph, region: Region, shares: Mapping[str, float]
    ) -> None:
        try:
            task = region_task(graph, region, shares, asked[1].settings.minor)
        except PlanError as error:
            self._outcomes[asked] = RegionOutcome(failure=error)
            return
        self._waiting[asked] = []
        self._scheduler.region(*asked[:2], task, lambda outcome: self._done(asked, outcome))

    def _done(self, asked: tuple[str, Terms, str], outcome: RegionOutcome) -> None:
        waiting = self._waiting.pop(asked)
        self._outcomes[asked] = outcome
        if outcome.stored:
            graph = waiting[0].graph
            region = next(one for one in find_regions(graph) if one.key == asked[2])
            try:
                self._plans[asked] = received.stored_plan(self._session(*asked[:2]), graph, region, outcome)
            except PlanError as error:
                self._outcomes[asked] = RegionOutcome(failure=error)
        waiting[0].elapsed_s += outcome.elapsed_s
        for planned in waiting:
            planned.open.discard(asked[2])
            if not planned.open:
                self._complete(planned)

    def _complete(self, planned: _Planned) -> None:
        """All regions of a graph are done."""
        session, regions = self._session(planned.device, planned.order.terms), find_regions(planned.graph)
        asked = {one.key: (planned.device, planned.order.terms, one.key) for one in regions}
        known = [one for one in regions if asked[one.key] not in self._outcomes]
        stored = session.planner().plan_graph(planned.graph, regions=known)
        plans = {one.region.key: one for one in stored.regions}
        plans |= {key: self._plans[one] for key, one in asked.items() if one in self._plans}
        planned.plan = GraphPlan(
            tuple(replace(plans[one.key], region=one) for one in regions if one.key in plans), stored.lookup_us)
        planned.order.batch.keep_summary(session, planned.done())
        if not is_cpu(self._kind):
            self._time_step(planned)

    def _time_step(self, planned: _Planned) -> None:
        if planned.plan is not None and planned.order.batch.timed(planned.name):
            session = self._session(planned.device, planned.order.terms)
            self._steps.append(self._timing.submit(self._step_timed, session, planned, planned.plan))

    def _step_timed(self, session: Session, planned: _Planned, plan: GraphPlan) -> None:
        began, terms = time.monotonic(), planned.order.terms
        limit_s = terms.how.budget(self._kind).job_limit_s
        found = measure_step(session, planned.graph, plan, self._remote(planned.device, terms), limit_s)
        planned.untimed = step_problem(planned.name, found)
        planned.elapsed_s += time.monotonic() - began

    def _remote(self, device: str, terms: Terms) -> _RemoteTuner:
        return _RemoteTuner(self._scheduler, device, terms, self._leases[device])

    def _result(self, order: Order, device: str, began: float) -> TuneResult:
        session = self._session(device, order.terms)
        mine = [one for one in self._planned if one.order is order and one.device == device and one.plan is not None]
        mine.sort(key=lambda one: one.place)
        plans = tuple(one.done() for one in mine)
        rechecked: tuple[Rechecked, ...] = ()
        try:
            rechecked = recheck(session, [(one.graph, one.plan) for one in plans], self._remote(device, order.terms))
        except RecordError as error:
            self._note(f"whether shipped times hold on {device} is not known: {error}")
        result = TuneResult(
            plans, session, time.monotonic() - began, rechecked, tuple(self._failures(mine, device, order.terms)),
            tuple(one.untimed for one in mine if one.untimed))
        return replace(result, session=session.recalibrated()) if result.measured else result

    def _failures(self, mine: Sequence[_Planned], device: str, terms: Terms) -> Iterator[RegionFailure]:
        told: set[str] = set()
        for planned in mine:
            for region in find_regions(planned.graph):
                outcome = self._outcomes.get((device, terms, region.key))
                if outcome is not None and outcome.failure is not None and region.key not in told:
                    told.add(region.key)
                    yield RegionFailure(planned.name, _label(planned.graph, region), outcome.failure)

    def _tell(self) -> None:
        counts = self._scheduler.counts
        left_s = counts.left_s()
        left = f", {_clock(left_s)} left" if left_s == left_s else ""
        devices = f"{counts.devices} device{'s' * (counts.devices != 1)}"
        self._say(f"tuning on {devices}: {counts.regions_done} of {counts.regions} regions{left}")


class _RemoteTuner:
    """Times steps and kernels where the device is."""

    def __init__(self, scheduler: RegionScheduler, device: str, terms: Terms, leases: Leases) -> None:
        self.leases, self._scheduler, self._at = leases, scheduler, (device, terms)

    def time_sides(
        self, parts: Mapping[str, Part], sides: Mapping[str, Sequence[str]], kept: Collection[str], min_rounds: int
    ) -> Outcome:
        return received.timed(self._scheduler.call(work.time_sides, *self._at, parts, sides, kept, min_rounds), sides)

    def time_again(self, kernels: Sequence[tuple[Subject, TuningRecord]]) -> list[Trial]:
        found = self._scheduler.call(work.time_again, *self._at, kernels) if kernels else []
        return received.trials(found, [record.key for _, record in kernels])


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
            raise PlanError(f"{_label(graph, region)}: its graph cannot be sent to a worker: {error}") from None
    flow = compute_graph_of(graph)
    parts = region_parts(graph, region)
    ops = sum(
        (1.0 if shares.get(part.key, 1.0) >= minor else _MINOR_OP)
        for part in parts for name in part.ops if flow.is_member(flow.position[name])
    )
    return RegionTask(region.key, _label(graph, region), data, {one.key: shares[one.key] for one in parts
                                                               if one.key in shares}, ops)


def _shares(session: Session, graph: DataflowGraph) -> Mapping[str, float]:
    ways = implementations_for(session.settings.regime, session.backends, session.target)
    return part_shares(GroupTable(graph, session.settings.numerics, session.target.device_type), ways.aten)


def _label(graph: DataflowGraph, region: Region) -> str:
    return located(region_label(graph, region), place_of(graph, region.ops))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
