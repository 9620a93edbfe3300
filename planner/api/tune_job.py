"""What a tune is asked for, and what there is to do: models, their graphs, and the regions of all of them.

A :class:`TuneJob` says what is wanted and touches nothing. :func:`captured_models` traces its models, and
:func:`distinct_regions` lists what they are made of, each region once, and whether it has a plan.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fuseplan.costmodel.devices import Kind, is_cpu
from fuseplan.planner.api.asked import Asked, of_model, of_pattern, plan_settings, sizes_text
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.errors import ConfigError, FuseplanError, NothingForDeviceError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.places import place_of
from fuseplan.planner.groups.regions import find_regions, unique_regions
from fuseplan.planner.models.manifest import Manifest, ManifestModel
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.settings import PlanSettings
from fuseplan.search.store.record import RecordKey


@dataclass(frozen=True)
class JobModel:
    """A model with its workloads, or a pattern, and what its plans are made for."""

    asked: Asked
    settings: PlanSettings


@dataclass(frozen=True)
class TuneJob:
    """What is tuned together on one device. One model is a job, too.

    Attributes:
        title: What the whole is called.
        left_out: Models that are not tuned on this device, and why.
    """

    title: str
    kind: Kind
    models: tuple[JobModel, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_one(cls, asked: Asked, settings: PlanSettings) -> TuneJob:
        """A job of one model."""
        return cls(asked.label, asked.kind, (JobModel(asked, settings),))

    def settings(self) -> list[PlanSettings]:
        """What its plans are made for, each once: a session for each of these."""
        return list(dict.fromkeys(one.settings for one in self.models))


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model of a job with the graphs of its workloads, by name; without any where it cannot be captured.

    ``seconds`` is how long that took.
    """

    model: JobModel
    graphs: tuple[tuple[str, DataflowGraph], ...] = ()
    failure: str = ""
    seconds: float = 0.0

    @property
    def label(self) -> str:
        return self.model.asked.label


@dataclass(frozen=True, eq=False)
class DistinctRegion:
    """A region that some graphs of a job have between them: what is measured once.

    Attributes:
        key: Of its plan.
        label, place: What it computes, and where in the first model that has it.
        models: Numbers of the captured models that have it, in order.
        graph, region: Where it occurs first: the number of a graph of the first of these models.
        uses: How often it occurs, in all graphs.
        stored: Whether it has a plan.
    """

    key: RecordKey
    label: str
    place: str
    models: tuple[int, ...]
    graph: int
    region: Region
    uses: int
    stored: bool


@dataclass(frozen=True, eq=False)
class Regions:
    """The distinct regions of a job, in the order in which they are tuned.

    ``listed`` counts each model's own distinct regions: what they would take one by one, each with an empty database.
    """

    distinct: tuple[DistinctRegion, ...]
    listed: int

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.distinct)

    def to_measure(self) -> list[DistinctRegion]:
        """Those without a plan."""
        return [one for one in self.distinct if not one.stored]

    def __str__(self) -> str:
        return (
            f"regions: {self.listed} in all models, {len(self.distinct)} distinct, {self.stored} stored, "
            f"{len(self.distinct) - self.stored} to measure"
        )


def captured_models(job: TuneJob, progress: Progress = SILENT) -> tuple[CapturedModel, ...]:
    """All graphs of a job. A model that cannot be captured costs only itself."""
    return tuple(captured_model(model, progress) for model in job.models)


def captured_model(model: JobModel, progress: Progress = SILENT) -> CapturedModel:
    """All graphs of a model, or why it has none."""
    began = time.monotonic()
    try:
        graphs, failure = tuple(model.asked.graphs(progress)), ""
    except FuseplanError as error:
        graphs, failure = (), f"{model.asked.label} is left out: {error}"
    return CapturedModel(model, graphs, failure, time.monotonic() - began)


