"""What is stored of a device, as an object with frames, and as one document. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from fuseplan.costmodel.accuracy import accuracy_frame
from fuseplan.costmodel.devices import kind_of_key
from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.api.answer import first_screen
from fuseplan.planner.api.device import DEVICES, check_device_key, device_kind
from fuseplan.planner.errors import Argument, FuseplanError, PlanError, one_family
from fuseplan.planner.models.sources import alias_of
from fuseplan.planner.reports import accuracy, against, frames, step_words, steps
from fuseplan.planner.reports.document import Document, write_text
from fuseplan.planner.reports.frames import ReportData, load_report
from fuseplan.planner.tuning.session import stored_spec
from fuseplan.search.errors import plain
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase, shipped_devices, shipped_files
from fuseplan.search.store.record import Versions

_SAVED = ("group", "saved_us", "uses", "place", "workload")
#: Of the group table, what a first screen shows.
GROUPS_FIRST = ("group", "place", "answer", "fused_us", "unfused_us", "speedup", "workload")
#: Of the group table, what a narrow terminal leaves out, in this order.
GROUP_SPARE = (
    "key", "doubt", "regime", "enumerated_configs", "measured_configs", "noise", "lower_bound_us", "predicted_us",
    "config", "ops", "backend", "times", "source", "answer", "fused_us", "unfused_us", "place")
#: By topic, the table that CSV has.
_MAIN = {"groups": "groups", "steps": "saved", "accuracy": "samples"}


@dataclass(frozen=True, eq=False)
class Report:
    """What was tuned for a device: whole steps first, then groups, fused against unfused.

    Each frame has one row per thing; times are microseconds. ``print(report)`` gives the lines of ``plan report``, a
    notebook shows the first screen.

    Attributes:
        data: What the frames are made of.
        other: Another tune, compared with this one; None without one.
    """

    data: ReportData
    other: ReportData | None = None

    @property
    def steps(self) -> pd.DataFrame:
        """One row per workload: a step unfused and as planned, its floor, its noise, and how it was measured."""
        return steps.step_frame(self.data)

    @property
    def parts(self) -> pd.DataFrame:
        """A step's time by part: matmuls, attention, fused groups, unfused ops, launches and gaps; ``cache reuse`` is
        what it takes less than parts measured by themselves."""
        return steps.part_frame(self.data)

    @property
    def saved(self) -> pd.DataFrame:
        """One row per group and workload, by what it saves in a step, most first."""
        return steps.saved_frame(self.data)

    @property
    def groups(self) -> pd.DataFrame:
        """One row per distinct group of the plans: its answer, its times, its configuration, where it is."""
        return frames.group_frame(self.data)

    @property
    def regions(self) -> pd.DataFrame:
        """One row per distinct region and workload: the partition against running everything unfused."""
        return frames.region_frame(self.data)

    @property
    def coverage(self) -> pd.DataFrame:
        """One row per workload: how many of its ops are fused, and what is left to launch."""
        return frames.coverage_frame(self.data)

    @property
    def misses(self) -> pd.DataFrame:
        """One row per look-up at run time that found no plan, most frequent first."""
        return frames.misses_frame(self.data.misses)

    @property
    def accuracy(self) -> pd.DataFrame:
        """Predicted against measured times."""
        return accuracy.accuracy_table(self.data)

    @property
    def step_changes(self) -> pd.DataFrame:
        """One row per workload that both tunes have: what a step takes here and there; empty without another tune."""
        return against.steps_against(self.data, self._other)

    @property
    def group_changes(self) -> pd.DataFrame:
        """One row per workload and group: what its uses take here and there; empty without another tune."""
        return against.groups_against(self.data, self._other)

    @property
    def _other(self) -> ReportData:
        if self.other is None:
            raise PlanError("there is no other tune to compare with; give one: report(against='other.db')")
        return self.other

    def lines(self) -> Iterator[str]:
        """The answer in words, as the terminal has it."""
        yield from step_words.step_lines(self.data)
        yield frames.headline(self.groups)
        if self.other is not None:
            yield from against.against_lines(self.data, self.other)

    def document(self, topic: str, style: str = "table") -> Document:
        """A document on ``"groups"``, ``"steps"`` or ``"accuracy"``.

        For a screen (``style`` ``"table"``) it leaves out tables of steps without content or without a timed step. Only
        ``"csv"`` and ``"json"`` have every prediction.
        """
        data = self.data
        document = Document(f"Fusion report: {data.model or data.device}", _MAIN[topic])
        if topic == "accuracy":
            self._tell_accuracy(document, style)
            return document
        document.tell(self._subject, one_line=True)
        self._tell_steps(document, topic, topic == "groups" and style == "table")
        if topic == "groups":
            self._tell_groups(document)
        if self.other is not None:
            for name, frame in (("steps", self.step_changes), ("groups", self.group_changes)):
                title = f"{name.capitalize()} against the other database"
                document.table(frame, f"{name}_against", title, shown="files")
            for line in against.against_lines(data, self.other):
                document.tell(line)
        return document

    @property
    def _subject(self) -> str:
        return f"{self.data.model or 'everything tuned'} on {self.data.device}"

    def _tell_steps(self, document: Document, topic: str, brief: bool) -> None:
        for line in step_words.step_lines(self.data, every=topic == "steps"):
            document.tell(line, one_line=line.startswith(" "))
        whole, parts, saved = self.steps, self.parts, self.saved
        if brief:
            if not any(map(len, (whole, parts, saved))):
                return
            timed = whole["workload"][whole["noise"].notna()]
            parts = parts[parts["workload"].isin(timed)] if len(timed) else parts
        times = ("unfused_us", "planned_us")
        document.table(whole, "steps", "Steps", shown="files")
        document.table(
            parts, "parts", "A step's time by part", spare=("regime", *times), keep=("workload", "part", "saved_us"))
        document.table(
            saved, "saved", "What each group saves in a step", keep=("workload", "group", "saved_us"),
            spare=("key", "doubt", "regime", "share", "runs", "place", *times, "uses"),
            shown="always" if topic == "steps" else "files")

    def _tell_groups(self, document: Document) -> None:
        groups = self.groups
        document.table(
            groups, "groups", f"Fused against unfused, {self.data.device}", spare=GROUP_SPARE,
            keep=("workload", "group", "speedup"))
        document.table(self.regions, "regions", "Regions", shown="files")
        if self.data.workloads:
            less = ("views", "ops", "planned_us", "unfused_us", "library_calls", "launches_unfused")
            document.table(self.coverage, "coverage", "Coverage", spare=less, keep=("workload", "coverage"))
        if self.data.misses:
            document.table(self.misses, "misses", "Look-ups without a plan", spare=("key", "numerics", "first_seen"),
                           keep=("label", "count"))
        document.tell(frames.headline(groups))
        if len(groups):  # says nothing of a step: a group that takes no time counts like others
            mean = frames.geometric_mean(groups["speedup"])
            document.tell(f"geometric mean of the groups' speed-ups over unfused: {mean:.2f}x", "files")

    def _tell_accuracy(self, document: Document, style: str) -> None:
        regret = "Trusting the model alone"
        document.table(self.accuracy, "accuracy", "Predicted against measured", digits=3)
        document.table(accuracy.regret_table(self.data), regret, regret, digits=3, spare=("key",))
        if style in ("csv", "json"):
            document.table(accuracy_frame(accuracy.accuracy_pairs(self.data)), "samples", "Samples")
        for line in accuracy.accuracy_text(self.data):
            document.tell(line)

    def html(self) -> str:
        """The page of ``plan report --format html``: one self-contained file."""
        from fuseplan.planner.reports.html_page import html_report

        return html_report(self.data, self.other)

    def to_html(self, path: str | Path) -> Path:
        """Write the page to a file, making its folder; OSError where that cannot be."""
        return write_text(path, self.html())

    def __str__(self) -> str:
        return "\n".join(plain(line) for line in self.lines())

    def _repr_html_(self) -> str:
        saved, groups = self.saved.sort_values("saved_us", ascending=False), self.groups
        table, columns = (saved, _SAVED) if len(saved) else (groups, GROUPS_FIRST)
        lines = [frames.headline(groups)]
        if self.other is not None:
            lines += against.against_lines(self.data, self.other)
        return first_screen(self._subject, lines, self.data, table, columns)


def report(
    model: str | None = None, *, device: str = "auto", device_key: str | None = None,
    regime: Literal["eager", "graph"] | None = None, db: str | Path | None = None, against: str | Path | None = None,
) -> Report:
    """What is stored for a device: steps, groups and what they save. Nothing is measured.

    Args:
        model: Only what was tuned for this model, by the name that it was tuned under.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, or any part of the name of a device that has records, such as
            ``"h200"``: stored, or shipped with fuseplan.
        device_key: The same by its whole key.
        regime: Only what was tuned for this regime; None for both.
        db: The tuning database, a file or a SQLAlchemy URL; None for the user's own.
        against: Another tuning database, whose steps and groups are compared with these.

    Raises:
        FuseplanError: Nothing is stored for this device or model, or a database cannot be read.
    """
    if regime not in (None, "eager", "graph"):
        raise PlanError(f"unknown regime {regime!r}: expected eager or graph")
    with one_family():
        database, key = open_layers(db, device, device_key)
        # llama stands for a preset of the device's size.
        name = alias_of(model, kind_of_key(key)) if model is not None else ""
        data = load_report(database, key, stored_spec(database, key), name, regime)
    if against is None:
        return Report(data)
    try:
        other = report(model, device=device, device_key=device_key, regime=regime, db=against)
    except FuseplanError as error:
        other_db = [Argument("against") if one == "db" and isinstance(one, Argument) else one for one in error.args]
        raise PlanError("{} {}: {}", Argument("against"), plain(str(against)), FuseplanError(*other_db)) from None
    return Report(data, other.data)


def open_layers(db: str | Path | None, device: str, device_key: str | None = None) -> tuple[LayeredDatabase, str]:
    """The stored and the shipped records of a device, and its key."""
    versions = None  # which software another machine has is not known here
    if device_key is not None or device not in DEVICES:
        with Database(db, mode="inspect") as stored:
            known = {*stored.device_keys(), *shipped_devices()}
        if device_key is None:
            device_key = _named(device, known)
        check_device_key(device_key, known)
    if device_key is None:
        kind = device_kind(device)
        device_key, versions = current_identity(kind).key(), Versions.current(kind)
    return LayeredDatabase(Database(db, mode="inspect", versions=versions), shipped_files(device_key)), device_key


def _named(words: str, known: Iterable[str]) -> str:
    """The key of the one device with records that has ``words`` in its name."""
    known = sorted(known)
    wanted = "-".join(words.lower().split())
    found = [key for key in known if wanted and wanted in key]
    if len(found) == 1:
        return found[0]
    which = "several devices have that in their names" if found else "no device with records has that in its name"
    there = ", ".join(found or known) or "none"
    raise PlanError("{} {}: {}; there are {}", Argument("device"), plain(words), which, there)
