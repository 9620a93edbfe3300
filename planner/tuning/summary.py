"""What a tune covered: a model's workloads and their regions, kept so that a report need not trace the model again.

The plans themselves are records of the database.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from fuseplan.planner.module_paths import RepeatedPaths, group_place
from fuseplan.search.store import codec
from fuseplan.search.store.limits import Count
from fuseplan.search.store.record import PlanRecord, RecordKey, now

if TYPE_CHECKING:
    from fuseplan.planner.graph.dataflow import DataflowGraph, Region
    from fuseplan.search.store.database import Database

_PREFIX = "summary"


@dataclass(frozen=True)
class RegionSummary:
    """One distinct region of a workload.

    Attributes:
        key: Workload key of the region's plan.
        occurrences: How often the region occurs (layers repeat).
        ops: Op names in canonical order (``mul.Tensor``); a plan's groups count positions in this list.
        kinds: ``"compute"``, ``"anchor"`` or ``"view"``, per op.
        edges: Positions of producer and consumer.
        shapes: Shape and dtype of each op's first output (``1x32x2048 bfloat16``).
        parts: Keys of the plans of its parts, where it has several.
        places: Where its ops are in the model; empty where older versions stored it. No key depends on it.
    """

    key: str
    occurrences: Count
    ops: tuple[str, ...]
    kinds: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    shapes: tuple[str, ...]
    parts: tuple[str, ...] = ()
    places: tuple[RepeatedPaths, ...] = ()

    def flaw(self) -> str:
        """Why the fields contradict one another; "" when they do not."""
        alike = len(self.ops) == len(self.kinds) == len(self.shapes)
        named = [*(at for edge in self.edges for at in edge), *(at for one in self.places for at, _ in one.paths)]
        known = all(0 <= at < len(self.ops) for at in named)
        if not (alike and known):
            return "names ops that it does not have"
        order = TopologicalSorter[int]()
        for before, after in self.edges:
            order.add(after, before)
        try:
            order.prepare()
        except CycleError:
            return "has ops that wait for each other"
        return ""

    def place_of(self, ops: Collection[int]) -> str:
        """Where a group of these ops is in the model, in words; "" where that is not known."""
        return group_place(self.places, ops)

    def has_plan(self, plan: PlanRecord) -> bool:
        """Whether the positions that a stored plan counts are ones of this region."""
        named = [*(group.ops for group in plan.groups), *(one.ops for one in plan.rejected)]
        return all(at < len(self.ops) for ops in named for at in ops)


@dataclass(frozen=True)
class WorkloadSummary:
    """One captured workload of a model.

    Attributes:
        model: Model name as the user gave it.
        workload: Name of the regime (``decode b1 kv1024``).
        ops: Ops of the graph, views included.
        views: How many of them are views.
        externs: How many are library calls, or ops no kernel can express.
        extern_ops: Number of each kind of opaque op by name.
        regions: Distinct regions, in order of first occurrence.
        created: ISO 8601 UTC time; "" where older versions stored it.
        order: Which region runs, one after another, by number; empty where older versions stored it.
    """

    model: str
    workload: str
    device: str
    regime: str
    numerics: str
    ops: Count
    views: Count
    externs: Count
    extern_ops: Mapping[str, Count]
    regions: tuple[RegionSummary, ...]
    created: str = ""
    order: tuple[Count, ...] = ()

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What tells it from others of a device."""
        return self.model, self.workload, self.regime, self.numerics

    def plan_key(self, region: RegionSummary) -> RecordKey:
        """Key of the plan of one of the regions."""
        return self._key(region.key)

    def part_keys(self, region: RegionSummary) -> set[RecordKey]:
        """Keys of the plans of its parts, where it has several."""
        return set(map(self._key, region.parts))

    def _key(self, workload: str) -> RecordKey:
        return RecordKey(workload, self.device, self.regime, self.numerics)

    def flaw(self) -> str:
        """Why the fields contradict one another; "" when they do not."""
        if len({region.key for region in self.regions}) < len(self.regions):
            return "has a region twice"
        if self.order and Counter(self.order) != Counter({at: one.occurrences for at, one in enumerate(self.regions)}):
            return "has its regions in an order that leaves some out, or names others"
        held = sum(region.occurrences * region.kinds.count("compute") for region in self.regions)
        return "" if self.computes >= held else "has fewer ops than its regions"

    @property
    def computes(self) -> int:
        """Ops that a generated kernel can absorb."""
        return self.ops - self.views - self.externs


