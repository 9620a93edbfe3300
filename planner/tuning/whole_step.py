"""A whole step of a model, end to end: all its regions one after another, as ATen runs them and as planned.

Repeated layers share weights and caches, so that a step fits where the model would not; each layer's are larger than a
cache, and read from memory as if they were its own. Opaque ops are on each side, as ATen runs them, where they can run
on numbers of our choice.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from fuseplan.costmodel.device import Mode
from fuseplan.planner.cost.step_floor import floor_us
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import same_values
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.choices import Choice, Implementations, implementations_for, in_order
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.inductor import InductorMode
from fuseplan.planner.partition.by_inductor import InductorStep, compare_step
from fuseplan.planner.partition.whole_region import opaque_parts, plain_parts, planned_parts
from fuseplan.planner.tuning.plans import GraphPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.search import policy
from fuseplan.search.store import codec
from fuseplan.search.store.limits import Amount
from fuseplan.search.store.record import PlanRecord, RecordKey, now
from fuseplan.search.timing.contest import Contest, middle_range
from fuseplan.search.timing.operands import MEMORY, memory_bytes
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner
from fuseplan.search.workers.worker import Outcome

logger = logging.getLogger(__name__)
_PREFIX, _UNTIMED = "step", "untimed"
_UNFUSED, _PLANNED = "unfused", "planned"


@dataclass(frozen=True)
class StepTimes:
    """A whole step, measured end to end in one interleaved run; what older versions did not store is None or empty.

    Attributes:
        unfused_us: Every op by ATen.
        planned_us: By the plan.
        noise: Relative difference of two runs of the same.
        gain_low, gain_high: The range of unfused over planned time in each of so many ``rounds``, without the tenth of
            them with the least and the tenth with the most.
        floor_us: What memory and arithmetic alone take; None where a peak is not known.
        inductor_us: By TorchInductor's code of the same graph; None where it was not timed. Plain ``torch.compile``
            has a graph whose attention nobody rewrote, and may take longer.
        inductor_mode: Which mode of ``torch.compile`` that was.
        by_inductor: Whether that is faster beyond doubt, so that dispatch leaves the whole graph to it.
        alone: Its time over the plan's on a GPU, in a CUDA graph; None where that was not timed apart.
        created: ISO 8601 UTC time.
        samples: Microseconds of each round by side.
        read_low, read_high: The range of the speed, in GB/s, at which the CPU read memory meanwhile.
        opaque: How many ops that only ATen can run are in all these times.
    """

    unfused_us: Amount
    planned_us: Amount
    noise: Amount
    floor_us: Amount | None = None
    created: str = ""
    device: str = ""
    inductor_us: Amount | None = None
    by_inductor: bool = False
    alone: Amount | None = None
    inductor_mode: InductorMode = "default"
    gain_low: Amount | None = None
    gain_high: Amount | None = None
    rounds: int = 0
    samples: Mapping[str, tuple[Amount, ...]] = field(default_factory=dict)
    read_low: Amount | None = None
    read_high: Amount | None = None
    opaque: int = 0

    @property
    def gains(self) -> tuple[float, float] | None:
        """The range of what the plan gained in its rounds; None where that is not known, or the plan does not run."""
        known = None if self.gain_low is None or self.gain_high is None else (self.gain_low, self.gain_high)
        return None if self.by_inductor else known

    @property
    def best_us(self) -> float:
        """What dispatch runs takes so long."""
        return self.inductor_us if self.by_inductor and self.inductor_us is not None else self.planned_us


@dataclass(frozen=True)
class Untimed:
    """A step that is not timed, and ``why``; "" where there is nothing to say.

    Kept where the run timed out: the next one with this ``job_limit_s`` or less would, too. Other failures may pass.
    """

    why: str = ""
    job_limit_s: Amount = 0.0


def step_key(planned: Iterable[tuple[int, PlanRecord]]) -> str:
    """What tells steps apart: the plans of their regions, when and by which tune each was decided, and how often it
    occurs.
    """
    return codec.checksum(str(sorted(
        (codec.dumps(record.key), record.evidence.created + record.evidence.run, count) for count, record in planned
    )))


def stored_steps(database: codec.CaptureStore) -> dict[str, StepTimes]:
    """What was measured of steps, by their keys; what cannot be read is left out."""
    return codec.stored(database, StepTimes, _PREFIX)


def steps_of_user(database: codec.CaptureStore) -> frozenset[str]:
    """The keys of steps that did not come with the package."""
    return frozenset(name.removeprefix(f"{_PREFIX}/") for name in database.capture_names(f"{_PREFIX}/"))


def runs_by_inductor(database: codec.CaptureStore, plan: GraphPlan) -> StepTimes | None:
    """The times of a step that TorchInductor's code was measured to be faster at; None where there is no such step."""
    key = step_key(counted(plan))
    found = codec.stored(database, StepTimes, _PREFIX, key).get(key)
    return found if found is not None and found.by_inductor else None


