"""Writing a decided partition down: the record that the database keeps of it, with the reasons and the evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import networkx as nx

from fuseplan.kernels.ir.in_place import choose_reuse
from fuseplan.planner.cost.prices import MeasuredPrices, ModelPrices
from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, region_dependencies, single_candidates
from fuseplan.planner.groups.places import place_of
from fuseplan.planner.implementations.choices import Choice, Implementations, Plans, recorded_choices
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import group_label
from fuseplan.planner.module_paths import located
from fuseplan.planner.ops.table import written_value
from fuseplan.planner.partition.guided_loop import GuidedResult, Priced, gap
from fuseplan.search import policy
from fuseplan.search.store.record import ATEN, Alternative, Evidence, GroupChoice, PlanRecord, RecordKey, Versions, now

#: Why most alternatives are none.
LOST = "measured; the chosen cover costs less"
_Placed = TypeVar("_Placed", GroupChoice, Alternative)


@dataclass(frozen=True)
class PlanWriter:
    """Turns the decision for one region, or for a part of one, into a :class:`PlanRecord`."""

    key: RecordKey
    table: GroupTable
    region: Region
    ways: Implementations
    seed: int
    run: str = ""

    @property
    def graph(self) -> DataflowGraph:
        return self.table.graph

    def record(self, prices: ModelPrices, result: GuidedResult, elapsed_s: float) -> PlanRecord:
        """The record of a partition; PlanError where a group of it has no time."""
        planned_us = sum(priced.cost_s * 1e6 for priced in result.chosen)
        # Those of its ops unfused are of the same interleaved runs, where there are some.
        tunings = ((one.choice, prices.record(one.choice)) for one in result.chosen)
        unfused_us = sum(prices.plain_us(choice) if tuning is None else tuning.unfused.median_us
                         for choice, tuning in tunings) or result.unfused_s * 1e6
        if not math.isfinite(planned_us + unfused_us):
            raise PlanError(f"{region_label(self.graph, self.region)}: a group of the partition has no measured time")
        lost = sorted(result.rejected, key=lambda priced: priced.cost_s)
        return self._written(
            {priced.choice.group: self._group(priced, prices) for priced in result.chosen}, elapsed_s, result.reason,
            planned_us=planned_us, unfused_us=unfused_us, rejected=[self._alternative(one, prices) for one in lost],
            enumerated=result.enumerated, measured=result.measured, gap=result.gap, undecided=result.undecided,
        )

    def joined(self, parts: Plans, elapsed_s: float, reason: str) -> PlanRecord:
        """The record of a region out of those of its parts."""
        records = [record for _, record in parts]
        chosen: dict[Candidate, GroupChoice] = {}
        rejected: list[Alternative] = []
        for part, record in parts:
            places = self._places(part.ops)
            for choice, group in recorded_choices(self.graph, part, record, self.ways).items():
                chosen[choice.group] = _moved(group, places)
            rejected += [_moved(one, places) for one in record.rejected]
        rejected.sort(key=lambda one: math.inf if one.measured_us is None else one.measured_us)
        bound_us = math.fsum(_cost_us(record) * (1.0 - record.gap) for record in records)
        return self._written(
            chosen, elapsed_s, reason, rejected=rejected,
            planned_us=math.fsum(one.planned_us for one in records),
            unfused_us=math.fsum(one.unfused_us for one in records),
            enumerated=sum(one.enumerated for one in records), measured=sum(one.measured for one in records),
            gap=gap(math.fsum(map(_cost_us, records)), bound_us), undecided=any(one.undecided for one in records),
        )

    def plain(self, record: PlanRecord, prices: ModelPrices) -> PlanRecord:
        """The record with every op run by ATen, for a region that is faster so."""
        faster = "measured; the whole region is faster without it"
        lost = [_lost(one, faster) for one in record.groups if not one.is_plain]
        known: list[GroupChoice | Alternative] = [*record.groups, *record.rejected]
        lost += [one for one in record.rejected if one.implementation != ATEN]
        times_us = {one.ops: one.measured_us for one in known if one.implementation == ATEN}
        singles = single_candidates(self.graph, self.region)
        groups = (self._group(Priced(Choice(one, self.ways.aten), 0.0, False), prices) for one in singles)
        found = replace(
            record, groups=tuple(replace(group, measured_us=times_us.get(group.ops)) for group in groups),
            planned_us=record.unfused_us, rejected=tuple(lost),
        )
        return replace(found, gap=gap(_cost_us(found), _cost_us(record) * (1.0 - record.gap)))

    def whole(
        self, record: PlanRecord, choices: Sequence[Choice], gain: float, prices: ModelPrices, elapsed_s: float,
        reason: str
    ) -> PlanRecord:
        """The record with all of the region run by another compiler's code, mostly one choice, which gains ``gain`` on
        the groups of ``record``: in a run, or by the cost model where nothing is measured.

        Of several choices each is given the part of the time that it has of what they all move.
        """
        planned_us, measured = record.planned_us * (1.0 - gain), isinstance(prices, MeasuredPrices)
        faster = f"{'measured' if measured else 'predicted'}; another compiler's code for the whole region is faster"
        lost = [_lost(one, faster) for one in record.groups]
        moved = [choice.implementation.work(self.table, choice.group).dram_bytes for choice in choices]
        chosen = {}
        for choice, nbytes in zip(choices, moved, strict=True):
            own_us = planned_us * nbytes / max(sum(moved), 1)
            own = self._group(Priced(choice, own_us * 1e-6, False), prices)
            chosen[choice.group] = replace(own, measured_us=own_us) if measured else replace(own, predicted_us=own_us)
        bound_us = math.fsum(own.lower_bound_us for own in chosen.values())
        return self._written(
            chosen, elapsed_s, reason, planned_us=planned_us, unfused_us=record.unfused_us,
            rejected=[*lost, *record.rejected], enumerated=record.enumerated + 1,
            measured=record.measured + measured, gap=gap(planned_us, bound_us), undecided=record.undecided,
        )

    def _written(
        self, chosen: Mapping[Candidate, GroupChoice], elapsed_s: float, reason: str, *, planned_us: float,
        unfused_us: float, rejected: Sequence[Alternative], **known: Any
    ) -> PlanRecord:
        """``rejected`` are all, cheapest first: ATen's ops are kept last, of the others the first. ``known`` are
        further fields.
        """
        ordered = in_running_order(self.graph, self.region, chosen)
        groups = tuple(chosen[one] for one in ordered)
        reuse = [
            self.ways.named(group.implementation).reuse(self.table, one, group.config)
            for one, group in zip(ordered, groups, strict=True)
        ]
        others = [one for one in rejected if one.implementation != ATEN]
        plain = [one for one in rejected if one.implementation == ATEN]
        singles, outputs = single_candidates(self.graph, self.region), self.region.outputs
        return PlanRecord(
            key=self.key,
            label=region_label(self.graph, self.region),
            groups=groups,
            planned_us=planned_us,
            unfused_us=unfused_us,
            margin=1.0 - planned_us / unfused_us if unfused_us else 0.0,
            predicted_us=sum(group.predicted_us for group in groups),
            rejected=(*others[: policy.ALTERNATIVES_LIMIT], *plain),
            peak_bytes=peak_bytes(self.graph, ordered, outputs, reuse),
            unfused_peak_bytes=peak_bytes(self.graph, singles, outputs),
            evidence=Evidence(
                now(), Versions.current(self.table.device_type), self.seed, round(elapsed_s, 3), reason=reason,
                run=self.run,
            ),
            **known,
        )

    def _places(self, ops: Iterable[str]) -> tuple[int, ...]:
        place = {name: at for at, name in enumerate(self.region.ops)}
        return tuple(place[name] for name in ops)

    def _group(self, priced: Priced, prices: ModelPrices) -> GroupChoice:
        choice = priced.choice
        name, config, workload = choice.implementation.recorded(self.table, choice.group, prices.record(choice))
        return GroupChoice(
            self._places(choice.group.ops),
            name,
            label=group_label(self.graph, choice.group.ops, choice.group.outputs),
            workload=workload,
            config=config,
            predicted_us=_predicted_us(choice, prices),
            lower_bound_us=prices.bound_us(choice),
            measured_us=priced.cost_s * 1e6 if priced.measured else None,
        )

    def _alternative(self, priced: Priced, prices: ModelPrices) -> Alternative:
        """A measured choice that lost: a group, a library call, or ATen's op."""
        choice = priced.choice
        tuning = prices.record(choice)
        measured_us = priced.cost_s * 1e6 if math.isfinite(priced.cost_s) else None
        if measured_us is not None:
            reason = LOST
        elif tuning is not None and tuning.fused is not None:
            reason = "not clearly faster than its ops unfused"
            measured_us = tuning.fused.median_us
        else:
            why = tuning.rejected[0].reason if tuning is not None and tuning.rejected else ""
            reason = f"does not work: {why or prices.failures.get(choice, 'reason unknown')}"
        return Alternative(
            self._places(choice.group.ops),
            group_label(self.graph, choice.group.ops, choice.group.outputs),
            reason,
            _predicted_us(choice, prices) if prices.spec is not None else None,
            measured_us,
            (tuning.backend if tuning is not None else "") or choice.implementation.run_by(self.table, choice.group),
            tuning.key.workload if tuning is not None else "",
        )


