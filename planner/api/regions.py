"""The graphs of captured models, and the distinct regions of all these graphs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.planner.api.request import Asked
from fuseplan.planner.errors import FuseplanError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.places import place_of
from fuseplan.planner.groups.regions import unique_regions
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.planner.tuning.session import Session
from fuseplan.search.store.record import RecordKey


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model with the graphs of its workloads, by name; without any where it cannot be captured.

    ``seconds`` is how long that took.
    """

    asked: Asked
    graphs: tuple[tuple[str, DataflowGraph], ...] = ()
    failure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class DistinctRegion:
    """A region that some graphs have between them: what is measured once.

    Attributes:
        key: Of its plan.
        label, place: What it computes, and where in the first model that has it.
        models: Numbers of the captured models that have it, in order.
        uses: How often it occurs, in all graphs.
        stored: Whether it has a plan.
    """

    key: RecordKey
    label: str
    place: str
    models: tuple[int, ...]
    uses: int
    stored: bool


def captured_model(asked: Asked, progress: Progress = SILENT) -> CapturedModel:
    """All graphs of a model, or why it has none: one that cannot be captured costs only itself."""
    began = time.monotonic()
    try:
        graphs, failure = tuple(asked.graphs(progress)), ""
    except FuseplanError as error:
        graphs, failure = (), f"{asked.label} is left out: {error}"
    return CapturedModel(asked, graphs, failure, time.monotonic() - began)


def distinct_regions(captured: Sequence[CapturedModel], session: Session) -> tuple[DistinctRegion, ...]:
    """The regions of all graphs, each once for each way to launch and to round, in the order in which they are tuned;
    looked up in the session's database.
    """
    first: dict[RecordKey, tuple[str, str]] = {}
    uses: Counter[RecordKey] = Counter()
    models: defaultdict[RecordKey, dict[int, None]] = defaultdict(dict)
    stored: set[RecordKey] = set()
    for number, one in enumerate(captured):
        planner = session.planning_for(one.asked.settings).planner()
        for workload, graph in one.graphs:
            new = []
            regions, _ = planner.look_up_regions(graph, one.asked.is_derived(workload))
            for name, occurrences in unique_regions(regions).items():
                key, region = planner.key(name), occurrences[0]
                if key not in first:
                    first[key] = region_label(graph, region), place_of(graph, region.ops)
                    new.append(region)
                uses[key] += len(occurrences)
                models[key][number] = None
            stored |= set(map(planner.key, planner.look_up_all(graph, new)))
    # A session tunes what it plans for together.
    order = list(dict.fromkeys((key.regime, key.numerics) for key in first))
    return tuple(DistinctRegion(key, *first[key], tuple(models[key]), uses[key], key in stored)
                 for key in sorted(first, key=lambda key: order.index((key.regime, key.numerics))))


def in_words(distinct: Sequence[DistinctRegion]) -> str:
    """How many regions there are, beside what each model would take by itself with an empty database."""
    stored, listed = sum(one.stored for one in distinct), sum(len(one.models) for one in distinct)
    return (f"regions: {listed} in all models, {len(distinct)} distinct, {stored} stored, "
            f"{len(distinct) - stored} to measure")
