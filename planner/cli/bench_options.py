"""Options of ``plan bench`` about named patterns, what they ask for, and how a bench is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuseplan.planner.cli.common import decimal, whole

if TYPE_CHECKING:
    import pandas as pd

    from fuseplan.planner.tuning.session import Session

PatternsOption = Annotated[
    list[str] | None,
    typer.Option("--pattern", metavar="NAME", help="patterns, launch: this pattern; repeatable. Default: a set."),
]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="32x4096", help="patterns, launch: this shape of each --pattern; repeatable."),
]
RowsOption = Annotated[
    str | None, typer.Option("--rows", metavar="1,32", help="patterns: rows to sweep, instead of 1 to 16384.")
]
ColsOption = Annotated[
    str | None, typer.Option("--cols", metavar="4096,8192", help="patterns: widths to sweep, instead of the pattern's.")
]
PeersOption = Annotated[
    str | None,
    typer.Option(
        "--peers", metavar="A,B",
        help="patterns: eager, inductor, inductor-max-autotune, liger, flashinfer, triton-default, "
        "ninetoothed-default, cpp-default. Default: all that the device has.",
    ),
]
ModesOption = Annotated[
    str | None,
    typer.Option(
        "--modes", metavar="eager,graph,cold",
        help="patterns: launched from Python, replayed from a CUDA graph, one call after the cache was overwritten. "
        "Default: all three, on CPUs eager.",
    ),
]
TuneOption = Annotated[
    bool, typer.Option("--tune/--no-tune", help="patterns, launch: tune what is not stored before measuring it.")
]
TrialsOption = Annotated[
    int,
    typer.Option(
        "--trials", parser=whole(1), metavar="N", help="patterns: configurations tried per group when tuning."
    ),
]
TuneSecondsOption = Annotated[
    float,
    typer.Option(
        "--tune-seconds", parser=decimal(0.1), metavar="S", help="patterns: search time per group when tuning."
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--compile-processes", parser=whole(0, 1024), metavar="N",
        help="patterns: processes that compile TorchInductor's programs beforehand. Default: the cores, on CPUs none.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="patterns: keep the cells that the result file has, measure the others.")
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        "--minutes", parser=decimal(0.0), metavar="M",
        help="patterns: start no new cell after this long; see --resume.",
    ),
]


@dataclass(frozen=True)
class Wanted:
    """What the options ask for.

    Attributes:
        patterns, shapes: Named ones; none for the default set.
        rows, cols, peers, modes: Lists as text; None for the defaults.
        dtype: Of every cell; None for each pattern's own.
        without: Peers that other options rule out.
        seconds: Seconds of rounds for each mode of a cell.
        tune: Tune what is not stored.
        trials, tune_seconds: What tuning one group may cost.
        processes: Compiling processes; None for the default.
        resume: Keep measured cells.
        minutes: When to stop.
        out: Folder of the results; None for the device's.
    """

    patterns: Sequence[str] = ()
    shapes: Sequence[str] = ()
    rows: str | None = None
    cols: str | None = None
    peers: str | None = None
    modes: str | None = None
    dtype: str | None = None
    without: tuple[str, ...] = ()
    seconds: float = 0.3
    tune: bool = True
    trials: int = 12
    tune_seconds: float = 6.0
    processes: int | None = None
    resume: bool = False
    minutes: float | None = None
    out: Path | None = None


def results_folder(session: Session, out: Path | None) -> Path:
    """Where results go: ``out``, else the device's folder."""
    from fuseplan.planner.bench.evidence import folder_name

    return (out if out is not None else Path("results") / folder_name(session.device)).expanduser()


def write(
    session: Session, name: str, frames: dict[str, pd.DataFrame], words: list[str], out: Path | None,
    tables: dict[str, pd.DataFrame] | None = None,
) -> None:
    """Say ``words``, and publish them with the frames and what the numbers depend on."""
    from fuseplan.planner.bench import evidence as results

    facts = results.environment(session, name)
    words = [*results.quietness(facts), *words]
    for line in words:
        typer.echo(line)
    folder = results_folder(session, out)
    for path in results.write_results(folder, results.file_name(name), frames, facts, words, tables):
        typer.echo(f"written: {path}")
