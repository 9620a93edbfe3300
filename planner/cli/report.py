"""``plan report``: what is stored, in tables and one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.source import DbOption, known_devices, known_models


@answers("that of the topic", page=True)
def report(
    topic: Annotated[Literal["groups", "steps", "accuracy"], Argument(
        help="groups: fused against unfused. steps: what whole steps take, by part, and what each group saves. "
        "accuracy: predicted against measured times.",
    )] = "groups",
    model: Annotated[str | None, Option(
        autocompletion=known_models, help="Only what was tuned for this model.",
    )] = None,
    device: Annotated[str, Option(
        autocompletion=known_devices,
        help="cpu, cuda, or any part of the name of a device that has records, such as h200: stored, or shipped with "
        "fuseplan. auto takes CUDA where PyTorch sees a GPU, else the CPU.",
    )] = "auto",
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
    screen = current()
    if screen.style == "html":
        screen.page(found.html(), Path("fuseplan-report.html"))
    else:
        screen.show(found.document(topic, screen.style))