def _lost(one: GroupChoice, reason: str) -> Alternative:
    """A group of a plan that another one takes the place of."""
    return Alternative(one.ops, one.label, reason, one.predicted_us, one.measured_us, one.implementation, one.workload)


def _moved(one: _Placed, places: Sequence[int]) -> _Placed:
    """The same in a region that has the part's ops at ``places``."""
    return replace(one, ops=tuple(places[at] for at in one.ops))


def _cost_us(record: PlanRecord) -> float:
    """What the partition was chosen by."""
    return math.fsum(one.predicted_us if one.measured_us is None else one.measured_us for one in record.groups)


def _predicted_us(choice: Choice, prices: ModelPrices) -> float:
    return prices.predict_s(choice) * 1e6 if prices.spec is not None else 0.0


def in_running_order(graph: DataflowGraph, region: Region, cover: Iterable[Candidate]) -> list[Candidate]:
    """The groups of a cover in an order in which they can run (a cover is acyclic, so there is one)."""
    listed, dependencies = list(cover), region_dependencies(graph, region)
    home = {dependencies.bit[op]: number for number, group in enumerate(listed) for op in group.ops}
    edges = ((home[before], home[after]) for before, after in dependencies.edges())
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_edges_from((before, after) for before, after in edges if before != after)
    order.add_nodes_from(range(len(listed)))
    return [listed[number] for number in nx.lexicographical_topological_sort(order)]


