"""From a graph to a plan: regions, looked up in the database, else tuned, else decided by the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.costmodel.roofline import lower_bound
from fuseplan.kernels.backend import Backend, Target
from fuseplan.planner.candidates import CandidateLimits, enumerate_candidates, region_dependencies
from fuseplan.planner.flow import flow_of
from fuseplan.planner.graph import DataflowGraph, Region
from fuseplan.planner.memory import peak_bytes
from fuseplan.planner.partition import (
    GuidedResult,
    Priced,
    guided_partition,
    predicted_partition,
    region_problem,
)
from fuseplan.planner.prices import GroupBook, MeasuredPrices, ModelPrices
from fuseplan.planner.regions import find_regions, unique_regions
from fuseplan.planner.subject import group_label
from fuseplan.search.database import Lookup
from fuseplan.search.record import Alternative, Evidence, GroupChoice, PlanRecord, RecordKey, Versions, now
from fuseplan.search.tuner import Tuner

Source = Literal["database", "tuned", "model"]


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for, and how hard to look.

    Attributes:
        numerics: ``"fp32"`` keeps intermediates of a group in fp32; ``"eager"`` rounds where ATen rounds.
        regime: ``"eager"`` or ``"graph"``: how the plan will be launched.
        tolerance: Stop when the measured partition is within this of the lower bound.
        margin: Partitions within this of the best count as equal; the one with the fewest launches is taken.
        max_fused_measured: Fused groups tuned per region at most.
        limits: Bounds on the enumeration of candidates.
        alternatives: Rejected groups kept in a plan's record.
    """

    numerics: str = "fp32"
    regime: str = "eager"
    tolerance: float = 0.01
    margin: float = 0.02
    max_fused_measured: int = 6
    limits: CandidateLimits = field(default_factory=CandidateLimits)
    alternatives: int = 24


class PlanStore(Protocol):
    """Where plans are looked up: a database, or a layered one."""

    def get_plan(self, key: RecordKey) -> Lookup[PlanRecord]: ...

    def log_miss(self, key: RecordKey, label: str = "", payload: Mapping[str, Any] | None = None) -> bool: ...


@dataclass(frozen=True)
class RegionPlan:
    """The plan of one occurrence of a region."""

    region: Region
    record: PlanRecord
    source: Source

    def group_ops(self, choice: GroupChoice) -> tuple[str, ...]:
        """Names of the ops of one of the record's groups in this occurrence."""
        return tuple(self.region.ops[position] for position in choice.ops)


@dataclass(frozen=True)
class GraphPlan:
    """The plans of all regions of a graph, in graph order, and how long the look-ups took."""

    regions: tuple[RegionPlan, ...]
    lookup_us: float = 0.0

    def unique(self) -> list[RegionPlan]:
        """The first occurrence of each distinct region."""
        return list({plan.region.key: plan for plan in reversed(self.regions)}.values())[::-1]


