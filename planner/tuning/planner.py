"""From a graph to a plan: regions, looked up in the database, else tuned, else decided by the cost model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeAlias
from weakref import WeakKeyDictionary

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.cost.prices import MeasuredPrices, ModelPrices, part_shares
from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.anchored import unpacks_weights
from fuseplan.planner.groups.candidates import enumerate_parts
from fuseplan.planner.groups.regions import find_regions, is_anchor, region_parts, unique_regions
from fuseplan.planner.implementations.choices import Implementations, RegionProblem, implementations_for, region_problem
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.partition.across_anchors import JointProblems, plan_across_anchors, predicted_across_anchors
from fuseplan.planner.partition.by_inductor import predicted_by_inductor, whole_by_inductor
from fuseplan.planner.partition.by_measurement import MeasuredRegion
from fuseplan.planner.partition.guided_loop import Prices, guided_partition, predicted_partition
from fuseplan.planner.partition.plan_record import PlanWriter, region_label
from fuseplan.planner.partition.whole_region import Verdict, last_word
from fuseplan.planner.tuning.lookahead import Lookahead
from fuseplan.planner.tuning.plans import GraphPlan, OnFailure, PlanSettings, RegionPlan, reporting
from fuseplan.planner.tuning.stored_plans import Renewal, StoredPlans
from fuseplan.search import policy
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.leases import POLL_S
from fuseplan.search.store.record import PlanRecord, RecordKey
from fuseplan.search.tune.tuner import Tuner

__all__ = ["GraphPlan", "PlanSettings", "Planner", "RegionPlan"]

#: The plans of a region's parts, or of the region itself.
_Plans: TypeAlias = Sequence[tuple[Region, PlanRecord]]


class Planner:
    """Plans graphs for one device.

    Plans are looked up in ``store``; ``device`` is part of every key, and ``backends`` are in order of preference.

    Args:
        spec: The probed device; None plans by the number of launches alone.
        tuner: Measures what is not stored; None leaves it to the cost model.
        learner: The calibration that the measurements go on improving; of ``spec`` by default.
    """

    def __init__(
        self, store: Database | LayeredDatabase, spec: DeviceSpec | None, device: str, target: Target,
        backends: Sequence[Backend], settings: PlanSettings | None = None, tuner: Tuner | None = None,
        learner: RunningCalibration | None = None,
    ) -> None:
        self.store = store
        self.learner = learner if learner is not None else RunningCalibration(spec)
        self.device = device
        self.target = target
        self.backends = tuple(backends)
        self.settings = settings if settings is not None else PlanSettings()
        self.tuner = tuner
        #: Told about each distinct region before it is planned: label, number, how many.
        self.on_region: Callable[[str, int, int], None] = lambda label, number, total: None
        regime = self.settings.regime
        self.implementations = implementations_for(regime, self.backends, target, self.settings.inductor)
        #: What runs what nothing was measured for: most calls of libraries are chosen by measurement alone.
        self.unmeasured = replace(self.implementations, libraries=self.implementations.by_rule)
        #: What is stored; why plans are not used although they were found, and which versions differ, by region key.
        self.stored = StoredPlans(
            store, RecordKey("", device, regime, self.settings.numerics), self.implementations,
            tuner.database.put_plan if tuner is not None and tuner.database.mode == "write" else None)
        self.renewal = Renewal(self.stored)
        self.key, self.refused, self.outdated = self.stored.key, self.stored.refused, self.stored.outdated
        #: What was measured by this planner, by key: a part is decided once for all regions that have it.
        self._decided: dict[str, PlanRecord] = {}
        #: The cost model's plans of parts, by graph and key: layers repeat them.
        self._predicted_parts: WeakKeyDictionary[GroupTable, dict[str, PlanRecord]] = WeakKeyDictionary()
        self._shares: WeakKeyDictionary[GroupTable, Mapping[str, float]] = WeakKeyDictionary()
        self._ahead: Lookahead | None = None
        self._joint = JointProblems(self.implementations)

    @property
    def spec(self) -> DeviceSpec | None:
        """The device as it is calibrated now."""
        return self.learner.spec

    @property
    def _margin(self) -> float:
        return policy.PARTITION_MARGIN.on(self.target.device_type)

    def lookahead(self) -> Lookahead | None:
        """What prepares regions from now on, where that disturbs no measurement: not on CPUs. Needs a tuner."""
        if self.tuner is None or not self.target.is_gpu:
            return None
        self._ahead = Lookahead(self._problem, lambda table: ModelPrices(table, self.spec), self._table,
                         self._rehearse, self.tuner, self._is_minor, self._nominal_joint)
        return self._ahead

    def prepare(self, graph: DataflowGraph, regions: Sequence[Region], step: Sequence[Region] = ()) -> None:
        """Begin to enumerate regions and to compile their kernels, where something looks ahead. Returns at once.

        ``step``: regions that will run together, beside TorchInductor's code for all of it.
        """
        if self._ahead is not None:
            table = self._ahead.table(graph)
            regions = [one for one in regions if self.renewal.older(table, one) is None]
            if regions and self.settings.inductor != "off":
                self._ahead.ask_inductor(graph, step, self.implementations)
            parts = [part for region in regions for part in region_parts(graph, region)]
            self._ahead.send(graph, self.undecided(graph, parts))
            self._ahead.send_whole(graph, regions)

    def _rehearse(self, problem: RegionProblem, prices: Prices) -> None:
        guided_partition(problem, prices, policy.GAP_TOLERANCE, self._margin, self._limit(problem))

    def _limit(self, problem: RegionProblem) -> int:
        return len(problem.ops) + policy.MEASURED_LIMIT.on(self.target.device_type)

    def plan_graph(
        self, graph: DataflowGraph, on_failure: OnFailure | None = None, regions: Sequence[Region] | None = None,
        on_taken: Callable[[Region], None] | None = None,
    ) -> GraphPlan:
        """Plan every region of a static graph; equal regions are planned once.

        Where nothing can be measured, a region without a stored plan is planned part by part: some may have one.

        ``regions`` are all that is planned; None for all there are. A region that cannot be planned is told to
        ``on_failure``, and one that another tuner is at work on to ``on_taken``; both are left out, with all regions
        equal to them. Without these the error is raised, and the other tuner is waited for.
        """
        table = self._ahead.table(graph) if self._ahead is not None else self._table(graph)
        if regions is None:
            regions, known = self.look_up_regions(graph)
            if self.tuner is None:
                regions = self.stored.unmeasured(table, regions, known, self.unmeasured, self.spec is not None)
        planned: dict[str, RegionPlan] = {}
        unfinished: list[tuple[Region, Callable[[], RegionPlan], ExitStack]] = []

        def finish() -> None:
            while unfinished:
                region, last_word, leased = unfinished.pop()
                with leased, reporting(region, on_failure):
                    planned[region.key] = last_word()

        distinct = unique_regions(regions)
        start = time.perf_counter()
        stored = self.stored.find_all(table, (occurrences[0] for occurrences in distinct.values()))
        spent_us = (time.perf_counter() - start) * 1e6
        with ExitStack() as ending:
            for number, (key, occurrences) in enumerate(distinct.items(), 1):
                region = occurrences[0]
                found, leased = stored[key], ExitStack()
                if found.hit is None and self.tuner is not None:
                    if on_taken is None:
                        leased.enter_context(self.tuner.leases.alone(self.key(key)))
                    elif not leased.enter_context(self.tuner.leases.taking([self.key(key)])):
                        on_taken(region)
                        continue
                    found = self.stored.find_all(table, [region])[key]  # another tuner may have tuned it meanwhile
                with leased:
                    self.on_region(region_label(graph, region), number, len(distinct))
                    with reporting(region, on_failure):
                        if found.hit is not None:
                            planned[key] = RegionPlan(region, found.hit, "database", found.shipped)
                        else:
                            last_word = self._decide(graph, region, table)
                            finish()  # the region before was run as a whole beside this one's planning
                            unfinished.append((region, last_word, ending.enter_context(leased.pop_all())))
            finish()
        plans = tuple(replace(planned[region.key], region=region) for region in regions if region.key in planned)
        return GraphPlan(plans, spent_us)

    def screen_regions(
        self, graph: DataflowGraph, regions: Sequence[Region], seconds: float, on_failure: OnFailure | None = None
    ) -> list[RegionPlan]:
        """Regions by the stored plans of their parts and the cost model, each as a whole beside plain ATen and
        TorchInductor's code. Nothing is searched or stored; after ``seconds`` no run begins. Needs a tuner.
        """
        assert self.tuner is not None
        ends_s, table = time.monotonic() + seconds, self._table(graph)
        predicted: list[tuple[float, Region, list[tuple[Region, PlanRecord]]]] = []
        found: dict[str, RegionPlan] = {}
        ways, asked = self.implementations, self.settings.inductor != "off"
        for region, *others in unique_regions(regions).values():
            with reporting(region, on_failure):
                stored = self.stored.find_all(table, parts := region_parts(graph, region))
                plans = [(part, stored[part.key].hit or self._by_model(table, part)) for part in parts]
                unfused_us = sum(record.unfused_us for _, record in plans)
                predicted.append((-(1 + len(others)) * unfused_us, region, plans))
        for _, region, plans in sorted(predicted, key=lambda one: one[0]):  # the longest first
            with reporting(region, on_failure):
                verdict = Verdict(words="; not run as a whole, for want of time")
                if time.monotonic() < ends_s:
                    longest_s = policy.LONG_REGION_S if self.spec is not None else math.inf  # no times, then
                    whole = whole_by_inductor(table, region, plans, ways) if asked else ()
                    verdict = last_word(table, region, plans, ways, self.tuner, whole, False, longest_s)()
                found[region.key] = RegionPlan(region, self._judged(table, region, plans, verdict, 0.0), "model")
        return [replace(found[region.key], region=region) for region in regions if region.key in found]

    def plan_dynamic(
        self, graph: DataflowGraph, dynamic: DataflowGraph, wanted: Sequence[tuple[Region, Sequence[Sequence[str]]]]
    ) -> list[RegionPlan]:
        """Plans of regions by the cost model, out of groups, and parts of groups, that are kernels with dynamic sizes.

        ``graph`` has its sizes bound, ``dynamic`` has not. ``wanted`` are regions with the groups of a plan for the
        bound sizes, as names of ops.
        """
        table = GroupTable(graph, self.settings.numerics, self.target.device_type, dynamic)
        records: dict[str, PlanRecord] = {}
        for region, groups in wanted:
            if region.key not in records:
                reason = "by the cost model: groups for these sizes are no kernels where sizes are dynamic"
                parts = []
                for part in region_parts(graph, region):
                    own = [ops for ops in groups if set(ops) <= set(part.ops)]
                    enumeration = enumerate_parts(graph, part, own, table.legal)
                    problem = region_problem(table, part, enumeration, self.unmeasured)
                    parts.append((part, self._predicted(table, part, problem, reason)))
                records[region.key] = self._joined(table, region, parts, 0.0, reason)
        return [RegionPlan(region, records[region.key], "model") for region, _ in wanted]

    def look_up_all(self, graph: DataflowGraph, regions: Iterable[Region]) -> dict[str, PlanRecord]:
        """The stored plans of regions of a static graph that are current and checked, by region key."""
        return self.stored.hits(self._table(graph), regions)

    def look_up_regions(self, graph: DataflowGraph, split: bool = False) -> tuple[list[Region], dict[str, PlanRecord]]:
        """The regions of a static graph as they are planned, and their stored plans by key. One without a plan is split
        from what makes its common values, where its layer has a plan, or to be planned like that with ``split``.
        """
        return self.stored.split(self._table(graph), find_regions(graph), split)

    def undecided(self, graph: DataflowGraph, regions: Iterable[Region] | None = None) -> list[Region]:
        """Which of the distinct ``regions``, all of a graph or parts of some, have no stored plan, in order."""
        found = unique_regions(find_regions(graph) if regions is None else regions)
        distinct = [occurrences[0] for occurrences in found.values()]
        stored = self.look_up_all(graph, distinct)
        return [region for region in distinct if region.key not in stored]

    def _decide(self, graph: DataflowGraph, region: Region, table: GroupTable) -> Callable[[], RegionPlan]:
        """The plan of a region, once what was measured of it as a whole is waited for."""
        parts = region_parts(graph, region)
        if self.tuner is None:
            plans = [(part, self._by_model(table, part)) for part in parts]
            joined = self._joined(table, region, plans, 0.0, plans[0][1].evidence.reason)
            prices = ModelPrices(table, self.spec)
            writer = self._writer(table, region)
            record = predicted_by_inductor(joined, plans, writer, prices)
            decides = self.spec is not None or not self.target.is_gpu
            if record is joined and decides and unpacks_weights(graph, region):
                problem = self._joint.planned(table, region, plans)
                if problem is not None:
                    record = predicted_across_anchors(problem, joined, writer, prices, self._margin)
            return lambda: RegionPlan(region, record, "model")
        return self._by_measurement(region, parts, table, self.tuner)

    def _by_model(self, table: GroupTable, part: Region) -> PlanRecord:
        known = self._predicted_parts.setdefault(table, {})
        if part.key not in known:
            reason = "by the cost model, nothing was measured"
            known[part.key] = self._predicted(table, part, self._problem(table, part, self.unmeasured), reason)
        return known[part.key]

    def _predicted(self, table: GroupTable, part: Region, problem: RegionProblem, reason: str) -> PlanRecord:
        prices = ModelPrices(table, self.spec)
        result = predicted_partition(problem, prices.predict_s, self._margin, reason)
        return self._writer(table, part).record(prices, result, 0.0)

    def _joined(
        self, table: GroupTable, region: Region, parts: _Plans, elapsed_s: float, reason: str
    ) -> PlanRecord:
        return parts[0][1] if len(parts) == 1 else self._writer(table, region).joined(parts, elapsed_s, reason)

    def _by_measurement(
        self, region: Region, parts: Sequence[Region], table: GroupTable, tuner: Tuner
    ) -> Callable[[], RegionPlan]:
        """The region's parts, those without a plan decided and stored now, and then the region as a whole.

        While the islands are planned, the calls of matmuls and attention are timed.
        """
        if (renewed := self.renewal.renew(table, region, tuner)) is not None:
            return lambda: RegionPlan(region, renewed, "database")
        began = time.monotonic()
        if self._ahead is not None:
            self._ahead.remind(region)
        stored = self.stored.find_all(table, parts)
        known = {part.key: self._decided.get(part.key) or stored[part.key].hit for part in parts}
        fresh = {part.key: part for part in reversed(parts) if known[part.key] is None}
        fresh = dict(reversed(fresh.items()))  # the first of equal parts, as the look-ahead has it
        decided: list[PlanRecord] = []
        while fresh:
            with tuner.leases.taking(self.key(key) for key in fresh) as taken:
                mine = {key: part for key, part in fresh.items() if self.key(key) in taken}
                found = self._measured_parts(table, mine, tuner)
                known |= found
                decided += [found[key] for key in mine if key in self._decided]
            fresh = {key: part for key, part in fresh.items() if key not in mine}
            time.sleep(POLL_S if fresh else 0.0)  # those that another tuner is at work on
        self.learner.update()
        plans = [(part, record) for part in parts if (record := known[part.key]) is not None]
        if len(parts) > 1 and (joint := self._across_anchors(table, region, plans, tuner)) is not None:
            plans = [(region, joint)]
        asked = self.settings.inductor != "off" and not all(self._is_minor(table, part) for part in parts)
        whole = whole_by_inductor(table, region, plans, self.implementations) if asked else ()
        verdict = last_word(table, region, plans, self.implementations, tuner, whole)

        def finished() -> RegionPlan:
            record = plans[0][1]
            if len(parts) > 1 or verdict is not Verdict:  # there is something to compare
                record = self._judged(table, region, plans, verdict(), time.monotonic() - began)
                with tuner.account.spend("storing"):
                    tuner.database.put_plan(record)
            return RegionPlan(region, record, "tuned", decided=tuple(decided))

        return finished

    def _measured_parts(self, table: GroupTable, parts: Mapping[str, Region], tuner: Tuner) -> dict[str, PlanRecord]:
        """Plans of leased parts: decided and stored now, unless another tuner has done it."""
        found = {key: lookup.hit for key, lookup in self.stored.find_all(table, parts.values()).items() if lookup.hit}
        fresh = {key: part for key, part in parts.items() if key not in found}
        anchors = {key: self._opened(table, part, tuner) for key, part in fresh.items() if is_anchor(table.graph, part)}
        for opened in anchors.values():
            opened.begin()
        for key in sorted(fresh, key=anchors.__contains__):
            found[key] = self._decided[key] = self._measured(table, fresh[key], tuner, anchors.get(key))
            tuner.leases.release([self.key(key)])  # others may wait for it
        return found

    def _across_anchors(self, table: GroupTable, region: Region, plans: _Plans, tuner: Tuner) -> PlanRecord | None:
        """A plan with matmuls inside its groups that is faster than those of the region's parts; None without one, or
        where the region takes too little of the model's time.
        """
        if all(self._is_minor(table, part) for part, _ in plans):
            return None
        problem = self._joint.planned(table, region, plans)
        if problem is None:
            return None
        prices = MeasuredPrices(table, self.spec, tuner, self.learner)
        limit = self._limit(problem) + policy.MEASURED_AROUND_ANCHORS
        decided = MeasuredRegion(problem, prices, self._margin, limit)
        return plan_across_anchors(decided, plans, self.implementations, self._writer(table, region))

    def _nominal_joint(self, table: GroupTable, region: Region) -> RegionProblem | None:
        """The problem across a region's matmuls as far as it is known by now; None where it takes too little time."""
        if all(self._is_minor(table, part) for part in region_parts(table.graph, region)):
            return None
        return self._joint.nominal(table, region)

    def _judged(
        self, table: GroupTable, region: Region, plans: _Plans, verdict: Verdict, elapsed_s: float
    ) -> PlanRecord:
        """The record of a region after its run beside plain ATen and TorchInductor."""
        reason = "; ".join(dict.fromkeys(record.evidence.reason for _, record in plans)) + verdict.words
        if not verdict.keeps and not verdict.whole:
            plans = [(part, self._writer(table, part).plain(record, ModelPrices(table, self.spec)))
                     for part, record in plans]
        record = self._joined(table, region, plans, elapsed_s, reason)
        if verdict.whole and self.tuner is not None:
            prices, writer = MeasuredPrices(table, self.spec, self.tuner), self._writer(table, region)
            record = writer.whole(record, verdict.whole, verdict.gain, prices, elapsed_s, reason)
        return record

    def _opened(self, table: GroupTable, part: Region, tuner: Tuner) -> MeasuredRegion:
        problem = (self._ahead.problem(part) if self._ahead is not None else None) or self._problem(table, part)
        prices = MeasuredPrices(table, self.spec, tuner, self.learner, self._is_minor(table, part))
        return MeasuredRegion(problem, prices, self._margin, self._limit(problem))

    def _measured(self, table: GroupTable, part: Region, tuner: Tuner, opened: MeasuredRegion | None) -> PlanRecord:
        """A part decided by measurement, and stored."""
        began = time.monotonic()
        opened = opened or self._opened(table, part, tuner)
        result, prices = opened.decide(), opened.prices
        record = self._writer(table, part).record(prices, result, time.monotonic() - began)
        with tuner.account.spend("storing"):
            tuner.database.put_plan(record)
        return record

    def _is_minor(self, table: GroupTable, part: Region) -> bool:
        """Whether all occurrences of a part together take too little of the graph's time for an elaborate search."""
        if table not in self._shares:
            self._shares[table] = part_shares(table, self.implementations.aten)
        return self._shares[table].get(part.key, 1.0) < policy.MINOR_SHARE

    def _table(self, graph: DataflowGraph) -> GroupTable:
        return GroupTable(graph, self.settings.numerics, self.target.device_type)

    def _problem(self, table: GroupTable, part: Region, ways: Implementations | None = None) -> RegionProblem:
        return region_problem(table, part, table.enumerated(part), ways or self.implementations)

    def _writer(self, table: GroupTable, region: Region) -> PlanWriter:
        seed, run = (self.tuner.seed, self.tuner.run) if self.tuner is not None else (0, "")
        return PlanWriter(self.key(region.key), table, region, self.implementations, seed, run)