def counted(plan: GraphPlan) -> list[tuple[int, PlanRecord]]:
    """The plan of each distinct region, with how often it occurs."""
    counts = Counter(one.region.key for one in plan.regions)
    return [(counts[one.region.key], one.record) for one in plan.unique()]


def measure_step(
    session: Session, graph: DataflowGraph, plan: GraphPlan, tuner: Tuner,
    on_start: Callable[[float], None] = lambda unfused_us: None
) -> StepTimes | Untimed:
    """The step's times, stored or measured and stored now; what another tuner is timing is waited for.

    Not timed is a step that takes too long, has a region without a plan, or fails (for want of memory, or of time).
    ``on_start`` is told what the sum of its regions takes unfused.
    """
    key = step_key(counted(plan))
    lease = RecordKey(key, session.device, session.settings.regime, session.settings.numerics)

    def known() -> StepTimes | Untimed | None:
        untimed = codec.stored(session.store, Untimed, _UNTIMED, key).get(key)
        if untimed is not None and untimed.job_limit_s < tuner.budget.job_limit_s:  # it may end within more time
            untimed = None
        return codec.stored(session.store, StepTimes, _PREFIX, key).get(key) or untimed

    return tuner.leases.once(lease, known, lambda: _measured(session, graph, plan, tuner, key, on_start))


def measure_again(session: Session, graph: DataflowGraph, plan: GraphPlan, tuner: Tuner, first: StepTimes) -> None:
    """Add rounds to a step's times: a machine's speed changes from minute to minute, as others use its memory.

    TorchInductor's time over the plan's becomes the geometric mean of both runs; who runs the step stays as it was.
    """
    ran = _run(session, graph, plan, tuner)
    if not ran.outcome.ok:
        return
    contest: Contest = ran.outcome.value
    samples = {side: (*first.samples.get(side, ()), *own) for side, own in contest.samples.items()}
    found = _times(session, ran, replace(contest, samples=samples, noise=max(contest.noise, first.noise)))
    if first.inductor_us is not None:
        ratio = first.inductor_us / first.planned_us
        planned_us = contest.time(_PLANNED).median_us
        again_us = ran.inductor.time_us(planned_us)
        ratio = ratio if again_us is None else math.sqrt(ratio * again_us / planned_us)
        found = replace(found, inductor_us=found.planned_us * ratio, by_inductor=first.by_inductor, alone=first.alone,
                        inductor_mode=first.inductor_mode)
    session.database.put_capture(f"{_PREFIX}/{step_key(counted(plan))}", asdict(found))


def step_problem(workload: str, found: StepTimes | Untimed) -> str:
    """Why a workload's step is not timed, in words; "" where it is, or there is nothing to say."""
    why = found.why if isinstance(found, Untimed) else ""
    return f"{workload}: its whole step is not timed: {why}" if why else ""


def _measured(
    session: Session, graph: DataflowGraph, plan: GraphPlan, tuner: Tuner, key: str, on_start: Callable[[float], None]
) -> StepTimes | Untimed:
    planned = counted(plan)
    unfused_us = sum(count * record.unfused_us for count, record in planned)
    is_whole = bool(planned) and len(plan.regions) == len(find_regions(graph))
    if not is_whole or session.spec is None:
        return Untimed()
    if unfused_us > policy.LONGEST_STEP_US:
        return Untimed(f"it takes about {unfused_us * 1e-6:.2g} s, and steps of more than "
                       f"{policy.LONGEST_STEP_US * 1e-6:g} s are told by the sum of their regions")
    on_start(unfused_us)
    ran = _run(session, graph, plan, tuner)
    if not ran.outcome.ok:
        untimed = Untimed(ran.outcome.failure, tuner.budget.job_limit_s)
        if ran.outcome.timed_out:
            session.database.put_capture(f"{_UNTIMED}/{key}", asdict(untimed))
        return untimed
    found, other = _times(session, ran, ran.outcome.value), ran.inductor
    if (inductor_us := other.time_us(found.planned_us)) is not None:
        found = replace(
            found, inductor_us=inductor_us, by_inductor=other.wins, alone=other.alone, inductor_mode=ran.mode)
    elif other.why:
        logger.info("TorchInductor's code for the step is not timed: %s", other.why)
    session.database.put_capture(f"{_PREFIX}/{key}", asdict(found))
    return found


