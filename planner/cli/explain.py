"""``plan explain``, ``report`` and ``patterns``: what is fused and why, and what is stored of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from fuseplan.planner.api.device import device_kind
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.source import DbOption, DeviceOption, known_devices, known_models
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.reports.document import Table
from fuseplan.search.errors import counted

if TYPE_CHECKING:
    from fuseplan.planner.api.explain import KernelSource, Planned


@answers("the groups, or with --source the kernels", without=("calls",))
def explain(
    given: ModelArguments,
    workload: Annotated[str | None, Option(metavar="TEXT", help="Only workloads whose name contains this.")] = None,
    source: Annotated[str | None, Option(
        "--source", metavar="GROUP", help="Print the generated code of a group instead: its letter, or a part of its "
        "name or its place in the model; all for every one.",
    )] = None,
    prelude: Annotated[bool, Option(
        "--prelude", help="With --source: also what every kernel begins with, includes and helpers.",
    )] = False,
    device: DeviceOption = "auto",
    db: DbOption = None,
) -> None:
    """Say in words what is fused, what is not, and why each boundary is where it is.

    Ends with tuned workloads side by side: ops fused into each matmul and attention, by row count. Uses the
    stored plan; the cost model plans the rest. Nothing is measured.
    """
    from fuseplan.planner.api.explain import Explained, explained
    from fuseplan.planner.api.request import asked_for
    from fuseplan.planner.errors import ConfigError

    if prelude and source is None:
        raise ConfigError("--prelude is of the code that --source prints; give --source GROUP, too")
    screen, asked = current(), asked_for(device_kind(device), replace(given, calls=False))
    planned: list[Planned] = []
    for one in explained(asked, db, workload, screen):
        planned.append(one)
        for line in (*one.lines, "") if source is None else ():
            screen.tell(line)
    found = Explained(asked.label, tuple(planned))
    if source is not None:
        _print_sources(found.kernels(), source, prelude)
        return
    if not screen.at_once:
        screen.table(found.groups, "groups")
    for line in found.side_by_side():
        screen.tell(line)


def _print_sources(kernels: Sequence[KernelSource], wanted: str, prelude: bool) -> None:
    from fuseplan.planner.api.explain import called
    from fuseplan.planner.module_paths import located

    screen = current()
    texts = [(one, one.text if prelude else one.own_text()) for one in called(kernels, wanted)]
    if not screen.at_once:
        screen.add(Table("kernels", ("group", "names", "place", "backend", "workloads", "source"), tuple(
            (one.label, ", ".join(one.names), one.place, one.backend, ", ".join(one.workloads), text)
            for one, text in texts)))
    for one, text in texts:
        mark = "//" if one.language == "cpp" else "#"
        title = f"{mark} {', '.join(one.names)}: {located(one.label, one.place)}, {one.backend}"
        screen.code(f"{title}\n{mark} used by {', '.join(one.workloads)}\n\n{text.strip()}\n", one.language)
    if left := sum(len(part.splitlines()) for one, _ in texts for part in one.common if not prelude):
        mark = "//" if texts[0][0].language == "cpp" else "#"
        lines = counted(left, "line")
        screen.tell(f"{mark} left out: {lines} that kernels have in common, includes and helpers (--prelude)")


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
    from fuseplan.planner.api import report as api

    found = api.report(
        model, device=device, device_key=device_key, db=db, against=against, regime=regime)  # type: ignore[arg-type]
    screen = current()
    if screen.style == "html":
        screen.page(found.html(), Path("fuseplan-report.html"))
    else:
        screen.show(found.document(topic, screen.style))


@answers(torch=False)
def patterns() -> None:
    """List the named patterns: small graphs that inference engines fuse by hand.

    Any of them can be tuned, explained and measured: plan tune --pattern swiglu --shape 32x4096.
    """
    from fuseplan.planner.patterns.listing import LISTING

    rows = tuple((name, found.summary, found.dims, found.example) for name, found in sorted(LISTING.items()))
    current().add(Table("patterns", ("pattern", "computes", "--shape is", "such as"), rows, spare=("--shape is",),
                        keep=("pattern", "computes", "such as")))
