"""The offline job: capture, plan, tune, store; and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.places import place_of
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.module_paths import located
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.tuning.graph_stream import GraphStream
from fuseplan.planner.tuning.lookahead import Lookahead
from fuseplan.planner.tuning.planner import GraphPlan, Planner, RegionPlan
from fuseplan.planner.tuning.recheck import Rechecked, recheck
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.whole_step import measure_step
from fuseplan.search.errors import DatabaseError, MachineFailureError
from fuseplan.search.store.leases import POLL_S
from fuseplan.search.store.record import PlanRecord
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import Budget, ProgressEvent
from fuseplan.search.workers.worker import WorkerPool

#: Told about each distinct region: workload, region label, number, how many.
OnRegion = Callable[[str, str, int, int], None]
#: Told about each workload's graph when it arrives, and its distinct regions that have no stored plan.
OnGraph = Callable[[DataflowGraph, Sequence[Region]], None]


@dataclass(frozen=True)
class WorkloadPlan:
    """The plan of one captured workload."""

    workload: str
    graph: DataflowGraph
    plan: GraphPlan


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
    """

    plans: tuple[WorkloadPlan, ...]
    session: Session
    elapsed_s: float
    rechecked: tuple[Rechecked, ...] = ()
    failures: tuple[RegionFailure, ...] = ()

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
    session: Session, graphs: Iterable[tuple[str, DataflowGraph]], budget: Budget | None = None, seed: int = 0,
    on_region: OnRegion | None = None, on_trial: Callable[[ProgressEvent], None] | None = None,
    account: TimeAccount | None = None, executor: WorkerPool | None = None, on_graph: OnGraph | None = None,
    times_step: Callable[[str], bool] | None = None,
    regions_of: Callable[[DataflowGraph], Sequence[Region]] | None = None,
) -> TuneResult:
    """Plan every graph, measuring what is not stored. Each group and each part is stored as soon as it is done,
    a region after the run beside plain ATen that the next region does not wait for.

    A region that cannot be planned costs only itself, unless the fault is the machine's or the database's. What another
    tuner on the database is at work on is left to it, and waited for when there is nothing else to do.

    The session's device is probed; ``graphs`` are static, each with the name of its workload. Those of a
    :class:`~fuseplan.planner.tuning.graph_stream.GraphStream` are planned as they come. What the tuner does not book in
    ``account`` is planning: enumerating, pricing, solving. Jobs run in ``executor``, by default in worker processes of
    its own. Whole steps are timed of the workloads that ``times_step`` says yes to, by name; of none without it.
    ``regions_of`` says which regions, or parts of some, are planned of a graph; all regions without it.

    Raises:
        CaptureError: Of a stream: a workload cannot be captured; what was finished is stored.
        CompilerMissingError: No kernel back end can be used here.
        MachineFailureError: The machine fails what a tune needs; what was finished is stored.
        DatabaseError: The database cannot be written.
    """
    start = time.monotonic()
    account = account if account is not None else TimeAccount()
    budget = budget or Budget.on(session.target.device_type)
    failures: list[RegionFailure] = []
    learner = RunningCalibration(session.spec)
    with ExitStack() as stack:
        stack.enter_context(account.spend("planning"))
        tuner = stack.enter_context(session.tuner(budget, seed, on_trial, account, executor))
        planner = session.planner(tuner, learner=learner)
        lookahead = planner.lookahead()
        if lookahead is not None:
            stack.enter_context(lookahead)
        waiting: deque[_Work] = deque()
        work: list[_Work] = []

        def arrive(found: Iterable[tuple[str, DataflowGraph]]) -> None:
            for workload, graph in found:
                undecided = planner.undecided(graph)
                if on_graph is not None:
                    on_graph(graph, undecided)
                if lookahead is not None:
                    lookahead.send(graph, planner.undecided_parts(graph, undecided))
                    lookahead.send_whole(graph, undecided)
                work.append(_Work(workload, graph, regions_of(graph) if regions_of else find_regions(graph)))
                waiting.append(work[-1])

        stream = graphs if isinstance(graphs, GraphStream) else None
        if stream is None:
            arrive(graphs)
        in_vain = 0
        while waiting or (stream is not None and stream.waiting):
            if in_vain >= len(waiting) and stream is not None and stream.waiting:
                with account.spend("capturing"):
                    found = stream.take()
                arrive(found)
                in_vain = 0
                continue
            if in_vain and in_vain >= len(waiting):
                with account.spend("waiting for other tuners"):
                    time.sleep(POLL_S)
                in_vain = 0
            one = waiting.popleft()

            def at_region(label: str, number: int, total: int, workload: str = one.workload) -> None:
                if stream is not None:
                    arrive(stream.ready())
                if on_region is not None:
                    on_region(workload, label, number, total)

            planner.on_region = at_region
            gains = one.plan(planner, lookahead, noting(failures, one.workload, one.graph))
            in_vain = 0 if gains else in_vain + 1
            if one.left:  # everything else comes first
                waiting.append(one)
        plans = [one.planned() for one in work]
        for done in plans:
            if times_step is not None and times_step(done.workload):
                measure_step(session, done.graph, done.plan, tuner)
        taken_over = [(done.graph, done.plan) for done in plans]
        with account.spend("checking shipped times"):
            rechecked = recheck(session, taken_over, tuner)
    result = TuneResult(tuple(plans), session, time.monotonic() - start, rechecked, tuple(failures))
    if not result.measured:
        return result
    with account.spend("calibrating"):
        learner.update(final=True)
        return replace(result, session=replace(session, spec=learner.spec).recalibrated())


@dataclass
class _Work:
    """A workload that is being planned: ``left`` are the regions that other tuners are at work on."""

    workload: str
    graph: DataflowGraph
    regions: Sequence[Region]
    plans: list[GraphPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = list(self.regions)

    def plan(
        self, planner: Planner, lookahead: Lookahead | None, on_failure: Callable[[Region, Exception], None]
    ) -> bool:
        """Plan what nobody else is at work on; False where that was nothing."""
        taken: set[str] = set()
        self.plans.append(planner.plan_graph(
            self.graph, lookahead, on_failure, self.left, lambda region: taken.add(region.key)))
        before, self.left = len(self.left), [region for region in self.left if region.key in taken]
        return len(self.left) < before or not before

    def planned(self) -> WorkloadPlan:
        """Its plan, in graph order."""
        found = {one.region: one for plan in self.plans for one in plan.regions}
        regions = tuple(found[region] for region in self.regions if region in found)
        return WorkloadPlan(self.workload, self.graph, GraphPlan(regions, sum(one.lookup_us for one in self.plans)))


def noting(failures: list[RegionFailure], workload: str, graph: DataflowGraph) -> Callable[[Region, Exception], None]:
    """Adds a failure for each region that cannot be planned; raises what is the machine's or the database's fault."""

    def note(region: Region, error: Exception) -> None:
        if isinstance(error, MachineFailureError | DatabaseError):
            raise error
        label = located(region_label(graph, region), place_of(graph, region.ops))
        failures.append(RegionFailure(workload, label, error))

    return note