def summarise(
    model: str, workload: str, graph: DataflowGraph, planned: Iterable[tuple[Region, PlanRecord]]
) -> WorkloadSummary:
    """The summary of a graph of which ``planned`` are all regions, repeats included; ValueError without any."""
    from fuseplan.planner.groups.compute_graph import compute_graph_of

    pairs = list(planned)
    if not pairs:
        raise ValueError(f"{model}, {workload}: no region was planned, so there is nothing to summarise")
    key = pairs[0][1].key
    found: dict[str, list[Region]] = {}
    for region, record in pairs:
        found.setdefault(record.key.workload, []).append(region)
    number = {name: at for at, name in enumerate(found)}
    flow = compute_graph_of(graph)
    kinds = dict(zip(flow.names, flow.kinds, strict=True))
    externs = Counter(node.op for node in graph if kinds[node.name] in ("anchor", "opaque"))
    return WorkloadSummary(
        model, workload, key.device, key.regime, key.numerics,
        ops=len(graph),
        views=sum(kind == "view" for kind in kinds.values()),
        externs=externs.total(),
        extern_ops=dict(sorted(externs.items())),
        regions=tuple(_region(graph, kinds, occurrences, name) for name, occurrences in found.items()),
        created=now(),
        order=tuple(number[record.key.workload] for _, record in pairs),
    )


def _region(graph: DataflowGraph, kinds: Mapping[str, str], occurrences: list[Region], key: str) -> RegionSummary:
    from fuseplan.planner.groups.places import region_paths
    from fuseplan.planner.groups.regions import region_parts

    region = occurrences[0]
    position = {name: number for number, name in enumerate(region.ops)}
    edges = sorted(
        (position[before], position[after])
        for before, after in graph.graph.subgraph(region.ops).edges
    )
    return RegionSummary(
        key,
        len(occurrences),
        ops=tuple(graph.op(name).op.split(".", 1)[-1] for name in region.ops),
        kinds=tuple(kinds[name] for name in region.ops),
        edges=tuple(edges),
        shapes=tuple(
            f"{'x'.join(map(str, spec.shape))} {spec.dtype}" for spec in map(graph.specs.__getitem__, region.ops)),
        parts=tuple(part.key for part in region_parts(graph, region) if part.key != key),
        places=region_paths(graph, occurrences),
    )


def store_summary(database: Database, summary: WorkloadSummary) -> None:
    """Keep a summary; one of the same model, workload, device, regime and numerics is replaced."""
    # A digest, because a model's name may be a long path and a database's keys are bounded.
    parts = (summary.device, summary.model, summary.workload, summary.regime, summary.numerics)
    database.put_capture(f"{_PREFIX}/{codec.checksum(' '.join(parts))}", asdict(summary))


def load_summaries(
    database: codec.CaptureStore, device: str | None = None, model: str | None = None
) -> tuple[WorkloadSummary, ...]:
    """Stored summaries of a device and a model (None for any) in natural order; unreadable ones are left out."""
    found = codec.stored(database, WorkloadSummary, _PREFIX).values()
    # A model's shortened versions (``llama-3.2-1b:2L``) are its, too.
    wanted = [one for one in found if device in (None, one.device)
              and (model in (None, one.model) or one.model.startswith(f"{model}:"))]
    return tuple(sorted(wanted, key=lambda one: (one.model, _natural(one.workload), one.regime, one.numerics)))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which ``b8`` comes before ``b16``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
