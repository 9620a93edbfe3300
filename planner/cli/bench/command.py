"""``plan bench``: our plan beside its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Option

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.cli.output.screen import check_writable
from fuseplan.planner.models.manifest import ModelArguments

#: Layers of the end-to-end model unless the user says otherwise: enough for every region to occur.
_LAYERS = 2
#: Seconds of rounds for one comparison.
_SECONDS = {"model": 1.0, "patterns": 0.3}
#: Options of patterns alone.
_PATTERNS = frozenset(("pattern", "shape", "rows", "cols", "rivals", "modes"))
#: Options that a topic does not take.
_NOT_OF = {
    "model": _PATTERNS,
    "patterns": frozenset(("model", "config", "layers", "module", "decode", "kv_len", "prefill")),
}


@answers("the first that is printed", out=False, without=("pattern", "shape", "calls", "pack_weights", "regime"))
def bench(
    context: Context,
    given: ModelArguments,
    topic: Annotated[Literal["model", "patterns"], Argument(
        help="model: end to end. patterns: named patterns beside every peer, tuned first.",
    )] = "model",
    regime: Annotated[opt.RegimeChoice | None, Option(
        help="Plans tuned for launches from Python, or for CUDA graphs. Default: eager; "
        "graph for patterns on CUDA, where device time decides.",
    )] = None,
    seconds: Annotated[float | None, Option(
        parser=opt.decimal(0.01), metavar="S", help="Seconds of interleaved rounds per comparison, seven rounds at "
        "least. Default: 1; 0.3 for patterns.",
    )] = None,
    max_autotune: Annotated[bool, Option(help="Also time TorchInductor with max-autotune (slow).")] = True,
    inductor: Annotated[bool, Option(help="Time TorchInductor at all.")] = True,
    pattern: Annotated[list[str] | None, Option(
        metavar="NAME", autocompletion=opt.known_patterns,
        help="patterns: this pattern; repeatable. Default: a set.",
    )] = None,
    shape: Annotated[list[str] | None, Option(
        metavar="32x4096", help="patterns: this shape of each --pattern; repeatable.",
    )] = None,
    rows: Annotated[str | None, Option(metavar="1,32", help="patterns: rows to sweep, instead of 1 to 16384.")] = None,
    cols: Annotated[str | None, Option(
        metavar="4096,8192", help="patterns: widths to sweep, instead of the pattern's.",
    )] = None,
    rivals: Annotated[str | None, Option(
        "--peers", metavar="A,B", help="patterns: eager, inductor, inductor-max-autotune, liger, flashinfer, "
        "triton-default, ninetoothed-default, cpp-default. Default: all that the device has.",
    )] = None,
    modes: Annotated[str | None, Option(
        metavar="eager,graph,cold", help="patterns: launched from Python, replayed from a CUDA graph, one call after "
        "the cache was overwritten. Default: all three, on CPUs eager.",
    )] = None,
    tune: Annotated[bool, Option(help="patterns: tune what is not stored before measuring it.")] = True,
    trials: Annotated[int, Option(
        parser=opt.whole(1), metavar="N", help="patterns: configurations tried per group when tuning.",
    )] = 12,
    tune_seconds: Annotated[float, Option(
        parser=opt.decimal(0.1), metavar="S", help="patterns: search time per group when tuning.",
    )] = 6.0,
    resume: Annotated[bool, Option(
        "--resume", help="patterns: keep the cells that the result file has, measure the others.",
    )] = False,
    out: Annotated[Path | None, Option(
        metavar="DIR", help="Where to write CSV, Markdown and JSON. Default: results/<device>.",
    )] = None,
    device: opt.DeviceOption = "auto",
    db: opt.DbOption = None,
) -> None:
    """Measure our plan beside its peers, on the same inputs in one run.

    Tune a model first: the cost model plans what is not stored, and the result says it. Patterns are tuned here. On
    CUDA everything is timed both launched from Python and replayed from a CUDA graph; patterns also with a cold cache.
    An interrupted bench keeps the cells and workloads that it has finished.
    """
    from fuseplan.costmodel.identity import current_identity
    from fuseplan.planner.api.request import plan_settings
    from fuseplan.planner.api.run import ready
    from fuseplan.planner.bench.patterns import PatternBench
    from fuseplan.planner.cli.bench import topics
    from fuseplan.planner.models.sources import DTYPES, find_source, workloads_for
    from fuseplan.planner.peers.contestant import INDUCTOR, MAX_AUTOTUNE, STANDARD_PEERS
    from fuseplan.planner.peers.peers import peer_names
    from fuseplan.planner.tuning.session import open_session
    from fuseplan.search.tune.tuner import Budget

    _check_options(context, topic)
    kind = device_kind(device)
    if regime is None:
        regime = "graph" if topic == "patterns" and is_gpu(kind) else "eager"
    settings = plan_settings(kind, given.numerics, regime)
    file = topics.results_folder(current_identity(kind).key(), out) / f"{topic}.csv"
    kept = {INDUCTOR: inductor, MAX_AUTOTUNE: inductor and max_autotune}
    without, spend = tuple(name for name in kept if not kept[name]), seconds or _SECONDS[topic]
    if topic == "patterns":
        cells = topics.cells_of(pattern or (), shape or (), rows, cols, DTYPES.get(given.dtype, given.dtype))
        peers, modes_of_all = peer_names(rivals, kind, without), topics.modes_of(modes, kind)
        check_writable(file, "--out")  # before anything is stored or measured
        session = open_session(kind, db, settings, mode="write" if tune else "inspect")
        session = ready(session, progress=current()) if tune else session
        topics.measure_patterns(
            PatternBench(session, peers, modes_of_all, spend), *cells,
            Budget(trials=trials, seconds=tune_seconds) if tune else None, resume, out)
        return
    session = open_session(kind, db, settings, mode="inspect")
    layers = given.layers or (_LAYERS if given.module is None else None)
    source = find_source(given.model, given.config, given.module, kind, given.dtype, layers)
    workloads = workloads_for(source, kind, given.decode, given.kv_len, given.prefill)
    standard = [name for name in STANDARD_PEERS if name not in without]
    check_writable(file, "--out")
    topics.measure_model(session, source, workloads, standard, spend, out)


def _check_options(context: Context, topic: str) -> None:
    """ConfigError where the command line has an option that the topic does not take: it is not passed over."""
    from fuseplan.planner.errors import ConfigError

    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if wrong := given & _NOT_OF[topic]:
        spelt = sorted(max(one.opts, key=len) for one in context.command.params if one.name in wrong)
        hint = "it measures named patterns" if topic == "patterns" else "`plan bench patterns` does"
        raise ConfigError(f"`plan bench {topic}` takes no {', '.join(spelt)}; {hint}")
