"""``plan report``: what is stored, in tables and one HTML page."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fuseplan.planner.cli.common import DbOption, Device, print_frame, print_text, write_text

if TYPE_CHECKING:
    import pandas as pd

    from fuseplan.planner.reports.frames import ReportData


class ReportTopic(StrEnum):
    """What to report on."""

    GROUPS = "groups"
    STEPS = "steps"
    ACCURACY = "accuracy"


class Format(StrEnum):
    """How to write it."""

    TABLE = "table"
    CSV = "csv"
    MARKDOWN = "markdown"
    HTML = "html"


#: Columns of the terminal's group table: what fits.
_SHOWN = [
    "workload", "group", "place", "ops", "times", "answer", "backend", "config", "fused_us", "unfused_us", "speedup",
    "source",
]


def report(
    topic: Annotated[ReportTopic, Argument(
        help="groups: fused against unfused. steps: what whole steps take, by part, and what each group saves. "
        "accuracy: predicted against measured times.",
    )] = ReportTopic.GROUPS,
    model: Annotated[str | None, Option(help="Only what was tuned for this model.")] = None,
    style: Annotated[Format, Option(
        "--format", help="html writes one self-contained page (fuseplan-report.html).",
    )] = Format.TABLE,
    out: Annotated[Path | None, Option(metavar="FILE", help="Write to a file.")] = None,
    device: Annotated[str, Option(
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
    if style is Format.HTML:
        target = found.to_html(out if out is not None else Path("fuseplan-report.html"))
        typer.echo(f"report written to {target}")
    elif style is Format.TABLE:
        _print(data, topic)
        if other is not None:
            from fuseplan.planner.reports.against import against_lines

            for line in against_lines(data, other):
                print_text(line)
    else:
        text = _text(data, topic, style, other)
        if out is None:
            # A pipe gets what is stored; a terminal would obey it.
            echo = print_text if sys.stdout.isatty() else typer.echo
            echo(text.removesuffix("\n"))
        else:
            write_text(out, text)
            typer.echo(f"report written to {out}")


def _print(data: ReportData, topic: ReportTopic) -> None:
    from fuseplan.planner.reports import accuracy, frames, step_words, steps

    if topic is ReportTopic.ACCURACY:
        for title, frame in _accuracy(data):
            print_frame(frame.drop(columns=["key"], errors="ignore"), title=title, digits=3)
    else:
        for line in step_words.step_lines(data, every=topic is ReportTopic.STEPS):
            print_text(line)
        parts = steps.part_frame(data)
        if len(parts):
            print_frame(parts.drop(columns=["regime"]), title="A step's time by part", spare=("saved_us",))
    if topic is ReportTopic.STEPS:
        saved = steps.saved_frame(data).drop(columns=["regime", "key"])
        print_frame(saved, title="What each group saves in a step", spare=("share", "runs", "place", "workload"))
    if topic is ReportTopic.GROUPS:
        groups = frames.group_frame(data)
        spare = ("config", "ops", "backend", "workload", "times", "source", "place")
        print_frame(groups[_SHOWN], title=f"Fused against unfused, {data.device}", spare=spare)
        if data.workloads:
            less = ("views", "ops", "planned_us", "unfused_us")
            print_frame(frames.coverage_frame(data), title="Coverage", spare=less)
        if data.misses:
            print_frame(frames.miss_frame(data).drop(columns=["key"]), title="Look-ups without a plan")
        typer.echo(frames.headline(groups))
    for line in accuracy.accuracy_text(data):
        print_text(line)


def _accuracy(data: ReportData) -> list[tuple[str, pd.DataFrame]]:
    from fuseplan.planner.reports import accuracy

    return [("Predicted against measured", accuracy.accuracy_table(data)), *accuracy.accuracy_tables(data)]


def _text(data: ReportData, topic: ReportTopic, style: Format, other: ReportData | None) -> str:
    from fuseplan.planner.reports import accuracy, against, frames, steps

    if style is Format.CSV:
        whole = {ReportTopic.ACCURACY: accuracy.accuracy_samples, ReportTopic.STEPS: steps.saved_frame,
                 ReportTopic.GROUPS: frames.group_frame}
        return str(whole[topic](data).to_csv(index=False))
    of_steps = [
        ("Steps", steps.step_frame(data)), ("A step's time by part", steps.part_frame(data)),
        ("What each group saves in a step", steps.saved_frame(data)),
    ]
    of_groups = [
        ("Groups", frames.group_frame(data)), ("Regions", frames.region_frame(data)),
        ("Coverage", frames.coverage_frame(data)), ("Misses", frames.miss_frame(data)),
    ]
    if other is not None:
        of_groups += [("Steps against the other database", against.steps_against(data, other)),
                      ("Groups against the other database", against.groups_against(data, other))]
    parts = _accuracy(data) if topic is ReportTopic.ACCURACY else (
        of_steps if topic is ReportTopic.STEPS else [*of_steps, *of_groups])
    tables = [f"## {title}\n\n{frames.markdown_table(frame)}" for title, frame in parts if len(frame)]
    return "\n".join([f"# Fusion report: {data.model or data.device}\n", *tables, *accuracy.accuracy_text(data), ""])