class Planner:
    """Plans graphs for one device.

    Args:
        store: Where plans are looked up.
        spec: The probed device; None plans by the number of launches alone.
        device: Identity of the device, part of every key.
        target: What kernels are compiled for.
        backends: Kernel back ends, in order of preference.
        settings: What to plan for.
        tuner: Measures what is not stored; None leaves it to the cost model.
        on_region: Told about each distinct region before it is planned: label, number, how many.
    """

    def __init__(
        self,
        store: PlanStore,
        spec: DeviceSpec | None,
        device: str,
        target: Target,
        backends: Sequence[Backend],
        settings: PlanSettings | None = None,
        tuner: Tuner | None = None,
        on_region: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.store = store
        self.spec = spec
        self.device = device
        self.target = target
        self.backends = tuple(backends)
        self.settings = settings if settings is not None else PlanSettings()
        self.tuner = tuner
        self._on_region = on_region

    def plan_graph(self, graph: DataflowGraph) -> GraphPlan:
        """Plan every region of a static graph; equal regions are planned once."""
        regions = find_regions(graph)
        book = GroupBook(graph, self.settings.numerics, self.target.device_type)
        planned: dict[str, tuple[PlanRecord, Source]] = {}
        distinct = unique_regions(regions)
        spent_us = 0.0
        for number, (key, occurrences) in enumerate(distinct.items(), 1):
            region = occurrences[0]
            if self._on_region is not None:
                self._on_region(region_label(graph, region), number, len(distinct))
            start = time.perf_counter()
            found = self.look_up(key)
            spent_us += (time.perf_counter() - start) * 1e6
            planned[key] = (found, "database") if found is not None else self._decide(graph, region, book)
        return GraphPlan(tuple(RegionPlan(region, *planned[region.key]) for region in regions), spent_us)

    def key(self, region_key: str) -> RecordKey:
        return RecordKey(region_key, self.device, self.settings.regime, self.settings.numerics)

    def look_up(self, region_key: str) -> PlanRecord | None:
        """The stored plan of exactly this region, if it is current."""
        return self.store.get_plan(self.key(region_key)).hit

    def _decide(self, graph: DataflowGraph, region: Region, book: GroupBook) -> tuple[PlanRecord, Source]:
        if self.tuner is None:
            return self._by_model(graph, region, book), "model"
        record = self._by_measurement(graph, region, book, self.tuner)
        self.tuner.database.put_plan(record)
        return record, "tuned"

    def _by_model(self, graph: DataflowGraph, region: Region, book: GroupBook) -> PlanRecord:
        prices = ModelPrices(book, self.spec, self.settings.regime, self.backends, self.target)
        problem = region_problem(graph, region, self._enumerate(graph, region, book))
        result = predicted_partition(problem, prices.predict_s, self.settings.margin)
        return self._record(graph, region, prices, result, 0.0, "by the cost model, nothing was measured")

    def _by_measurement(self, graph: DataflowGraph, region: Region, book: GroupBook, tuner: Tuner) -> PlanRecord:
        start = time.monotonic()
        settings = self.settings
        prices = MeasuredPrices(book, self.spec, settings.regime, self.backends, self.target, tuner)
        problem = region_problem(graph, region, self._enumerate(graph, region, book))
        limit = len(problem.ops) + settings.max_fused_measured
        result = guided_partition(problem, prices, settings.tolerance, settings.margin, limit)
        reason = (
            f"measured {result.measured} of {result.enumerated} choices in {result.iterations} rounds; "
            f"{'optimal' if result.optimal else f'within {result.gap:.1%} of the bound'} over the candidates"
        )
        return self._record(graph, region, prices, result, time.monotonic() - start, reason)

    def _enumerate(self, graph: DataflowGraph, region: Region, book: GroupBook) -> Any:
        return enumerate_candidates(graph, region, self.settings.limits, legal=book.legal)

    # -- the record ---------------------------------------------------------------------------------------

    def _record(
        self,
        graph: DataflowGraph,
        region: Region,
        prices: ModelPrices,
        result: GuidedResult,
        elapsed_s: float,
        reason: str,
    ) -> PlanRecord:
        chosen = in_running_order(graph, region, result.chosen)
        singles = [choice.group for choice in _unfused_choices(graph, region, prices.book)]
        groups = tuple(self._group(region, priced, prices) for priced in chosen)
        planned_us, unfused_us = result.cost_s * 1e6, result.unfused_s * 1e6
        versions = Versions.current(self.target.device_type)
        seed = self.tuner.seed if self.tuner is not None else 0
        return PlanRecord(
            key=self.key(region.key),
            label=region_label(graph, region),
            groups=groups,
            planned_us=planned_us,
            unfused_us=unfused_us,
            margin=1.0 - planned_us / unfused_us if unfused_us else 0.0,
            predicted_us=sum(group.predicted_us for group in groups),
            rejected=self._alternatives(region, result, prices),
            enumerated=result.enumerated,
            measured=result.measured,
            gap=result.gap,
            peak_bytes=peak_bytes(graph, [priced.choice.group for priced in chosen], region.outputs),
            unfused_peak_bytes=peak_bytes(graph, singles, region.outputs),
            evidence=Evidence(now(), versions, seed, round(elapsed_s, 3), reason=reason),
        )

    def _group(self, region: Region, priced: Priced, prices: ModelPrices) -> GroupChoice:
        choice = priced.choice
        positions = tuple(region.ops.index(name) for name in choice.group.ops)
        measured_us = priced.cost_s * 1e6 if priced.measured else None
        predicted_us = prices.predict_s(choice) * 1e6 if self.spec is not None else 0.0
        book = prices.book
        label = group_label(book.graph, choice.group.ops, book.lowered(choice.group))
        if not choice.fused:
            return GroupChoice(positions, "unfused", label=label, predicted_us=predicted_us, measured_us=measured_us)
        record = prices.records.get(choice.group.ops) if isinstance(prices, MeasuredPrices) else None
        if record is not None:
            backend, config = record.backend, record.config
        else:
            best = prices.backend_for(choice.group)
            assert best is not None, "a cover never uses a group that no back end can express"
            backend, config = best.name, best.default_config(book.lowered(choice.group).ir, self.target)
        bound_us = lower_bound(book.work(choice.group), self.spec, prices.fused_mode) if self.spec is not None else 0.0
        return GroupChoice(
            positions, "fused", book.subject(choice.group).key, label, backend, dict(config), predicted_us, bound_us,
            measured_us,
        )

    def _alternatives(self, region: Region, result: GuidedResult, prices: ModelPrices) -> tuple[Alternative, ...]:
        """The measured choices that lost: fused groups, cheapest first, then ops by themselves."""
        fused = [priced for priced in result.rejected if priced.choice.fused][: self.settings.alternatives]
        unfused = [priced for priced in result.rejected if not priced.choice.fused]
        found = []
        for priced in (*fused, *unfused):
            group = priced.choice.group
            finite = priced.cost_s != float("inf")
            record = prices.records.get(group.ops) if isinstance(prices, MeasuredPrices) else None
            reason = "measured; the chosen cover costs less" if finite else "not faster than its ops unfused"
            if record is not None and record.fused is None:
                why = record.rejected[0].reason if record.rejected else record.evidence.reason
                reason = f"no kernel works: {why}"
            measured_us = priced.cost_s * 1e6 if finite else (
                record.fused.median_us if record is not None and record.fused is not None else None
            )
            found.append(
                Alternative(
                    tuple(region.ops.index(name) for name in group.ops),
                    group_label(prices.book.graph, group.ops, prices.book.lowered(group)),
                    reason,
                    prices.predict_s(priced.choice) * 1e6 if self.spec is not None else None,
                    measured_us,
                    "fused" if priced.choice.fused else "unfused",
                    record.key.workload if record is not None else "",
                )
            )
        return tuple(found)


def _unfused_choices(graph: DataflowGraph, region: Region, book: GroupBook) -> list[Any]:
    from fuseplan.planner.candidates import Enumeration

    problem = region_problem(graph, region, Enumeration((), ()))
    return list(problem.choices)


def in_running_order(graph: DataflowGraph, region: Region, chosen: Iterable[Priced]) -> list[Priced]:
    """The groups of a cover in an order in which they can run (a cover is acyclic, so there is one)."""
    waiting = list(chosen)
    dependencies = region_dependencies(graph, region)
    flow = flow_of(graph, None)
    names = [flow.names[at] for at in dependencies.members]
    before: dict[str, set[str]] = {name: set() for name in names}
    for first, second in dependencies.edges():
        before[names[second]].add(names[first])
    done: set[str] = set()
    ordered: list[Priced] = []
    while waiting:
        ready = next(
            priced for priced in waiting
            if all(before[op] <= done | set(priced.choice.group.ops) for op in priced.choice.group.ops)
        )
        waiting.remove(ready)
        ordered.append(ready)
        done |= set(ready.choice.group.ops)
    return ordered


def region_label(graph: DataflowGraph, region: Region) -> str:
    """For people: what the region computes, from its ops, and the shape of its largest output."""
    names = dict.fromkeys(
        node.op.split(".")[1] for node in map(graph.op, region.ops) if node.op.split(".")[1] not in _QUIET
    )
    largest = max(region.outputs, key=lambda value: graph.specs[value].nbytes(graph.symbols), default=None)
    text = "+".join(names) or "copy"
    text = text if len(text) <= 48 else text[:45] + "..."
    if largest is None:
        return text
    spec = graph.specs[largest]
    return f"{text} {'x'.join(map(str, spec.shape))} {spec.dtype}"


#: Ops that say little about what a region is for.
_QUIET = frozenset({
    "to", "_to_copy", "view", "reshape", "transpose", "slice", "unsqueeze", "expand", "permute", "clone", "select",
    "squeeze", "split", "chunk", "alias", "t",
})