def distinct_regions(captured: Sequence[CapturedModel], session: Session) -> Regions:
    """The regions of all graphs, each once for each way to launch and to round, looked up in the session's database."""
    first: dict[RecordKey, tuple[int, int, Region]] = {}
    uses: Counter[RecordKey] = Counter()
    models: defaultdict[RecordKey, dict[int, None]] = defaultdict(dict)
    stored: set[RecordKey] = set()
    for number, one in enumerate(captured):
        planner = session.planning_for(one.model.settings).planner()
        for at, (_, graph) in enumerate(one.graphs):
            new = []
            for name, occurrences in unique_regions(find_regions(graph)).items():
                key = planner.key(name)
                if key not in first:
                    first[key] = number, at, occurrences[0]
                    new.append(occurrences[0])
                uses[key] += len(occurrences)
                models[key][number] = None
            stored |= set(map(planner.key, planner.look_up_all(graph, new)))
    distinct = []
    for key, (number, at, region) in first.items():
        graph = captured[number].graphs[at][1]
        label, place = region_label(graph, region), place_of(graph, region.ops)
        distinct.append(
            DistinctRegion(key, label, place, tuple(models[key]), at, region, uses[key], key in stored))
    # A session tunes what it plans for together.
    order = list(dict.fromkeys((key.regime, key.numerics) for key in first))
    distinct.sort(key=lambda one: order.index((one.key.regime, one.key.numerics)))
    return Regions(tuple(distinct), sum(map(len, models.values())))


def manifest_job(manifest: Manifest, kind: Kind, device: str) -> TuneJob:
    """The models of a manifest that are for a device, by its key; nothing is captured yet.

    Raises:
        ConfigError: A model cannot be planned as it is asked for, or is there twice. The message names file and table.
        NothingForDeviceError: None is for this device.
    """
    models: list[tuple[ManifestModel, JobModel]] = []
    left_out: list[tuple[str, str]] = []
    for one in manifest.models:
        if not one.is_for(device):
            left_out.append((one.source, f"it is for {', '.join(one.devices)}"))
        elif one.regime == "graph" and is_cpu(kind):
            left_out.append((one.source, "it is for CUDA graphs, which a CPU does not have"))
        else:
            models.append((one, _job_model(one, kind)))
    if not models:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out)
        raise NothingForDeviceError(f"{manifest.path.name}: no model is for this device, {device} ({reasons})")
    return TuneJob(manifest.path.name, kind, tuple(_named_apart(models)), tuple(left_out))


def _job_model(one: ManifestModel, kind: Kind) -> JobModel:
    try:
        settings = plan_settings(kind, one.numerics, one.regime)
        if one.pattern is not None:
            asked = of_pattern(kind, one.pattern, one.shape, one.dtype)
        else:
            asked = of_model(
                kind, find_source(one.model, one.config, one.module, kind, one.dtype, one.layers),
                sizes_text("decode", one.decode), one.kv_len, sizes_text("prefill", one.prefill), one.calls,
                one.pack_weights,
            )
    except FuseplanError as error:
        raise ConfigError(f"{one.where}: {error}") from None
    return JobModel(replace(asked, label=one.name or asked.label), settings)


def _named_apart(models: Sequence[tuple[ManifestModel, JobModel]]) -> Iterator[JobModel]:
    """The models under names that keep their reports apart: those of several dtypes have these in their names.

    ConfigError where two are the same, or where different ones are called the same.
    """
    known: dict[object, ManifestModel] = {}
    dtypes: defaultdict[str, set[str | None]] = defaultdict(set)
    for table, one in models:
        same = known.setdefault((_made_from(table, one), table.shape, one.asked.workloads, one.asked.pack_weights,
                                 one.settings), table)
        if same is not table:
            raise ConfigError(f"{table.where}: {_number(same)} asks for the same; leave one of them out")
        dtypes[one.asked.label].add(_dtype(table, one))
    called: dict[str, tuple[object, ManifestModel]] = {}
    for table, one in models:
        label = one.asked.label
        label = label if len(dtypes[label]) == 1 else f"{label}:{_dtype(table, one)}"
        what, other = called.setdefault(label, (_made_from(table, one), table))
        if what != _made_from(table, one):
            raise ConfigError(f"{table.where}: {_number(other)} is called {label}, too; give one of them a name")
        yield replace(one, asked=replace(one.asked, label=label))


def _made_from(table: ManifestModel, one: JobModel) -> object:
    """What a model is, wherever its file is."""
    source = one.asked.source
    if source is None:
        return table.pattern, table.dtype
    return replace(source, name="") if source.config_json else source


def _dtype(table: ManifestModel, one: JobModel) -> str | None:
    return one.asked.source.dtype if one.asked.source is not None else table.dtype


def _number(table: ManifestModel) -> str:
    return table.where.partition(": ")[2]
