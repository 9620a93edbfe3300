"""The plan in words: what runs together, what does not, and why each boundary is where it is."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fuseplan.costmodel.roofline import lower_bound
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, Refusal, enumerate_candidates
from fuseplan.planner.groups.regions import find_boundaries, region_parts
from fuseplan.planner.implementations.choices import kernel_mode
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.ops.table import kind_of, why_opaque
from fuseplan.planner.partition.plan_record import located_label
from fuseplan.planner.reports.drawing import group_name, reads
from fuseplan.planner.reports.frames import config_text, floor_doubt, how_it_runs, time_of
from fuseplan.planner.tuning.planner import GraphPlan, RegionPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.summary import RegionSummary, summarise
from fuseplan.planner.tuning.whole_step import runs_by_inductor
from fuseplan.search import policy
from fuseplan.search.errors import counted
from fuseplan.search.store.record import ATEN, GroupChoice, TuningRecord

#: Examples of a kind that are spelled out; the rest is counted.
_EXAMPLES = 5


def explain_plan(session: Session, workload: str, graph: DataflowGraph, plan: GraphPlan) -> Iterator[str]:
    """Lines that explain the plan of one captured workload."""
    table = GroupTable(graph, session.settings.numerics, session.target.device_type)
    kinds = Counter(kind_of(node, graph.specs) for node in graph)
    regions = distinct_regions(graph, plan)
    yield (f"{workload}: {len(graph)} ops. {kinds['view']} are views (address maps, no work), {kinds['compute']} can "
           f"run in generated kernels, {kinds['anchor']} are matmuls, convolutions or attention, and {kinds['opaque']} "
           f"only ATen runs. Regions: {len(plan.regions)}, distinct: {len(regions)}.")
    if (step := runs_by_inductor(session.store, plan)) is not None:
        yield (f"TorchInductor's code of the whole graph runs it: {step.best_us:.3g} us a step, where the plan takes "
               f"{step.planned_us:.3g}.")
    yield from _externs(graph)
    yield from _region_boundaries(graph)
    for number, (region, one) in enumerate(regions, 1):
        yield ""
        yield f"Region {number} of {len(regions)}, {_times(region.occurrences)}: {one.record.label}"
        yield from _RegionWords(session, graph, table, one, region).lines()


def distinct_regions(graph: DataflowGraph, plan: GraphPlan) -> list[tuple[RegionSummary, RegionPlan]]:
    """Each distinct region of a planned graph: what is to be said of it, and the plan of its first occurrence."""
    if not plan.regions:
        return []
    summary = summarise("", "", graph, [(one.region, one.record) for one in plan.regions])
    regions = {region.key: region for region in summary.regions}
    return [(regions[one.record.key.workload], one) for one in plan.unique()]


def tuning_of(session: Session, plan: RegionPlan, workload: str) -> TuningRecord | None:
    """The record of a group of a region's plan, by its key; None where it was not tuned."""
    return session.store.get_record(replace(plan.record.key, workload=workload)).record if workload else None


def note_failure(graph: DataflowGraph, lines: list[str]) -> Callable[[Region, Exception], None]:
    """Adds a line for each region that cannot be planned."""
    return lambda region, error: lines.append(
        f"\n{located_label(graph, region)}: not planned, runs unfused: {failure_reason(error)}")


def _externs(graph: DataflowGraph) -> Iterator[str]:
    opaque = [node for node in graph if kind_of(node, graph.specs) == "opaque"]
    reasons = Counter(why_opaque(node, graph.specs) or f"{node.op}: a library call" for node in opaque)
    for reason, count in reasons.most_common():
        yield f"  boundary: {reason} ({_times(count)})"


def _region_boundaries(graph: DataflowGraph) -> Iterator[str]:
    """Compute ops that exchange a value and still are in different regions."""
    boundaries = find_boundaries(graph)
    kinds = [boundary.reason.split(" (")[0] for boundary in boundaries]
    example = dict(zip(reversed(kinds), reversed(boundaries), strict=True))
    for kind, count in Counter(kinds).most_common(_EXAMPLES):
        one = example[kind]
        before, after = (_short(graph.op(name).op) for name in (one.before, one.after))
        yield f"  apart although one reads the other ({_times(count)}): {before} and {after}, because {one.reason}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _short(op: str) -> str:
    return op.removeprefix("aten.").split(".")[0]


