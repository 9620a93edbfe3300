"""Every choice of a region that was measured, with the work behind it: what the cost model is judged by and fitted to.

Kept beside a region's plan, which only has the answer. A report can then leave kernels out of a fit and predict them,
without a device and without tracing the model again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, ClassVar, Literal

from fuseplan.costmodel.work import Work
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import region_dependencies
from fuseplan.planner.implementations.choices import Choice
from fuseplan.search.store import codec, limits
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import RecordKey

#: Begins the names under which samples are stored.
PREFIX = "samples"


@dataclass(frozen=True)
class ChoiceSample:
    """One measured way to run some ops of a region.

    Attributes:
        ops: Positions among the region's ops.
        implementation: Name of the way to run them; a kernel is in its default configuration.
        name: Calibration that predicts it: the kernel's back end, the library call, or ``"unfused"``.
        family: What it computes, whatever the shape.
        group: Workload key, and the name of a library call; equal ones are the same kernel.
        measured_us: Its time in the screening, by itself.
    """

    ops: limits.Positions
    implementation: limits.Word
    name: str
    label: str
    family: str
    group: str
    mode: Literal["eager", "kernel", "graph", "overlapped", "early"]
    work: Annotated[Work, limits.possible_work]
    measured_us: limits.Measured
    RETIRED: ClassVar = frozenset({"delay_us"})


@dataclass(frozen=True)
class RegionSamples:
    """What was measured of a plan's region, of ``enumerated`` choices that there are.

    ``edges`` are pairs of positions of ops, of which the first has to run before the second, by way of views too.
    """

    key: RecordKey
    label: str
    edges: tuple[tuple[int, int], ...]
    enumerated: limits.Count
    samples: tuple[ChoiceSample, ...]


def region_samples(
    key: RecordKey, label: str, graph: DataflowGraph, region: Region, enumerated: int,
    measured: Iterable[tuple[Choice, ChoiceSample]],
) -> RegionSamples:
    """The record of a region; the samples of ``measured`` get their positions here."""
    dependencies = region_dependencies(graph, region)
    position = {name: number for number, name in enumerate(region.ops)}
    places = [position[name] for name in dependencies.bit]
    edges = tuple(sorted((places[first], places[second]) for first, second in dependencies.edges()))
    samples = tuple(
        replace(sample, ops=tuple(position[op] for op in choice.group.ops)) for choice, sample in measured
    )
    return RegionSamples(key, label, edges, enumerated, samples)


def store_samples(database: Database, samples: RegionSamples) -> None:
    """Keep the samples of a region; earlier ones of the same plan are replaced."""
    key = samples.key
    parts = (key.device, key.regime, key.numerics, key.workload)
    database.put_capture(f"{PREFIX}/{codec.checksum(' '.join(parts))}", asdict(samples))
