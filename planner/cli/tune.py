"""``plan tune``: capture, plan, measure what is not stored yet, and store it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer
from typer import Option

from fuseplan.planner.api.device import device_kind
from fuseplan.planner.capture.aside import CAPTURERS
from fuseplan.planner.cli import source as opt
from fuseplan.planner.cli.output.options import answers, current
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.search import policy
from fuseplan.search.tune.time_account import TimeAccount, process_age_s


def _expect_captures(given: Mapping[str, Any]) -> None:
    """Have processes import what capturing needs, where this tune captures a model of a config here."""
    model: ModelArguments = given["given"]
    if not given["misses"] and given["workers"] is None and model.module is None and model.pattern is None:
        CAPTURERS.expect()


@answers("the groups, or with --misses what was tuned, or with --manifest the models", beside=_expect_captures)
def tune(
    context: typer.Context,
    given: ModelArguments,
    manifest: opt.ManifestOption = None,
    trials: Annotated[int | None, Option(
        parser=opt.whole(1), metavar="N", help="Configurations tried per group, over all back ends: 12 on CPUs, 8 "
        "on CUDA by default; two for a group that takes little of the model's time.",
    )] = None,
    seconds: Annotated[float, Option(
        parser=opt.decimal(0.1), metavar="S", help="Search time per group, in seconds.",
    )] = 6.0,
    seed: Annotated[int, Option(
        parser=opt.whole(0, 2**32 - 1), metavar="N", help="Seed of the search and of the inputs.",
    )] = 0,
    shipped: Annotated[bool, Option(help="Take the records that come with fuseplan for this device.")] = True,
    again: Annotated[bool, Option(
        "--again", help="Measure anew what is stored or shipped; the new answers replace it.",
    )] = False,
    study: Annotated[str | None, Option(
        metavar="URL", help="Keep each search as an Optuna study, too: sqlite:///studies.db, another SQLAlchemy URL, "
        "or the path of a journal file. optuna-dashboard opens them.",
    )] = None,
    job_limit: Annotated[float | None, Option(
        parser=opt.decimal(policy.LEAST_JOB_LIMIT_S), metavar="SECONDS", help="After how long a call of a kernel "
        "or an op counts as hanging: 60 seconds by default, and what a call of its size should take.",
    )] = None,
    inductor: Annotated[Literal["default", "max-autotune", "off"], Option(
        help="Which code TorchInductor is asked for, too, and taken where it is faster: of regions that leave much to "
        "PyTorch's ops, and of whole steps. That of max-autotune takes minutes to compile; off asks for none.",
    )] = "default",
    misses: Annotated[bool, Option(
        "--misses", help="Tune the regions that this database lists as missed, without a model; with --regime only "
        "those missed in that regime.",
    )] = False,
    most: Annotated[int | None, Option(
        parser=opt.whole(1), metavar="N", help="Regions that --misses tunes, those missed most often first: 16 by "
        "default.",
    )] = None,
    workers: Annotated[str | None, Option(
        metavar="URL|local", help="Who measures: `local` are workers for the GPUs of this host, tcp://HOST:8786 are "
        "those of a Dask scheduler (tls://HOST:8786 with a key); see `plan fleet`.",
    )] = None,
    tls: opt.TlsFiles = opt.NO_TLS,
    device: opt.DeviceOption = "auto",
    db: opt.DbOption = None,
) -> None:
    """Plan a model's fusion, tune it on this device, and store the result.

    What is stored already is not measured again. Without options, tunes the llama preset. Ctrl-C loses nothing that
    was finished: the same command goes on. Ends with step time before and after, and torch.compile's.
    """
    account = TimeAccount(process_age_s())
    with account.spend("starting"):
        from fuseplan.planner.api.request import HowToTune, TuneRequest
        from fuseplan.planner.api.run import Runner, run_here
        from fuseplan.planner.api.tune import tune_request
        from fuseplan.planner.errors import ConfigError

        opt.use_tls(context, workers, tls)
        kind = device_kind(device) if workers is None else opt.fleet_kind(workers, device)
    if misses and workers is not None:
        raise ConfigError("--misses tunes on this device; leave out --workers")
    how = HowToTune(trials, seconds, seed, shipped, again, study, job_limit, inductor)
    screen = current()
    runner: Runner = run_here
    if workers is not None:
        from fuseplan.planner.fleet.run import run_by

        runner = run_by(workers)
    found = tune_request(TuneRequest(kind, given, manifest, misses, most, how, db), screen, account, runner)
    for one in found:
        for table in one.tables():
            screen.add(table)
        for line in one.course():
            (screen.tell if misses else screen.say)(line)
    screen.say(account.line())
    for line in (line for one in found for line in one.step_lines()):
        screen.tell(line, one_line=line.startswith(" "))  # what answers is shown whole
    for text in (text for one in found for text in one.warnings):
        screen.warn(text)
    if failures := dict.fromkeys(one.failure for one in found if one.failure):  # more than a region or some noise
        typer.echo(f"plan: error: {'; '.join(failures)}", err=True)
        raise typer.Exit(1)
