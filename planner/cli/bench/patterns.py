"""``plan bench patterns``: named patterns beside every peer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.planner.cli.output.options import current

if TYPE_CHECKING:
    import pandas as pd

    from fuseplan.planner.bench.patterns import PatternBench, RowLog
    from fuseplan.planner.patterns.cells import Cell
    from fuseplan.planner.tuning.session import Session
    from fuseplan.search.tune.tuner import Budget
    from fuseplan.search.workers.worker import WorkerPool


def cells_of(
    patterns: Sequence[str], shapes: Sequence[str], rows: str | None, cols: str | None, dtype: str | None
) -> tuple[str, list[Cell], list[str]]:
    """The cells that the options name, or all: the name of their results, the cells, and what is left out."""
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


def measure(
    bench: PatternBench, name: str, cells: Sequence[Cell], said: list[str], budget: Budget | None, minutes: float,
    resume: bool, out: Path | None,
) -> None:
    """Tune and time the cells, writing rows as they come, and publish what there is whatever happens.

    ``name`` is that of the results, ``said`` what else is told. Without a ``budget`` nothing is tuned; no cell is
    started after ``minutes``.
    """
    from fuseplan.planner.bench import verdicts
    from fuseplan.planner.bench.patterns import RowLog

    log = RowLog(results_folder(bench.session, out) / f"{name}-cells.csv", resume)
    try:
        _fill(bench, [cell for cell in cells if not log.has(cell.key)], budget, minutes, log, said)
    finally:  # an interrupted bench keeps what it has measured
        if log.frame.empty:
            for line in said:
                current().tell(line)
        else:
            frame, table = log.frame, verdicts.pattern_table(log.frame)
            current().table(table, "cells", f"{name}: median us", spare=("gbps", "mb"),
                            keep=("pattern", "shape", "vs_best"))
            said += [*verdicts.pattern_verdict(frame), *verdicts.notes(frame)]
            publish(bench.session, name, {"cells": frame}, said, out, {"cells": table})


def _fill(
    bench: PatternBench, cells: Sequence[Cell], budget: Budget | None, minutes: float, log: RowLog, said: list[str]
) -> None:
    """Measure cells into the log; what else should be said goes to ``said``."""
    from fuseplan.search.tune.tuner import make_pool

    end, done, tuned = time.monotonic() + 60 * minutes, 0, bench.session
    with make_pool(tuned.target.device_type) as workers:
        for _, group in groupby(cells, lambda cell: cell.pattern):
            if time.monotonic() >= end:
                break
            batch = list(group)
            tuned = tune_cells(tuned, batch, budget, workers, said)
            with current().status("measuring") as say:
                for cell in batch:
                    if time.monotonic() >= end:
                        break
                    say(f"cell {done + 1} of {len(cells)}: measuring {cell.key}")
                    log.add(bench.rows(cell))
                    done += 1
    if done < len(cells):
        said.append(f"stopped after {minutes:g} minutes with {len(cells) - done} cells left; --resume goes on")


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
