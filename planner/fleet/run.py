"""A run by a fleet: models captured by workers, and their regions measured once for each kind of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fuseplan.planner.api.many import Models
from fuseplan.planner.api.regions import CapturedModel, captured_model, in_words
from fuseplan.planner.api.request import Asked, TuneRequest
from fuseplan.planner.api.run import Ran, Runner, Wanted
from fuseplan.planner.api.tune import OneModel
from fuseplan.planner.errors import FuseplanError, NothingForDeviceError
from fuseplan.planner.fleet.asking import fleet
from fuseplan.planner.fleet.terms import Captured
from fuseplan.planner.fleet.tune import Fleet, Order, graphs_of
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
            wanted[device] = wanted_on(device)
        except NothingForDeviceError as error:
            refused.append(error)
    if not wanted:
        raise refused[0]
    return wanted


def _tuned(found: Fleet, model: OneModel, account: TimeAccount) -> list[tuple[Wanted, Ran]]:
    """One model: workers tune what they have captured of it while they capture the rest."""
    asked, graphs = model.asked, list[tuple[str, DataflowGraph]]()
    here = _is_captured_here(asked)
    if here:
        with account.spend("capturing"):
            graphs = asked.graphs(found.progress)
    orders = [Order(device, replace(found.terms, settings=asked.settings), model.batch(graphs))
              for device in found.devices]

    def captured(place: int, part: Captured) -> None:
        for name, graph in graphs_of(asked.workloads[place], part, asked.pack_weights, found.progress.note):
            for order in orders:
                found.arrive(order, place, name, graph)

    found.probe(found.devices)
    if not here:
        found.capture(asked, captured)
    results = found.tune(orders, account, "tuning on workers" if here else "capturing")
    return [(model, Ran(((order.batch, result),), result.session, found.load))
            for order, result in zip(orders, results, strict=True)]


def _is_captured_here(asked: Asked) -> bool:
    """Patterns, and users' own modules: workers may not have their code."""
    return asked.source is None or asked.source.kind == "module"


def _tuned_together(found: Fleet, wanted: Mapping[str, Models], account: TimeAccount) -> list[tuple[Wanted, Ran]]:
    """The models of a manifest: all are captured first, so that each region is measured once."""
    progress, orders = found.progress, dict[str, list[Order]]()
    models = list(dict.fromkeys(asked for one in wanted.values() for asked in one.models))
    with account.spend("capturing"):
        found.probe(wanted)
        captured = _captured(found, models)
    sessions = {device: found.session(device, found.terms) for device in wanted}
    for device, one in wanted.items():
        for name, why in one.left_out:
            progress.note(f"{name} is left out on {device}: {why}")
        one.captured = tuple(captured[asked] for asked in one.models)
        batches = one.batches(sessions[device], SILENT, account)
        words = in_words(one.regions)
        progress.note(words if len(wanted) == 1 else f"{device}: {words}")
        orders[device] = [Order(device, replace(found.terms, settings=batch.settings), batch) for batch in batches]
    results = iter(found.tune([order for its in orders.values() for order in its], account))
    ran: list[tuple[Wanted, Ran]] = []
    for device, one in wanted.items():
        its = tuple((order.batch, next(results)) for order in orders[device])
        ran.append((one, Ran(its, its[-1][1].session if its else sessions[device], found.load)))
    return ran


def _captured(found: Fleet, models: Sequence[Asked]) -> dict[Asked, CapturedModel]:
    """The graphs of models, while devices are probed."""
    made: dict[Asked, CapturedModel] = {}
    parts: dict[Asked, dict[int, Captured]] = {}
    for asked in models:
        if _is_captured_here(asked):
            made[asked] = captured_model(asked, found.progress)
        else:
            parts[asked] = {}
            found.capture(asked, parts[asked].__setitem__)
    found.run("capturing")
    return made | {asked: _put_together(asked, its, found.progress.note) for asked, its in parts.items()}


def _put_together(asked: Asked, parts: Mapping[int, Captured], note: Callable[[str], None]) -> CapturedModel:
    """A model of what workers captured; one that cannot be captured costs only itself."""
    graphs, failure = list[tuple[str, DataflowGraph]](), ""
    try:
        for place, workload in enumerate(asked.workloads):
            graphs += graphs_of(workload, parts[place], asked.pack_weights, note)
    except FuseplanError as error:
        graphs, failure = [], f"{asked.label} is left out: {error}"
    return CapturedModel(asked, tuple(graphs), failure, sum(part.elapsed_s for part in parts.values()))
