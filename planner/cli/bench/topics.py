"""What each topic of ``plan bench`` measures, and how its results are shown and written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pandas as pd

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.planner.bench import evidence, verdicts
from fuseplan.planner.bench.model import bench_model
from fuseplan.planner.bench.patterns import PatternBench, RowLog
from fuseplan.planner.bench.rows import BenchRow, bench_frame, comparison, failure, verdict
from fuseplan.planner.cli.output.options import current
from fuseplan.planner.errors import ConfigError, DeviceError
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.patterns import cells as sweeps
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers import contestant
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import Batch, tune
from fuseplan.search.tune.tuner import Budget, make_pool
from fuseplan.search.workers.worker import WorkerPool


def results_folder(device: str, out: Path | None) -> Path:
    """Where results go: ``out``, else the folder of the device, by its key."""
    return (out if out is not None else Path("results") / evidence.folder_name(device)).expanduser()


def publish(
    session: Session, name: str, frames: dict[str, pd.DataFrame], words: list[str], out: Path | None,
    tables: dict[str, pd.DataFrame] | None = None, legend: str = evidence.LEGEND,
) -> None:
    """Say ``words``, and write them with the frames and what the numbers depend on."""
    facts = evidence.environment(session, name)
    words = [*evidence.quietness(facts), *words]
    for line in words:
        current().tell(line)
    folder, start = results_folder(session.device, out), evidence.file_name(name)
    for path in evidence.write_results(folder, start, frames, facts, words, tables, legend):
        current().say(f"written: {path}")


def cells_of(
    patterns: Sequence[str], shapes: Sequence[str], rows: str | None, cols: str | None, dtype: str | None
) -> tuple[str, list[Cell], list[str]]:
    """The cells that the options name, or all: the name of their results, the cells, and what is left out."""
    heights, widths = sweeps.parse_sizes(rows, "rows"), sweeps.parse_sizes(cols, "cols")
    if shapes and not patterns:
        raise ConfigError("--shape needs --pattern: the pattern whose shape it is")
    if shapes and (rows or cols):
        raise ConfigError("--shape names sizes one by one; leave out --rows and --cols, or --shape")
    if shapes:
        found, left_out = [sweeps.cell(name, shape, dtype) for name in patterns for shape in shapes], list[str]()
    else:
        found, left_out = sweeps.sweep_cells(patterns, heights, widths, dtype)
    # Only the whole matrix has the name of the whole: a part does not take the place of a published result.
    part = "-".join(dict.fromkeys(patterns)) or ("part" if rows or cols else "")
    return f"patterns-{part}"[:80] if part else "patterns", found, left_out


def modes_of(text: str | None, kind: str) -> tuple[str, ...]:
    """The modes that ``text`` lists, in the order of the tables; all that the device has when it is None."""
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


def measure_patterns(
    bench: PatternBench, name: str, cells: Sequence[Cell], said: list[str], budget: Budget | None, resume: bool,
    out: Path | None,
) -> None:
    """Tune and time the cells, writing rows as they come, and publish what there is under ``name`` whatever happens.

    Without a ``budget`` nothing is tuned. ``said`` is told, too.
    """
    log = RowLog(results_folder(bench.session.device, out) / f"{name}-cells.csv", resume)
    missing = [cell for cell in cells if not log.has(cell.key)]
    tuned = bench.session
    try:
        with make_pool(tuned.target.device_type) as workers:
            for batch in (list(group) for _, group in groupby(missing, lambda cell: cell.pattern)):
                tuned = tune_cells(tuned, batch, budget, workers, said)
                with current().status("measuring") as say:
                    for cell in batch:
                        say(f"cell {missing.index(cell) + 1} of {len(missing)}: measuring {cell.key}")
                        log.add(bench.rows(cell))
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


def tune_cells(
    session: Session, cells: Sequence[Cell], budget: Budget | None, pool: WorkerPool, said: list[str]
) -> Session:
    """Tune what is not stored of some cells, and give the recalibrated session; what cannot be tuned is said."""
    graphs = []
    for cell in cells if budget is not None else ():
        try:
            graph = contestant.trace_cell(cell, session.target.device_type)[0].graph
        except Exception as error:
            said.append(f"{cell.key} could not be tuned: {failure(error)}")
            continue
        if session.planner().undecided(graph):
            graphs.append((cell.key, graph))
    if not graphs:
        return session
    names = {cell.key: (f"pattern {cell.pattern}", f"{cell.size} {cell.dtype}") for cell in cells}
    result = tune(session, Batch(graphs, reported=names.get), budget, progress=current(), executor=pool)
    said += map(str, result.failures)
    return result.session


def measure_model(
    session: Session, source: ModelSource, workloads: tuple[Workload, ...], peers: Sequence[str], seconds: float,
    out: Path | None,
) -> None:
    """Time the model's workloads, and publish what there is whatever happens."""
    modes = ("eager", "graph") if is_gpu(session.target.device_type) else ("eager",)
    rows: list[BenchRow] = []
    try:
        with current().status(f"building {source.label}") as say:
            model = build_model(source, session.target.device_type)
            for workload in workloads:
                say(f"{source.label}, {workload.label}: compiling and measuring every contestant")
                rows += bench_model(session, model, workload, peers, modes, seconds)
    finally:  # an interrupted bench keeps what it has measured
        if rows:
            publish_rows(session, source.label, "model", rows, out)


def publish_rows(session: Session, name: str, part: str, rows: Sequence[BenchRow], out: Path | None) -> None:
    """Show a part of a bench, contestants side by side with times in microseconds, and write it."""
    frame = bench_frame(rows)
    current().table(
        comparison(frame), part, f"{name}, {part}: median us", spare=("mode",),
        keep=("workload", "subject", f"vs_{EAGER}", f"vs_{INDUCTOR}"))
    words = verdict(frame, part) + [f"{row.contestant}, {row.workload}, {row.mode}: {row.note}"
                                    for row in rows if row.note]
    publish(session, name, {part: frame}, words, out)