@dataclass(frozen=True)
class _RegionWords:
    """Explains one region."""

    session: Session
    graph: DataflowGraph
    table: GroupTable
    plan: RegionPlan
    region: RegionSummary

    def lines(self) -> Iterator[str]:
        yield f"  {self._source()}"
        for number, group in enumerate(self.plan.record.groups):
            yield from self._group(group_name(number), group)
        parts = region_parts(self.graph, self.plan.region)
        found = [enumerate_candidates(self.graph, part, self.table.legal) for part in parts]
        candidates = {frozenset(candidate.ops): candidate for one in found for candidate in one.candidates}
        refusals = [refusal for one in found for refusal in one.refusals]
        yield from self._pairs(candidates, refusals)
        yield from self._rejected()
        yield from _refused(self.graph, refusals)
        yield from [f"  {one.truncated}" for one in found if one.truncated][:1]

    def _source(self) -> str:
        record = self.plan.record
        shipped = "that comes with fuseplan, measured on another such device"
        where = shipped if self.plan.shipped else "from the database"
        found = {
            "database": f"plan {where} ({record.evidence.created})",
            "tuned": "plan tuned now",
            "model": "not tuned yet: this is the cost model's plan",
        }[self.plan.source]
        gain = ""
        if record.unfused_us > 0 and record.measured:
            gain = f"; {record.planned_us:.2f} us against {record.unfused_us:.2f} us unfused"
        return f"{found}; {record.evidence.reason}{gain}"

    def _group(self, name: str, choice: GroupChoice) -> Iterator[str]:
        tuning = tuning_of(self.session, self.plan, choice.workload)
        ops = ", ".join(_short(self.graph.op(name).op) for name in self.plan.group_ops(choice))
        yield f"  {name}: {how_it_runs(choice)}: {ops}"
        if where := self.region.place_of(choice.ops):
            yield f"     in {where}"
        parts = [f"{choice.measured_us:.2f} us measured"] if choice.measured_us is not None else ["not measured"]
        if choice.predicted_us:
            parts.append(f"{choice.predicted_us:.2f} us predicted")
        if choice.lower_bound_us:
            doubt = floor_doubt(choice.measured_us, choice.lower_bound_us, policy.FLOOR_TOLERANCE)
            words = f" (it is {doubt})" if doubt else ""
            floor_us = choice.lower_bound_us if doubt else min(choice.lower_bound_us, choice.measured_us or math.inf)
            parts.append(f"no kernel can take less than {floor_us:.2f} us{words}")
        if choice.config:
            parts.append(config_text(choice.config))
        yield f"     {'; '.join(parts)}"
        if tuning is not None:
            yield f"     why: {tuning.evidence.reason}"

    def _pairs(
        self, candidates: Mapping[frozenset[str], Candidate], refusals: Sequence[Refusal]
    ) -> Iterator[str]:
        """For each two groups that exchange a value: why they are not one."""
        groups = self.plan.record.groups
        pairs = [(group_name(a), group_name(b), a, b) for a, b in reads(self.region, self.plan.record)]
        for name, other, a, b in sorted(pairs)[: 4 * _EXAMPLES]:
            yield f"  between {name} and {other}: {self._why_apart(groups[a], groups[b], candidates, refusals)}"

    def _why_apart(
        self, first: GroupChoice, second: GroupChoice, candidates: Mapping[frozenset[str], Candidate],
        refusals: Sequence[Refusal],
    ) -> str:
        sides = [frozenset(self.plan.group_ops(one)) for one in (first, second)]
        union = frozenset.union(*sides)
        apart = f"apart {time_of(first):.2f} + {time_of(second):.2f} us"
        for one in reversed(self.plan.record.rejected):
            if one.implementation != ATEN and union == {self.plan.region.ops[at] for at in one.ops}:
                measured = "no working kernel"
                if one.measured_us is not None:
                    measured = f"{one.measured_us:.2f} us"
                return f"tried as one kernel: {measured}, {apart}; {one.reason}"
        for refusal in refusals:
            ops = frozenset(refusal.ops)
            if ops <= union and all(ops & side for side in sides):
                return f"they cannot be one kernel: {refusal.reason}"
        if union not in candidates:
            larger = min((len(one) for one in candidates if union < one), default=None)
            if larger is None:
                return "no legal group holds both"
            return f"a kernel with both must hold {larger} ops at least, and no such group is in the best cover"
        spec = self.session.spec
        if spec is None:
            return "legal as one kernel, but not in the best cover"
        bound_us = lower_bound(self.table.work(candidates[union]), spec, kernel_mode(self.session.settings.regime))
        return f"as one kernel at least {bound_us:.2f} us, {apart}: not worth measuring further"

    def _rejected(self) -> Iterator[str]:
        fused = [one for one in self.plan.record.rejected if one.implementation != ATEN]
        for one in fused[:_EXAMPLES]:
            times = [f"{one.measured_us:.2f} us measured"] if one.measured_us is not None else []
            times += [f"{one.predicted_us:.2f} us predicted"] if one.predicted_us is not None else []
            ops = counted(len(one.ops), "op")
            tuning = tuning_of(self.session, self.plan, one.workload)
            why = tuning.evidence.reason if tuning is not None and not tuning.fuse else one.reason
            yield f"  not chosen: {one.label}, {ops} ({'; '.join(times) or 'no time'}): {why}"
        if len(fused) > _EXAMPLES:
            more = counted(len(fused) - _EXAMPLES, "more measured group that was",
                           "more measured groups that were")
            yield f"  and {more} not chosen"


def _refused(graph: DataflowGraph, refusals: Sequence[Refusal]) -> Iterator[str]:
    """Groups that cannot exist, by reason; equal reasons about other ops count together."""
    by_reason: dict[str, list[Sequence[str]]] = {}
    for refusal in refusals:
        by_reason.setdefault(re.sub(r" \(\S+\)", "", refusal.reason), []).append(refusal.ops)
    for reason, ops in sorted(by_reason.items(), key=lambda item: -len(item[1]))[:_EXAMPLES]:
        names = ", ".join(dict.fromkeys(_short(graph.op(name).op) for name in ops[0]))
        groups = "one group" if len(ops) == 1 else f"{len(ops)} groups, such as"
        yield f"  cannot be one kernel ({groups} {names}): {reason}"