@dataclass(frozen=True)
class _Ran:
    """What came of timing a step with so many ``opaque`` ops: a :class:`Contest` of its sides, and of TorchInductor."""

    table: GroupTable
    outcome: Outcome
    inductor: InductorStep
    mode: InductorMode
    opaque: int


def _run(session: Session, graph: DataflowGraph, plan: GraphPlan, tuner: Tuner) -> _Ran:
    """Time a step; without its opaque ops where it fails with them, which may not take the numbers that we chose.

    TorchInductor comes first: while it compiles, a host launches more slowly.
    """
    settings, plans = session.settings, [(one.region, one.record) for one in plan.regions]
    table = GroupTable(graph, settings.numerics, session.target.device_type)
    ways = implementations_for(settings.regime, session.backends, session.target, settings.inductor)
    for opaque in (opaque_parts(table, ways), {}):
        inductor = InductorStep() if settings.inductor == "off" else compare_step(table, plans, opaque, ways, tuner)
        outcome = tuner.time_sides(*_sides(table, plan, opaque, ways))
        if outcome.ok or outcome.timed_out or not opaque:
            break
    return _Ran(table, outcome, inductor, ways.inductor.compiled_for, len(opaque))


def _times(session: Session, ran: _Ran, contest: Contest) -> StepTimes:
    """The times of a step, of a run of both sides."""
    assert session.spec is not None
    unfused, planned = (contest.time(side).median_us for side in (_UNFUSED, _PLANNED))
    low, high = contest.gain_range(_PLANNED, _UNFUSED)
    read = memory_bytes(session.target.l2_bytes) * 1e-3
    slow, fast = middle_range(read / one for one in contest.samples[MEMORY]) if MEMORY in contest.samples else (
        None, None)
    mode: Mode = "graph" if session.settings.regime == "graph" else "eager"
    floor = floor_us(ran.table, session.spec, mode, fast or 0.0)  # a machine's neighbours may have been busier before
    return StepTimes(
        unfused, planned, contest.noise, floor, now(), session.device, gain_low=low, gain_high=high,
        rounds=len(contest.samples[_PLANNED]), samples=contest.samples, read_low=slow, read_high=fast,
        opaque=ran.opaque)


def _sides(
    table: GroupTable, plan: GraphPlan, opaque: Mapping[Choice, Part], ways: Implementations
) -> tuple[dict[str, Part], dict[str, list[str]], list[str]]:
    """Both sides of a step: parts by name, the names that each side runs in order, and values that are returned."""
    graph, flow = table.graph, compute_graph_of(table.graph)
    members = {at for one in plan.regions for name in one.region.ops if flow.is_member(at := flow.position[name])}
    members |= {flow.position[name] for choice in opaque for name in choice.group.ops}
    made = {value for at in members for value in flow.nodes[at].outputs}
    parts: dict[str, Part] = {}
    sides: dict[str, list[str]] = {_UNFUSED: [], _PLANNED: []}
    first: dict[str, tuple[Region, dict[str, list[Part]]]] = {}
    for one in plan.unique():
        plain, planned = plain_parts(table, [one.region], ways), planned_parts(table, [(one.region, one.record)], ways)
        first[one.region.key] = one.region, {
            side: [its[choice] for choice in in_order(graph, its)]
            for side, its in ((_UNFUSED, plain), (_PLANNED, planned))
        }
    for number, one in enumerate(plan.regions):
        region, of_sides = first[one.region.key]
        same = same_values(graph, region, one.region)
        names = {a: b if b in made or a in made else a for a, b in same.items()}  # what no region makes all share
        for side, run in of_sides.items():
            for at, part in enumerate(run):
                reads, makes = (tuple(names.get(a, a) for a in values) for values in (part.reads, part.makes))
                sides[side].append(name := f"{number}.{side}.{at}")
                parts[name] = replace(part, reads=reads, makes=makes)
    for choice, part in opaque.items():
        parts[choice.group.ops[0]] = part
        for names_of_side in sides.values():
            names_of_side.append(choice.group.ops[0])
    return parts, sides, flow.needed_outside(members)
