"""``plan report``: what is stored, in tables and one HTML page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fuseplan.planner.cli import completion
from fuseplan.planner.cli.common import DbOption, Device
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.output.screen import PageFormat


class ReportTopic(StrEnum):
    """What to report on."""

    GROUPS = "groups"
    STEPS = "steps"
    ACCURACY = "accuracy"



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
    from fuseplan.planner.reports.contents import report_document

    found = load(db, device, device_key, model, regime, against)
    screen = current()
    if screen.style == PageFormat.HTML:
        screen.page(found.html(), Path("fuseplan-report.html"))
    else:
        screen.show(report_document(found.data, topic.value, found.other, screen.style))
