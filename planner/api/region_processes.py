"""Several processes that tune regions for one GPU: while one of them measures, the others plan and compile."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.api.region_tuner import Rankings, RegionTask, RegionTuner, Terms, graph_shares, region_task
from fuseplan.planner.api.request import HowToTune, memory_bytes
from fuseplan.planner.cost.running_calibration import RunningCalibration, Samples
from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.tuning.plans import GraphPlan, RegionPlan
from fuseplan.planner.tuning.progress import Progress, TuneEvents
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.whole_step import measure_step
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.store.leases import Leases, forget
from fuseplan.search.store.location import sqlite_file
from fuseplan.search.timing import signs
from fuseplan.search.tune import tuner as tuners
from fuseplan.search.tune.resources import Alike, ProgressEvent
from fuseplan.search.workers.worker import Outcome, WorkerPool, usable_cores

#: Planning has no time limit, and each job that measures has one of its own. A system call waits 24 days at most.
_ANY_TIME_S = 1e6
#: Seconds between two steps of a search that are shown.
_SHOWN_S = 0.1


def processes_on(kind: str) -> int:
    """How many processes share the device of a tune; 1 on CPUs, where they would disturb each other's measurements."""
    if not is_gpu(kind):
        return 1
    room = memory_bytes(kind) // policy.GPU_BYTES_A_PROCESS
    return max(1, min(policy.PROCESSES_A_GPU, usable_cores() // policy.CORES_A_PROCESS, room))


@dataclass(frozen=True)
class Maker:
    """What the tuner of a process is made of; ``owner`` is the name of its leases."""

    terms: Terms
    owner: str
    threads: int
    compilers: int


@dataclass(frozen=True)
class RegionTuned:
    """A region's plan, None where it failed or another tuner is at work on it; and what its search has shown."""

    plan: RegionPlan | None
    rankings: Rankings = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A region that is to be tuned, by its name, and the workload that had it first."""

    workload: str
    label: str
    task: RegionTask


@dataclass(eq=False)
class _Lane:
    """A process by its number: what gives the outcome of its job, whether that only starts it, the region that it tunes
    (None where it times a step), and the region that it prepares.
    """

    number: int
    outcome: Callable[[], Outcome | None] | None = None
    starts: bool = False
    tuning: _Asked | None = None
    ahead: _Asked | None = None

    @property
    def busy(self) -> bool:
        return self.outcome is not None and not self.starts


class RegionProcesses:
    """Processes that tune regions of this device, of which one measures at a time. A context manager.

    What a process fails at, and what ends it, is left to whoever asked.

    Args:
        count: How many processes.
        preload: What they import or call first (:class:`~fuseplan.search.workers.worker.WorkerPool`).
    """

    def __init__(self, kind: str, how: HowToTune, progress: Progress, count: int, preload: Sequence[str] = ()) -> None:
        self._kind, self._how, self._progress = kind, how, progress
        self._lanes = [_Lane(number) for number in range(1, count + 1)]
        self._pool = WorkerPool(count, preload=(__name__, *preload))
        self._machine = torch.get_num_threads(), max(1, usable_cores() // count)
        self._waiting: list[_Asked] = []
        self._steps: deque[tuple[str, DataflowGraph, GraphPlan]] = deque()
        self._done: dict[str, RegionPlan | None] = {}
        self._seen = self._asked = self._begun = self._timed = self._failed = 0
        self._rankings: dict[Alike, Sequence[Config]] = {}

    def __enter__(self) -> RegionProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def start(self) -> None:
        """Have the processes import what they need, while there is no region yet; at once returns."""
        for lane in self._lanes:
            lane.outcome = self._pool.begin(
                lane.number, warm_up, self._kind, *self._machine, limit_s=_ANY_TIME_S)
            lane.starts = True

    def begin(self, session: Session, learner: RunningCalibration, told: TuneEvents) -> bool:
        """Tune regions for a session from now on; False where no other process can open its database.

        ``learner`` takes in what they measure; ``told`` hears what they do.
        """
        url = session.database.url
        if url.get_backend_name() == "sqlite" and sqlite_file(url) is None:
            return False
        self._session, self._learner, self._told = session, learner, told
        location = url.render_as_string(hide_password=False)
        self._terms = Terms(session.run, self._kind, location, session.settings, self._how)
        self._owner = Leases(session.database).owner
        return True

    def end(self) -> None:
        """End the processes, and release what they were at work on."""
        self._pool.close()
        if busy := [self._owner_of(lane) for lane in self._lanes if lane.busy]:
            forget(self._session.database, busy)
        self._lanes = [_Lane(lane.number) for lane in self._lanes]
        for kept in (self._waiting, self._steps, self._done, self._rankings):
            kept.clear()
        self._seen = self._asked = self._begun = self._timed = self._failed = 0

    @property
    def busy(self) -> bool:
        """Whether something that was asked for is not done."""
        return bool(self._waiting or self._steps or self._done or any(lane.busy for lane in self._lanes))

    @property
    def used(self) -> bool:
        """Whether they have tuned anything since they began."""
        return self._begun > 0

    def ask(self, workload: str, graph: DataflowGraph, regions: Sequence[Region]) -> set[str]:
        """Have regions of a static graph tuned; the keys of those that are. None is until they are more than the
        processes, which take a while to start, and some cannot be sent.
        """
        self._seen += len(regions)
        if not regions or self._seen <= len(self._lanes) or self._gave_up:
            return set()
        shares, sent = graph_shares(self._session, graph), set[str]()
        for region in regions:
            with contextlib.suppress(PlanError):
                task = region_task(graph, region, shares, self._session.settings.minor)
                self._waiting.append(_Asked(workload, region_label(graph, region), task))
                sent.add(region.key)
            while self._pool.has_word():  # a process may wait for its next region
                self._listen()
        self._asked += len(sent)
        self._hand_out()
        return sent

    def ask_step(self, workload: str, graph: DataflowGraph, plan: GraphPlan) -> None:
        """Have a whole step timed, once no region waits; its times are stored."""
        if not self._gave_up:
            self._steps.append((workload, graph, plan))
            self._hand_out()

    def step(self) -> dict[str, RegionPlan | None]:
        """Wait until a process says something: the plans of regions that are done, by key; None for one it leaves."""
        if not self._done:
            self._listen()
        done, self._done = self._done, {}
        return done

    def _listen(self) -> None:
        word = self._pool.listen()
        if isinstance(word, ProgressEvent):
            self._told.on_trial(word)
        for lane in self._lanes:
            if lane.outcome is not None and (outcome := lane.outcome()) is not None:
                self._end(lane, outcome)
        self._hand_out()

    def _end(self, lane: _Lane, outcome: Outcome) -> None:
        """The job of a process has ended."""
        tuned, lane.tuning, lane.outcome, lane.starts = lane.tuning, None, None, False
        if not outcome.ok:
            forget(self._session.database, [self._owner_of(lane)])
            self._progress.note(f"a process of this tune failed ({outcome.failure}); its work is done by this one")
            self._failed += 1
        if tuned is not None:
            found: RegionTuned = outcome.value if outcome.ok else RegionTuned(None)
            self._done[tuned.task.key] = found.plan
            self._rankings |= found.rankings
            self._learner.take(found.samples)

    @property
    def _gave_up(self) -> bool:
        """Whether so many jobs ended their process that this machine has no room for several."""
        return self._failed >= len(self._lanes)

    def _hand_out(self) -> None:
        """Begin what comes next in each process that is idle."""
        if self._gave_up:
            self._waiting += [lane.ahead for lane in self._lanes if lane.ahead is not None]
            self._done |= dict.fromkeys(one.task.key for one in self._waiting)
            self._waiting.clear()
            self._steps.clear()
            for lane in self._lanes:
                lane.ahead = None
        for lane in self._lanes:
            if lane.outcome is not None:
                continue
            if (asked := lane.ahead or self._next() or self._prepared()) is not None:
                self._begin(lane, asked)
            elif self._steps:
                self._timed += 1
                event = ProgressEvent(self._steps[0][0], self._timed, self._timed + len(self._steps) - 1, 0.0, "step")
                self._send(lane, time_step, event, *self._steps.popleft()[1:])

    def _begin(self, lane: _Lane, asked: _Asked) -> None:
        self._begun += 1
        self._told.on_region(asked.workload, asked.label, self._begun, self._asked)
        lane.tuning, lane.ahead = asked, None
        lane.ahead = self._next(apart=True)
        ahead = lane.ahead.task if lane.ahead is not None else None
        self._send(lane, tune_region, asked.task, ahead, self._rankings, self._learner.samples)

    def _send(self, lane: _Lane, job: Callable[..., object], *args: object) -> None:
        maker = Maker(self._terms, self._owner_of(lane), *self._machine)
        lane.outcome = self._pool.begin(lane.number, job, maker, *args, limit_s=_ANY_TIME_S)

    def _next(self, apart: bool = False) -> _Asked | None:
        """The region that takes longest, but rather one that has no part in common with those under way: a part is
        measured once, and waited for. ``apart``: only such a one.
        """
        under_way = {key for lane in self._lanes for one in (lane.tuning, lane.ahead) if one for key in one.task.shares}
        alone = [one for one in self._waiting if under_way.isdisjoint(one.task.shares)]
        found = max(alone if alone or apart else self._waiting, key=lambda one: one.task.ops, default=None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def _prepared(self) -> _Asked | None:
        """A region that another process prepares and does not tune yet: nothing else is left."""
        found = None
        if (other := next((one for one in self._lanes if one.ahead is not None), None)) is not None:
            found, other.ahead = other.ahead, None
        return found

    def _owner_of(self, lane: _Lane) -> str:
        return f"{self._owner}.{lane.number}"


# -- in the processes --------------------------------------------------------------------------------------------------


def warm_up(kind: str, threads: int, compilers: int) -> None:
    """Start what measures and compiles for this process."""
    _measuring_pool(kind, threads, compilers).start()


def tune_region(
    maker: Maker, task: RegionTask, ahead: RegionTask | None, rankings: Rankings, samples: Samples
) -> RegionTuned:
    """Tune a region, and prepare the one after it. ``rankings`` and ``samples`` are what all have learnt before."""
    tuner, plan = _region_tuner(maker), None
    learner = tuner.planner.learner
    learner.take(samples)
    for one in (task, ahead):
        if one is not None:
            tuner.prepare(one, rankings)
    try:
        plan = tuner.measure(task)
    except Exception as error:  # whoever asked meets it, too, and says so
        OWN_FAULTS.tolerate(error)
    new = {name: {choice: sample for choice, sample in its.items() if choice not in samples.get(name, {})}
           for name, its in learner.samples.items()}
    return RegionTuned(plan, tuner.learnt(), new)


def time_step(maker: Maker, event: ProgressEvent, graph: DataflowGraph, plan: GraphPlan) -> None:
    """Time a workload's whole step, and store its times."""
    tuner = _region_tuner(maker)
    limit_s = maker.terms.how.budget(maker.terms.kind).job_limit_s
    measure_step(tuner.session, graph, plan, tuner.tuner, limit_s,
                 lambda unfused_us: signs.goes_on(replace(event, best_us=unfused_us), 0.0))


@functools.cache
def _measuring_pool(kind: str, threads: int, compilers: int) -> WorkerPool:
    torch.set_num_threads(threads)  # a CPU with others is another device
    pool = tuners.make_pool(kind)
    pool.compilers = compilers
    return pool


@functools.cache
def _region_tuner(maker: Maker) -> RegionTuner:
    """The tuner of this process: one tune ends its processes."""
    pool = _measuring_pool(maker.terms.kind, maker.threads, maker.compilers)
    found = RegionTuner(maker.terms, pool, lambda event: signs.goes_on(event, _SHOWN_S))
    found.tuner.leases.owner = maker.owner
    return found
