"""A run by a fleet: its devices, graphs as workers capture them, their regions each once, and what workers stored."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import zip_longest

from distributed import Client

from fuseplan.costmodel.devices import Kind, is_cpu, kind_of_key
from fuseplan.costmodel.probe.probe import MachineLoad
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.many import Models
from fuseplan.planner.api.request import TuneRequest
from fuseplan.planner.api.run import MakeWanted, Ran, Runner, Wanted, doubts
from fuseplan.planner.capture.trace import Graphs
from fuseplan.planner.cost.prices import part_shares
from fuseplan.planner.errors import Argument, ConfigError, DeviceError, NothingForDeviceError, PlanError
from fuseplan.planner.fleet import terms, worker_state
from fuseplan.planner.fleet.cluster import LOCAL, ask_workers, connected, device_workers, fleet_client, workers_of
from fuseplan.planner.fleet.scheduler import RegionScheduler
from fuseplan.planner.fleet.terms import RegionOutcome, Terms, WorkerDevice
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.plans import PlanSettings, RegionPlan
from fuseplan.planner.tuning.progress import Progress
from fuseplan.planner.tuning.recheck import longest_shipped, rechecked
from fuseplan.planner.tuning.session import Session, session_on
from fuseplan.planner.tuning.tune import Batch, RegionFailure, TuneResult, WorkloadPlan
from fuseplan.search.store.database import Database
from fuseplan.search.store.location import location_name, resolve_url, sqlite_file
from fuseplan.search.store.record import Versions
from fuseplan.search.tune.time_account import TimeAccount


def run_by(workers: str) -> Runner:
    """A run on each kind of device that ``workers`` own, with the answers and errors of a run here."""

    def run(
        request: TuneRequest, wanted_on: MakeWanted, progress: Progress, account: TimeAccount
    ) -> list[tuple[Wanted, Ran]]:
        with ExitStack() as stack:
            found = _joined(stack, workers, request, progress, account)
            wanted = _wanted(found, wanted_on)
            with account.spend("probing"):
                found.probe(wanted)
            models = {asked: None for one in wanted.values() if isinstance(one, Models) for asked in one.models}
            for asked in models:  # all at once
                if asked.source is not None and asked.source.kind != "module":
                    for workload in asked.workloads:
                        found.capture(asked.source, workload, asked.kind, asked.pack_weights)
            batches: dict[str, Sequence[Batch]] = {}
            for device, one in wanted.items():
                if len(wanted) > 1:
                    progress.note(f"on {device}:")
                one.capture(stack, progress, account)
                batches[device] = one.batches(found.session(device), progress, account)
            ran: list[tuple[Wanted, Ran]] = []
            for device, its in found.tune(batches, account).items():
                session = its[-1][1].session if its else found.session(device)
                ran.append((wanted[device], Ran(tuple(its), session, found.load)))
            return ran

    return run


def _wanted(found: Fleet, wanted_on: MakeWanted) -> dict[str, Wanted]:
    """What is to do on each device that has anything to do; :class:`NothingForDeviceError` where none has."""
    wanted: dict[str, Wanted] = {}
    refused: list[NothingForDeviceError] = []
    for device in found.devices:
        try:
            wanted[device] = wanted_on(device, found.capture)
        except NothingForDeviceError as error:
            refused.append(error)
    if not wanted:
        raise refused[0]
    return wanted


def fleet_kind(workers: str, device: str) -> Kind:
    """The type of the devices that are tuned for: with ``auto`` CUDA where the fleet has a GPU.

    :class:`DeviceError` where no scheduler answers, or there is no such device here (``local``).
    """
    if workers == LOCAL:
        return device_kind(device)
    if device != "auto":
        return kind_of_key(device)
    with fleet_client(workers) as client:
        return "cuda" if device_workers(client, "cuda") else "cpu"


def _joined(
    stack: ExitStack, workers: str, request: TuneRequest, progress: Progress, account: TimeAccount
) -> Fleet:
    """The workers that own devices of a request's type, connected until the ``stack`` ends."""
    url = resolve_url(request.db)
    file = str(there.absolute()) if (there := sqlite_file(url)) is not None else ""
    if not file and url.get_backend_name() == "sqlite":
        raise ConfigError("{} {} is of one process alone; give a fleet a file or a server", Argument("db"),
                          location_name(url))
    location = file or url.render_as_string(hide_password=False)  # as every worker reaches it
    Database(location).close()  # a file is there before workers look for it
    with account.spend("starting workers"), progress.status("waiting for workers"):
        client = stack.enter_context(connected(workers, request.kind))
        return Fleet(client, _devices(client, request.kind, file, progress), location, request, progress)


