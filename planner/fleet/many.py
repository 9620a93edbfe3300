"""A manifest tuned by a fleet: its models captured by workers, and their regions measured once for each device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fuseplan.costmodel.devices import Kind
from fuseplan.planner.api.job import HowToTune, keep_summary
from fuseplan.planner.api.many import Graphs, Together, TunedMany, answer, graphs_for
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.api.tune_job import (
    CapturedModel,
    JobModel,
    Regions,
    TuneJob,
    captured_model,
    distinct_regions,
    manifest_job,
)
from fuseplan.planner.errors import FuseplanError, NothingForDeviceError
from fuseplan.planner.fleet.asking import Fleet, fleet, terms_of
from fuseplan.planner.fleet.spread import Spread
from fuseplan.planner.fleet.terms import Captured, Terms, WorkerDevice
from fuseplan.planner.fleet.tune import Order, graphs_of
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.manifest import Manifest, read_manifest
from fuseplan.planner.tuning.session import Session, session_on
from fuseplan.planner.tuning.tune import WorkloadPlan
from fuseplan.search.store.database import Database
from fuseplan.search.tune.time_account import TimeAccount


@dataclass(frozen=True, eq=False)
class _OnDevice:
    """What a manifest asks for on one device, and its orders: one for each way to launch and to round."""

    job: TuneJob
    session: Session
    captured: tuple[CapturedModel, ...]
    regions: Regions
    orders: tuple[Order, ...]


def tune_manifest_by_fleet(
    path: str | Path, kind: Kind, workers: str, db: str | Path | None, how: HowToTune, progress: Progress = SILENT,
    account: TimeAccount | None = None,
) -> list[TunedMany]:
    """As :func:`~fuseplan.planner.api.many.tune_manifest`, on each kind of device that ``workers`` own.

    Raises:
        FuseplanError, SearchError: As of a tune here; what was finished is stored.
    """
    account = account if account is not None else TimeAccount()
    manifest = read_manifest(path)
    with fleet(workers, kind, db, progress, account) as found:
        jobs, terms, load = _jobs(manifest, found), terms_of(found, how), found.load
        models = list(dict.fromkeys(model for job in jobs.values() for model in job.models))
        with account.spend("capturing"):
            captured = dict(zip(models, _captured(found, jobs.keys(), terms, models), strict=True))
        with account.spend("looking regions up"):
            wanted = [_on_device(found, device, jobs[device.device], captured, terms)
                      for device in found.devices if device.device in jobs]
        for one in wanted:
            for name, why in one.job.left_out:
                progress.note(f"{name} is left out on {one.session.device}: {why}")
            progress.note(str(one.regions) if len(wanted) == 1 else f"{one.session.device}: {one.regions}")
        orders = [order for one in wanted for order in one.orders]
        results = {id(order): result for order, result in found.tune(orders, account)} if orders else {}
    with account.spend("reporting"):
        answers = []
        for one in wanted:
            together = [Together(graphs_for(one.captured, order.terms.settings), results[id(order)])
                        for order in one.orders]
            session = together[-1].result.session if together else one.session
            answers.append(answer(one.job, one.captured, one.regions, session, together, load))
        return answers


def _jobs(manifest: Manifest, found: Fleet) -> dict[str, TuneJob]:
    """What is to do on each device that has anything to do; :class:`NothingForDeviceError` where none has."""
    jobs: dict[str, TuneJob] = {}
    refused: list[NothingForDeviceError] = []
    for device in found.devices:
        try:
            jobs[device.device] = manifest_job(manifest, found.kind, device.device)
        except NothingForDeviceError as error:
            refused.append(error)
    if not jobs:
        raise refused[0]
    return jobs


def _captured(
    found: Fleet, devices: Collection[str], terms: Terms, models: Sequence[JobModel]
) -> list[CapturedModel]:
    """The graphs of models; devices that are not known yet are probed meanwhile. Users' own modules are captured here:
    workers may not have their code.
    """
    spread = Spread(found.client, found.kind, terms.run, note=found.progress.note)
    for device in found.devices:
        if device.device in devices and _session(found, device, terms).spec is None:
            spread.probe(device.device, terms, then=lambda probed: None)
    theirs: dict[tuple[int, int], Captured] = {}
    made: dict[int, CapturedModel] = {}
    for number, model in enumerate(models):
        asked = model.asked
        if asked.source is None or asked.source.kind == "module":
            made[number] = captured_model(model, found.progress)
            continue
        for place, workload in enumerate(asked.workloads):
            spread.capture(asked.source, workload, found.kind, asked.pack_weights,
                           then=lambda one, at=(number, place): theirs.update({at: one}))  # type: ignore[misc]
    with found.progress.status("capturing"):
        spread.run()
    for number, model in enumerate(models):
        if number not in made:
            parts = [theirs[number, place] for place in range(len(model.asked.workloads))]
            made[number] = _put_together(model, parts, found.progress.note)
    return [made[number] for number in range(len(models))]


def _put_together(model: JobModel, parts: Sequence[Captured], note: Callable[[str], None]) -> CapturedModel:
    """A model of what workers captured; one that cannot be captured costs only itself."""
    asked, graphs, failure = model.asked, list[tuple[str, DataflowGraph]](), ""
    try:
        for workload, part in zip(asked.workloads, parts, strict=True):
            graphs += graphs_of(workload, part, asked.pack_weights, note)
    except FuseplanError as error:
        graphs, failure = [], f"{asked.label} is left out: {error}"
    return CapturedModel(model, tuple(graphs), failure, sum(part.elapsed_s for part in parts))


def _on_device(
    found: Fleet, device: WorkerDevice, job: TuneJob, captured: dict[JobModel, CapturedModel], terms: Terms
) -> _OnDevice:
    models, session = tuple(captured[model] for model in job.models), _session(found, device, terms)
    return _OnDevice(
        job, session, models, distinct_regions(models, session), tuple(_orders(job, models, terms, device.device)))


def _session(found: Fleet, device: WorkerDevice, terms: Terms) -> Session:
    """A session to look plans up with."""
    session = session_on(device.device, device.target, Database(found.location, versions=device.versions))
    return replace(session, shipped=terms.shipped, run=terms.session_run)


def _orders(job: TuneJob, models: Sequence[CapturedModel], terms: Terms, device: str) -> Iterator[Order]:
    for settings in job.settings():
        graphs = graphs_for(models, settings)

        def is_asked_for(name: str, graphs: Graphs = graphs) -> bool:
            one, workload, _ = graphs[name]
            return one.model.asked.is_asked_for(workload)

        def on_plan(session: Session, planned: WorkloadPlan, graphs: Graphs = graphs) -> None:
            one, workload, _ = graphs[planned.workload]
            keep_summary(session, one.label, workload, planned)

        if graphs:
            named = tuple((name, graph) for name, (_, _, graph) in graphs.items())
            yield Order(job.title, replace(terms, settings=settings), graphs=named, times_step=is_asked_for,
                        on_plan=on_plan, devices=frozenset([device]))
