"""``plan tune``: capture, plan, measure what is not stored yet, and store it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from fuseplan.planner.cli import common
from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.device import warn_of_problems
from fuseplan.search.errors import plain
from fuseplan.search.tune.time_account import TimeAccount, process_age_s

if TYPE_CHECKING:
    from fuseplan.costmodel.probe.probe import MachineLoad
    from fuseplan.planner.graph.dataflow import DataflowGraph
    from fuseplan.planner.tuning.session import Session
    from fuseplan.planner.tuning.tune import TuneResult
    from fuseplan.search.store.record import PlanRecord
    from fuseplan.search.tune.tuner import Budget
    from fuseplan.search.workers.worker import WorkerPool


def tune(
    model: opt.ModelOption = None,
    config: opt.ConfigOption = None,
    module: opt.ModuleOption = None,
    pattern: opt.PatternOption = None,
    shape: opt.ShapeOption = None,
    decode: opt.DecodeOption = None,
    kv_len: opt.KvLenOption = None,
    prefill: opt.PrefillOption = None,
    dtype: opt.DtypeOption = None,
    layers: opt.LayersOption = None,
    calls: Annotated[
        bool,
        typer.Option(
            "--calls/--no-calls",
            help="Also plan what a call with an attention mask, and Hugging Face's generate(), make of these sizes.",
        ),
    ] = True,
    pack_weights: opt.PackWeightsOption = False,
    numerics: opt.NumericsOption = opt.Numerics.FP32,
    trials: Annotated[
        int | None,
        typer.Option(
            parser=common.whole(1), metavar="N",
            help="Configurations tried per group, over all back ends: 12 on CPUs, 8 on CUDA by default; two for a "
            "group that takes little of the model's time.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(parser=common.decimal(0.1), metavar="S", help="Search time per group, in seconds.")
    ] = 6.0,
    seed: Annotated[
        int, typer.Option(parser=common.whole(0, 2**32 - 1), metavar="N", help="Seed of the search and of the inputs.")
    ] = 0,
    shipped: Annotated[
        bool,
        typer.Option("--shipped/--no-shipped", help="Take the records that come with fuseplan for this device."),
    ] = True,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what is stored or shipped; the new answers replace it.")
    ] = False,
    study: Annotated[
        str | None,
        typer.Option(
            "--study", metavar="URL",
            help="Keep each search as an Optuna study, too: sqlite:///studies.db, another SQLAlchemy URL, or the path "
            "of a journal file. optuna-dashboard opens them.",
        ),
    ] = None,
    regime: opt.RegimeOption = opt.Regime.EAGER,
    device: common.DeviceOption = common.Device.AUTO,
    db: common.DbOption = None,
) -> None:
    """Plan a model's fusion, tune it on this device, and store the result.

    What is stored already is not measured again. Without options, tunes the llama preset. Ctrl-C loses nothing that
    was finished: the same command goes on. The last line says where the time went.
    """
    account = TimeAccount(process_age_s())
    with account.spend("starting"):
        from fuseplan.costmodel.probe.probe import machine_load
        from fuseplan.planner.tuning.planner import PlanSettings
        from fuseplan.planner.tuning.session import open_session
        from fuseplan.search.store.location import left_behind
        from fuseplan.search.store.record import now
        from fuseplan.search.tune.study import Studies
        from fuseplan.search.tune.tuner import Budget, make_pool

        kind = common.device_type(device)
    settings = PlanSettings(numerics=numerics.value, regime=opt.regime_name(kind, regime))

    what = opt.named(
        kind, (model, config, module), (pattern, shape), (decode, kv_len, prefill), dtype, layers, calls, pack_weights
    )
    studies = None if study is None else Studies(study)
    note = left_behind() if db is None else ""
    with ExitStack() as stack:
        pool = stack.enter_context(make_pool(kind))
        graphs: Iterable[tuple[str, DataflowGraph]]
        if kind == "cuda" and what.source is not None:  # captured by the host beside what is measured on the GPU
            graphs = stack.enter_context(opt.stream(what.source, what.workloads, kind, pack_weights))
        else:
            with account.spend("capturing"):
                graphs = what.graphs()
        session = open_session(kind, db, settings)
        if session.spec is None and kind == "cuda":  # hardly anything is stored: the workers will be needed
            pool.start()
        session = ready(session, account)
        if session.spec is not None:
            warn_of_problems(session.spec)
        if note:
            common.console(stderr=True).print(note, markup=False, soft_wrap=True)
        load = machine_load()
        session = replace(session, shipped=shipped, since=now() if again else "", studies=studies)
        result = run(session, what.label, graphs, Budget.on(kind, trials, seconds), seed, account, pool,
                     what.is_asked_for)
    with account.spend("reporting"):
        say(result, what.label, what.is_asked_for)
    typer.echo(account.line())
    if complain(result, load):
        raise typer.Exit(1)


def ready(session: Session, account: TimeAccount | None = None) -> Session:
    """The session with a measured device: the stored one, else probed now."""
    if session.spec is not None:
        return session
    account = account if account is not None else TimeAccount()
    with account.spend("probing"), common.console(stderr=True).status("probing") as status:
        return session.probed(
            progress=lambda fraction, step: status.update(f"probing this device once: {step}, {fraction:.0%}")
        )


def run(
    session: Session, name: str, graphs: Iterable[tuple[str, DataflowGraph]], budget: Budget, seed: int = 0,
    account: TimeAccount | None = None, executor: WorkerPool | None = None,
    times_step: Callable[[str], bool] | None = None,
) -> TuneResult:
    """Tune with a progress bar, and keep a summary of each workload for the reports.

    Whole steps are timed of the workloads that ``times_step`` says yes to.
    """
    from fuseplan.planner.cli.progress import TuneProgress
    from fuseplan.planner.tuning import summary
    from fuseplan.planner.tuning import tune as offline

    with TuneProgress() as progress:
        result = offline.tune(
            session, graphs, budget, seed, progress.on_region, progress.on_trial, account, executor, progress.on_graph,
            times_step,
        )
    for planned in result.plans:
        pairs = [(one.region, one.record) for one in planned.plan.regions]
        if pairs:
            found = summary.summarise(name, planned.workload, planned.graph, pairs)
            summary.store_summary(session.database, found)
    return result


def say(result: TuneResult, name: str, is_asked_for: Callable[[str], bool]) -> None:
    """The final table, what it took, and last the steps of the workloads that were asked for."""
    from fuseplan.planner.reports import frames, step_words
    from fuseplan.planner.tuning import recheck

    session = result.session
    if not result.distinct():
        return
    data = frames.load_report(replace(session, since="").store, session.device, session.spec, name)
    groups = frames.group_frame(data)
    shown = groups[groups["key"].isin(_tuned_groups([region.record for _, region in result.distinct()]))]
    measured = _tuned_groups(result.decided())
    shown = shown.assign(source=shown["source"].mask(shown["key"].isin(measured), "measured"))
    spare = ("config", "ops", "backend", "workload", "source", "place")
    common.print_frame(shown[_SHOWN], title=f"{name} on {session.device}", spare=spare)
    typer.echo(frames.headline(groups))
    common.print_text(outcome(result))
    noise = [record.unfused.noise for record in data.records.values() if record.key.workload in measured]
    if noise:
        typer.echo(f"noise of what was measured: {median(noise):.1%} in the median, {max(noise):.1%} at most")
    if result.rechecked:
        common.print_text(recheck.recheck_verdict(result.rechecked))
    typer.echo(f"stored in {session.database.where}")
    tuned = {one.workload for one in result.plans if is_asked_for(one.workload)}
    chosen = [one for one in data.workloads if one.workload in tuned and one.regime == session.settings.regime]
    for line in step_words.step_lines(replace(data, workloads=tuple(chosen))):
        common.print_text(line)


def complain(result: TuneResult, load: MachineLoad) -> bool:
    """Name what was not decided, or doubtfully; True when that is more than a region or some noise.

    ``load`` is how busy the machine was when it began.
    """
    from fuseplan.search.errors import NothingCompilesError

    for failure in result.failures:
        typer.echo(f"plan: warning: {plain(str(failure))}", err=True)
    if result.measured and load.busy:
        typer.echo(
            f"plan: warning: the machine was busy ({load}), so times are noisy; `plan tune --again` measures anew",
            err=True,
        )
    hidden = sum(plan.record.undecided for _, plan in result.distinct())
    if hidden:
        typer.echo(
            f"plan: warning: noise hides the answer in {hidden} regions: until a tune on a quieter machine they are "
            "planned by the cost model", err=True,
        )
    if any(isinstance(failure.error, NothingCompilesError) for failure in result.failures):
        why = "nothing compiles here"
    elif result.failures and not result.distinct():
        why = "no region could be planned"
    else:
        return False
    typer.echo(f"plan: error: {why}; nothing of that is stored, and the same command tries again", err=True)
    return True


_SHOWN = [
    "workload", "group", "place", "ops", "answer", "backend", "config", "fused_us", "unfused_us", "speedup", "source",
]


def _tuned_groups(records: Sequence[PlanRecord]) -> set[str]:
    """Keys of the tuning records that plans rest on."""
    groups = [one.workload for record in records for one in record.groups]
    return {*groups, *(one.workload for record in records for one in record.rejected)} - {""}


def outcome(result: TuneResult) -> str:
    """What was measured, in one sentence."""
    distinct = result.distinct()
    tuned = sum(region.source == "tuned" for _, region in distinct)
    shipped = sum(region.shipped for _, region in distinct)
    stored = len(distinct) - tuned - shipped
    if not tuned:
        came = "came from the database"
        if shipped:
            came = f"come with fuseplan ({shipped}) or from the database ({stored})"
        return f"nothing was measured: all {len(distinct)} distinct regions {came} ({result.elapsed_s:.1f} s)"
    known = f"{stored} regions were stored already" + (f", {shipped} come with fuseplan" if shipped else "")
    return (
        f"measured {result.measured} of {result.enumerated} candidates in {tuned} regions "
        f"({known}); tuning took {result.elapsed_s:.1f} s"
    )