def described(client: Client, kind: str, file: str = "") -> list[WorkerDevice]:
    """What the workers that own devices of this type say of them, and whether they see the database's ``file``.

    :class:`DeviceError` where not all of them answer.
    """
    owners = [address for addresses in device_workers(client, kind).values() for address in addresses]
    return list(ask_workers(client, worker_state.describe, kind, file, workers=owners).values())


def _devices(client: Client, kind: Kind, file: str, progress: Progress) -> tuple[WorkerDevice, ...]:
    """The fleet's devices of this type, each key once.

    :class:`ConfigError` where not all hosts have the same software, or a worker does not see the database.
    """
    found = described(client, kind, file)
    blind = sorted({one.host for one in found if not one.sees_database})
    if blind:
        raise ConfigError("{} {} is not there on {}; give a file on a disk that all hosts share, or a server",
                          Argument("db"), file, ", ".join(blind))
    ours = Versions.current("cpu")
    try:  # by a function that it has in any case
        client.run_on_scheduler(metadata.version, "fuseplan")
    except metadata.PackageNotFoundError:
        where = client.scheduler_info()["address"]
        raise ConfigError(f"fuseplan {ours.fuseplan} is not installed where the scheduler runs, at {where}; install it "
                          "there, and start the scheduler again") from None
    for one in found:
        for name in ("fuseplan", "torch"):
            if getattr(one.versions, name) != getattr(ours, name):
                raise ConfigError(f"the worker on {one.host} has {name} {getattr(one.versions, name)}, and here is "
                                  f"{getattr(ours, name)}; install the same on all hosts")
    if file and {one.host for one in found} != {socket.gethostname()}:
        progress.note(f"{file} is a file that several hosts write; a server is safer: postgresql://...")
    return tuple({one.device: one for one in found}.values())


@dataclass(eq=False)
class Order:
    """A batch of graphs to be tuned on a session's device, and what came of them.

    Attributes:
        work: The graphs that have arrived.
        waiting: By the key of a region that is asked for: which graphs wait for it, that which had it first before all.
        plans, errors: By the key of a region that is done.
        untimed: Why the whole step of a graph is not timed; "" where it is.
    """

    session: Session
    terms: Terms
    batch: Batch
    work: list[WorkloadPlan] = field(default_factory=list)
    waiting: dict[str, list[WorkloadPlan]] = field(default_factory=dict)
    plans: dict[str, RegionPlan] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    failures: list[RegionFailure] = field(default_factory=list)
    untimed: dict[str, str] = field(default_factory=dict)


class WorkerCapture(Future[Graphs]):
    """A workload that a worker captures: who waits for its graphs lets the fleet go on with what it does."""

    def __init__(self, go_on: Callable[[Callable[[], bool]], None]) -> None:
        super().__init__()
        self._go_on = go_on

    def result(self, timeout: float | None = None) -> Graphs:
        self._go_on(self.done)
        return super().result(timeout)


