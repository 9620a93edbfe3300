"""What each topic of ``plan bench`` measures, and how its results are shown and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pandas as pd

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.planner.api.request import capture_all
from fuseplan.planner.bench import evidence, verdicts
from fuseplan.planner.bench import generate as generation
from fuseplan.planner.bench.generate import GenerateRow, Sizes
from fuseplan.planner.bench.model import bench_group, bench_model, fused_groups
from fuseplan.planner.bench.patterns import PatternBench, RowLog
from fuseplan.planner.bench.rows import BenchRow, bench_frame, comparison, failure, verdict
from fuseplan.planner.cli.output.options import current
from fuseplan.planner.errors import Argument, ConfigError, DeviceError, PlanError
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload, read_size
from fuseplan.planner.patterns import cells as sweeps
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers import contestant
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import Batch, RegionFailure, noting, tune
from fuseplan.search.tune.tuner import Budget, make_pool
from fuseplan.search.workers.worker import WorkerPool

#: Of generate(), unless the user says otherwise: sequences, tokens of a prompt, and new ones.
_BATCHES, _PROMPT, _NEW = "1,16", 512, 128


def results_folder(session: Session, out: Path | None) -> Path:
    """Where results go: ``out``, else the device's folder."""
    return (out if out is not None else Path("results") / evidence.folder_name(session.device)).expanduser()


def publish(
    session: Session, name: str, frames: dict[str, pd.DataFrame], words: list[str], out: Path | None,
    tables: dict[str, pd.DataFrame] | None = None, legend: str = evidence.LEGEND,
) -> None:
    """Say ``words``, and write them with the frames and what the numbers depend on."""
    facts = evidence.environment(session, name)
    words = [*evidence.quietness(facts), *words]
    for line in words:
        current().tell(line)
    folder, start = results_folder(session, out), evidence.file_name(name)
    for path in evidence.write_results(folder, start, frames, facts, words, tables, legend):
        current().say(f"written: {path}")


# -- patterns -------------------------------------------------------------------------------------------------


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
    """Tune and time the cells, writing rows as they come, and publish what there is whatever happens.

    ``name`` is that of the results, ``said`` what else is told. Without a ``budget`` nothing is tuned.
    """
    log = RowLog(results_folder(bench.session, out) / f"{name}-cells.csv", resume)
    try:
        _fill(bench, [cell for cell in cells if not log.has(cell.key)], budget, log, said)
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
    bench: PatternBench, cells: Sequence[Cell], budget: Budget | None, log: RowLog, said: list[str]
) -> None:
    """Measure cells into the log; what else should be said goes to ``said``."""
    done, tuned = 0, bench.session
    with make_pool(tuned.target.device_type) as workers:
        for _, group in groupby(cells, lambda cell: cell.pattern):
            batch = list(group)
            tuned = tune_cells(tuned, batch, budget, workers, said)
            with current().status("measuring") as say:
                for cell in batch:
                    say(f"cell {done + 1} of {len(cells)}: measuring {cell.key}")
                    log.add(bench.rows(cell))
                    done += 1


def tune_cells(
    session: Session, cells: Sequence[Cell], budget: Budget | None, pool: WorkerPool, said: list[str]
) -> Session:
    """Tune what is not stored of some cells; what cannot be is said, and measured as the cost model plans it.

    Returns the session with the calibration that the new records gave.
    """
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


# -- generate -------------------------------------------------------------------------------------------------


def results_name(source: ModelSource, sizes: Sequence[Sizes]) -> str:
    """Name of the results: other sizes do not take the place of a published result."""
    text = f"{','.join(str(one.batch) for one in sizes)}x{sizes[0].prompt}+{sizes[0].new}"
    return source.label if text == f"{_BATCHES}x{_PROMPT}+{_NEW}" else f"{source.label} {text}"


def sizes_of(source: ModelSource, batches: str | None, prompt: int | None, new: int | None) -> list[Sizes]:
    """The sizes that the options name; ConfigError where the model cannot be asked for one of them."""
    text = _BATCHES if batches is None else batches
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError("--batch is empty; write it like --batch 1,16")
    numbers = dict.fromkeys(read_size(word, Argument("batch"), "1,16") for word in words)
    found = [Sizes(number, _PROMPT if prompt is None else prompt, _NEW if new is None else new) for number in numbers]
    for one in found:
        generation.check_sizes(source, one)
    return found


def measure_generate(
    session: Session, source: ModelSource, sizes: Sequence[Sizes], names: Sequence[str], seconds: float,
    out: Path | None,
) -> None:
    """Time the contestants at each size, ``seconds`` of rounds each, and publish what there is whatever happens."""
    rows: list[GenerateRow] = []
    try:
        with current().status(f"building {source.label}") as say:
            module = build_model(source, session.target.device_type).module
            for one in sizes:
                say(f"{source.label}, {one.label}: compiling and measuring every contestant")
                rows += generation.bench_generate(session, module, one, names, seconds)
    finally:  # an interrupted bench keeps what it has measured
        if rows:
            _publish_generate(session, source, sizes, rows, out)


