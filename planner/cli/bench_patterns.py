"""``plan bench patterns``, ``headlines`` and ``launch``: named patterns beside every peer, and what a call costs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import typer

from fuseplan.planner.cli.common import console, print_frame

if TYPE_CHECKING:
    import pandas as pd

    from fuseplan.planner.bench.log import RowLog
    from fuseplan.planner.bench.patterns import PatternBench
    from fuseplan.planner.patterns.cells import Cell
    from fuseplan.planner.tuning.session import Session
    from fuseplan.search.workers.worker import WorkerPool

#: What the headline patterns are said to gain over eager.
_HEADLINES: Mapping[tuple[str, str, str], str] = MappingProxyType({
    ("pointwise_chain", "1024x1024", "float32"): "claimed 4.71x",
    ("sin_chain", "10000000", "float32"): "claimed 2.89x",
    ("swiglu", "32x4096", "bfloat16"): "target 2.5x",
    ("add_rms_norm", "32x4096", "bfloat16"): "target 2.4x",
})
#: Groups whose launch is timed unless patterns are named: one without and one with a reduction, both tiny.
_LAUNCHES = (("swiglu", "1x4096"), ("add_rms_norm", "1x4096"))


@dataclass(frozen=True)
class Wanted:
    """What the options ask for; lists as text, and None, stand for the defaults."""

    patterns: Sequence[str] = ()
    shapes: Sequence[str] = ()
    rows: str | None = None
    cols: str | None = None
    peers: str | None = None
    modes: str | None = None
    dtype: str | None = None
    #: Peers that other options rule out.
    without: tuple[str, ...] = ()
    #: Seconds of rounds for each mode of a cell.
    seconds: float = 0.3
    tune: bool = True
    trials: int = 12
    tune_seconds: float = 6.0
    processes: int | None = None
    resume: bool = False
    minutes: float | None = None
    out: Path | None = None


def check(wanted: Wanted, kind: str) -> None:
    """Refuse what the options ask for, before anything is opened or written.

    Raises:
        FuseplanError: No such pattern, shape, peer or mode.
    """
    from fuseplan.planner.peers.peers import peer_names

    peer_names(wanted.peers, kind, wanted.without)
    _modes(wanted.modes, kind)
    _cells(wanted)


def _cells(wanted: Wanted) -> tuple[list[Cell], list[str]]:
    """The cells that the options name, or those of the default sweeps; and what is left out."""
    from fuseplan.planner.patterns.cells import parse_sizes, sweep_cells

    rows, cols = parse_sizes(wanted.rows, "--rows"), parse_sizes(wanted.cols, "--cols")
    if wanted.shapes:
        return _named_cells(wanted), []
    return sweep_cells(wanted.patterns, rows, cols, wanted.dtype)


def patterns(session: Session, wanted: Wanted) -> None:
    """Measure the cells that the options name, or the default sweeps."""
    cells, skipped = _cells(wanted)
    # Only the whole matrix has the name of the whole: a part does not take the place of a published result.
    part = "-".join(dict.fromkeys(wanted.patterns)) or ("part" if wanted.rows or wanted.cols else "")
    _measure(session, wanted, cells, f"patterns-{part}"[:80] if part else "patterns", skipped)


def headlines(session: Session, wanted: Wanted) -> None:
    """The gains over eager that fusers are shown with: ours beside TorchInductor's."""
    from fuseplan.planner.patterns.cells import cell
    from fuseplan.planner.patterns.table import PATTERNS

    known = {one: words for one, words in _HEADLINES.items() if one[0] in PATTERNS}
    missing = [f"there is no pattern {one[0]}" for one in _HEADLINES if one not in known]
    cells = {cell(*one): words for one, words in known.items()}
    _measure(session, wanted, list(cells), "headlines", missing, {one.key: words for one, words in cells.items()})


def launch(session: Session, wanted: Wanted) -> None:
    """Host time of one call, and of the look-up at compile."""
    from fuseplan.planner.bench import launch as bench
    from fuseplan.planner.bench.rows import bench_frame
    from fuseplan.planner.patterns.cells import cell
    from fuseplan.search.tune.tuner import make_pool

    named = bool(wanted.patterns or wanted.shapes)
    cells = _named_cells(wanted) if named else [cell(name, shape, wanted.dtype) for name, shape in _LAUNCHES]
    said: list[str] = []
    session = _measured(session, wanted)
    with make_pool(session.target.device_type) as pool:
        _tune(session, wanted, cells, pool, said)
    # Not before the pool's processes are gone: they may still be compiling.
    with console(stderr=True).status("timing look-ups and launches"):
        lookups = [bench.bench_lookup(session, one) for one in cells]
        calls = bench.bench_launch(session, cells, wanted.seconds)
    frames = {"calls": bench_frame(calls), "lookups": bench_frame(lookups)}
    for part, frame in frames.items():
        print_frame(frame, title=f"launch, {part}: us", spare=("note",))
    said += bench.launch_verdict(frames["calls"], frames["lookups"])
    write(session, "launch", frames, said, wanted.out)


def _named_cells(wanted: Wanted) -> list[Cell]:
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.patterns.cells import cell
    from fuseplan.planner.patterns.table import PATTERNS

    if not wanted.patterns:
        raise ConfigError("--shape needs --pattern: the pattern whose shape it is")
    if wanted.rows or wanted.cols:
        raise ConfigError("--shape names sizes one by one; leave out --rows and --cols, or --shape")
    return [
        cell(name, shape, wanted.dtype)
        for name in wanted.patterns
        for shape in wanted.shapes or [PATTERNS[name].example if name in PATTERNS else ""]
    ]


