"""``plan bench patterns``: named patterns beside every peer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.planner.cli.output.options import current

if TYPE_CHECKING:
    import pandas as pd

    from fuseplan.planner.bench.patterns import RowLog
    from fuseplan.planner.patterns.cells import Cell
    from fuseplan.planner.tuning.session import Session
    from fuseplan.search.tune.tuner import Budget
    from fuseplan.search.workers.worker import WorkerPool


@dataclass(frozen=True)
class WantedCells:
    """What the options ask for.

    ``name`` is that of the results; ``left_out`` says what is not measured. ``seconds`` are of rounds for each mode of
    a cell; without a ``budget`` nothing is tuned. Peers are compiled beforehand in ``processes``, and no cell is
    started after ``minutes``.
    """

    name: str
    cells: Sequence[Cell]
    left_out: Sequence[str]
    peers: Sequence[str]
    modes: Sequence[str]
    seconds: float
    budget: Budget | None
    processes: int
    resume: bool
    minutes: float
    out: Path | None


def cells_of(
    patterns: Sequence[str], shapes: Sequence[str], rows: str | None, cols: str | None, dtype: str | None
) -> tuple[str, list[Cell], list[str]]:
    """The cells that the options name, or all: the first fields of :class:`WantedCells`."""
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.patterns.cells import cell, parse_sizes, sweep_cells

    heights, widths = parse_sizes(rows, "rows"), parse_sizes(cols, "cols")
    if shapes and not patterns:
        raise ConfigError("--shape needs --pattern: the pattern whose shape it is")
    if shapes and (rows or cols):
        raise ConfigError("--shape names sizes one by one; leave out --rows and --cols, or --shape")
    if shapes:
        found, left_out = [cell(name, shape, dtype) for name in patterns for shape in shapes], list[str]()
    else:
        found, left_out = sweep_cells(patterns, heights, widths, dtype)
    # Only the whole matrix has the name of the whole: a part does not take the place of a published result.
    part = "-".join(dict.fromkeys(patterns)) or ("part" if rows or cols else "")
    return f"patterns-{part}"[:80] if part else "patterns", found, left_out


def modes_of(text: str | None, kind: str) -> tuple[str, ...]:
    """The modes that ``text`` lists, in the order of the tables; all that the device has when it is None."""
    from fuseplan.planner.errors import ConfigError, DeviceError

    known = ("eager", "graph", "cold")
    if text is None:
        return known if is_gpu(kind) else known[:1]
    modes = [word.strip().lower() for word in text.split(",") if word.strip()]
    for mode in modes:
        if mode not in known:
            raise ConfigError(f"--modes: there is no mode {mode!r}; known: {', '.join(known)}")
        if mode != "eager" and is_cpu(kind):
            raise DeviceError(f"--modes {mode} needs a CUDA device; on the CPU there is only eager")
    if not modes:
        raise ConfigError(f"--modes is empty; known: {', '.join(known)}")
    return tuple(mode for mode in known if mode in modes)


def measure(session: Session, wanted: WantedCells) -> None:
    """Tune and time the cells, writing rows as they come, and publish what there is whatever happens."""
    from fuseplan.planner.bench import verdicts
    from fuseplan.planner.bench.patterns import RowLog

    log = RowLog(results_folder(session, wanted.out) / f"{wanted.name}-cells.csv", wanted.resume)
    said = list(wanted.left_out)
    try:
        _fill(session, wanted, [cell for cell in wanted.cells if not log.has(cell.key)], log, said)
    finally:  # an interrupted bench keeps what it has measured
        if log.frame.empty:
            for line in said:
                current().tell(line)
        else:
            frame, table = log.frame, verdicts.pattern_table(log.frame)
            current().table(table, "cells", f"{wanted.name}: median us", spare=("gbps", "mb"),
                            keep=("pattern", "shape", "vs_best"))
            said += [*verdicts.pattern_verdict(frame), *verdicts.notes(frame)]
            publish(session, wanted.name, {"cells": frame}, said, wanted.out, {"cells": table})


def _fill(session: Session, wanted: WantedCells, cells: Sequence[Cell], log: RowLog, said: list[str]) -> None:
    """Measure cells into the log; what else should be said goes to ``said``."""
    from fuseplan.planner.bench.patterns import PatternBench
    from fuseplan.planner.peers.compile_ahead import compile_ahead
    from fuseplan.search.tune.tuner import make_pool

    end = time.monotonic() + 60 * wanted.minutes
    kind, done = session.target.device_type, 0
    bench, tuned = PatternBench(session, wanted.peers, wanted.modes, wanted.seconds), session
    with make_pool(kind) as workers, compile_ahead(kind, wanted.peers, wanted.processes) as compile_cells:
        for pattern, group in groupby(cells, lambda cell: cell.pattern):
            if time.monotonic() >= end:
                break
            batch = list(group)
            with current().status(f"{pattern}: compiling peers in {wanted.processes} processes"):
                said += [f"compiling beforehand failed: {failure}" for failure in compile_cells(batch)]
            tuned = tune_cells(tuned, batch, wanted.budget, workers, said)
            with current().status("measuring") as say:
                for cell in batch:
                    if time.monotonic() >= end:
                        break
                    say(f"cell {done + 1} of {len(cells)}: measuring {cell.key}")
                    log.add(bench.rows(cell))
                    done += 1
    if done < len(cells):
        said.append(f"stopped after {wanted.minutes:g} minutes with {len(cells) - done} cells left; --resume goes on")


def tune_cells(
    session: Session, cells: Sequence[Cell], budget: Budget | None, pool: WorkerPool, said: list[str]
) -> Session:
    """Tune what is not stored of some cells; what cannot be is said, and measured as the cost model plans it.

    Returns the session with the calibration that the new records gave.
    """
    from fuseplan.planner.bench.rows import failure
    from fuseplan.planner.peers.contestant import trace_cell
    from fuseplan.planner.tuning.tune import Batch, tune

    if budget is None:
        return session
    for pattern, group in groupby(cells, lambda cell: cell.pattern):
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
            batch = Batch(graphs, reported=lambda name, pattern=pattern: (f"pattern {pattern}", name))  # type: ignore[misc]
            result = tune(session, batch, budget, progress=current(), executor=pool)
            said += [f"{pattern} {one}" for one in result.failures]
            session = result.session
    return session


def results_folder(session: Session, out: Path | None) -> Path:
    """Where results go: ``out``, else the device's folder."""
    from fuseplan.planner.bench.evidence import folder_name

    return (out if out is not None else Path("results") / folder_name(session.device)).expanduser()


def publish(
    session: Session, name: str, frames: dict[str, pd.DataFrame], words: list[str], out: Path | None,
    tables: dict[str, pd.DataFrame] | None = None, legend: str | None = None,
) -> None:
    """Say ``words``, and write them with the frames and what the numbers depend on."""
    from fuseplan.planner.bench import evidence

    facts = evidence.environment(session, name)
    words = [*evidence.quietness(facts), *words]
    for line in words:
        current().tell(line)
    folder, legend = results_folder(session, out), legend or evidence.LEGEND
    for path in evidence.write_results(folder, evidence.file_name(name), frames, facts, words, tables, legend):
        current().say(f"written: {path}")
