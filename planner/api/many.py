"""Many models at once: each region that they have between them is measured once, and a table says what that cost."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fuseplan.costmodel.devices import Kind, is_cpu
from fuseplan.planner.api.answer import TuneAnswer, first_screen
from fuseplan.planner.api.request import Asked, asked_for
from fuseplan.planner.api.run import Ran, outcome
from fuseplan.planner.errors import ConfigError, FuseplanError, NothingForDeviceError, PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.places import place_of
from fuseplan.planner.groups.regions import unique_regions
from fuseplan.planner.models.manifest import Manifest, ManifestModel
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.reports import frames
from fuseplan.planner.reports.document import Table, table_of
from fuseplan.planner.reports.step_words import step_words
from fuseplan.planner.reports.steps import step_frame, steps
from fuseplan.planner.tuning.graph_stream import CaptureElsewhere
from fuseplan.planner.tuning.plans import PlanSettings
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import Batch, TuneResult
from fuseplan.search.errors import counted
from fuseplan.search.store.record import RecordKey
from fuseplan.search.tune.time_account import TimeAccount

MODEL_COLUMNS = (
    "model", "workloads", "regions", "shared", "stored", "measured", "failed", "capture_s", "tune_s", "step",
    "unfused_us", "planned_us", "saved_us", "dtype", "regime", "numerics", "outcome",
)
#: Of these, what adds up, and is 0 where nothing was done.
_COUNTED = MODEL_COLUMNS[1:9]


@dataclass(frozen=True, eq=False)
class TunedMany(TuneAnswer):
    """What came of tuning several models together.

    Attributes:
        title: The name of the manifest.
        where: The database, in words.
        models: One row per model. Of its distinct ``regions`` some are ``shared`` with models before it; the others
            were ``stored``, are ``measured`` now, or ``failed``. ``tune_s`` is what these and its whole steps took.
            ``step`` is its first workload, in microseconds.
        regions: One row per distinct region: how many ``models`` have it, how often it occurs, and whether it was
            ``stored``.
        totals: The same numbers for all models together.
        data: What is stored of these models; ``steps`` is made of it.
        results: What was measured, for each way to launch and to round.
    """

    title: str
    where: str
    models: pd.DataFrame
    regions: pd.DataFrame
    totals: dict[str, float]
    data: frames.ReportData
    results: tuple[TuneResult, ...] = ()

    @property
    def steps(self) -> pd.DataFrame:
        """One row per workload of each model: a step unfused and as planned, its floor, and how it was measured."""
        return step_frame(self.data)

    @property
    def total_frame(self) -> pd.DataFrame:
        """``totals`` as a table of one row."""
        return pd.DataFrame([self.totals])

    def tables(self) -> Iterator[Table]:
        yield table_of(self.models, "models", f"{self.title} on {self.data.device}", keep=(
            "model", "regions", "shared", "measured", "tune_s", "saved_us"), spare=(
            "numerics", "dtype", "regime", "capture_s", "workloads", "failed", "unfused_us", "planned_us", "step",
            "outcome", "stored"))
        for title, frame in (("Totals", self.total_frame), ("Steps", self.steps), ("Regions", self.regions)):
            yield table_of(frame, title.lower(), title, shown="files")

    def course(self) -> Iterator[str]:
        total = self.totals
        models, regions = (counted(int(total[f"{name}s"]), name) for name in ("model", "region"))
        stored = counted(int(total["stored"]), "was stored", "were stored")
        yield (f"{models}, {regions}, {total['distinct']} distinct: {stored}, {total['measured']} measured now in "
               f"{total['tune_s']:.1f} s")
        for result in self.results:
            what = result.session.settings
            yield f"{what.regime}, {what.numerics}: {outcome(result)}" if len(self.results) > 1 else outcome(result)
        yield f"stored in {self.where}"

    def step_lines(self) -> Iterator[str]:
        yield from (step_words(one) for one in steps(self.data) if one.times is not None)

    def _repr_html_(self) -> str:
        lines = [*self.course(), *(f"Warning: {one}" for one in self.warnings)]
        columns = ("model", "regions", "shared", "stored", "measured", "tune_s", "step", "saved_us")
        return first_screen(f"{self.title} on {self.data.device}", lines, None, self.models, columns)


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
        key: Of its plan; ``stored`` says whether there is one.
        label, place: What it computes, and where in the first model that has it.
        models: Numbers of the captured models that have it, in order.
        uses: How often it occurs, in all graphs.
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


class Models:
    """The models of a manifest that are for a device, by its key: a batch for each way to launch and to round.

    Raises:
        ConfigError: A model cannot be planned as it is asked for, or is there twice. The message names file and table.
        NothingForDeviceError: None is for this device.
    """

    def __init__(
        self, manifest: Manifest, kind: Kind, device: str, elsewhere: CaptureElsewhere | None = None
    ) -> None:
        self.title = manifest.path.name
        self.left_out: list[tuple[str, str]] = []
        found: list[tuple[ManifestModel, Asked]] = []
        for one in manifest.models:
            if not one.is_for(device):
                self.left_out.append((one.source, f"it is for {', '.join(one.devices)}"))
            elif one.regime == "graph" and is_cpu(kind):
                self.left_out.append((one.source, "it is for CUDA graphs, which a CPU does not have"))
            else:
                try:
                    asked = asked_for(kind, one)
                except FuseplanError as error:
                    raise ConfigError(f"{one.where}: {error}") from None
                found.append((one, replace(asked, label=one.name or asked.label, elsewhere=elsewhere)))
        if not found:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left_out)
            raise NothingForDeviceError(f"{self.title}: no model is for this device, {device} ({reasons})")
        self.models = tuple(_named_apart(found))
        self.captured: tuple[CapturedModel, ...] = ()
        self.regions: tuple[DistinctRegion, ...] = ()
        #: By settings and name of a graph.
        self._of: dict[tuple[PlanSettings, str], CapturedModel] = {}

    def capture(self, stack: ExitStack, progress: Progress, account: TimeAccount) -> None:
        for name, why in self.left_out:
            progress.note(f"{name} is left out: {why}")
        with account.spend("capturing"):
            self.captured = tuple(captured_model(asked, progress) for asked in self.models)

    def batches(self, session: Session, progress: Progress, account: TimeAccount) -> Sequence[Batch]:
        with account.spend("looking regions up"):
            self.regions = distinct_regions(self.captured, session)
        stored, listed = sum(one.stored for one in self.regions), sum(len(one.models) for one in self.regions)
        progress.note(f"regions: {listed} in all models, {len(self.regions)} distinct, {stored} stored, "
                      f"{len(self.regions) - stored} to measure")
        found = [self._batch(settings) for settings in dict.fromkeys(one.settings for one in self.models)]
        return [batch for batch in found if batch.graphs]

    def _batch(self, settings: PlanSettings) -> Batch:
        found: dict[str, tuple[CapturedModel, str, DataflowGraph]] = {}
        for one in self.captured:
            for workload, graph in one.graphs if one.asked.settings == settings else ():
                found.setdefault(f"{one.asked.label}: {workload}", (one, workload, graph))
        self._of |= {(settings, name): one for name, (one, _, _) in found.items()}
        return Batch(
            [(name, graph) for name, (_, _, graph) in found.items()], settings,
            reported=lambda name: (found[name][0].asked.label, found[name][1]),
            timed=lambda name: found[name][0].asked.is_asked_for(found[name][1]),
            split=lambda name: found[name][0].asked.is_derived(found[name][1]))

    def answer(self, ran: Ran) -> TunedMany:
        """What came of it, as frames and words."""
        captured, distinct, data = self.captured, self.regions, _stored(self.captured, ran.session)
        rows = [self._row(number, one, ran, data) for number, one in enumerate(captured)]
        rows += [dict.fromkeys(_COUNTED, 0) | {"model": name, "outcome": f"left out: {why}"}
                 for name, why in self.left_out]
        models = pd.DataFrame(rows, columns=list(MODEL_COLUMNS))
        sums = {name: round(sum(row[name] for row in rows), 2) for name in _COUNTED}
        totals = {"models": len(captured), **sums, "distinct": len(distinct)}
        regions = pd.DataFrame(
            [(one.label, one.place, len(one.models), one.uses, captured[one.models[0]].asked.label, one.stored,
              one.key.regime, one.key.numerics, one.key.workload) for one in distinct],
            columns=["region", "place", "models", "uses", "first_model", "stored", "regime", "numerics", "key"])
        warnings, failure = ran.complaints()
        lost = [one.failure for one in captured if one.failure]
        why = f"{len(lost)} of {counted(len(captured), 'model')} cannot be captured" if lost else ""
        return TunedMany(
            self.title, ran.session.database.where, models, regions, totals, data,
            tuple(result for _, result in ran.results), warnings=tuple(dict.fromkeys((*lost, *warnings))),
            failure="; ".join(filter(None, (why, failure))))

    def _row(self, number: int, one: CapturedModel, ran: Ran, data: frames.ReportData) -> dict[str, Any]:
        """A model's row: what its regions came from, what it cost, and what its first workload gains."""
        asked, settings = one.asked, one.asked.settings
        row: dict[str, Any] = dict.fromkeys(_COUNTED, 0) | {
            "model": asked.label, "workloads": len(one.graphs), "capture_s": round(one.seconds, 2),
            "regime": settings.regime, "numerics": settings.numerics,
            "dtype": asked.source.dtype if asked.source is not None else None,
        }
        if one.failure:
            return row | {"outcome": "not captured"}
        its = [region for region in self.regions if number in region.models]
        own = {region.key.workload for region in its if region.models[0] == number}
        row |= {"regions": len(its), "shared": len(its) - len(own)}
        tuned = next((result for batch, result in ran.results if batch.settings == settings), None)
        if tuned is None:  # it has no graph with a region in it
            return row | {"outcome": "nothing to plan"}
        came = Counter(plan.source for _, plan in tuned.distinct() if plan.region.key in own)
        failed = len(own) - came.total()
        words = f"{counted(failed, 'region')} failed" if failed else "tuned" if came["tuned"] else "nothing new"
        took_s = sum(plan.elapsed_s for plan in tuned.plans if self._of[settings, plan.workload] is one)
        row |= {"stored": came["database"], "measured": came["tuned"], "failed": failed, "outcome": words,
                "tune_s": round(took_s, 2)}
        first = next((name for name, _ in one.graphs if asked.is_asked_for(name)), None)
        for step in steps(data):
            if step.workload.identity == (asked.label, first, settings.regime, settings.numerics):
                row |= {"step": first, "unfused_us": step.unfused_us, "planned_us": step.planned_us,
                        "saved_us": step.unfused_us - step.planned_us}
        return row


