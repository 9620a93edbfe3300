"""A run by a fleet: models captured by workers, and their regions measured once for each kind of device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from fuseplan.planner.api.many import Models
from fuseplan.planner.api.regions import CapturedModel, captured_model
from fuseplan.planner.api.request import Asked, TuneRequest
from fuseplan.planner.api.run import Ran, Wanted
from fuseplan.planner.api.tune import OneModel, Runner
from fuseplan.planner.errors import FuseplanError, NothingForDeviceError
from fuseplan.planner.fleet.asking import Fleet, fleet
from fuseplan.planner.fleet.scheduler import RegionScheduler
from fuseplan.planner.fleet.terms import Captured, Terms
from fuseplan.planner.fleet.tune import Order, graphs_of
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.search.tune.time_account import TimeAccount


def run_by(workers: str) -> Runner:
    """A run on each kind of device that ``workers`` own, with the answers of a run here.

    Raises:
        FuseplanError, SearchError: As of a run here; what was finished is stored.
    """

    def run(
        request: TuneRequest, wanted_on: Callable[[str], Wanted], progress: Progress, account: TimeAccount
    ) -> list[tuple[Wanted, Ran]]:
        with fleet(workers, request, progress, account) as found:
            wanted = _wanted(found, wanted_on)
            one = next(iter(wanted.values()))
            if isinstance(one, OneModel):
                return _tuned(found, one, account)
            return _tuned_together(found, {key: one for key, one in wanted.items() if isinstance(one, Models)}, account)

    return run


def _wanted(found: Fleet, wanted_on: Callable[[str], Wanted]) -> dict[str, Wanted]:
    """What is to do on each device that has anything to do; :class:`NothingForDeviceError` where none has."""
    wanted: dict[str, Wanted] = {}
    refused: list[NothingForDeviceError] = []
    for device in found.devices:
        try:
            wanted[device.device] = wanted_on(device.device)
        except NothingForDeviceError as error:
            refused.append(error)
    if not wanted:
        raise refused[0]
    return wanted


def _tuned(found: Fleet, model: OneModel, account: TimeAccount) -> list[tuple[Wanted, Ran]]:
    """One model: workers tune what they have captured of it while they capture the rest."""
    asked, source = model.asked, model.asked.source
    terms, graphs = replace(found.terms(), settings=asked.settings), list[tuple[str, DataflowGraph]]()
    if source is None or source.kind == "module":  # workers may not have its code
        with account.spend("capturing"):
            graphs, source = asked.graphs(found.progress), None
    order = Order(terms, model.batch(graphs), source, asked.workloads if source is not None else (), asked.pack_weights)
    return [(model, Ran(((order.batch, result),), result.session, found.load))
            for _, result in found.tune([order], account)]


def _tuned_together(found: Fleet, wanted: Mapping[str, Models], account: TimeAccount) -> list[tuple[Wanted, Ran]]:
    """The models of a manifest: all are captured first, so that each region is measured once."""
    terms, progress, orders = found.terms(), found.progress, dict[str, list[Order]]()
    models = list(dict.fromkeys(asked for one in wanted.values() for asked in one.job.models))
    with account.spend("capturing"):
        captured = dict(zip(models, _captured(found, wanted.keys(), terms, models), strict=True))
    sessions = {one.device: found.session(one, terms) for one in found.devices if one.device in wanted}
    for device, one in wanted.items():
        for name, why in one.job.left_out:
            progress.note(f"{name} is left out on {device}: {why}")
        one.captured = tuple(captured[asked] for asked in one.job.models)
        batches = one.batches(sessions[device], SILENT, account)
        progress.note(str(one.regions) if len(wanted) == 1 else f"{device}: {one.regions}")
        orders[device] = [Order(replace(terms, settings=batch.settings), batch, devices=frozenset([device]))
                          for batch in batches]
    tuned = found.tune([order for its in orders.values() for order in its], account)
    results = {id(order): result for order, result in tuned}
    ran: list[tuple[Wanted, Ran]] = []
    for device, one in wanted.items():
        its = tuple((order.batch, results[id(order)]) for order in orders[device])
        ran.append((one, Ran(its, its[-1][1].session if its else sessions[device], found.load)))
    return ran


def _captured(
    found: Fleet, devices: Collection[str], terms: Terms, models: Sequence[Asked]
) -> list[CapturedModel]:
    """The graphs of models; devices that are not known yet are probed meanwhile. Users' own modules are captured here:
    workers may not have their code.
    """
    scheduler = RegionScheduler(found.client, terms.kind, terms.run, note=found.progress.note)
    for device in found.devices:
        if device.device in devices and found.session(device, terms).spec is None:
            scheduler.probe(device.device, terms, then=lambda probed: None)
    theirs: dict[tuple[int, int], Captured] = {}
    made: dict[int, CapturedModel] = {}
    for number, asked in enumerate(models):
        if asked.source is None or asked.source.kind == "module":
            made[number] = captured_model(asked, found.progress)
            continue
        for place, workload in enumerate(asked.workloads):
            scheduler.capture(asked.source, workload, terms.kind, asked.pack_weights,
                           then=lambda one, at=(number, place): theirs.update({at: one}))  # type: ignore[misc]
    with found.progress.status("capturing"):
        scheduler.run()
    for number, asked in enumerate(models):
        if number not in made:
            parts = [theirs[number, place] for place in range(len(asked.workloads))]
            made[number] = _put_together(asked, parts, found.progress.note)
    return [made[number] for number in range(len(models))]


def _put_together(asked: Asked, parts: Sequence[Captured], note: Callable[[str], None]) -> CapturedModel:
    """A model of what workers captured; one that cannot be captured costs only itself."""
    graphs, failure = list[tuple[str, DataflowGraph]](), ""
    try:
        for workload, part in zip(asked.workloads, parts, strict=True):
            graphs += graphs_of(workload, part, asked.pack_weights, note)
    except FuseplanError as error:
        graphs, failure = [], f"{asked.label} is left out: {error}"
    return CapturedModel(asked, tuple(graphs), failure, sum(part.elapsed_s for part in parts))
