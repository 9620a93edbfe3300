"""Writing a decided partition down: the record that the database keeps of it, with the reasons and the evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx

from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.kernels.ir.in_place import WritesInPlace
from fuseplan.planner.cost.prices import MeasuredPrices, ModelPrices
from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import region_dependencies, single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.choices import Choice
from fuseplan.planner.implementations.group_book import GroupBook
from fuseplan.planner.implementations.subject import group_label
from fuseplan.planner.partition.guided_loop import GuidedResult, Priced
from fuseplan.planner.partition.peak_memory import NamedReuse, peak_bytes
from fuseplan.search.store.record import (
    Alternative,
    Evidence,
    GroupChoice,
    PlanRecord,
    RecordKey,
    TuningRecord,
    Versions,
    now,
)


@dataclass(frozen=True)
class DecidedPart:
    """The partition of one part of a region, and what its choices cost."""

    prices: ModelPrices
    result: GuidedResult
    reason: str = ""
    undecided: bool = False


class PlanWriter:
    """Turns the decisions for one region into a :class:`PlanRecord`.

    Of the rejected groups it keeps as many as ``alternatives`` says.
    """

    def __init__(
        self, key: RecordKey, book: GroupBook, region: Region, backends: Sequence[Backend], target: Target, seed: int,
        alternatives: int,
    ) -> None:
        self.key = key
        self.book = book
        self.graph = book.graph
        self.region = region
        self.backends = {backend.name: backend for backend in backends}
        self.target = target
        self.seed = seed
        self.alternatives = alternatives

    def record(
        self, parts: Sequence[DecidedPart], elapsed_s: float, reason: str, undecided: bool = False
    ) -> PlanRecord:
        """The record of a region's parts; ``reason`` says in words how they were found.

        Raises:
            PlanError: A group of the partition has no time.
        """
        results = [part.result for part in parts]
        prices = {priced.choice: part.prices for part in parts for priced in part.result.chosen}
        chosen = in_running_order(self.graph, self.region, [priced for one in results for priced in one.chosen])
        groups = tuple(self._group(priced, prices[priced.choice]) for priced in chosen)
        # Times that are stored are of choices by themselves, as those of ATen's ops are.
        planned_us = sum(_alone_us(priced, prices[priced.choice]) for priced in chosen)
        unfused_us = sum(self._unfused_us(part) for part in parts)
        if not math.isfinite(planned_us + unfused_us):
            raise PlanError(f"{region_label(self.graph, self.region)}: a group of the partition has no measured time")
        singles = single_candidates(self.graph, self.region)
        cost_s = math.fsum(one.cost_s for one in results)
        bound_s = math.fsum(one.bound_s for one in results)
        return PlanRecord(
            key=self.key,
            label=region_label(self.graph, self.region),
            groups=groups,
            planned_us=planned_us,
            unfused_us=unfused_us,
            margin=1.0 - planned_us / unfused_us if unfused_us else 0.0,
            predicted_us=sum(group.predicted_us for group in groups),
            rejected=self._rejected(parts),
            enumerated=sum(one.enumerated for one in results),
            measured=sum(one.measured for one in results),
            gap=max(0.0, 1.0 - bound_s / cost_s) if cost_s > 0 else 0.0,
            peak_bytes=peak_bytes(
                self.graph, [priced.choice.group for priced in chosen], self.region.outputs,
                [self._reuse(priced.choice, group) for priced, group in zip(chosen, groups, strict=True)],
            ),
            unfused_peak_bytes=peak_bytes(self.graph, singles, self.region.outputs),
            evidence=Evidence(
                now(), Versions.current(self.target.device_type), self.seed, round(elapsed_s, 3), reason=reason
            ),
            undecided=undecided,
        )

    def _unfused_us(self, part: DecidedPart) -> float:
        """Time of a part's ops unfused, from the same interleaved runs as the groups' own where there are some."""
        found = 0.0
        for priced in part.result.chosen:
            tuning = _tuning(priced.choice, part.prices)
            if tuning is not None:
                found += tuning.unfused.median_us
            elif isinstance(part.prices, MeasuredPrices):
                found += part.prices.plain_us(priced.choice)
        return found or part.result.unfused_s * 1e6

    def _positions(self, choice: Choice) -> tuple[int, ...]:
        return tuple(self.region.ops.index(name) for name in choice.group.ops)

    def _label(self, choice: Choice) -> str:
        return group_label(self.graph, choice.group.ops, choice.group.outputs)

    def _name(self, choice: Choice) -> str:
        """What runs a choice: a back end, where there are several to search."""
        way = choice.implementation
        return (way.calibration(self.book, choice.group) if way.searches else "") or way.name

    def _group(self, priced: Priced, prices: ModelPrices) -> GroupChoice:
        choice, way = priced.choice, priced.choice.implementation
        tuning = _tuning(choice, prices)
        name, config, workload = way.name, {}, ""
        if way.searches:
            workload = self.book.subject(choice.group).key
            if tuning is not None:
                name, config = tuning.backend, dict(tuning.config)
            else:
                backend = self.backends[self._name(choice)]
                name = backend.name
                config = dict(backend.default_config(self.book.lowered(choice.group).ir, self.target))
        return GroupChoice(
            self._positions(choice),
            name,
            label=self._label(choice),
            workload=workload,
            config=config,
            predicted_us=_predicted_us(choice, prices),
            lower_bound_us=prices.bound_us(choice),
            measured_us=_alone_us(priced, prices) if priced.measured else None,
            delay_us=prices.delay_us(choice),
        )

    def _reuse(self, choice: Choice, group: GroupChoice) -> NamedReuse:
        """Which outputs of a group may take which inputs' memory."""
        backend = self.backends.get(group.implementation)
        if not isinstance(backend, WritesInPlace):
            return {}
        lowered = self.book.lowered(choice.group)
        options = backend.reuse_options(lowered.ir, group.config)
        return {
            lowered.outputs[output]: tuple(lowered.inputs[source] for source in sources)
            for output, sources in options.items()
        }

    def _rejected(self, parts: Sequence[DecidedPart]) -> tuple[Alternative, ...]:
        """The measured choices that lost: groups and library calls, cheapest first, then ATen's ops."""
        lost = [(priced, part.prices) for part in parts for priced in part.result.rejected]
        lost.sort(key=lambda one: one[0].cost_s)
        plain = [(priced, prices) for priced, prices in lost if prices.is_plain(priced.choice)]
        others = [(priced, prices) for priced, prices in lost if not prices.is_plain(priced.choice)]
        return tuple(self._alternative(priced, prices) for priced, prices in (*others[: self.alternatives], *plain))

    def _alternative(self, priced: Priced, prices: ModelPrices) -> Alternative:
        choice = priced.choice
        tuning = _tuning(choice, prices)
        measured_us = _alone_us(priced, prices) if math.isfinite(priced.cost_s) else None
        if measured_us is not None:
            reason = "measured; the chosen cover costs less"
        elif tuning is not None and tuning.fused is not None:
            reason = "not faster than its ops unfused"
            measured_us = tuning.fused.median_us
        else:
            failures = prices.failures if isinstance(prices, MeasuredPrices) else {}
            why = tuning.rejected[0].reason if tuning is not None and tuning.rejected else ""
            reason = f"does not work: {why or failures.get(choice, 'reason unknown')}"
        return Alternative(
            self._positions(choice),
            self._label(choice),
            reason,
            _predicted_us(choice, prices) if prices.spec is not None else None,
            measured_us,
            tuning.backend if tuning is not None and tuning.backend else self._name(choice),
            tuning.key.workload if tuning is not None else "",
            prices.delay_us(choice),
        )


def _tuning(choice: Choice, prices: ModelPrices) -> TuningRecord | None:
    return prices.record(choice) if isinstance(prices, MeasuredPrices) else None


def _alone_us(priced: Priced, prices: ModelPrices) -> float:
    return priced.cost_s * 1e6 - prices.delay_us(priced.choice)


def _predicted_us(choice: Choice, prices: ModelPrices) -> float:
    return prices.predict_alone_s(choice) * 1e6 if prices.spec is not None else 0.0


def in_running_order(graph: DataflowGraph, region: Region, chosen: Iterable[Priced]) -> list[Priced]:
    """The groups of a cover in an order in which they can run (a cover is acyclic, so there is one)."""
    listed = list(chosen)
    dependencies = region_dependencies(graph, region)
    flow = compute_graph_of(graph, None)
    home = {op: number for number, priced in enumerate(listed) for op in priced.choice.group.ops}
    of_member = [home[flow.names[at]] for at in dependencies.members]
    edges = ((of_member[before], of_member[after]) for before, after in dependencies.edges())
    order = nx.DiGraph((before, after) for before, after in edges if before != after)
    order.add_nodes_from(range(len(listed)))
    return [listed[number] for number in nx.lexicographical_topological_sort(order)]


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