def _measure(
    session: Session, wanted: Wanted, cells: Sequence[Cell], name: str, words: Sequence[str],
    claims: Mapping[str, str] | None = None,
) -> None:
    """Tune and time the cells, writing rows as they come, and publish what there is whatever happens."""
    from fuseplan.planner.bench.log import RowLog
    from fuseplan.planner.bench.patterns import PatternBench
    from fuseplan.planner.peers.peers import peer_names

    kind = session.target.device_type
    peers = peer_names(wanted.peers, kind, wanted.without)
    bench = PatternBench(session, peers, _modes(wanted.modes, kind), wanted.seconds)
    log = RowLog(results_folder(session, wanted.out) / f"{name}-cells.csv", wanted.resume)
    left = [cell for cell in cells if not log.has(cell.key)]
    said = list(words)
    try:
        _fill(session, wanted, bench, left, log, said)
    finally:  # an interrupted bench keeps what it has measured
        if log.frame.empty:
            for line in said:
                typer.echo(line)
        else:
            _publish(session, wanted, log.frame, name, said, claims)


def _fill(
    session: Session, wanted: Wanted, bench: PatternBench, cells: Sequence[Cell], log: RowLog, said: list[str]
) -> None:
    """Measure cells into the log; what else should be said goes to ``said``."""
    from fuseplan.planner.peers.compile_ahead import CompilePool
    from fuseplan.search.tune.tuner import make_pool
    from fuseplan.search.workers.worker import usable_cores

    deadline = time.monotonic() + 60 * wanted.minutes if wanted.minutes is not None else math.inf
    kind = session.target.device_type
    processes = wanted.processes if wanted.processes is not None else usable_cores() if kind == "cuda" else 0
    session = tuned = _measured(session, wanted)
    bench = replace(bench, session=session)
    batches = [list(group) for _, group in groupby(cells, lambda cell: cell.pattern)]
    done = 0
    with make_pool(kind) as workers, CompilePool(kind, bench.peers, processes) as pool:
        for batch in batches:
            if time.monotonic() >= deadline:
                break
            with console(stderr=True).status(f"{batch[0].pattern}: compiling peers in {processes} processes"):
                said += [f"compiling beforehand failed: {failure}" for failure in pool.compile(batch)]
            tuned = _tune(tuned, wanted, batch, workers, said)
            with console(stderr=True).status("measuring") as status:
                for cell in batch:
                    if time.monotonic() >= deadline:
                        break
                    status.update(f"cell {done + 1} of {len(cells)}: measuring {cell.key}")
                    log.add(bench.rows(cell))
                    done += 1
    if done < len(cells):
        said.append(f"stopped after {wanted.minutes:g} minutes with {len(cells) - done} cells left; --resume goes on")


def _measured(session: Session, wanted: Wanted) -> Session:
    """The session, with a measured device where anything is to be tuned."""
    from fuseplan.planner.cli.tune import ready

    return ready(session) if wanted.tune else session


def _tune(session: Session, wanted: Wanted, cells: Sequence[Cell], pool: WorkerPool, said: list[str]) -> Session:
    """Tune what is not stored of some cells; what cannot be is said, and measured as the cost model plans it.

    Returns the session with the calibration that the new records gave.
    """
    from fuseplan.planner.bench.rows import failure
    from fuseplan.planner.cli.tune import run
    from fuseplan.planner.peers.inputs import trace_cell
    from fuseplan.search.tune.tuner import Budget

    budget = Budget(trials=wanted.trials, seconds=wanted.tune_seconds)
    for pattern, group in groupby(cells if wanted.tune else (), lambda cell: cell.pattern):
        graphs = []
        for cell in group:
            try:
                graph = trace_cell(cell, session.target.device_type)[0].graph
            except Exception as error:
                said.append(f"{cell.key} could not be tuned: {failure(error)}")
                continue
            if session.planner().undecided(graph):
                graphs.append((f"{cell.size} {cell.dtype}", graph))
        if graphs:
            result = run(session, f"pattern {pattern}", graphs, budget, executor=pool)
            said += [f"{pattern} {one}" for one in result.failures]
            session = result.session
    return session


def _modes(text: str | None, kind: str) -> tuple[str, ...]:
    from fuseplan.planner.errors import ConfigError, DeviceError

    known = ("eager", "graph", "cold")
    if text is None:
        return known if kind == "cuda" else known[:1]
    modes = [word.strip().lower() for word in text.split(",") if word.strip()]
    for mode in modes:
        if mode not in known:
            raise ConfigError(f"--modes: there is no mode {mode!r}; known: {', '.join(known)}")
        if mode != "eager" and kind == "cpu":
            raise DeviceError(f"--modes {mode} needs a CUDA device; on the CPU there is only eager")
    if not modes:
        raise ConfigError(f"--modes is empty; known: {', '.join(known)}")
    return tuple(mode for mode in known if mode in modes)


def _publish(
    session: Session, wanted: Wanted, frame: pd.DataFrame, name: str, words: Sequence[str],
    claims: Mapping[str, str] | None,
) -> None:
    from fuseplan.planner.bench import verdicts

    table = verdicts.pattern_table(frame) if claims is None else verdicts.headline_table(frame, claims)
    print_frame(table, title=f"{name}: median us", spare=("gbps", "mb"))
    said = [*words, *verdicts.pattern_verdict(frame), *verdicts.notes(frame)]
    write(session, name, {"cells": frame}, said, wanted.out, {"cells": table})


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