def peak_bytes(
    graph: DataflowGraph, groups: Sequence[Candidate], escaping: Sequence[str],
    reuse: Sequence[Mapping[str, tuple[str, ...]]] | None = None
) -> int:
    """Peak memory of a partition: the largest number of bytes of produced values alive at once.

    ``groups`` are in running order; each allocates its outputs before it runs. Values that are ``escaping`` stay alive
    to the end. ``reuse`` says for each group which outputs need no memory of their own where an input dies in it. Only
    values that the groups produce count as inputs that die: of others it is not known here who else needs them. What an
    op writes to an operand takes none.
    """
    last_use = {value: step for step, group in enumerate(groups) for value in group.inputs}
    kept = set(escaping)
    alive: dict[str, int] = {}
    peak = 0
    for step, group in enumerate(groups):
        dying = [value for value in alive if value not in kept and last_use.get(value) == step]
        taken = choose_reuse(reuse[step], dying) if reuse is not None else {}
        for source in taken.values():
            del alive[source]
        for value in group.outputs:
            if (maker := graph.maker(value)) is None or written_value(maker) is None:
                alive[value] = graph.specs[value].nbytes(graph.symbols)
        peak = max(peak, sum(alive.values()))
        alive = {value: size for value, size in alive.items() if value in kept or last_use.get(value, -1) > step}
    return peak


def located_label(graph: DataflowGraph, region: Region) -> str:
    """For people: what the region computes, and where in the model it is."""
    return located(region_label(graph, region), place_of(graph, region.ops))


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
