"""``plan report``: what is stored, in tables and one HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from fuseplan.planner.cli import completion
from fuseplan.planner.cli.common import DbOption, Device, device_type
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.output.screen import PageFormat, Screen, Shown
from fuseplan.planner.cli.output.tables import table_of

if TYPE_CHECKING:
    from fuseplan.planner.report.frames import ReportData


class ReportTopic(StrEnum):
    """What to report on."""

    GROUPS = "groups"
    STEPS = "steps"
    ACCURACY = "accuracy"


#: Of the group table, what a narrow terminal leaves out, in this order.
_SPARE = ("key", "regime", "enumerated_configs", "measured_configs", "noise", "lower_bound_us", "predicted_us",
          "config", "ops", "backend", "times", "source", "answer", "fused_us", "unfused_us", "place")
_ANSWER = ("workload", "group", "speedup")


@answers("that of the topic", page=True)
def report(
    topic: Annotated[ReportTopic, Argument(
        help="groups: fused against unfused. steps: what whole steps take, by part, and what each group saves. "
        "accuracy: predicted against measured times.",
    )] = ReportTopic.GROUPS,
    model: Annotated[str | None, Option(
        autocompletion=completion.models, help="Only what was tuned for this model.",
    )] = None,
    device: Annotated[str, Option(
        autocompletion=completion.devices,
        help="cpu, cuda, or any part of the name of a device that has records, such as h200: stored, or shipped with "
        "fuseplan. auto takes CUDA where PyTorch sees a GPU, else the CPU.",
    )] = Device.AUTO.value,
    device_key: Annotated[str | None, Option(help="The same by its whole key (`plan db ls` lists them).")] = None,
    regime: Annotated[str | None, Option(help="Only what was tuned for this regime: eager or graph.")] = None,
    against: Annotated[str | None, Option(
        metavar="FILE|URL", help="Another tuning database: also say which steps and groups differ from its.",
    )] = None,
    db: DbOption = None,
) -> None:
    """Report what was tuned: whole steps first, then groups, fused against unfused. Nothing is measured."""
    data = load(db, device, device_key, model, regime)
    other = _other(against, device, device_key, model, regime) if against is not None else None
    screen = current()
    if screen.style == PageFormat.HTML:
        from fuseplan.planner.report.html_page import html_report

        screen.page(html_report(data, other), Path("fuseplan-report.html"))
        return
    screen.heading(f"Fusion report: {data.model or data.device}", _MAIN[topic])
    if topic is ReportTopic.ACCURACY:
        _accuracy(screen, data)
    else:
        _steps(screen, data, topic)
        if topic is ReportTopic.GROUPS:
            _groups(screen, data)
        if other is not None:
            _against(screen, data, other)


#: The table of a topic that CSV has.
_MAIN = {ReportTopic.GROUPS: "groups", ReportTopic.STEPS: "saved", ReportTopic.ACCURACY: "samples"}


def _other(db: str, device: str, device_key: str | None, model: str | None, regime: str | None) -> ReportData:
    from fuseplan.planner.errors import PlanError
    from fuseplan.search.errors import plain

    try:
        return load(db, device, device_key, model, regime)
    except PlanError as error:
        raise PlanError(f"--against {plain(db)}: {error}") from None


def _named(words: str, stored: Iterable[str]) -> str:
    """The key of the one device with records that has ``words`` in its name."""
    from fuseplan.planner.errors import PlanError
    from fuseplan.search.errors import plain
    from fuseplan.search.store.layered import shipped_devices

    known = sorted({*stored, *shipped_devices()})
    wanted = "-".join(words.lower().split())
    found = [key for key in known if wanted and wanted in key]
    if len(found) == 1:
        return found[0]
    which = "several devices have that in their names" if found else "no device with records has that in its name"
    raise PlanError(f"--device {plain(words)}: {which}; there are {', '.join(found or known) or 'none'}")


def load(
    db: str | None, device: str, device_key: str | None, model: str | None, regime: str | None = None
) -> ReportData:
    """The stored and the shipped data of this machine's device, or of the one that is named by a part of its key."""
    from fuseplan.costmodel.identity import current_identity
    from fuseplan.planner.errors import PlanError
    from fuseplan.planner.models.sources import ALIASES
    from fuseplan.planner.report.frames import load_report
    from fuseplan.planner.tuning.session import stored_spec
    from fuseplan.search.store.database import Database
    from fuseplan.search.store.layered import LayeredDatabase, shipped_files
    from fuseplan.search.store.record import Versions

    here = device in list(Device)
    if device_key is None and not here:
        with Database(db, mode="inspect") as stored:
            device_key = _named(device, stored.devices())
    kind = device_type(Device(device)) if here else str(device_key).split("-")[0]
    key = device_key if device_key is not None else current_identity(kind).key()
    # Which software another machine has is not known here.
    versions = Versions.current(kind) if device_key is None else None
    database = LayeredDatabase(Database(db, mode="inspect", versions=versions), shipped_files(key))
    if regime not in (None, "eager", "graph"):
        raise PlanError(f"unknown regime {regime!r}: expected eager or graph")
    # llama stands for a preset of the device's size.
    name = ALIASES.get(model, {}).get(kind, model) if model is not None else ""
    return load_report(database, key, stored_spec(database, key), name, regime)


