"""From a captured graph to the groups that dispatch runs: look-ups, neighbouring sizes, and what to do on a miss."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.graph.dataflow import DataflowGraph, Region, bind_graph
from fuseplan.planner.groups.places import paths_of, place_of
from fuseplan.planner.groups.regions import find_regions, region_parts, unique_regions
from fuseplan.planner.implementations.group_book import GroupBook
from fuseplan.planner.libraries.library_calls import LIBRARY_CALLS
from fuseplan.planner.module_paths import located, place
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.runtime.fallback import CallPlan, GroupPlan
from fuseplan.planner.runtime.logs import warn_once
from fuseplan.planner.tuning.misses import log_missed
from fuseplan.planner.tuning.planner import Planner, RegionPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.search import policy
from fuseplan.search.store.record import GroupChoice
from fuseplan.search.tune.tuner import Budget

#: What happens to a region that the database does not know: the cost model's plan with default configurations,
#: nothing, or a tune here and now.
OnMiss = Literal["model", "unfused", "tune"]


logger = logging.getLogger(__name__)
_LOGGED: set[tuple[str, str]] = set()
_WARNED: set[str] = set()


@dataclass(frozen=True)
class Resolved:
    """The plans of a graph's regions, without those left unfused; what generated kernels and what library calls run."""

    regions: tuple[RegionPlan, ...]
    groups: tuple[GroupPlan, ...]
    calls: tuple[CallPlan, ...] = ()


def resolve(session: Session, graph: DataflowGraph, on_miss: OnMiss, tally: Tally) -> Resolved:
    """Plan ``graph``, whose sizes may be dynamic (they are looked up by their hints, then by neighbouring sizes).

    Never raises for lack of a plan: what cannot be planned stays unfused and is counted in ``tally``. Where no kernel
    can be built at all nothing is looked up: the graph is refused, and the first one warns.
    """
    if (reason := session.unusable()) is not None:
        tally.refuse(reason)
        message = f"fuseplan fuses nothing here: {reason}"
        logger.info(message)
        if message not in _WARNED:  # a process compiles hundreds of graphs
            _WARNED.add(message)
            warnings.warn(message, stacklevel=2)
        return Resolved((), ())
    start = time.perf_counter()
    planner = session.planner()
    static = bind_graph(graph)
    regions = find_regions(static)
    tally.count("regions", len(regions))
    plans, left, unfit = _stored_plans(planner, graph, static, regions, on_miss, tally)
    apart = unfit if on_miss == "tune" else [*unfit, *left]
    if apart:
        parts = [part for region in apart for part in planner.parts_to_plan(static, region, ())]
        again = [part for part in parts if part not in apart]
        more, missing, _ = _stored_plans(planner, graph, static, again, on_miss, tally)
        plans += more
        left = [region for region in left if region not in apart]
        left += [part for part in parts if part not in again] + missing
    if left:
        plans += _plans_on_miss(session, static, left, on_miss, tally)
    for reason in planner.refused.values():
        tally.quarantine(f"a stored plan is not used: {reason}")
    for names in planner.outdated.values():
        tally.note(f"a stored plan is of another version of {' and '.join(names)}: plan tune measures it again")
    if graph.symbols and on_miss != "unfused":
        plans = _dynamic_plans(planner, graph, static, regions, plans)
    resolved = _resolved(session, graph, plans, tally)
    tally.count("lookup_s", time.perf_counter() - start)
    return resolved


def _stored_plans(
    planner: Planner, graph: DataflowGraph, static: DataflowGraph, regions: Sequence[Region], on_miss: OnMiss,
    tally: Tally,
) -> tuple[list[RegionPlan], list[Region], list[Region]]:
    """What is stored for regions, or parts of some, or for neighbouring sizes of them; those without; and those of
    several parts whose plans have groups that are no kernels where sizes are dynamic, such as ones around matmuls.
    """
    found = planner.look_up_all(static, (occurrences[0] for occurrences in unique_regions(regions).values()))
    # What is stored and unsound runs unfused, unless it can be replaced by something measured.
    known = found.keys() if on_miss == "tune" else found.keys() | planner.refused.keys()
    plans = [RegionPlan(region, found[region.key], "database") for region in regions if region.key in found]
    waiting = [region for region in regions if region.key not in known]
    near = _neighbouring_plans(planner, graph, waiting) if waiting else []
    unfit = _in_parts(planner, graph, static, regions, [*plans, *near])
    apart = {frozenset(region.ops) for region in unfit}
    plans, near = ([one for one in some if frozenset(one.region.ops) not in apart] for some in (plans, near))
    tally.count("bucketed", len(near))
    served = {frozenset(plan.region.ops) for plan in near} | apart
    missed = [
        region for region in waiting
        if on_miss == "tune" or frozenset(region.ops) in served or region_parts(static, region) == (region,)
    ]  # of others it depends on their parts
    _report_misses(planner, static, unique_regions(missed), on_miss, tally)
    left = [region for region in waiting if frozenset(region.ops) not in served]
    return [*plans, *near], left, unfit


