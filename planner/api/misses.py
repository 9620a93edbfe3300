"""What ``torch.compile`` looked up in vain: listed, and tuned from the graphs that were written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from fuseplan.costmodel.devices import Kind, kind_of_key
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.planner.api.answer import first_screen
from fuseplan.planner.api.asked import plan_settings
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.job import HowToTune, complaints, keep_summary, outcome, ready
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.errors import FuseplanError, one_family
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.reports.frames import misses_frame
from fuseplan.planner.tuning import misses as logged
from fuseplan.planner.tuning import tune as offline
from fuseplan.planner.tuning.miss_list import logged_misses
from fuseplan.planner.tuning.misses import MissedRegion
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.planner.tuning.tune import TuneResult, WorkloadPlan
from fuseplan.search.errors import plain
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase, shipped_files
from fuseplan.search.store.record import Versions
from fuseplan.search.tune import tuner
from fuseplan.search.tune.study import Studies
from fuseplan.search.tune.time_account import TimeAccount

TUNED_COLUMNS = (
    "label", "count", "place", "outcome", "unfused_us", "planned_us", "saved_us", "regime", "numerics", "key",
)


@dataclass(frozen=True, eq=False)
class TunedMisses:
    """What came of tuning misses.

    Attributes:
        where: The database, in words.
        regions: One row per region that was tuned: how often it was looked up, and what one run of it takes (us).
        left: The misses that remain, one row each; ``tunable`` says why, or yes where more were asked for than tuned.
        forgotten: Misses that have a plan now, and are logged no more.
        most: Regions that were tuned at most.
        words: What was measured, one line for each way to launch and to round.
        warnings: What makes an answer doubtful or is missing, one line each.
        failure: Why all of it failed; "" where it did not.
    """

    where: str
    regions: pd.DataFrame
    left: pd.DataFrame
    forgotten: int
    most: int
    words: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    failure: str = ""

    def lines(self) -> Iterator[str]:
        """The answer in words, as the terminal has it below the tables."""
        if self.regions.empty and self.left.empty and not self.forgotten:
            yield f"no misses are logged for this device in {self.where}"
            return
        tuned = len(self.regions)
        yield (
            f"tuned {tuned} missed region{'s' * (tuned != 1)}, looked up {int(self.regions['count'].sum())} times; "
            f"{self.forgotten} misses have a plan now and are logged no more"
        )
        yield from self.words
        waiting = int((self.left["tunable"] == "yes").sum())
        if waiting:
            yield f"{waiting} misses can be tuned still; the same again tunes {self.most} more at most"
        if others := len(self.left) - waiting:
            yield f"{others} misses cannot be tuned by themselves; `plan db misses` says why"

    def __str__(self) -> str:
        return "\n".join(
            plain(line) for line in (*self.lines(), *(f"warning: {one}" for one in self.warnings)))

    def _repr_html_(self) -> str:
        columns = ("label", "count", "place", "outcome", "unfused_us", "planned_us")
        return first_screen("Misses", str(self).splitlines(), None, self.regions, columns)


def misses(
    db: str | Path | None = None, *, device: str = "auto", device_key: str | None = None
) -> pd.DataFrame:
    """What ``torch.compile`` looked up in vain on this device, most frequent first: one row per region.

    Its columns are ``label``, ``count``, ``place`` (where in the model), ``tunable`` (yes, or why not), ``first_seen``
    and ``last_seen`` (ISO 8601, UTC), ``regime``, ``numerics`` and ``key``. ``tune(misses=True)`` tunes them.

    Args:
        db: The tuning database, a file or a SQLAlchemy URL; None for the user's own.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        device_key: Another device, by its whole key.

    Raises:
        FuseplanError: The database cannot be read, or there is no such device.
    """
    with one_family():
        return listed(db, device_kind(device), device_key)


def listed(db: str | Path | None, kind: Kind, device_key: str | None = None) -> pd.DataFrame:
    """:func:`misses`, with errors in the words of the command line."""
    key = device_key if device_key is not None else current_identity(kind).key()
    versions = Versions.current(kind) if device_key is None else None
    with Database(db, mode="inspect", versions=versions) as database:
        return misses_frame(logged_misses(LayeredDatabase(database, shipped_files(key)), key))


def tune_misses(
    kind: Kind, db: str | Path | None, most: int, how: HowToTune, progress: Progress = SILENT,
    account: TimeAccount | None = None, regime: str | None = None,
) -> TunedMisses:
    """Tune the regions that were missed most often, ``most`` at most; errors in the words of the command line.

    Only those that were launched as ``regime`` says, where it is given; whatever is left is of any regime.
    """
    if regime is not None:
        plan_settings(kind, "fp32", regime)
    account = account if account is not None else TimeAccount()
    session, studies = open_session(kind, db), how.studies()
    with account.spend("reading misses"):
        listed = logged_misses(session.store, session.device)
        chosen = logged.missed_regions(one for one in listed if regime in (None, one.key.regime))[:most]
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    warnings: list[str] = []
    failure, load = "", probe.machine_load()
    if chosen:
        session = ready(session, account, progress)
    chosen.sort(key=_launched)
    with ExitStack() as stack:
        pool = stack.enter_context(tuner.make_pool(kind))
        for _, some in groupby(chosen, key=_launched):
            tuning = _Tuning(session, tuple(some), how, studies)
            if tuning.graphs:
                with progress.tuning() as events:
                    result = offline.tune(
                        tuning.session, tuning.graphs, how.budget(kind), how.seed,
                        events.on_region, events.on_trial, account, pool, events.on_graph,
                        regions_of=lambda graph, tuning=tuning: tuning.regions[id(graph)],  # type: ignore[misc]
                        on_plan=tuning.keep,
                    )
                said.append(outcome(result))
                more, failed = complaints(result, load)
                warnings += more
                failure = failed or failure
                session = tuning.back(result.session)
                rows += tuning.rows(result)
            rows += tuning.refused
    forgotten = logged.forget_tuned(session.database, session.store, session.device)
    regions = pd.DataFrame(rows, columns=list(TUNED_COLUMNS)).sort_values("count", ascending=False, kind="stable")
    left = misses_frame(logged_misses(session.store, session.device))
    return TunedMisses(
        session.database.where, regions, left, forgotten, most, tuple(dict.fromkeys(said)),
        tuple(dict.fromkeys(warnings)), failure,
    )


def _launched(missed: MissedRegion) -> tuple[str, str]:
    return missed.regime, missed.numerics


class _Tuning:
    """Missed regions of one way to launch and to round, with their graphs by name, and what is planned of each."""

    def __init__(
        self, session: Session, missed: tuple[MissedRegion, ...], how: HowToTune, studies: Studies | None
    ) -> None:
        self._settings, self._target = session.settings, session.target
        self.session = how.of(logged.settings_of(session, missed[0]), studies)
        self.refused: list[dict[str, Any]] = []
        self.graphs: list[tuple[str, DataflowGraph]] = []
        self.regions: dict[int, list[Region]] = {}
        self._missed: list[MissedRegion] = []
        for one in missed:
            try:
                plan_settings(kind_of_key(session.device), one.numerics, one.regime)
                graph = logged.missed_graph(session.database, one)
                self.regions[id(graph)] = logged.to_tune(self.session, one, graph)
            except FuseplanError as error:
                self.refused.append(_row(one, str(error)))
                continue
            self._missed.append(one)
            # Names tell failures apart; equal labels may be of other strides.
            self.graphs.append((f"miss {len(self.graphs) + 1}", graph))

    def back(self, session: Session) -> Session:
        """The session as it was before, with what was learnt of the device."""
        return replace(session, settings=self._settings, target=self._target, run="", studies=None)

    def keep(self, planned: WorkloadPlan) -> None:
        """Store what reports say of a missed region: a workload of its own, of a model called ``misses``."""
        missed = next(one for one, (name, _) in zip(self._missed, self.graphs, strict=True) if name == planned.workload)
        # Equal labels may be of other strides.
        keep_summary(self.session, "misses", f"{missed.label} ({missed.region[:8]})", planned)

    def rows(self, result: TuneResult) -> Iterator[dict[str, Any]]:
        failed = {failure.workload: str(failure.error) for failure in result.failures}
        for missed, planned in zip(self._missed, result.plans, strict=True):
            yield _row(missed, failed.get(planned.workload, ""), planned)


def _row(missed: MissedRegion, failure: str, planned: WorkloadPlan | None = None) -> dict[str, Any]:
    records = [one.record for one in planned.plan.regions] if planned is not None else []
    unfused_us, planned_us = (sum(getattr(one, name) for one in records) for name in ("unfused_us", "planned_us"))
    fused = sum(group.is_kernel for one in records for group in one.groups)
    what = f"{fused} group{'s' * (fused != 1)} fused" if fused else "left as it is"
    if any(one.undecided for one in records):
        what = "noise hides the answer"
    return {
        "label": missed.label, "count": missed.count, "place": missed.place, "outcome": failure or what,
        "unfused_us": unfused_us if records else None, "planned_us": planned_us if records else None,
        "saved_us": unfused_us - planned_us if records else None, "regime": missed.regime,
        "numerics": missed.numerics, "key": missed.region,
    }
