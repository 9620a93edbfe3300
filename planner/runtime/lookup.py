"""From a captured graph to the groups that dispatch runs: passes that fill in a :class:`RegionLookup` for each region.

They look in the database, for neighbouring sizes and for parts of a region, ask the cost model or a tune, and adapt
plans to dynamic sizes.
"""

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
from fuseplan.planner.groups.places import paths_of
from fuseplan.planner.groups.regions import parts_to_plan, region_parts, unique_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.inductor import InductorMode
from fuseplan.planner.module_paths import located, place
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.partition.by_inductor import decided_whole, may_run_whole
from fuseplan.planner.partition.plan_record import located_label, region_label
from fuseplan.planner.runtime.dynamic_sizes import neighbouring_plans, with_configs
from fuseplan.planner.runtime.logs import is_news, warn_once
from fuseplan.planner.tuning.miss_log import log_missed
from fuseplan.planner.tuning.plans import GraphPlan, RegionPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.whole_step import runs_by_inductor
from fuseplan.search import policy
from fuseplan.search.store.record import PlanRecord
from fuseplan.search.tune.tuner import Budget
from fuseplan.search.workers.compilers import COMPILERS

#: What happens to a region that the database does not know: the cost model's plan with default configurations, the
#: same beside plain ATen and TorchInductor in a short run, nothing, or a tune here and now.
OnMiss = Literal["model", "measure", "unfused", "tune"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegionLookup:
    """What became of a region, or of a part of one.

    ``status`` says where its plan is from. Without a plan it is ``"missed"`` (not found), or ``"refused"`` (a stored
    plan is unsound, or planning failed: ``reason``), and runs unfused. One that is ``"apart"`` is looked up by parts.
    """

    region: Region
    status: Literal["stored", "neighbour", "planned", "missed", "refused", "apart"] = "missed"
    plan: RegionPlan | None = None
    reason: str = ""


@dataclass(frozen=True)
class GraphLookup:
    """The look-ups of a graph, the groups that ATen does not run, and the code of TorchInductor's that is faster."""

    regions: tuple[RegionLookup, ...] = ()
    groups: tuple[PlannedGroup, ...] = ()
    by_inductor: InductorMode | None = None

    @property
    def plans(self) -> list[RegionPlan]:
        """Of those that have one."""
        return [one.plan for one in self.regions if one.plan is not None]


def look_up(session: Session, graph: DataflowGraph, on_miss: OnMiss, tally: Tally) -> GraphLookup:
    """Plan ``graph``, whose sizes may be dynamic (they are looked up by their hints, then by neighbouring sizes).

    What cannot be planned stays unfused and is counted in ``tally``. Where no kernel can be built the graph is refused.
    """
    if (reason := session.unusable()) is not None:
        tally.refuse(reason)
        message = f"fuseplan fuses nothing here: {reason}"
        logger.info(message)
        if is_news(message):
            warnings.warn(message, stacklevel=2)
        return GraphLookup()
    start = time.perf_counter()
    passes = _Passes(session, graph, on_miss, tally)
    tally.count("regions", len(passes.regions))
    found = passes.in_database(passes.regions, passes.stored)
    apart = [one.region for one in found if one.status == "apart"]
    parts = [part for region in apart for part in parts_to_plan(passes.static, region, ())]
    stored = passes.planner.look_up_all(passes.static, parts)
    of_parts = passes.whole_again(apart, passes.in_database(parts, stored))
    found = [one for one in found if one.status != "apart"] + of_parts
    found = passes.fit_dynamic(passes.planned(found))
    unfused = {one.region.key for one in found if one.status == "refused"}
    for key, reason in passes.planner.refused.items():
        tally.count("quarantined")
        (tally.refuse if key in unfused else tally.note)(f"a stored plan is not used: {reason}")
    for names in passes.planner.outdated.values():
        used = "" if on_miss == "tune" else " and used all the same"
        tally.note(f"a stored plan is of another version of {' and '.join(names)}{used}: plan tune times it again")
    groups: list[PlannedGroup] = []
    for plan in (one.plan for one in found if one.plan is not None):
        fused = list(passes.groups(plan))
        tally.count("planned_unfused", not fused)
        groups += fused
    by_inductor = _step_by_inductor(session, graph, found)
    tally.count("lookup_s", time.perf_counter() - start)
    return GraphLookup(tuple(found), tuple(groups), by_inductor)


def _step_by_inductor(session: Session, graph: DataflowGraph, found: Sequence[RegionLookup]) -> InductorMode | None:
    """TorchInductor's code that was measured to be faster than the stored plans of a static graph; None for none."""
    is_tuned = bool(found) and all(one.status == "stored" for one in found)
    if graph.symbols or session.settings.numerics != "fp32" or not is_tuned or not may_run_whole(
            graph, session.target.device_type):
        return None
    plans = tuple(one.plan for one in found if one.plan is not None)
    step = runs_by_inductor(session.store, GraphPlan(plans))
    return None if step is None else step.inductor_mode


class _Passes:
    """Fills in look-ups of a graph's ``regions`` and their parts; ``static`` is the graph with its hints for sizes."""

    def __init__(self, session: Session, graph: DataflowGraph, on_miss: OnMiss, tally: Tally) -> None:
        self.session, self.planner = session, session.planner() if on_miss == "tune" else session.dispatcher()
        self.graph, self.static = graph, bind_graph(graph)
        self.on_miss, self.tally = on_miss, tally
        self.regions, self.stored = self.planner.look_up_regions(self.static)
        self._unfit: dict[str, bool] = {}

    def in_database(self, regions: Sequence[Region], stored: Mapping[str, PlanRecord]) -> list[RegionLookup]:
        """What is ``stored`` for these sizes, else for neighbouring ones. Misses are reported."""
        refused = {} if self.on_miss == "tune" else self.planner.refused  # a tune replaces it by something measured
        near = neighbouring_plans(
            self.planner, self.graph, [one for one in regions if one.key not in stored and one.key not in refused])
        found = []
        for region in regions:
            if region.key in stored:
                found.append(RegionLookup(region, "stored", RegionPlan(region, stored[region.key], "database")))
            elif region.key in refused:
                found.append(RegionLookup(region, "refused", reason=refused[region.key]))
            else:
                found.append(RegionLookup(region, "neighbour" if region in near else "missed", near.get(region)))
        is_whole = self.on_miss in ("tune", "measure")
        self._report_misses([
            one.region for one in found if one.status == "neighbour"
            # Without a tune it depends on the parts of a region.
            or (one.status == "missed" and (is_whole or region_parts(self.static, one.region) == (one.region,)))
        ])
        found = [replace(one, status="apart", plan=None) if self._is_apart(one) else one for one in found]
        self.tally.count("bucketed", sum(one.status == "neighbour" for one in found))
        return found

    def _is_apart(self, one: RegionLookup) -> bool:
        """Whether the parts of a region are looked up instead of it."""
        if one.status == "refused" or len(region_parts(self.static, one.region)) == 1:
            return False
        if one.plan is None:  # what is measured runs as a whole, with what is stored of its parts
            return self.on_miss != "tune" and (self.on_miss != "measure" or bool(self.graph.symbols))
        return self._is_unfit(one.plan)

    def _is_unfit(self, plan: RegionPlan) -> bool:
        """Whether a group of a plan is known to be a kernel for the sizes seen and none for dynamic ones."""
        if not self.graph.symbols:
            return False
        if plan.region.key not in self._unfit:
            settings, device_type = self.planner.settings, self.planner.target.device_type
            dynamic, static = (GroupTable(graph, settings.numerics, device_type) for graph in (self.graph, self.static))
            try:
                self._unfit[plan.region.key] = any(
                    not one.implementation.is_writable(dynamic, one.ops, one.config)
                    and one.implementation.is_writable(static, one.ops, one.config) for one in self.groups(plan)
                )
            except Exception as error:  # such groups run unfused
                self._unfit[plan.region.key] = False
                label, reason = plan.record.label, failure_reason(error)
                logger.warning("%s may be no kernels with dynamic sizes: %s", label, reason)
        return self._unfit[plan.region.key]

    def _report_misses(self, regions: Iterable[Region]) -> None:
        """Count each distinct miss, store it with its graph for the next tune, and log it once per process."""
        planner, missed = self.planner, []
        for region, *others in unique_regions(regions).values():
            self.tally.count("misses")
            where = place([paths_of(self.static, one.ops) for one in (region, *others)])
            key = planner.key(region.key)
            missed.append((key, region, where))
            if is_news((key.workload, key.device)):
                named = located(region_label(self.static, region), where)
                logger.info("no tuned plan for %s; `plan tune --misses` stores one", named)
        if not missed:
            return
        log_missed(self.session.database, self.static, self.regions, missed)
        if self.on_miss != "tune" and any(len(region.ops) > 1 for _, region, _ in missed):  # there is something to fuse
            how = {"unfused": "unfused", "measure": "as a short run decides now, in each process again"}.get(
                self.on_miss, "as the cost model says, with default configurations")
            advice = "`plan tune --misses` tunes all that were missed" if self.session.database.logs_misses else (
                "run `plan tune` for the model, since `plan tune --misses` needs a database that can be written")
            warn_once("misses", "regions of graph %s have no tuned plan and run %s; %s", self.tally.compile_id, how,
                      advice)

    def whole_again(self, apart: Sequence[Region], of_parts: Sequence[RegionLookup]) -> list[RegionLookup]:
        """Look-ups of parts, but of a static region where no part is stored and the cost model decides more of it."""
        if self.graph.symbols or self.on_miss != "model":
            return list(of_parts)
        found = {one.region.key for one in of_parts if one.status != "missed"}
        table = GroupTable(self.static, self.planner.settings.numerics, self.planner.target.device_type)
        whole = decided_whole(table, apart, self.planner.unmeasured, self.session.spec is not None, found)
        gone = {part for region in whole for part in region_parts(self.static, region)}
        return [one for one in of_parts if one.region not in gone] + list(map(RegionLookup, whole))

    def planned(self, found: Sequence[RegionLookup]) -> list[RegionLookup]:
        """With plans for what was missed, as ``on_miss`` says."""
        missed, session = [one.region for one in found if one.status == "missed"], self.session
        if not missed or self.on_miss == "unfused":
            return list(found)
        if session.target.is_gpu and self.on_miss == "model":  # they import for seconds, as planning takes
            COMPILERS.expect()
        if session.spec is None and self.on_miss != "tune":
            logger.info(
                "this device has not been probed, so the plan with the fewest launches is used; run `plan probe`")
        failed: dict[str, str] = {}

        def drop(region: Region, error: Exception) -> None:  # a plan is a bonus: without one the ops run as they are
            reason = failed[region.key] = f"planning failed: {failure_reason(error)}"
            self.tally.refuse(reason, paths_of(self.static, region.ops))
            named = located_label(self.static, region)
            logger.warning("%s runs unfused: %s", named, reason)

        measures = self.on_miss in ("tune", "measure")
        tuning = session.tuner(Budget.on(session.target.device_type)) if measures else nullcontext()
        try:
            with tuning as tuner:
                planner = session.planner(tuner)
                made = planner.screen_regions(
                    self.static, missed, policy.MEASURED_ON_MISS_S, drop) if self.on_miss == "measure" else (
                    planner.plan_graph(self.static, on_failure=drop, regions=missed).regions)
        except Exception as error:  # there is no tuner, or it cannot be shut down
            reason = f"planning failed: {failure_reason(error)}"
            self.tally.refuse(reason)
            logger.warning("%d regions run unfused: %s", len(missed), reason)
            return list(found)
        plans = {plan.region: plan for plan in made}
        return [
            one if one.status != "missed"
            else RegionLookup(one.region, "planned", plans[one.region]) if one.region in plans
            else RegionLookup(one.region, "refused", reason=failed.get(one.region.key, ""))
            for one in found
        ]

    def fit_dynamic(self, found: Sequence[RegionLookup]) -> list[RegionLookup]:
        """The cost model's plan where a group of one for these sizes is no kernel when they are dynamic.

        Sizes of one, say, join what a symbol keeps apart.
        """
        if not self.graph.symbols or self.on_miss == "unfused":
            return list(found)
        try:
            old = {one.region: one.plan for one in found if one.plan is not None and self._is_unfit(one.plan)}
            wanted = [(region, [one.ops for one in self.groups(plan) if one.implementation.backends])
                      for region, plan in old.items()]
            new = self.planner.plan_dynamic(self.static, self.graph, wanted)
        except Exception as error:  # groups that are no kernels run unfused
            logger.warning("regions with dynamic sizes cannot be planned: %s", failure_reason(error))
            return list(found)
        made = {one.region: with_configs(one, old[one.region]) for one in new}
        return [replace(one, plan=made.get(one.region, one.plan)) for one in found]

    def groups(self, plan: RegionPlan) -> Iterator[PlannedGroup]:
        """The groups of a plan that ATen does not run."""
        for choice in plan.record.groups:
            if not choice.is_plain:
                names = (self.graph.op(name) for name in plan.group_ops(choice))
                ops = tuple(node.name for node in names if kind_of(node, self.graph.specs) != "view")
                implementation = self.planner.implementations.named(choice.implementation)
                paths = paths_of(self.graph, ops)
                yield PlannedGroup(ops, implementation, choice.config, plan.source, choice.label, paths)
