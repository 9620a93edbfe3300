"""How a fleet is: its devices, the leases of its database, and what has no plan yet for which device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from fuseplan.costmodel.devices import KINDS, kind_of_key
from fuseplan.planner.api.many import CapturedModel, Models, captured_model
from fuseplan.planner.api.request import Asked, TuneRequest, asked_for
from fuseplan.planner.errors import NothingForDeviceError
from fuseplan.planner.fleet.terms import needs_dask
from fuseplan.planner.groups.places import place_of
from fuseplan.planner.groups.regions import find_regions, unique_regions
from fuseplan.planner.models.manifest import read_manifest
from fuseplan.planner.partition.plan_record import region_label
from fuseplan.planner.tuning.miss_list import logged_misses
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.search.store import leases
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase, shipped_files
from fuseplan.search.store.record import RecordKey, Versions

DEVICE_COLUMNS = ("device", "worker", "host", "doing", "waiting")
LEASE_COLUMNS = ("label", "owner", "taken", "left_s", "device", "regime", "numerics", "key")
MISSING_COLUMNS = ("device", "label", "place", "workload", "count", "key")


#: The models that are wanted on a device, by its key; none on a device of a type that was not asked for.
WantedOn: TypeAlias = Callable[[str], Sequence[CapturedModel]]


def wanted_by(request: TuneRequest, progress: Progress = SILENT) -> WantedOn:
    """What a request wants on each device. Each model is captured once, when a device first asks for it.

    A manifest's model that cannot be captured is told to ``progress``.
    """
    if request.manifest is None:
        asked = asked_for(request.kind, request.given)
        only = CapturedModel(asked, tuple(asked.graphs(progress)))
        return lambda device: [only] if device.startswith(f"{asked.kind}-") else ()
    manifest = read_manifest(request.manifest)

    @cache
    def captured(model: Asked) -> CapturedModel:
        found = captured_model(model, progress)
        if found.failure:
            progress.note(found.failure)
        return found

    def wanted(device: str) -> Sequence[CapturedModel]:
        try:
            return [captured(model) for model in Models(manifest, kind_of_key(device), device).models]
        except NothingForDeviceError:
            return ()

    return wanted


@dataclass(frozen=True, eq=False)
class FleetStatus:
    """Tables of :data:`LEASE_COLUMNS`, :data:`MISSING_COLUMNS` and, with a scheduler, :data:`DEVICE_COLUMNS`."""

    where: str  # the database in words
    devices: pd.DataFrame | None
    leases: pd.DataFrame
    missing: pd.DataFrame


def fleet_status(
    scheduler: str | None, db: str | Path | None, wanted: WantedOn | None = None, here: str = ""
) -> FleetStatus:
    """What the fleet of a scheduler does, and what is done and missing in a database.

    What is missing are the regions without a plan of what is ``wanted`` for each device of the fleet and of the
    database, and for the one ``here``, by its key; without that, the misses that dispatch has logged.

    :class:`FuseplanError` without Dask or an answer of the scheduler, :class:`DatabaseError` where the database cannot
    be read.
    """
    devices, versions, labels = None, dict[str, Versions](), {"probe": "probe of the device"}
    if scheduler is not None:
        needs_dask()
        from fuseplan.planner.fleet.cluster import device_statuses, known_labels, scheduler_client
        from fuseplan.planner.fleet.run import described

        with scheduler_client(scheduler) as client:
            devices = pd.DataFrame(device_statuses(client), columns=list(DEVICE_COLUMNS))
            versions = {one.device: one.versions for kind in KINDS for one in described(client, kind)}
            labels |= known_labels(client)
    with Database(db, mode="peek") as database:
        held, missed = leases.listed(database), database.misses()
        labels |= {str(row["workload"]): str(row["label"]) for row in missed}
        labels |= {one.key.workload: one.label for one in database.everything()}
        keys = {*versions, *database.devices(), *(str(row["device"]) for row in missed)}
        where = database.where if database.engine is not None else f"{database.where}, which is not there yet"
    keys |= {here} - {""}
    rows: list[tuple[str, str, str, str, int, str]] = []
    for key in sorted(keys):
        with Database(db, mode="peek", versions=versions.get(key)) as database:
            store = LayeredDatabase(database, shipped_files(key))
            if wanted is not None:
                rows += _without_plan(store, key, wanted(key))
            else:
                rows += [(key, one.label, one.place, "", one.count, one.key.workload)
                         for one in logged_misses(store, key)]
    return FleetStatus(
        where, devices,
        pd.DataFrame([one | {"label": labels.get(one["workload"], ""), "key": one["workload"]} for one in held],
                     columns=list(LEASE_COLUMNS)),
        pd.DataFrame(rows, columns=list(MISSING_COLUMNS)),
    )


def _without_plan(
    store: LayeredDatabase, device: str, wanted: Iterable[CapturedModel]
) -> Iterator[tuple[str, str, str, str, int, str]]:
    """Each region once, with the workload in which it occurs first, and how often it occurs there."""
    told: set[RecordKey] = set()
    for one in wanted:
        for name, graph in one.graphs:
            distinct = {RecordKey(key, device, one.asked.settings.regime, one.asked.settings.numerics): found
                        for key, found in unique_regions(find_regions(graph)).items()}
            for key, lookup in store.get_plans([key for key in distinct if key not in told]).items():
                told.add(key)
                if lookup.hit is None:
                    region = distinct[key][0]
                    yield (device, region_label(graph, region), place_of(graph, region.ops),
                           f"{one.asked.label}: {name}", len(distinct[key]), key.workload)
