"""Options that name a model and its workloads, and what is shown meanwhile; shared by tune, explain and bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuseplan.planner.cli import completion
from fuseplan.planner.cli.common import whole
from fuseplan.planner.cli.output.options import current
from fuseplan.search.errors import plain

if TYPE_CHECKING:
    from fuseplan.costmodel.devices import Kind
    from fuseplan.planner.api.tune import Runner
    from fuseplan.planner.tuning.progress import TuneEvents


class NumericsChoice(StrEnum):
    """How intermediates inside a kernel are rounded."""

    FP32 = "fp32"
    EAGER = "eager"


class RegimeChoice(StrEnum):
    """How kernels are launched."""

    EAGER = "eager"
    GRAPH = "graph"


ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", autocompletion=completion.models,
                 help="A preset: llama, llama-3.2-1b, llama-3.1-8b, llama-3.1-70b."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A local Hugging Face config.json (weights are random).")
]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        "--module", metavar="PKG.MOD:FACTORY",
        help="Your own: FACTORY() returns (nn.Module, example inputs). Runs that code.",
    ),
]
PatternOption = Annotated[
    str | None,
    typer.Option("--pattern", metavar="NAME", autocompletion=completion.patterns,
                 help="A pattern such as swiglu, with --shape; see `plan patterns`."),
]
ShapeOption = Annotated[
    str | None, typer.Option("--shape", metavar="32x4096", help="Shape of the pattern's activations.")
]
DecodeOption = Annotated[
    str | None, typer.Option("--decode", metavar="1,8", help="Decode batch sizes: one new token per sequence.")
]
KvLenOption = Annotated[
    int | None,
    typer.Option("--kv-len", parser=whole(2), metavar="N", help="Length of the static KV cache in decode."),
]
PrefillOption = Annotated[
    str | None, typer.Option("--prefill", metavar="128,4x512", help="Prefill sizes: sequence, or batch x sequence.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="bfloat16, float16 or float32 (a --module's inputs too); by default the model's own."),
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", parser=whole(1), metavar="N", help="Keep only the first N layers.")
]
RegimeOption = Annotated[
    RegimeChoice,
    typer.Option("--regime", help="eager: launched from Python. graph: replayed from a CUDA graph (CUDA only)."),
]
PackWeightsOption = Annotated[
    bool,
    typer.Option(
        "--pack-weights",
        help="Linear ops that read one value (Q, K and V; gate and up) are one op, as with the option pack_weights.",
    ),
]
NumericsOption = Annotated[
    NumericsChoice,
    typer.Option("--numerics", help="fp32 keeps a kernel's intermediates in fp32; eager rounds where PyTorch does."),
]
TlsCaOption = Annotated[Path | None, typer.Option(
    "--tls-ca", metavar="FILE", help="For a tls:// scheduler: the certificate that signs those of the fleet (PEM).")]
TlsCertOption = Annotated[Path | None, typer.Option(
    "--tls-cert", metavar="FILE", help="For a tls:// scheduler: the certificate of this side (PEM).")]
TlsKeyOption = Annotated[Path | None, typer.Option(
    "--tls-key", metavar="FILE", help="For a tls:// scheduler: the private key of --tls-cert, if that has it not.")]


def fleet_kind(workers: str, device: str) -> Kind:
    """The type of device that ``--workers`` tune for; :class:`ConfigError` where Dask is not installed."""
    from fuseplan.planner.fleet.terms import needs_dask

    needs_dask()
    from fuseplan.planner.fleet.asking import fleet_kind as kind_of

    return kind_of(workers, device)


def runner(workers: str | None) -> Runner:
    """The runner: this process, or the workers of ``--workers``."""
    if workers is None:
        from fuseplan.planner.api.tune import run_here

        return run_here
    from fuseplan.planner.fleet.run import run_by

    return run_by(workers)


def use_tls(context: typer.Context, workers: str | None, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Use these files for all that a command asks of a fleet.

    Raises:
        ConfigError: Dask is not installed, a file cannot be used, or there is no scheduler to use them with.
    """
    if ca is cert is key is None:
        return
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.fleet.terms import needs_dask

    needs_dask()
    from fuseplan.planner.fleet.cluster import LOCAL
    from fuseplan.planner.fleet.security import tls_files

    if workers in (None, LOCAL):
        raise ConfigError("--tls-ca, --tls-cert and --tls-key go with the tls:// address of a scheduler; "
                          "--workers local has a key of its own")
    context.with_resource(tls_files(ca, cert, key))


class Terminal:
    """Shows on the standard error what a job is doing (:class:`~fuseplan.planner.tuning.progress.Progress`)."""

    @contextmanager
    def status(self, what: str) -> Iterator[Callable[[str], None]]:
        with current().status(what) as status:
            yield status.update

    def tuning(self) -> AbstractContextManager[TuneEvents]:
        from fuseplan.planner.cli.progress import tune_progress

        return tune_progress()

    def note(self, text: str) -> None:
        if not current().quiet:
            typer.echo(plain(text), err=True)

    def warn(self, text: str) -> None:
        typer.echo(f"plan: warning: {plain(text)}", err=True)
