"""``plan bench``: our plan beside its peers, what a call costs, and how planning scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuseplan.planner.cli import bench_patterns, common
from fuseplan.planner.cli import source as opt
from fuseplan.search.errors import plain

if TYPE_CHECKING:
    import pandas as pd

    from fuseplan.planner.bench.rows import BenchRow
    from fuseplan.planner.models.sources import ModelSource
    from fuseplan.planner.models.workload import Workload
    from fuseplan.planner.tuning.session import Session

#: Layers of the end-to-end model unless the user says otherwise: enough for every region to occur.
_LAYERS = 2


class BenchTopic(StrEnum):
    """What to measure."""

    ALL = "all"
    MODEL = "model"
    GROUPS = "groups"
    PATTERNS = "patterns"
    HEADLINES = "headlines"
    LAUNCH = "launch"
    PLANNER = "planner"


#: Topics about named patterns.
_OF_PATTERNS = {
    BenchTopic.PATTERNS: bench_patterns.patterns, BenchTopic.HEADLINES: bench_patterns.headlines,
    BenchTopic.LAUNCH: bench_patterns.launch,
}
#: Of those, the ones whose plans are made for CUDA graphs where there are any.
_IN_GRAPHS = (BenchTopic.PATTERNS, BenchTopic.HEADLINES)
#: Seconds of rounds for one comparison, where it is not one.
_SECONDS = {BenchTopic.PATTERNS: 0.3, BenchTopic.HEADLINES: 0.5, BenchTopic.LAUNCH: 0.5}


def bench(
    topic: Annotated[
        BenchTopic,
        typer.Argument(
            help="model: end to end. groups: every fused group. all: both. patterns: named patterns beside every peer, "
            "tuned first. headlines: gains over eager that are often quoted. launch: host time of a call. "
            "planner: how planning scales to 100k ops."
        ),
    ] = BenchTopic.ALL,
    model: opt.ModelOption = None,
    config: opt.ConfigOption = None,
    module: opt.ModuleOption = None,
    decode: opt.DecodeOption = None,
    kv_len: opt.KvLenOption = None,
    prefill: opt.PrefillOption = None,
    dtype: opt.DtypeOption = None,
    layers: opt.LayersOption = None,
    numerics: opt.NumericsOption = opt.Numerics.FP32,
    regime: Annotated[
        opt.Regime | None,
        typer.Option("--regime", help="Plans tuned for launches from Python, or for CUDA graphs. Default: eager; "
                     "graph for patterns and headlines on CUDA, where device time decides."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(parser=common.decimal(0.01), metavar="S",
                     help="Seconds of interleaved rounds per comparison. Default: 1; 0.3 for patterns, 0.5 "
                     "for headlines and launch."),
    ] = None,
    max_autotune: Annotated[
        bool, typer.Option("--max-autotune/--no-max-autotune", help="Also time TorchInductor with max-autotune (slow).")
    ] = True,
    inductor: Annotated[bool, typer.Option("--inductor/--no-inductor", help="Time TorchInductor at all.")] = True,
    pattern: Annotated[
        list[str] | None,
        typer.Option("--pattern", metavar="NAME", help="patterns, launch: this pattern; repeatable. Default: a set."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="32x4096", help="patterns, launch: this shape of each --pattern; repeatable."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="1,32", help="patterns: rows to sweep, instead of 1 to 16384.")
    ] = None,
    cols: Annotated[
        str | None, typer.Option(metavar="4096,8192", help="patterns: widths to sweep, instead of the pattern's.")
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option("--peers", metavar="A,B",
                     help="patterns: eager, inductor, inductor-max-autotune, liger, flashinfer, triton-default, "
                     "ninetoothed-default, cpp-default. Default: all that the device has."),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(metavar="eager,graph,cold",
                     help="patterns: launched from Python, replayed from a CUDA graph, one call after the cache was "
                     "overwritten. Default: all three, on CPUs eager."),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", help="patterns, launch: tune what is not stored before measuring it.")
    ] = True,
    trials: Annotated[
        int,
        typer.Option(parser=common.whole(1), metavar="N", help="patterns: configurations tried per group when tuning."),
    ] = 12,
    tune_seconds: Annotated[
        float,
        typer.Option(parser=common.decimal(0.1), metavar="S", help="patterns: search time per group when tuning."),
    ] = 6.0,
    compile_processes: Annotated[
        int | None,
        typer.Option(parser=common.whole(0, 1024), metavar="N",
                     help="patterns: processes that compile the peers' kernels beforehand. Default: the cores, on CPUs "
                     "none."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="patterns: keep the cells that the result file has, measure the others.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(parser=common.decimal(0.0), metavar="M",
                     help="patterns: start no new cell after this long; see --resume."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write CSV, Markdown and JSON. "
                                  "Default: results/<device>.")
    ] = None,
    device: common.DeviceOption = common.Device.AUTO,
    db: common.DbOption = None,
) -> None:
    """Measure our plan beside its peers, on the same inputs in one run.

    Tune a model first: what is not stored is planned by the cost model, and said so. Patterns are tuned here. On CUDA
    everything is timed both launched from Python and replayed from a CUDA graph; patterns also with a cold cache. An
    interrupted bench keeps what it has measured.
    """
    from fuseplan.planner.tuning.planner import PlanSettings
    from fuseplan.planner.tuning.session import open_session

    kind = common.device_type(device)
    if regime is None:
        regime = opt.Regime.GRAPH if topic in _IN_GRAPHS and kind == "cuda" else opt.Regime.EAGER
    settings = PlanSettings(numerics=numerics.value, regime=opt.regime_name(kind, regime))
    _check_options(topic, (model, config, module, decode, kv_len, prefill, layers), (pattern, shape, rows, cols, rivals,
                   modes, compile_processes, minutes))
    without, spend = _left_out(inductor, max_autotune), seconds or _SECONDS.get(topic, 1.0)
    if topic in _OF_PATTERNS:
        wanted = bench_patterns.Wanted(
            pattern or (), shape or (), rows, cols, rivals, modes, opt.full_dtype_name(dtype), without, spend,
            tune, trials, tune_seconds, compile_processes, resume, minutes, out,
        )
        bench_patterns.check(wanted, kind)
        _OF_PATTERNS[topic](open_session(kind, db, settings, mode="write" if tune else "inspect"), wanted)
        return
    session = open_session(kind, db, settings, mode="inspect")
    if topic is BenchTopic.PLANNER:
        _planner(session, out)
        return
    from fuseplan.planner.models.sources import find_source, workloads_for
    from fuseplan.planner.peers.contestant import STANDARD_PEERS

    peers = [name for name in STANDARD_PEERS if name not in without]
    source = find_source(model, config, module, kind, dtype, layers or (None if module else _LAYERS))
    workloads = workloads_for(source, kind, decode, kv_len, prefill)
    launches = ("eager", "graph") if kind == "cuda" else ("eager",)
    parts: dict[str, list[BenchRow]] = {}
    try:
        if topic in (BenchTopic.ALL, BenchTopic.GROUPS):
            parts["groups"] = []
            parts["groups"].extend(_groups(session, source, workloads, peers, launches, spend))
        if topic in (BenchTopic.ALL, BenchTopic.MODEL):
            parts["model"] = []
            parts["model"].extend(_models(session, source, workloads, peers, launches, spend))
    finally:  # an interrupted bench keeps what it has measured
        measured = {part: rows for part, rows in parts.items() if rows}
        if measured:
            _publish(session, source.label, measured, out)


def _check_options(topic: BenchTopic, of_model: Sequence[object], of_patterns: Sequence[object]) -> None:
    """An option that a topic does not take is a mistake, not something to pass over."""
    from fuseplan.planner.errors import ConfigError

    if topic in _OF_PATTERNS and any(option is not None for option in of_model):
        raise ConfigError(f"`plan bench {topic}` measures named patterns; a model's options do not go with it")
    if topic not in _OF_PATTERNS and any(option is not None for option in of_patterns):
        raise ConfigError(f"`plan bench {topic}` takes no pattern's options; try `plan bench patterns`")


def _left_out(inductor: bool, max_autotune: bool) -> tuple[str, ...]:
    """What ``--no-inductor`` and ``--no-max-autotune`` rule out."""
    from fuseplan.planner.peers.contestant import INDUCTOR, MAX_AUTOTUNE

    return tuple(name for name, kept in ((INDUCTOR, inductor), (MAX_AUTOTUNE, inductor and max_autotune)) if not kept)


def _groups(
    session: Session, source: ModelSource, workloads: tuple[Workload, ...], peers: Sequence[str],
    modes: Sequence[str], seconds: float,
) -> Iterator[BenchRow]:
    from fuseplan.planner.bench.groups import bench_group, fused_groups
    from fuseplan.planner.errors import PlanError
    from fuseplan.planner.tuning.tune import RegionFailure, noting

    graphs = opt.capture_all(source, workloads, session.target.device_type)
    failures: list[RegionFailure] = []
    planned = [
        (name, graph, session.planner().plan_graph(graph, on_failure=noting(failures, name, graph)))
        for name, graph in graphs
    ]
    for failure in failures:
        typer.echo(f"plan: warning: {plain(str(failure))}", err=True)
    untuned = {one.region.key for _, _, plan in planned for one in plan.regions if one.source == "model"}
    if untuned:
        words = f"{len(untuned)} regions have no tuned plan and run as the cost model says; tune first"
        typer.echo(f"plan: warning: {words}", err=True)
    groups = fused_groups(session, planned)
    if not groups:
        raise PlanError("the plan fuses nothing, so there is no group to measure; run `plan tune` first")
    with common.console(stderr=True).status("measuring") as status:
        for number, group in enumerate(groups, 1):
            status.update(f"group {number} of {len(groups)}: {group.choice.label}")
            yield from bench_group(session, group, peers, modes, seconds)


def _models(
    session: Session, source: ModelSource, workloads: tuple[Workload, ...], peers: Sequence[str],
    modes: Sequence[str], seconds: float,
) -> Iterator[BenchRow]:
    from fuseplan.planner.bench.model import bench_model
    from fuseplan.planner.models.build import build_model

    with common.console(stderr=True).status(f"building {source.label}") as status:
        model = build_model(source, session.target.device_type)
        for workload in workloads:
            status.update(f"{source.label}, {workload.label}: compiling and measuring every contestant")
            yield from bench_model(session, model, workload, peers, modes, seconds)


def _publish(session: Session, name: str, parts: dict[str, list[BenchRow]], out: Path | None) -> None:
    from fuseplan.planner.bench import rows as results

    frames: dict[str, pd.DataFrame] = {part: results.bench_frame(rows) for part, rows in parts.items()}
    words: list[str] = []
    for part, frame in frames.items():
        common.print_frame(results.comparison(frame), title=f"{name}, {part}: median us")
        words += results.verdict(frame, part)
        words += [f"{row.contestant}, {row.workload}, {row.mode}: {row.note}" for row in parts[part] if row.note]
    bench_patterns.write(session, name, frames, words, out)


def _planner(session: Session, out: Path | None) -> None:
    from fuseplan.planner.bench.scaling import plan_scaling

    with common.console(stderr=True).status("planning synthetic graphs of 1k, 10k and 100k ops"):
        frame = plan_scaling(session.planner)
    common.print_frame(frame, title="Planning time by graph size")
    words = [
        f"{row['ops']:,} ops are built, hashed and planned in {row['total_s']:.2f} s: {row['us_per_op']:.0f} us per op"
        for row in frame.to_dict("records")
    ]
    bench_patterns.write(session, "planner", {"planner": frame}, words, out)