def _steps(screen: Screen, data: ReportData, topic: ReportTopic) -> None:
    from fuseplan.planner.report import step_words, steps

    for line in step_words.step_lines(data, every=topic is ReportTopic.STEPS):
        screen.tell(line, one_line=True)
    files: Shown = "always" if topic is ReportTopic.STEPS else "files"
    found = {"steps": steps.step_frame(data), "parts": steps.part_frame(data), "saved": steps.saved_frame(data)}
    if topic is ReportTopic.GROUPS and screen.style == PageFormat.TABLE and not any(map(len, found.values())):
        return
    times = ("unfused_us", "planned_us")
    screen.table(table_of(found["steps"], "steps", "Steps"), "files")
    screen.table(table_of(
        found["parts"], "parts", "A step's time by part", spare=("regime", *times),
        keep=("workload", "part", "saved_us"),
    ))
    screen.table(table_of(
        found["saved"], "saved", "What each group saves in a step", keep=("workload", "group", "saved_us"),
        spare=("key", "regime", "share", "runs", "place", *times, "uses"),
    ), files)


def _groups(screen: Screen, data: ReportData) -> None:
    from fuseplan.planner.report import frames

    groups = frames.group_frame(data)
    title = f"Fused against unfused, {data.device}"
    screen.table(table_of(groups, "groups", title, spare=_SPARE, keep=_ANSWER))
    screen.table(table_of(frames.region_frame(data), "regions", "Regions"), "files")
    if data.workloads:
        less = ("views", "ops", "planned_us", "unfused_us", "library_calls", "launches_unfused")
        found = frames.coverage_frame(data)
        screen.table(table_of(found, "coverage", "Coverage", spare=less, keep=("workload", "coverage")))
    if data.misses:
        misses = frames.miss_frame(data)
        screen.table(table_of(misses, "misses", "Look-ups without a plan", spare=("key", "numerics", "first_seen"),
                              keep=("label", "count")))
    screen.tell(frames.headline(groups))
    if len(groups):
        screen.tell(frames.average(groups), "files")


def _accuracy(screen: Screen, data: ReportData) -> None:
    from fuseplan.planner.report import accuracy

    tables = [("accuracy", "Predicted against measured", accuracy.accuracy_table(data))]
    tables += [(title, title, frame) for title, frame in accuracy.accuracy_tables(data)]
    for name, title, frame in tables:
        screen.table(table_of(frame, name, title, 3, spare=("key",)))
    if screen.style in (PageFormat.CSV, PageFormat.JSON):
        screen.table(table_of(accuracy.accuracy_samples(data), "samples", "Samples"))
    for line in accuracy.accuracy_text(data):
        screen.tell(line)


def _against(screen: Screen, data: ReportData, other: ReportData) -> None:
    from fuseplan.planner.report import against

    for name, frame in (("steps", against.steps_against(data, other)), ("groups", against.groups_against(data, other))):
        title = f"{name.capitalize()} against the other database"
        screen.table(table_of(frame, f"{name}_against", title), "files")
    for line in against.against_lines(data, other):
        screen.tell(line)
