"""Many models at once: each region that they have between them is measured once, and a table says what that cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from fuseplan.costmodel.devices import Kind, is_gpu
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.planner.api.answer import first_screen
from fuseplan.planner.api.job import HowToTune, complaints, keep_summary, outcome, ready
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.api.tune_job import (
    CapturedModel,
    Regions,
    TuneJob,
    captured_models,
    distinct_regions,
    manifest_job,
)
from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.manifest import read_manifest
from fuseplan.planner.reports import frames
from fuseplan.planner.reports.step_words import step_words
from fuseplan.planner.reports.steps import step_frame, steps
from fuseplan.planner.tuning import tune as offline
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.planner.tuning.settings import PlanSettings
from fuseplan.planner.tuning.tune import TuneResult, WorkloadPlan
from fuseplan.search.errors import plain
from fuseplan.search.store.location import left_behind
from fuseplan.search.tune import tuner
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.workers.worker import WorkerPool

MODEL_COLUMNS = (
    "model", "workloads", "regions", "shared", "stored", "measured", "failed", "capture_s", "tune_s", "step",
    "unfused_us", "planned_us", "saved_us", "dtype", "regime", "numerics", "outcome",
)
#: Of these, what adds up, and is 0 where nothing was done.
_COUNTED = MODEL_COLUMNS[1:9]
REGION_COLUMNS = ("region", "place", "models", "uses", "first_model", "stored", "regime", "numerics", "key")


@dataclass(frozen=True, eq=False)
class TunedMany:
    """What came of tuning several models together.

    Attributes:
        title: The name of the manifest.
        where: The database, in words.
        models: One row per model. Of its distinct ``regions`` some are ``shared`` with models before it; the others
            were ``stored``, are ``measured`` now, or ``failed``. ``tune_s`` is what these and its whole steps took.
            ``step`` is its first workload, in microseconds.
        regions: One row per distinct region of all models, as it was found: how many ``models`` have it, how often
            it occurs, and whether it was ``stored``.
        totals: The same numbers for all models together.
        data: What is stored of these models; ``steps`` is made of it.
        results: What was measured, for each way to launch and to round.
        warnings: What makes an answer doubtful or is missing, one line each.
        failure: Why it did not wholly succeed; "" where it did.
    """

    title: str
    where: str
    models: pd.DataFrame
    regions: pd.DataFrame
    totals: dict[str, float]
    data: frames.ReportData
    results: tuple[TuneResult, ...] = ()
    warnings: tuple[str, ...] = ()
    failure: str = ""

    @property
    def steps(self) -> pd.DataFrame:
        """One row per workload of each model: a step unfused and as planned, its floor, and how it was measured."""
        return step_frame(self.data)

    def lines(self) -> Iterator[str]:
        """The answer in words, as the terminal has it below the table of models."""
        total = self.totals
        yield (
            f"{total['models']} model{'s' * (total['models'] != 1)}, {total['regions']} regions, {total['distinct']} "
            f"distinct: {total['stored']} were stored, {total['measured']} measured now in {total['tune_s']:.1f} s"
        )
        for result in self.results:
            what = result.session.settings
            yield f"{what.regime}, {what.numerics}: {outcome(result)}" if len(self.results) > 1 else outcome(result)
        yield f"stored in {self.where}"

    def __str__(self) -> str:
        said = (*self.lines(), *self.step_lines(), *(f"warning: {one}" for one in self.warnings))
        return "\n".join(plain(line) for line in said)

    def step_lines(self) -> Iterator[str]:
        """In words: the step of each workload that was timed as a whole."""
        yield from (step_words(one) for one in steps(self.data) if one.times is not None)

    def _repr_html_(self) -> str:
        lines = [*self.lines(), *(f"Warning: {one}" for one in self.warnings)]
        columns = ("model", "regions", "shared", "stored", "measured", "tune_s", "step", "saved_us")
        return first_screen(f"{self.title} on {self.data.device}", lines, None, self.models, columns)


def tune_manifest(
    path: str | Path, kind: Kind, db: str | Path | None, how: HowToTune, progress: Progress = SILENT,
    account: TimeAccount | None = None,
) -> TunedMany:
    """Tune the models of a manifest that are for this device; errors in the words of the command line."""
    job = manifest_job(read_manifest(path), kind, current_identity(kind).key())
    for name, why in job.left_out:
        progress.note(f"{name} is left out: {why}")
    return tune_job(job, db, how, progress, account)


def tune_job(
    job: TuneJob, db: str | Path | None, how: HowToTune, progress: Progress = SILENT, account: TimeAccount | None = None
) -> TunedMany:
    """Capture all models, say which regions they have between them, and tune each of these once.

    What is stored is not measured again: after an interruption, or where others tuned it, the same job goes on.
    """
    account = account if account is not None else TimeAccount()
    note, studies = left_behind() if db is None else "", how.studies()
    with ExitStack() as stack:
        pool = stack.enter_context(tuner.make_pool(job.kind))
        with account.spend("capturing"):
            captured = captured_models(job, progress)
        session = how.of(open_session(job.kind, db), studies)
        with account.spend("looking regions up"):
            regions = distinct_regions(captured, session)
        progress.note(str(regions))
        if session.spec is None and is_gpu(job.kind):  # hardly anything is stored: the workers will be needed
            pool.start()
        load = probe.machine_load()
        results: list[Together] = []
        if regions.distinct:
            session = ready(session, account, progress)
        if note:
            progress.note(note)
        for settings in job.settings():
            graphs = graphs_for(captured, settings)
            if graphs:
                together = _tuned_together(session.planning_for(settings), graphs, how, account, pool, progress)
                results.append(together)
                session = together.result.session
    with account.spend("reporting"):
        return answer(job, captured, regions, session, results, load)


#: Graphs by names of their own: the first model that has it, the workload's name there, and the graph.
Graphs: TypeAlias = dict[str, tuple[CapturedModel, str, DataflowGraph]]


@dataclass(frozen=True, eq=False)
class Together:
    """The tune of models whose plans are made for the same."""

    graphs: Graphs
    result: TuneResult


def graphs_for(captured: Sequence[CapturedModel], settings: PlanSettings) -> Graphs:
    """What is planned for these settings."""
    found: Graphs = {}
    for one in captured:
        if one.model.settings == settings:
            for workload, graph in one.graphs:
                found.setdefault(f"{one.label}: {workload}", (one, workload, graph))
    return found


def _tuned_together(
    session: Session, graphs: Graphs, how: HowToTune, account: TimeAccount, pool: WorkerPool, progress: Progress
) -> Together:
    """The tune of some graphs, one after another; of each what reports say of it is stored once it is planned."""

    def is_asked_for(name: str) -> bool:
        one, workload, _ = graphs[name]
        return one.model.asked.is_asked_for(workload)

    def on_plan(planned: WorkloadPlan) -> None:
        one, workload, _ = graphs[planned.workload]
        keep_summary(session, one.label, workload, planned)

    budget = how.budget(session.target.device_type)
    with progress.tuning() as events:
        result = offline.tune(
            session, [(name, graph) for name, (_, _, graph) in graphs.items()], budget, how.seed, events.on_region,
            events.on_trial, account, pool, events.on_graph, is_asked_for, on_plan=on_plan,
        )
    return Together(graphs, result)


def answer(
    job: TuneJob, captured: Sequence[CapturedModel], regions: Regions, session: Session, results: Sequence[Together],
    load: probe.MachineLoad,
) -> TunedMany:
    """What came of it, as frames and words."""
    data = _stored(captured, session)
    rows = [_row(number, one, regions, results, data) for number, one in enumerate(captured)]
    rows += [dict.fromkeys(_COUNTED, 0) | {"model": name, "outcome": f"left out: {why}"} for name, why in job.left_out]
    models = pd.DataFrame(rows, columns=list(MODEL_COLUMNS))
    sums = {name: round(sum(row[name] for row in rows), 2) for name in _COUNTED}
    totals = {"models": len(captured), **sums, "distinct": len(regions.distinct)}
    found = [
        (one.label, one.place, len(one.models), one.uses, captured[one.models[0]].label, one.stored, one.key.regime,
         one.key.numerics, one.key.workload) for one in regions.distinct
    ]
    warnings = [one.failure for one in captured if one.failure]
    why = [f"{len(warnings)} of {len(captured)} models cannot be captured"] if warnings else []
    for together in results:
        more, failure = complaints(together.result, load)
        warnings += more
        why += [failure] if failure else []
    return TunedMany(
        job.title, session.database.where, models, pd.DataFrame(found, columns=list(REGION_COLUMNS)), totals, data,
        tuple(together.result for together in results), tuple(dict.fromkeys(warnings)), "; ".join(dict.fromkeys(why)),
    )


def _stored(captured: Sequence[CapturedModel], session: Session) -> frames.ReportData:
    """What is stored of the workloads that were asked for."""
    wanted = {
        (one.label, name, one.model.settings.regime, one.model.settings.numerics)
        for one in captured for name, _ in one.graphs if one.model.asked.is_asked_for(name)
    }
    try:
        data = frames.load_report(replace(session, run="").store, session.device, session.spec)
    except PlanError:  # nothing at all is stored
        return frames.ReportData(session.device, "", session.spec, {}, {})
    chosen = [one for one in data.workloads if (one.model, one.workload, one.regime, one.numerics) in wanted]
    return replace(data, model="", workloads=tuple(chosen))


def _row(
    number: int, one: CapturedModel, regions: Regions, results: Sequence[Together], data: frames.ReportData
) -> dict[str, Any]:
    """A model's row: what its regions came from, what it cost, and what its first workload gains."""
    settings, asked = one.model.settings, one.model.asked
    row: dict[str, Any] = dict.fromkeys(_COUNTED, 0) | {
        "model": one.label, "workloads": len(one.graphs), "capture_s": round(one.seconds, 2),
        "regime": settings.regime, "numerics": settings.numerics,
        "dtype": asked.source.dtype if asked.source is not None else None,
    }
    if one.failure:
        return row | {"outcome": "not captured"}
    its = [region for region in regions.distinct if number in region.models]
    own = {region.key.workload for region in its if region.models[0] == number}
    row |= {"regions": len(its), "shared": len(its) - len(own)}
    tuned = next((found for found in results if found.result.session.settings == settings), None)
    if tuned is None:  # it has no graph with a region in it
        return row | {"outcome": "nothing to plan"}
    came = Counter(plan.source for _, plan in tuned.result.distinct() if plan.region.key in own)
    failed = len(own) - came.total()
    words = f"{failed} regions failed" if failed else "tuned" if came["tuned"] else "nothing new"
    row |= {
        "stored": came["database"], "measured": came["tuned"], "failed": failed, "outcome": words,
        "tune_s": round(sum(plan.elapsed_s for plan in tuned.result.plans if tuned.graphs[plan.workload][0] is one), 2),
    }
    first = next((name for name, _ in one.graphs if asked.is_asked_for(name)), None)
    for step in steps(data):
        of = step.workload
        if (of.model, of.workload, of.regime, of.numerics) == (one.label, first, settings.regime, settings.numerics):
            row |= {"step": first, "unfused_us": step.unfused_us, "planned_us": step.planned_us,
                    "saved_us": step.unfused_us - step.planned_us}
    return row
