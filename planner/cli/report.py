"""``plan report``: what is stored, in tables and one HTML page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from fuseplan.planner.cli import completion
from fuseplan.planner.cli.common import DbOption, Device
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.output.screen import PageFormat, Screen, Shown
from fuseplan.planner.cli.output.tables import table_of

if TYPE_CHECKING:
    from fuseplan.planner.reports.frames import ReportData


class ReportTopic(StrEnum):
    """What to report on."""

    GROUPS = "groups"
    STEPS = "steps"
    ACCURACY = "accuracy"


#: Of the group table, what a narrow terminal leaves out, in this order.
_SPARE = ("key", "doubt", "regime", "enumerated_configs", "measured_configs", "noise", "lower_bound_us", "predicted_us",
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
    from fuseplan.planner.api.report import load

    found = load(db, device, device_key, model, regime, against)
    data, other = found.data, found.other
    screen = current()
    if screen.style == PageFormat.HTML:
        screen.page(found.html(), Path("fuseplan-report.html"))
        return
    screen.heading(f"Fusion report: {data.model or data.device}", _MAIN[topic])
    if topic is ReportTopic.ACCURACY:
        _accuracy(screen, data)
    else:
        screen.tell(f"{data.model or 'everything tuned'} on {data.device}", one_line=True)
        _steps(screen, data, topic)
        if topic is ReportTopic.GROUPS:
            _groups(screen, data)
        if other is not None:
            _against(screen, data, other)


#: The table of a topic that CSV has.
_MAIN = {ReportTopic.GROUPS: "groups", ReportTopic.STEPS: "saved", ReportTopic.ACCURACY: "samples"}


def _steps(screen: Screen, data: ReportData, topic: ReportTopic) -> None:
    from fuseplan.planner.reports import step_words, steps

    for line in step_words.step_lines(data, every=topic is ReportTopic.STEPS):
        screen.tell(line, one_line=True)
    files: Shown = "always" if topic is ReportTopic.STEPS else "files"
    found = {"steps": steps.step_frame(data), "parts": steps.part_frame(data), "saved": steps.saved_frame(data)}
    if topic is ReportTopic.GROUPS and screen.style == PageFormat.TABLE and not any(map(len, found.values())):
        return
    timed = found["steps"]["workload"][found["steps"]["noise"].notna()]
    if screen.style == PageFormat.TABLE and topic is ReportTopic.GROUPS and len(timed):
        found["parts"] = found["parts"][found["parts"]["workload"].isin(timed)]
    times = ("unfused_us", "planned_us")
    screen.table(table_of(found["steps"], "steps", "Steps"), "files")
    screen.table(table_of(
        found["parts"], "parts", "A step's time by part", spare=("regime", *times),
        keep=("workload", "part", "saved_us"),
    ))
    screen.table(table_of(
        found["saved"], "saved", "What each group saves in a step", keep=("workload", "group", "saved_us"),
        spare=("key", "doubt", "regime", "share", "runs", "place", *times, "uses"),
    ), files)


def _groups(screen: Screen, data: ReportData) -> None:
    from fuseplan.planner.reports import frames

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
    from fuseplan.costmodel.accuracy import accuracy_frame
    from fuseplan.planner.reports import accuracy

    regret = "Trusting the model alone"
    screen.table(table_of(accuracy.accuracy_table(data), "accuracy", "Predicted against measured", 3))
    screen.table(table_of(accuracy.regret_table(data), regret, regret, 3, spare=("key",)))
    if screen.style in (PageFormat.CSV, PageFormat.JSON):
        screen.table(table_of(accuracy_frame(accuracy.accuracy_pairs(data)), "samples", "Samples"))
    for line in accuracy.accuracy_text(data):
        screen.tell(line)


def _against(screen: Screen, data: ReportData, other: ReportData) -> None:
    from fuseplan.planner.reports import against

    for name, frame in (("steps", against.steps_against(data, other)), ("groups", against.groups_against(data, other))):
        title = f"{name.capitalize()} against the other database"
        screen.table(table_of(frame, f"{name}_against", title), "files")
    for line in against.against_lines(data, other):
        screen.tell(line)
