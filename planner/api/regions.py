"""The graphs of captured models, and the distinct regions of all these graphs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """A model with its graphs by workload, captured in so many ``seconds``; without any where it cannot be captured."""

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
    """The regions of all graphs, each once per regime and numerics, in tuning order, looked up in the database."""
    found: dict[RecordKey, DistinctRegion] = {}
    for number, one in enumerate(captured):
        planner = session.planning_for(one.asked.settings).planner()
        for workload, graph in one.graphs:
            regions, plans = planner.look_up_regions(graph, one.asked.is_derived(workload))
            for name, same in unique_regions(regions).items():
                key, region = planner.key(name), same[0]
                known = found.get(key) or DistinctRegion(
                    key, region_label(graph, region), place_of(graph, region.ops), (), 0, name in plans)
                models = dict.fromkeys((*known.models, number))
                found[key] = replace(known, models=tuple(models), uses=known.uses + len(same))
    # A session tunes what it plans for together.
    order = list(dict.fromkeys((key.regime, key.numerics) for key in found))
    return tuple(sorted(found.values(), key=lambda one: order.index((one.key.regime, one.key.numerics))))


def in_words(distinct: Sequence[DistinctRegion]) -> str:
    """How many regions there are, beside what each model would take by itself with an empty database."""
    stored, listed = sum(one.stored for one in distinct), sum(len(one.models) for one in distinct)
    return (f"regions: {listed} in all models, {len(distinct)} distinct, {stored} stored, "
            f"{len(distinct) - stored} to measure")