def _in_parts(
    planner: Planner, graph: DataflowGraph, static: DataflowGraph, regions: Iterable[Region],
    plans: Iterable[RegionPlan],
) -> list[Region]:
    """Those of ``regions`` whose parts are to be looked up, for a group of their plan is no kernel."""
    if not graph.symbols:
        return []
    books = _books(planner, graph, static)
    known: dict[str, bool] = {}
    found, by_ops = [], {frozenset(region.ops): region for region in regions}
    for plan in plans:
        region, key = by_ops[frozenset(plan.region.ops)], plan.region.key
        if key not in known:
            known[key] = len(region_parts(static, region)) > 1 and _unfit(planner, books, plan)
        if known[key]:
            found.append(region)
    return found


def _books(planner: Planner, *graphs: DataflowGraph) -> list[GroupBook]:
    return [GroupBook(graph, planner.settings.numerics, planner.target.device_type) for graph in graphs]


def _unfit(planner: Planner, books: Sequence[GroupBook], plan: RegionPlan) -> bool:
    """Whether a group of a plan is a kernel for the sizes seen and none for dynamic ones, as far as that can be told.

    ``books`` are of the graph with dynamic sizes, and with the sizes seen.
    """
    backends = {backend.name: backend for backend in planner.backends}

    def writable(book: GroupBook, choice: GroupChoice, ops: Sequence[str]) -> bool:
        # As at run time: where the tuned one cannot, another one does with its default.
        configs = dict.fromkeys(backends) | {choice.implementation: choice.config}
        return any(book.unwritable(ops, backends[name], configs[name], planner.target) is None for name in configs)

    dynamic, static = books
    kernels = [pair for pair in _fused(dynamic.graph, plan) if pair[0].implementation in backends]
    try:
        return any(not writable(dynamic, *kernel) and writable(static, *kernel) for kernel in kernels)
    except Exception as error:  # such groups run unfused
        logger.warning("%s may be no kernels with dynamic sizes: %s", plan.record.label, failure_reason(error))
        return False


def _report_misses(
    planner: Planner, graph: DataflowGraph, regions: Mapping[str, Sequence[Region]], on_miss: OnMiss, tally: Tally
) -> None:
    """Count each distinct miss, store it with its graph for the next tune, and log it once per process."""
    missed = []
    for region, *others in regions.values():
        tally.count("misses")
        where = place([paths_of(graph, one.ops) for one in (region, *others)])
        key = planner.key(region.key)
        missed.append((key, region, where))
        if (key.workload, key.device) not in _LOGGED:
            _LOGGED.add((key.workload, key.device))
            named = located(region_label(graph, region), where)
            logger.info("no tuned plan for %s; `plan tune --misses` stores one", named)
    if missed:
        log_missed(planner.store, graph, missed)
        if on_miss != "tune" and any(len(region.ops) > 1 for _, region, _ in missed):  # there is something to fuse
            how = "unfused" if on_miss == "unfused" else "as the cost model says, with default configurations"
            advice = "`plan tune --misses` tunes all that were missed" if planner.store.logs_misses else (
                "run `plan tune` for the model, since `plan tune --misses` needs a database that can be written")
            warn_once("misses", "regions of graph %s have no tuned plan and run %s; %s", tally.compile_id, how, advice)


def _neighbouring_plans(planner: Planner, graph: DataflowGraph, regions: list[Region]) -> list[RegionPlan]:
    """Plans tuned for the same regions with another value of one dynamic size.

    A plan is used only between two tuned sizes, neither more than ``policy.MAX_SIZE_RATIO`` away: the nearer
    one serves.
    """
    for name, hint in graph.symbols.items():
        if name in graph.derived or not isinstance(hint, int):
            continue
        powers = [2**power for power in range(1, hint.bit_length() + 3)]
        smaller = [size for size in reversed(powers) if size < hint <= size * policy.MAX_SIZE_RATIO]
        larger = [size for size in powers if hint < size <= hint * policy.MAX_SIZE_RATIO]
        below = _tuned(planner, graph, name, smaller, regions)
        above = _tuned(planner, graph, name, larger, regions) if below else {}
        if both := below.keys() & above.keys():
            return [
                below[ops][1] if hint / below[ops][0] <= above[ops][0] / hint else above[ops][1]
                for ops in (frozenset(region.ops) for region in regions)
                if ops in both
            ]
    return []


def _tuned(
    planner: Planner, graph: DataflowGraph, name: str, sizes: Iterable[int], regions: Iterable[Region]
) -> dict[frozenset[str], tuple[int, RegionPlan]]:
    """For the ops of each region: the first of ``sizes`` that a plan was tuned for, and that plan."""
    wanted = {frozenset(region.ops) for region in regions}
    found: dict[frozenset[str], tuple[int, RegionPlan]] = {}
    for size in sizes:
        if wanted <= found.keys():
            break
        bound = bind_graph(graph, {name: size})
        there = (one for region in find_regions(bound) for one in {region, *region_parts(bound, region)})
        asked = [region for region in there if (ops := frozenset(region.ops)) in wanted and ops not in found]
        stored = planner.look_up_all(bound, asked)
        for region in asked:
            if region.key in stored:
                found[frozenset(region.ops)] = (size, RegionPlan(region, stored[region.key], "database"))
    return found


