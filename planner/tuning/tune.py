"""The offline job: capture, plan, tune, store; and what came of it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace

from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.regions import unique_regions
from fuseplan.planner.partition.plan_record import located_label
from fuseplan.planner.tuning.graph_stream import GraphStream
from fuseplan.planner.tuning.planner import GraphPlan, Planner, RegionPlan
from fuseplan.planner.tuning.plans import PlanSettings
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.planner.tuning.recheck import Rechecked, longest_shipped, recheck
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.summary import store_summary, summarise
from fuseplan.planner.tuning.whole_step import StepTimes, measure_again, measure_step, step_problem
from fuseplan.search import policy
from fuseplan.search.errors import DatabaseError, MachineFailureError
from fuseplan.search.store.leases import POLL_S
from fuseplan.search.store.record import PlanRecord
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import Budget, ProgressEvent
from fuseplan.search.workers.worker import WorkerPool


@dataclass(frozen=True, eq=False)
class Batch:
    """Static graphs that are planned for the same settings, each by its name.

    Attributes:
        graphs: Those of a :class:`~fuseplan.planner.tuning.graph_stream.GraphStream` are planned as they are captured.
        reported: The model and the workload under which reports have a graph; None keeps it out of reports.
        timed: Whether the whole step of a graph is timed.
        split: Whether the layers of a graph are planned apart from what makes their common values: embedded tokens,
            rotary tables, masks. Other calls then find the layers, and tables and masks, in any combination.
        regions: Regions, or parts of some, that are planned of a graph; all of those that are not named.
    """

    graphs: Iterable[tuple[str, DataflowGraph]]
    settings: PlanSettings = field(default_factory=PlanSettings)
    reported: Callable[[str], tuple[str, str] | None] = lambda name: None
    timed: Callable[[str], bool] = lambda name: False
    split: Callable[[str], bool] = lambda name: False
    regions: Mapping[str, Sequence[Region]] = field(default_factory=dict)

    def keep_summary(self, session: Session, planned: WorkloadPlan) -> None:
        """Store what reports say of a planned workload."""
        pairs = [(one.region, one.record) for one in planned.plan.regions]
        if pairs and (names := self.reported(planned.workload)) is not None:
            store_summary(session.database, summarise(*names, planned.graph, pairs))


@dataclass(eq=False)
class WorkloadPlan:
    """The plan of one captured workload, as far as it is known. All of a tune share what it has decided (``plans``),
    and what it failed at and why (``errors``), by key of the region.

    Attributes:
        lookup_us: How long look-ups took.
        elapsed_s: Wall time of planning it, of measuring what no workload before it had, and of its whole step.
        left: Regions that are still to be planned: other tuners are at work on them.
    """

    workload: str
    graph: DataflowGraph
    regions: Sequence[Region]
    plans: dict[str, RegionPlan]
    errors: dict[str, Exception] = field(default_factory=dict)
    lookup_us: float = 0.0
    elapsed_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = list(self.regions)

    @property
    def plan(self) -> GraphPlan:
        """What is planned, in graph order."""
        regions = [replace(self.plans[one.key], region=one) for one in self.regions if one.key in self.plans]
        return GraphPlan(tuple(regions), self.lookup_us)

    def go_on(self, planner: Planner, failures: list[RegionFailure]) -> bool:
        """Plan what is not known, and what nobody else is at work on; False where that was nothing."""
        began, taken = time.monotonic(), set[str]()

        def failed(region: Region, error: Exception) -> None:
            if isinstance(error, MachineFailureError | DatabaseError):
                raise error
            self.errors[region.key] = error
            failures.append(RegionFailure(self.workload, located_label(self.graph, region), error))

        for key, (region, *_) in unique_regions(self.left).items():
            if key in self.errors:
                failed(region, self.errors[key])
        fresh = [one for one in self.left if one.key not in self.plans and one.key not in self.errors]
        plan = planner.plan_graph(self.graph, failed, fresh, lambda region: taken.add(region.key))
        self.plans |= {one.region.key: one for one in plan.unique()}
        before, self.left = len(self.left), [region for region in self.left if region.key in taken]
        self.lookup_us += plan.lookup_us
        self.elapsed_s += time.monotonic() - began
        return len(self.left) < before or not before


@dataclass(frozen=True)
class RegionFailure:
    """A region of a workload that could not be planned, and why."""

    workload: str
    label: str
    error: Exception

    def __str__(self) -> str:
        return f"{self.workload}: {self.label} is not planned and runs unfused: {failure_reason(self.error)}"


@dataclass(frozen=True)
class TuneResult:
    """What a tune did.

    Attributes:
        plans: One per workload, in order.
        session: The session with the calibration that the new records gave.
        elapsed_s: Wall time of planning and tuning (capture and probe not included).
        rechecked: Shipped kernels that were measured here to see whether their times hold.
        failures: Regions that could not be planned.
        untimed: Whole steps that were not timed, each with its workload and why.
        renewed: Regions whose plans of other versions of the software were timed again.
    """

    plans: tuple[WorkloadPlan, ...]
    session: Session
    elapsed_s: float
    rechecked: tuple[Rechecked, ...] = ()
    failures: tuple[RegionFailure, ...] = ()
    untimed: tuple[str, ...] = ()
    renewed: int = 0

    def distinct(self) -> list[tuple[str, RegionPlan]]:
        """Each distinct region once, with the workload it first occurs in."""
        found: dict[str, tuple[str, RegionPlan]] = {}
        for workload in self.plans:
            for region in workload.plan.unique():
                found.setdefault(region.region.key, (workload.workload, region))
        return list(found.values())

    @property
    def measured(self) -> int:
        """Choices measured now, each once; 0 when everything came from the database."""
        return sum(record.measured for record in self.decided())

    @property
    def enumerated(self) -> int:
        """Choices enumerated in the parts of regions that were decided now, each once."""
        return sum(record.enumerated for record in self.decided())

    def decided(self) -> list[PlanRecord]:
        """The plans of the parts of regions that were measured now, each once."""
        return [record for _, plan in self.distinct() for record in plan.decided]


def tune(
    session: Session, batch: Batch, budget: Budget | None = None, seed: int = 0, progress: Progress = SILENT,
    account: TimeAccount | None = None, executor: WorkerPool | None = None,
) -> TuneResult:
    """Plan every graph, measuring what is not stored. Each group and each part is stored as soon as it is done,
    a region after the run beside plain ATen that the next region does not wait for.

    A region is planned once, in the first graph that has it: also where noise hides its answer, which is then not
    stored, or where it fails. One that cannot be planned costs only itself, unless the fault is the machine's or the
    database's. What another tuner on the database is at work on is left to it, and waited for when there is nothing
    else to do.

    The session's device is probed. What the tuner does not book in ``account`` is planning: enumerating, pricing,
    solving. Jobs run in ``executor``, by default in worker processes of its own.

    Raises:
        CaptureError: Of a stream: a workload cannot be captured; what was finished is stored.
        CompilerMissingError: No kernel back end can be used here.
        MachineFailureError: The machine fails what a tune needs; what was finished is stored.
        DatabaseError: The database cannot be written.
    """
    start = time.monotonic()
    account = account if account is not None else TimeAccount()
    budget = budget or Budget.on(session.target.device_type)
    failures, untimed = list[RegionFailure](), list[str]()
    learner = RunningCalibration(session.spec)
    with ExitStack() as stack:
        told = stack.enter_context(progress.tuning())
        stack.enter_context(account.spend("planning"))
        tuner = stack.enter_context(session.tuner(budget, seed, told.on_trial, account, executor))
        planner = session.planner(tuner, learner=learner)
        stack.enter_context(planner.lookahead() or nullcontext())
        waiting: deque[WorkloadPlan] = deque()
        work: list[WorkloadPlan] = []
        plans, errors, sent = dict[str, RegionPlan](), dict[str, Exception](), set[str]()
        visited = list[tuple[float, WorkloadPlan, StepTimes]]()

        def arrive(found: Iterable[tuple[str, DataflowGraph]]) -> None:
            for workload, graph in found:
                regions = batch.regions.get(workload) or planner.look_up_regions(graph, batch.split(workload))[0]
                undecided = planner.undecided(graph, regions)
                told.on_graph(regions, undecided)
                fresh = [region for region in undecided if region.key not in sent]
                planner.prepare(graph, fresh, regions if batch.timed(workload) else ())
                sent.update(region.key for region in undecided)
                work.append(WorkloadPlan(workload, graph, regions, plans, errors))
                waiting.append(work[-1])

        def time_step(one: WorkloadPlan) -> None:
            if not batch.timed(one.workload):
                return
            began, fresh = time.monotonic(), list[float]()

            def on_start(unfused_us: float) -> None:
                fresh.append(unfused_us)
                told.on_trial(ProgressEvent(one.workload, 0, 0, unfused_us, "step"))

            found = measure_step(session, one.graph, one.plan, tuner, on_start)
            if fresh and isinstance(found, StepTimes) and not session.target.is_gpu:
                visited.append((began, one, found))
            untimed.extend(filter(None, [step_problem(one.workload, found)]))
            one.elapsed_s += time.monotonic() - began
            if isinstance(found, StepTimes):
                told.on_trial(ProgressEvent(
                    one.workload, 0, 0, found.best_us, "step done", found.unfused_us, found.gains))

        def check_shipped() -> tuple[Rechecked, ...]:
            with account.spend("checking shipped times"):
                return recheck(session, longest_shipped(session, [(one.graph, one.plan) for one in work]), tuner)

        rechecked: tuple[Rechecked, ...] = ()
        stream = batch.graphs if isinstance(batch.graphs, GraphStream) else None
        arrive(batch.graphs if stream is None else stream.ready())
        in_vain = 0
        while waiting or (stream is not None and stream.waiting):
            if in_vain >= len(waiting):
                in_vain = 0
                if stream is not None and stream.waiting:
                    if session.target.is_gpu and not rechecked and not batch.timed(stream.waiting):
                        rechecked = check_shipped()  # what was asked for is planned; captures go on meanwhile
                    told.on_trial(ProgressEvent(stream.waiting, 0, 0, math.inf, "capture"))
                    with account.spend("capturing"):
                        graphs = stream.take()
                    arrive(graphs)
                    continue
                with account.spend("waiting for other tuners"):
                    time.sleep(POLL_S)
            one = waiting.popleft()

            def at_region(label: str, number: int, total: int, workload: str = one.workload) -> None:
                if stream is not None:
                    arrive(stream.ready())
                told.on_region(workload, label, number, total)

            planner.on_region = at_region
            in_vain = 0 if one.go_on(planner, failures) else in_vain + 1
            if one.left:  # everything else comes first
                waiting.append(one)
            else:
                batch.keep_summary(session, one)
                if not session.target.is_gpu:
                    time_step(one)
        if session.target.is_gpu:  # what compiles TorchInductor's code of steps has had time for it
            for one in work:
                time_step(one)
        for began, one, found in visited:
            if time.monotonic() - began >= policy.STEP_AGAIN_S:
                told.on_trial(ProgressEvent(one.workload, 0, 0, found.unfused_us, "step"))
                measure_again(session, one.graph, one.plan, tuner, found)
        rechecked = rechecked or check_shipped()
    result = TuneResult(tuple(work), session, time.monotonic() - start, rechecked, tuple(failures), tuple(untimed),
                        len(planner.renewal.renewed))
    if not result.measured:
        return result
    with account.spend("calibrating"):
        learner.update(final=True)
        return replace(result, session=replace(session, spec=learner.spec).recalibrated())
