"""``plan tune``: capture, plan, measure what is not stored yet, and store it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuseplan.costmodel.devices import Kind
from fuseplan.planner.cli import common
from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.output.options import answers
from fuseplan.search import policy
from fuseplan.search.errors import plain
from fuseplan.search.tune.time_account import TimeAccount, process_age_s

if TYPE_CHECKING:
    from fuseplan.planner.api.job import HowToTune
    from fuseplan.planner.api.many import TunedMany
    from fuseplan.planner.api.tune import Tuned


@answers("the groups, or with --misses what was tuned, or with --manifest the models")
def tune(
    context: typer.Context,
    model: opt.ModelOption = None,
    config: opt.ConfigOption = None,
    module: opt.ModuleOption = None,
    manifest: Annotated[
        Path | None,
        typer.Option("--manifest", metavar="FILE", help="Models that are tuned together: a TOML file."),
    ] = None,
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
    job_limit: Annotated[
        float | None,
        typer.Option(
            "--job-limit", parser=common.decimal(policy.LEAST_JOB_LIMIT_S), metavar="SECONDS",
            help="After how long a call of a kernel or an op counts as hanging: 60 seconds by default, and what a call "
            "of its size should take.",
        ),
    ] = None,
    misses: Annotated[
        bool,
        typer.Option("--misses", help="Tune what torch.compile looked up in vain in this database, without a model."),
    ] = False,
    most: Annotated[
        int,
        typer.Option(
            parser=common.whole(1), metavar="N", help="Regions that --misses tunes, those missed most often first."),
    ] = 16,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", metavar="URL|local",
            help="Who measures: `local` are workers for the GPUs of this host, tcp://HOST:8786 are those of a Dask "
            "scheduler (tls://HOST:8786 with a key); see `plan fleet`.",
        ),
    ] = None,
    tls_ca: opt.TlsCaOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    regime: Annotated[opt.Regime | None, typer.Option(
        help="eager: launched from Python; the default. graph: replayed from a CUDA graph (CUDA only). With --misses: "
        "only what was missed so.",
    )] = None,
    device: common.DeviceOption = common.Device.AUTO,
    db: common.DbOption = None,
) -> None:
    """Plan a model's fusion, tune it on this device, and store the result.

    What is stored already is not measured again. Without options, tunes the llama preset. Ctrl-C loses nothing that
    was finished: the same command goes on. Last come whole steps, unfused and as planned.
    """
    account = TimeAccount(process_age_s())
    with account.spend("starting"):
        from fuseplan.planner.api.asked import plan_settings
        from fuseplan.planner.api.job import HowToTune
        from fuseplan.planner.api.tune import tune_asked
        from fuseplan.planner.errors import ConfigError
        from fuseplan.planner.reports.step_words import step_lines

        opt.use_tls(context, workers, tls_ca, tls_cert, tls_key)
        kind = common.device_type(device) if workers is None else opt.fleet_kind(workers, device.value)
    how = HowToTune(trials, seconds, seed, shipped, again, study, job_limit)
    if misses and workers is not None:
        raise ConfigError("--misses tunes on this device; leave out --workers")
    given = (model, config, module, pattern, shape, decode, kv_len, prefill, dtype, layers)
    has_model = any(one is not None for one in given)
    if manifest is not None:
        changed = (not calls, pack_weights, numerics is not opt.Numerics.FP32, regime is not None)
        tune_manifest(manifest, kind, db, how, account, has_model or misses or any(changed), workers)
        return
    if misses:
        tune_misses(kind, db, most, how, account, has_model, regime)
        return
    what = opt.named(
        kind, (model, config, module), (pattern, shape), (decode, kv_len, prefill), dtype, layers, calls, pack_weights
    )
    settings = plan_settings(kind, numerics.value, (regime or opt.Regime.EAGER).value)
    if workers is None:
        found = [tune_asked(what, settings, db, how, opt.Terminal(), account)]
    else:
        from fuseplan.planner.fleet.asking import tune_by_fleet

        found = tune_by_fleet(what, settings, workers, db, how, opt.Terminal(), account)
    for one in found:
        title = f"{one.label} on {one.data.device}"
        common.print_frame(one.groups, title, name="groups", shown="talk", spare=_SPARE, keep=_ANSWER)
        common.print_frame(one.steps, "Steps", name="steps", shown="files")
        for line in one.course():
            common.say(line)
    common.say(account.line())
    for one in found:
        for line in step_lines(one.data):
            common.print_line(line)
    complain_of(found)


def tune_misses(
    kind: Kind, db: str | None, most: int, how: HowToTune, account: TimeAccount, has_model: bool,
    regime: opt.Regime | None,
) -> None:
    """Tune what dispatch logged, and say what that was and what remains."""
    from fuseplan.planner.api import misses
    from fuseplan.planner.errors import ConfigError

    if has_model:
        raise ConfigError("--misses tunes what was missed; a model's options do not go with it")
    found = misses.tune_misses(kind, db, most, how, opt.Terminal(), account, regime.value if regime else None)
    for title, frame in (("Tuned", found.regions), ("What remains", found.left)):
        if len(frame):
            common.print_frame(frame, title, name="_".join(title.lower().split()), spare=_SPARE_OF_MISSES,
                               keep=("label", "count", "saved_us"))
    for line in found.lines():
        common.print_text(line)
    common.say(account.line())
    complain(found.warnings, found.failure)


def tune_manifest(
    path: Path, kind: Kind, db: str | None, how: HowToTune, account: TimeAccount, has_more: bool,
    workers: str | None,
) -> None:
    """Tune the models of a manifest together, and say what each of them cost."""
    import pandas as pd

    from fuseplan.planner.api import many
    from fuseplan.planner.errors import ConfigError

    if has_more:
        raise ConfigError("--manifest names models with all that belongs to them; leave out the options of a model")
    if workers is None:
        answers = [many.tune_manifest(path, kind, db, how, opt.Terminal(), account)]
    else:
        from fuseplan.planner.fleet.many import tune_manifest_by_fleet

        answers = tune_manifest_by_fleet(path, kind, workers, db, how, opt.Terminal(), account)
    for found in answers:
        common.print_frame(found.models, f"{found.title} on {found.data.device}", name="models", spare=_SPARE_OF_MODELS,
                           keep=_ANSWER_OF_MODELS)
        common.print_frame(pd.DataFrame([found.totals]), "Totals", name="totals", shown="files")
        common.print_frame(found.steps, "Steps", name="steps", shown="files")
        common.print_frame(found.regions, "Regions", name="regions", shown="files")
        for line in found.lines():
            common.say(line)
    common.say(account.line())
    for found in answers:
        for line in found.step_lines():
            common.print_line(line)
    complain_of(answers)


def complain_of(answers: Sequence[Tuned | TunedMany]) -> None:
    """:func:`complain` of what came of a tune on each device."""
    failures = dict.fromkeys(one.failure for one in answers if one.failure)
    complain([text for one in answers for text in one.warnings], "; ".join(failures))


def complain(warnings: Sequence[str], failure: str) -> None:
    """Name what was not decided, or doubtfully; exit status 1 where that is more than a region or some noise."""
    for text in warnings:
        typer.echo(f"plan: warning: {plain(text)}", err=True)
    if failure:
        typer.echo(f"plan: error: {failure}", err=True)
        raise typer.Exit(1)


#: Of the groups, what a narrow terminal leaves out, in this order; and what it keeps.
_SPARE = ("key", "doubt", "regime", "enumerated_configs", "measured_configs", "noise", "lower_bound_us", "predicted_us",
          "config", "ops", "backend", "times", "source", "answer", "fused_us", "unfused_us", "place")
_ANSWER = ("workload", "group", "speedup")
_SPARE_OF_MISSES = ("key", "numerics", "first_seen", "regime", "last_seen", "place")
_SPARE_OF_MODELS = ("numerics", "dtype", "regime", "capture_s", "workloads", "failed", "unfused_us", "planned_us",
                    "step", "outcome", "stored")
_ANSWER_OF_MODELS = ("model", "regions", "shared", "measured", "tune_s", "saved_us")