class Fleet:
    """Connected workers, their ``devices`` (each key once), and the ``location`` of a database that they all reach.

    :class:`DatabaseError` where it cannot be opened for writing.
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
        self._captures: dict[tuple[object, ...], WorkerCapture] = {}
        #: Whole steps that are under way.
        self._timing = 0
        self._say: Callable[[str], None] = lambda text: None

    @property
    def load(self) -> MachineLoad:
        """How busy the busiest machine was when it began."""
        return max((one.load for one in self.devices.values()), key=lambda one: one.average / one.cores)

    def session(self, device: str, settings: PlanSettings | None = None) -> Session:
        """A session to look plans up with, by the device's key."""
        there = session_on(device, self.devices[device].target, self._databases[device], settings)
        return self.terms.how.of(there, None, self.terms.run)

    def probe(self, devices: Iterable[str]) -> None:
        """Have those of these devices probed that are not known yet; on a CPU nothing else is done meanwhile."""
        unknown = [device for device in devices if self.session(device).spec is None]
        for device in unknown:
            self._scheduler.call(worker_state.probe_device, device, self.terms)
        if unknown and is_cpu(self._kind):
            self.run("probing")

    def capture(self, source: ModelSource, workload: Workload, kind: str, pack_weights: bool) -> Future[Graphs]:
        """Have a workload captured, once for all who ask."""
        asked = source, workload, kind, pack_weights
        if asked not in self._captures:
            self._captures[asked] = coming = WorkerCapture(self._scheduler.run)
            self._scheduler.capture(*asked, then=lambda found: (
                coming.set_exception(found) if isinstance(found, Exception) else coming.set_result(found)))
        return self._captures[asked]

    def run(self, what: str) -> None:
        """Until all that was asked for is done, called ``what``; errors as those of :meth:`RegionScheduler.run`, and
        :class:`DatabaseError` where several workers cannot write the database.
        """
        with self._status(what):
            self._scheduler.run()

    @contextmanager
    def _status(self, what: str) -> Iterator[None]:
        with self.progress.status(what) as self._say:
            yield
        self._say = lambda text: None

    def tune(
        self, batches: Mapping[str, Iterable[Batch]], account: TimeAccount
    ) -> dict[str, list[tuple[Batch, TuneResult]]]:
        """What came of each batch of each device. Errors as :meth:`run`, and of a stream of graphs."""
        began, results = time.monotonic(), {device: list[tuple[Batch, TuneResult]]() for device in batches}
        orders = [Order(self.session(device, one.settings), replace(self.terms, settings=one.settings), one)
                  for device, its in batches.items() for one in its]
        with account.spend("tuning on workers"):
            with self._status("tuning on workers"):
                for graphs in zip_longest(*(order.batch.graphs for order in orders)):
                    for order, found in zip(orders, graphs, strict=True):
                        if found is not None:
                            self._arrive(order, *found)
                self._scheduler.run()
            for order in orders:
                results[order.session.device].append((order.batch, self._result(order, began)))
        for device, its in results.items():
            for doubt in doubts(spec) if its and (spec := its[-1][1].session.spec) is not None else ():
                self.progress.warn(f"{device}: {doubt}")
        with suppress(DeviceError):  # whoever does not answer ends it with the next tune
            ask_workers(self._client, worker_state.end, self.terms.run, workers=workers_of(self._client).keys())
        return results

    def _arrive(self, order: Order, name: str, graph: DataflowGraph) -> None:
        """Ask for those regions of a graph that have no plan yet, and that nobody has asked for."""
        session, planner = order.session, order.session.planner()
        regions, _ = planner.look_up_regions(graph, order.batch.split(name))
        work = WorkloadPlan(name, graph, regions, order.plans, order.errors)
        order.work.append(work)
        fresh = [one for one in planner.undecided(graph, regions)
                 if one.key not in order.plans and one.key not in order.errors]
        new = [one for one in fresh if one.key not in order.waiting]
        for region in fresh:
            order.waiting.setdefault(region.key, []).append(work)
        if new:
            table = GroupTable(graph, session.settings.numerics, session.target.device_type)
            shares = part_shares(table, planner.implementations.aten)
            for region in new:
                task = terms.region_task(graph, region, shares)
                self._scheduler.region(session.device, order.terms, task, partial(self._done, order, region))
        if not fresh:
            self._complete(order, work)

    def _done(self, order: Order, region: Region, outcome: RegionOutcome) -> None:
        waiting, failure = order.waiting.pop(region.key), outcome.failure
        if failure is None:
            try:
                order.plans[region.key] = terms.stored_plan(order.session, waiting[0].graph, region, outcome)
            except PlanError as error:
                failure = error
        if failure is not None:
            order.errors[region.key] = failure
        waiting[0].elapsed_s += outcome.elapsed_s
        for work in waiting:
            if order.waiting.keys().isdisjoint(one.key for one in work.regions):
                self._complete(order, work)

    def _complete(self, order: Order, work: WorkloadPlan) -> None:
        """All regions of a graph are done."""
        work.go_on(order.session.planner(), order.failures)
        order.batch.keep_summary(order.session, work)
        if order.batch.timed(work.workload):
            self._timing += 1
            self._scheduler.call(worker_state.time_step, order.session.device, order.terms, work.workload, work.graph,
                                 work.plan, then=partial(self._timed, order, work))

    def _timed(self, order: Order, work: WorkloadPlan, found: tuple[str, float]) -> None:
        order.untimed[work.workload], elapsed_s = found
        work.elapsed_s += elapsed_s
        self._timing -= 1

    def _result(self, order: Order, began: float) -> TuneResult:
        session = order.session.with_stored_spec() or order.session  # it may have been probed since
        kernels = longest_shipped(session, [(one.graph, one.plan) for one in order.work])
        if len(rechecked(session, kernels)) < len(kernels):
            self._scheduler.call(worker_state.time_again, session.device, order.terms, kernels)
            self.run("checking shipped times")
        checked = rechecked(session, kernels)
        if len(checked) < len(kernels):
            self.progress.note(f"whether shipped times hold on {session.device} is not known")
        untimed = filter(None, (order.untimed.get(one.workload) for one in order.work))
        result = TuneResult(tuple(order.work), session, time.monotonic() - began, checked,
                            tuple(order.failures), tuple(untimed))
        return replace(result, session=session.recalibrated()) if result.measured else result

    def _tell(self) -> None:
        counts = self._scheduler.counts
        if self._timing and counts.regions_done == counts.regions:
            self._say(f"timing {self._timing} whole steps")
        elif counts.regions:
            self._say(str(counts))
