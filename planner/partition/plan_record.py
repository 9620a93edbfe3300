"""Writing a decided partition down: the record that the database keeps of it, with the reasons and the evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fuseplan.costmodel.roofline import lower_bound
from fuseplan.kernels.ir.in_place import WritesInPlace
from fuseplan.planner.cost.prices import MeasuredPrices, ModelPrices
from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import region_dependencies
from fuseplan.planner.groups.choices import Choice
from fuseplan.planner.groups.compute_graph import compute_graph_of
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


class PlanWriter:
    """Turns the result for one region into a :class:`PlanRecord`.

    Args:
        key: Identity of the record.
        graph: The graph.
        region: The region that was planned.
        prices: What its choices cost, and the tuning records behind that.
        seed: Seed of the search.
        alternatives: Rejected fused groups to keep.
    """

    def __init__(
        self, key: RecordKey, graph: DataflowGraph, region: Region, prices: ModelPrices, seed: int, alternatives: int
    ) -> None:
        self.key = key
        self.graph = graph
        self.region = region
        self.prices = prices
        self.seed = seed
        self.alternatives = alternatives

    def record(self, result: GuidedResult, elapsed_s: float, reason: str, undecided: bool = False) -> PlanRecord:
        """The record of ``result``; ``reason`` says in words how it was found.

        Raises:
            PlanError: A group of the partition has no time.
        """
        chosen = in_running_order(self.graph, self.region, result.chosen)
        groups = tuple(self._group(priced) for priced in chosen)
        # Times that are stored are of kernels by themselves, as those of the unfused ops are.
        planned_us = sum(self._alone_us(priced) for priced in chosen)
        unfused_us = sum(self._unfused_us(priced) for priced in chosen) or result.unfused_s * 1e6
        if not math.isfinite(planned_us + unfused_us):
            raise PlanError(f"{region_label(self.graph, self.region)}: a group of the partition has no measured time")
        singles = [choice.group for choice in self.prices.book.unfused_choices(self.region)]
        return PlanRecord(
            key=self.key,
            label=region_label(self.graph, self.region),
            groups=groups,
            planned_us=planned_us,
            unfused_us=unfused_us,
            margin=1.0 - planned_us / unfused_us if unfused_us else 0.0,
            predicted_us=sum(group.predicted_us for group in groups),
            rejected=self._rejected(result),
            enumerated=result.enumerated,
            measured=result.measured,
            gap=result.gap,
            peak_bytes=peak_bytes(
                self.graph, [priced.choice.group for priced in chosen], self.region.outputs,
                [self._reuse(priced.choice, group) for priced, group in zip(chosen, groups, strict=True)],
            ),
            unfused_peak_bytes=peak_bytes(self.graph, singles, self.region.outputs),
            evidence=Evidence(
                now(), Versions.current(self.prices.target.device_type), self.seed, round(elapsed_s, 3), reason=reason
            ),
            undecided=undecided,
        )

    def _tuning(self, choice: Choice) -> TuningRecord | None:
        if not choice.fused or not isinstance(self.prices, MeasuredPrices):
            return None
        return self.prices.records.get(choice.group.ops)

    def _unfused_us(self, priced: Priced) -> float:
        """Time of a group's ops unfused, from the same interleaved run as the group's own where there is one."""
        tuning = self._tuning(priced.choice)
        if tuning is not None:
            return tuning.unfused.median_us
        return self._alone_us(priced) if priced.measured else 0.0

    def _alone_us(self, priced: Priced) -> float:
        return priced.cost_s * 1e6 - self.prices.delay_us(priced.choice)

    def _positions(self, choice: Choice) -> tuple[int, ...]:
        return tuple(self.region.ops.index(name) for name in choice.group.ops)

    def _label(self, choice: Choice) -> str:
        return group_label(self.graph, choice.group.ops, choice.group.outputs)

    def _predicted_us(self, choice: Choice) -> float:
        return self.prices.predict_alone_s(choice) * 1e6 if self.prices.spec is not None else 0.0

    def _group(self, priced: Priced) -> GroupChoice:
        choice, prices = priced.choice, self.prices
        positions, label = self._positions(choice), self._label(choice)
        predicted_us = self._predicted_us(choice)
        measured_us = self._alone_us(priced) if priced.measured else None
        delay_us = prices.delay_us(choice)
        if not choice.fused:
            return GroupChoice(
                positions, "unfused", label=label, predicted_us=predicted_us, measured_us=measured_us,
                delay_us=delay_us,
            )
        tuning = self._tuning(choice)
        if tuning is not None:
            backend, config = tuning.backend, tuning.config
        else:
            best = prices.backend_for(choice.group)
            assert best is not None, "a cover never uses a group that no back end can express"
            backend, config = best.name, best.default_config(prices.book.lowered(choice.group).ir, prices.target)
        spec = prices.spec
        bound_us = 0.0 if spec is None else lower_bound(prices.book.work(choice.group), spec, prices.fused_mode)
        return GroupChoice(
            positions,
            "fused",
            label=label,
            workload=prices.book.subject(choice.group).key,
            backend=backend,
            config=dict(config),
            predicted_us=predicted_us,
            lower_bound_us=bound_us,
            measured_us=measured_us,
            delay_us=delay_us,
        )

    def _reuse(self, choice: Choice, group: GroupChoice) -> NamedReuse:
        """Which outputs of a group may take which inputs' memory."""
        backend = next((one for one in self.prices.backends if one.name == group.backend), None)
        if not choice.fused or not isinstance(backend, WritesInPlace):
            return {}
        lowered = self.prices.book.lowered(choice.group)
        options = backend.reuse_options(lowered.ir, group.config)
        return {
            lowered.outputs[output]: tuple(lowered.inputs[source] for source in sources)
            for output, sources in options.items()
        }

    def _rejected(self, result: GuidedResult) -> tuple[Alternative, ...]:
        """The measured choices that lost: fused groups, cheapest first, then ops by themselves."""
        fused = [priced for priced in result.rejected if priced.choice.fused][: self.alternatives]
        unfused = [priced for priced in result.rejected if not priced.choice.fused]
        return tuple(self._alternative(priced) for priced in (*fused, *unfused))

    def _alternative(self, priced: Priced) -> Alternative:
        choice = priced.choice
        tuning = self._tuning(choice)
        measured_us = self._alone_us(priced) if math.isfinite(priced.cost_s) else None
        if measured_us is not None:
            reason = "measured; the chosen cover costs less"
        elif tuning is not None and tuning.fused is not None:
            reason = "not faster than its ops unfused"
            measured_us = tuning.fused.median_us
        else:
            failures = self.prices.failures if isinstance(self.prices, MeasuredPrices) else {}
            why = tuning.rejected[0].reason if tuning is not None and tuning.rejected else ""
            reason = f"no kernel works: {why or failures.get(choice.group.ops, 'reason unknown')}"
        return Alternative(
            self._positions(choice),
            self._label(choice),
            reason,
            self._predicted_us(choice) if self.prices.spec is not None else None,
            measured_us,
            "fused" if choice.fused else "unfused",
            tuning.key.workload if tuning is not None else "",
            self.prices.delay_us(choice),
        )


def in_running_order(graph: DataflowGraph, region: Region, chosen: Iterable[Priced]) -> list[Priced]:
    """The groups of a cover in an order in which they can run (a cover is acyclic, so there is one)."""
    waiting = list(chosen)
    dependencies = region_dependencies(graph, region)
    flow = compute_graph_of(graph, None)
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