def _publish_generate(
    session: Session, source: ModelSource, sizes: Sequence[Sizes], rows: Sequence[GenerateRow], out: Path | None
) -> None:
    frame = bench_frame(rows)
    table = generation.generate_table(frame)
    current().table(table, "generate", f"{source.label}, generate(): ms a token", spare=("p20", "p80"),
                    keep=("workload", "contestant", "ms_token", "vs_inductor"))
    said = generation.generate_verdict(frame)
    if frame["floor_us"].isna().all():
        said.append("what reading the weights takes is unknown: the device was never probed (`plan probe`), or a "
                    "token chooses its weights")
    if any(" misses" in row.note for row in rows):
        said.append(f"what was missed is tuned by: {tune_command(source, sizes, session.target.device_type)}")
    name = results_name(source, sizes)
    publish(session, name, {"generate": frame}, said, out, {"generate": table}, generation.LEGEND)


def tune_command(source: ModelSource, sizes: Sequence[Sizes], device_type: str) -> str:
    """The ``plan tune`` of the very calls that were measured. A config is named by its file alone."""
    named = f"--model {source.name}" if source.kind == "preset" else f"--config {Path(source.name).name}"
    words = [f"plan tune {named}"]
    words += [f"--layers {source.layers}"] if source.layers else []
    words += [f"--dtype {source.dtype}"] if source.dtype else []
    first, batches = sizes[0], [one.batch for one in sizes]
    prefills = ",".join(f"{batch}x{first.prompt}" for batch in batches)
    words += [f"--decode {','.join(map(str, batches))} --kv-len {first.kv_len} --prefill {prefills}"]
    # CUDA graphs have plans of their own.
    words += ["--regime graph, and the same without it"] if is_gpu(device_type) else []
    return " ".join(words)


# -- model and groups -----------------------------------------------------------------------------------------


def measure_model(
    session: Session, source: ModelSource, workloads: tuple[Workload, ...], parts: Sequence[str], peers: Sequence[str],
    seconds: float, out: Path | None,
) -> None:
    """Time ``"groups"``, the ``"model"`` or both, and publish what there is whatever happens."""
    modes = ("eager", "graph") if is_gpu(session.target.device_type) else ("eager",)
    found: dict[str, list[BenchRow]] = {}
    try:
        for part in parts:
            measured = _groups if part == "groups" else _models
            for rows in measured(session, source, workloads, peers, modes, seconds):
                found.setdefault(part, []).extend(rows)
    finally:  # an interrupted bench keeps what it has measured
        if found:
            _publish_model(session, source.label, found, out)


def _groups(
    session: Session, source: ModelSource, workloads: tuple[Workload, ...], peers: Sequence[str],
    modes: Sequence[str], seconds: float,
) -> Iterator[list[BenchRow]]:
    graphs = capture_all(source, workloads, session.target.device_type, progress=current())
    failures: list[RegionFailure] = []
    planned = [
        (name, graph, session.planner().plan_graph(graph, on_failure=noting(failures, name, graph)))
        for name, graph in graphs
    ]
    for one in failures:
        current().warn(str(one))
    untuned = {one.region.key for _, _, plan in planned for one in plan.regions if one.source == "model"}
    if untuned:
        current().warn(f"{len(untuned)} regions have no tuned plan and run as the cost model says; tune first")
    groups = fused_groups(session, planned)
    if not groups:
        raise PlanError("the plan fuses nothing, so there is no group to measure; run `plan tune` first")
    with current().status("measuring") as say:
        for number, group in enumerate(groups, 1):
            say(f"group {number} of {len(groups)}: {group.choice.label}")
            yield bench_group(session, group, peers, modes, seconds)


def _models(
    session: Session, source: ModelSource, workloads: tuple[Workload, ...], peers: Sequence[str],
    modes: Sequence[str], seconds: float,
) -> Iterator[list[BenchRow]]:
    with current().status(f"building {source.label}") as say:
        model = build_model(source, session.target.device_type)
        for workload in workloads:
            say(f"{source.label}, {workload.label}: compiling and measuring every contestant")
            yield bench_model(session, model, workload, peers, modes, seconds)


def _publish_model(session: Session, name: str, parts: dict[str, list[BenchRow]], out: Path | None) -> None:
    frames = {part: bench_frame(rows) for part, rows in parts.items()}
    words: list[str] = []
    for part, frame in frames.items():
        current().table(
            comparison(frame), part, f"{name}, {part}: median us", spare=("mode",),
            keep=("workload", "subject", f"vs_{EAGER}", f"vs_{INDUCTOR}"))
        words += verdict(frame, part)
        words += [f"{row.contestant}, {row.workload}, {row.mode}: {row.note}" for row in parts[part] if row.note]
    publish(session, name, frames, words, out)
