"""``plan tune``: capture, plan, measure what is not stored yet, and store it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuseplan.planner.cli import common
from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.output.options import answers
from fuseplan.search import policy
from fuseplan.search.errors import plain
from fuseplan.search.tune.time_account import TimeAccount, process_age_s

if TYPE_CHECKING:
    from fuseplan.planner.api.many import TunedMany
    from fuseplan.planner.api.misses import TunedMisses
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
    numerics: opt.NumericsOption = opt.NumericsChoice.FP32,
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
    regime: Annotated[opt.RegimeChoice | None, typer.Option(
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
        from fuseplan.planner.api.request import HowToTune, TuneRequest
        from fuseplan.planner.api.tune import tune_request
        from fuseplan.planner.errors import ConfigError
        from fuseplan.planner.models.manifest import ModelArguments

        opt.use_tls(context, workers, tls_ca, tls_cert, tls_key)
        kind = common.device_type(device) if workers is None else opt.fleet_kind(workers, device.value)
    if misses and workers is not None:
        raise ConfigError("--misses tunes on this device; leave out --workers")
    given = ModelArguments(
        model, config, module, pattern=pattern, shape=shape, decode=decode, kv_len=kv_len, prefill=prefill, dtype=dtype,
        layers=layers, pack_weights=pack_weights, calls=calls, regime=regime and regime.value, numerics=numerics.value)
    how = HowToTune(trials, seconds, seed, shipped, again, study, job_limit)
    request = TuneRequest(kind, given, manifest, misses, most, how, db)
    found = tune_request(request, opt.Terminal(), account, opt.runner(workers))
    for one in found:
        _print_tables(one)
        for line in one.course():
            (common.print_text if misses else common.say)(line)
    common.say(account.line())
    for one in found:
        for line in one.step_lines():
            common.print_line(line)
    for text in (text for one in found for text in one.warnings):
        typer.echo(f"plan: warning: {plain(text)}", err=True)
    if failures := dict.fromkeys(one.failure for one in found if one.failure):  # more than a region or some noise
        typer.echo(f"plan: error: {'; '.join(failures)}", err=True)
        raise typer.Exit(1)


def _print_tables(found: Tuned | TunedMany | TunedMisses) -> None:
    from fuseplan.planner.api.many import TunedMany
    from fuseplan.planner.api.misses import TunedMisses
    from fuseplan.planner.reports.contents import GROUP_SPARE

    if isinstance(found, TunedMisses):
        for title, frame in (("Tuned", found.regions), ("What remains", found.left)):
            if len(frame):
                common.print_frame(
                    frame, title, name="_".join(title.lower().split()), keep=("label", "count", "saved_us"),
                    spare=("key", "numerics", "first_seen", "regime", "last_seen", "place"))
        return
    if isinstance(found, TunedMany):
        common.print_frame(found.models, f"{found.title} on {found.data.device}", name="models", keep=(
            "model", "regions", "shared", "measured", "tune_s", "saved_us"), spare=(
            "numerics", "dtype", "regime", "capture_s", "workloads", "failed", "unfused_us", "planned_us", "step",
            "outcome", "stored"))
        more = {"Totals": found.total_frame, "Steps": found.steps, "Regions": found.regions}
    else:
        title = f"{found.label} on {found.data.device}"
        common.print_frame(found.groups, title, name="groups", shown="talk", spare=GROUP_SPARE,
                           keep=("workload", "group", "speedup"))
        more = {"Steps": found.steps}
    for title, frame in more.items():
        common.print_frame(frame, title, name=title.lower(), shown="files")