def _plans_on_miss(
    session: Session, graph: DataflowGraph, regions: list[Region], on_miss: OnMiss, tally: Tally
) -> list[RegionPlan]:
    if not regions or on_miss == "unfused":
        return []
    if session.spec is None and on_miss == "model":
        logger.info("this device has not been probed, so the plan with the fewest launches is used; run `plan probe`")

    def drop(region: Region, error: Exception) -> None:  # a plan is a bonus: without one the ops run as they are
        reason = f"planning failed: {failure_reason(error)}"
        tally.refuse(reason, paths_of(graph, region.ops))
        named = located(region_label(graph, region), place_of(graph, region.ops))
        logger.warning("%s runs unfused: %s", named, reason)

    try:
        with session.tuner(Budget.on(session.target.device_type)) if on_miss == "tune" else nullcontext() as tuner:
            planned = session.planner(tuner).plan_graph(graph, on_failure=drop, regions=regions)
    except Exception as error:  # there is no tuner, or it cannot be shut down
        reason = f"planning failed: {failure_reason(error)}"
        tally.refuse(reason)
        logger.warning("%d regions run unfused: %s", len(regions), reason)
        return []
    return list(planned.regions)


def _dynamic_plans(
    planner: Planner, graph: DataflowGraph, static: DataflowGraph, regions: Iterable[Region], plans: list[RegionPlan]
) -> list[RegionPlan]:
    """The plans; the cost model's where a group of a plan for these sizes is no kernel when they are dynamic.

    Sizes of one, say, join what a symbol keeps apart.
    """
    parts = (part for region in regions for part in region_parts(static, region))
    by_ops = {frozenset(region.ops): region for region in (*regions, *parts)}
    try:
        books = _books(planner, graph, static)
        distinct = {plan.region.key: plan for plan in plans}
        unfit = {key for key, plan in distinct.items() if _unfit(planner, books, plan)}
        old = [plan for plan in plans if plan.region.key in unfit]
        wanted = [(by_ops[frozenset(plan.region.ops)], _kernels(planner, graph, plan)) for plan in old]
        new = planner.plan_dynamic(static, graph, wanted)
    except Exception as error:  # groups that are no kernels run unfused
        logger.warning("regions with dynamic sizes cannot be planned: %s", failure_reason(error))
        return plans
    kept = [plan for plan in plans if plan.region.key not in unfit]
    return [*kept, *(_with_configs(one, other) for one, other in zip(new, old, strict=True))]


def _kernels(planner: Planner, graph: DataflowGraph, plan: RegionPlan) -> list[tuple[str, ...]]:
    """The ops of each group that a generated kernel runs."""
    names = {backend.name for backend in planner.backends}
    return [ops for choice, ops in _fused(graph, plan) if choice.implementation in names]


def _with_configs(plan: RegionPlan, tuned: RegionPlan) -> RegionPlan:
    """The plan, with the configurations of another for groups that are in both."""
    known = {frozenset(tuned.group_ops(choice)): choice for choice in tuned.record.groups}

    def configured(choice: GroupChoice) -> GroupChoice:
        same = known.get(frozenset(plan.group_ops(choice)))
        if same is None or same.is_plain != choice.is_plain:
            return choice
        return replace(choice, implementation=same.implementation, config=same.config)

    return replace(plan, record=replace(plan.record, groups=tuple(map(configured, plan.record.groups))))


def _resolved(session: Session, graph: DataflowGraph, plans: Iterable[RegionPlan], tally: Tally) -> Resolved:
    libraries = {call.name: call for call in LIBRARY_CALLS}
    backends = {backend.name: (backend, backend.unavailable()) for backend in session.backends}
    usable = tuple(backend for backend, unavailable in backends.values() if not unavailable)
    groups: list[GroupPlan] = []
    calls: list[CallPlan] = []
    for plan in plans:
        fused = list(_fused(graph, plan))
        if not fused:
            tally.count("planned_unfused")
        for choice, ops in fused:
            name, paths = choice.implementation, paths_of(graph, ops)
            if name in libraries:
                calls.append(CallPlan(ops, libraries[name], choice.label, paths))
            elif name in backends:
                backend, unavailable = backends[name]
                if unavailable:
                    tally.fall_back(f"{name}: {unavailable}", paths=paths)
                else:
                    groups.append(GroupPlan(ops, backend, choice.config, plan.source, choice.label, usable, paths))
    return Resolved(tuple(plans), tuple(groups), tuple(calls))


def _fused(graph: DataflowGraph, plan: RegionPlan) -> Iterator[tuple[GroupChoice, tuple[str, ...]]]:
    """The groups of a plan that ATen does not run, with the names of their ops in the graph, views left out."""
    for choice in plan.record.groups:
        if not choice.is_plain:
            names = plan.group_ops(choice)
            yield choice, tuple(name for name in names if kind_of(graph.op(name), graph.specs) != "view")
