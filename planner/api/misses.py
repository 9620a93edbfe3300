"""Regions that ``torch.compile`` found no tuned plan for: listed, and tuned from their stored graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd

from fuseplan.costmodel.devices import kind_of_key
from fuseplan.planner.api.answer import TuneAnswer, first_screen
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.report import open_layers
from fuseplan.planner.api.request import plan_settings
from fuseplan.planner.api.run import Ran, outcome
from fuseplan.planner.errors import FuseplanError, one_family
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.reports.document import Table, table_of
from fuseplan.planner.reports.frames import misses_frame
from fuseplan.planner.tuning import miss_log
from fuseplan.planner.tuning.miss_list import logged_misses
from fuseplan.planner.tuning.miss_log import MissedRegion
from fuseplan.planner.tuning.progress import Progress
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import Batch, WorkloadPlan
from fuseplan.search.errors import counted
from fuseplan.search.tune.time_account import TimeAccount


@dataclass(frozen=True, eq=False)
class TunedMisses(TuneAnswer):
    """What came of tuning misses.

    Attributes:
        where: The database, in words.
        regions: One row per region that was tuned: how often it was looked up, and what one run of it takes (us).
        left: The misses that remain, one row each; ``tunable`` says why, or yes where more were asked for than tuned.
        forgotten: Misses that have a plan now, and are logged no more.
        most: Regions that were tuned at most.
        words: What was measured, one line for each way to launch and to round.
    """

    where: str
    regions: pd.DataFrame
    left: pd.DataFrame
    forgotten: int
    most: int
    words: tuple[str, ...] = ()

    def tables(self) -> Iterator[Table]:
        for title, frame in (("Tuned", self.regions), ("What remains", self.left)):
            if len(frame):
                yield table_of(
                    frame, "_".join(title.lower().split()), title, keep=("label", "count", "saved_us"),
                    spare=("key", "numerics", "first_seen", "regime", "last_seen", "place"))

    def course(self) -> Iterator[str]:
        if self.regions.empty and self.left.empty and not self.forgotten:
            yield f"no misses are logged for this device in {self.where}"
            return
        tuned = self.regions[self.regions["planned_us"].notna()]
        gone = counted(self.forgotten, "miss has a plan now and is", "misses have a plan now and are")
        yield (f"tuned {counted(len(tuned), 'missed region')}, looked up {counted(int(tuned['count'].sum()), 'time')}; "
               f"{gone} logged no more")
        if failed := len(self.regions) - len(tuned):
            yield f"{counted(failed, 'missed region')} could not be tuned; `outcome` says why"
        yield from self.words
        if waiting := int((self.left["tunable"] == "yes").sum()):
            more = counted(waiting, "miss", "misses")
            yield f"{more} can be tuned still; `plan tune --misses --most {self.most}` goes on"
        if others := len(self.left) - waiting:
            alone = counted(others, "miss cannot be tuned by itself", "misses cannot be tuned by themselves")
            yield f"{alone}; `plan db misses` says why"

    def _repr_html_(self) -> str:
        columns = ("label", "count", "place", "outcome", "unfused_us", "planned_us")
        return first_screen("Misses", str(self).splitlines(), None, self.regions, columns)


def misses(
    db: str | Path | None = None, *, device: str = "auto", device_key: str | None = None
) -> pd.DataFrame:
    """Regions that ``torch.compile`` found no tuned plan for on this device, most frequent first: one row each.

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
        database, key = open_layers(db, device_kind(device), device_key)
        with database.user:
            return misses_frame(logged_misses(database, key))


class LoggedMisses:
    """The regions that were missed most often (in ``regime``, where given), a batch for each regime and numerics."""

    def __init__(self, regime: str | None, most: int) -> None:
        self._regime, self._most = regime, most
        self.refused: list[dict[str, Any]] = []
        #: By the name of its graph.
        self._missed: dict[str, MissedRegion] = {}

    def capture(self, stack: ExitStack, progress: Progress, account: TimeAccount) -> None:
        """Dispatch has written the graphs down."""

    def batches(self, session: Session, progress: Progress, account: TimeAccount) -> Sequence[Batch]:
        with account.spend("reading misses"):
            listed = logged_misses(replace(session, run="", shipped=True).store, session.device)
            of_regime = (one for one in listed if self._regime in (None, one.key.regime))
            launched = attrgetter("regime", "numerics")
            chosen = sorted(miss_log.missed_regions(of_regime)[: self._most], key=launched)
            found = [self._batch(session, list(some)) for _, some in groupby(chosen, key=launched)]
        return [batch for batch in found if batch.regions]

    def _batch(self, session: Session, missed: Sequence[MissedRegion]) -> Batch:
        settings = replace(session.settings, regime=missed[0].regime, numerics=missed[0].numerics)
        session = session.planning_for(settings)
        graphs: list[tuple[str, DataflowGraph]] = []
        regions: dict[str, Sequence[Region]] = {}
        for one in missed:
            try:
                plan_settings(kind_of_key(session.device), one.numerics, one.regime)
                graph = miss_log.missed_graph(session.database, one)
                name = f"miss {len(self._missed) + 1}"  # tells failures apart: equal labels may be of other strides
                regions[name] = miss_log.to_tune(session, one, graph)
            except FuseplanError as error:
                self.refused.append(_row(one, str(error)))
                continue
            self._missed[name] = one
            graphs.append((name, graph))
        # Each is a workload of its own, of a model called ``misses``.
        names = {name: f"{self._missed[name].label} ({self._missed[name].region[:8]})" for name, _ in graphs}
        return Batch(graphs, settings, lambda name: ("misses", names[name]), regions=regions)

    def answer(self, ran: Ran) -> TunedMisses:
        """What came of it; misses that have a plan now are forgotten."""
        rows, said = self.refused, dict.fromkeys(outcome(result) for _, result in ran.results)
        for _, result in ran.results:
            failed = {one.workload: str(one.error) for one in result.failures}
            rows += [_row(self._missed[one.workload], failed.get(one.workload, ""), one) for one in result.plans]
        session = replace(ran.session, run="")
        forgotten = miss_log.forget_tuned(session.database, session.store, session.device)
        names = ["label", "count", "place", "outcome", "unfused_us", "planned_us", "saved_us", "regime", "numerics",
                 "key"]
        regions = pd.DataFrame(rows, columns=names).sort_values("count", ascending=False, kind="stable")
        left = misses_frame(logged_misses(session.store, session.device))
        warnings, failure = ran.complaints()
        return TunedMisses(session.database.where, regions, left, forgotten, self._most, tuple(said),
                           warnings=warnings, failure=failure)


def _row(missed: MissedRegion, failure: str, planned: WorkloadPlan | None = None) -> dict[str, Any]:
    records = [one.record for one in planned.plan.regions] if planned is not None else []
    unfused_us, planned_us = (sum(getattr(one, name) for one in records) for name in ("unfused_us", "planned_us"))
    fused = sum(group.is_kernel for one in records for group in one.groups)
    what = f"{counted(fused, 'group')} fused" if fused else "left as it is"
    if any(one.undecided for one in records):
        what = "noise hides the answer"
    return {
        "label": missed.label, "count": missed.count, "place": missed.place, "outcome": failure or what,
        "unfused_us": unfused_us if records else None, "planned_us": planned_us if records else None,
        "saved_us": unfused_us - planned_us if records else None, "regime": missed.regime,
        "numerics": missed.numerics, "key": missed.region,
    }