def _stored(captured: Sequence[CapturedModel], session: Session) -> frames.ReportData:
    """What is stored of the workloads that were asked for."""
    wanted = {(one.asked.label, name, one.asked.settings.regime, one.asked.settings.numerics)
              for one in captured for name, _ in one.graphs if one.asked.is_asked_for(name)}
    try:
        data = frames.load_report(replace(session, run="").store, session.device, session.spec)
    except PlanError:  # nothing at all is stored
        return frames.ReportData(session.device, "", session.spec, {}, {})
    return replace(data, model="", workloads=tuple(one for one in data.workloads if one.identity in wanted))


def _named_apart(models: Sequence[tuple[ManifestModel, Asked]]) -> Iterator[Asked]:
    """The models under distinct names, with the dtype where several differ; ConfigError for two of one name."""
    known: dict[object, ManifestModel] = {}
    dtypes: defaultdict[str, set[str | None]] = defaultdict(set)
    made: list[tuple[ManifestModel, Asked, object, str | None]] = []
    for table, one in models:
        source = one.source
        what: object = (table.pattern, table.dtype) if source is None else source
        if source is not None and source.config_json:
            what = replace(source, name="")  # wherever its file is
        same = known.setdefault((what, table.shape, one.workloads, one.pack_weights, one.settings), table)
        if same is not table:
            raise ConfigError(f"{table.where}: {_number(same)} asks for the same; leave one of them out")
        dtype = source.dtype if source is not None else table.dtype
        dtypes[one.label].add(dtype)
        made.append((table, one, what, dtype))
    called: dict[str, tuple[object, ManifestModel]] = {}
    for table, one, what, dtype in made:
        label = one.label if len(dtypes[one.label]) == 1 else f"{one.label}:{dtype}"
        known_as, other = called.setdefault(label, (what, table))
        if known_as != what:
            raise ConfigError(f"{table.where}: {_number(other)} is called {label}, too; give one of them a name")
        yield replace(one, label=label)


def _number(table: ManifestModel) -> str:
    return table.where.partition(": ")[2]
