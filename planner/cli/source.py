"""Options that several commands share, each declared once with what completes it; `plan completion` itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import typer
from typer import Option

from fuseplan.costmodel.devices import Kind

N = TypeVar("N", int, float)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell to complete in.")]
) -> None:
    """Print the script that completes commands, options and their values in a shell.

    bash: eval "$(plan completion bash)" in ~/.bashrc. zsh: eval "$(plan completion zsh)" in ~/.zshrc, after compinit.
    fish: plan completion fish > ~/.config/fish/completions/plan.fish.
    """
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="plan", complete_var="_PLAN_COMPLETE", shell=shell))


def known_models(incomplete: str) -> list[str]:
    """Presets that begin so."""
    from fuseplan.planner.models.sources import ALIASES, PRESETS

    return [name for name in (*ALIASES, *PRESETS) if name.startswith(incomplete)]


def known_patterns(incomplete: str) -> list[str]:
    """Named patterns that begin so."""
    from fuseplan.planner.patterns.listing import LISTING

    return [name for name in LISTING if name.startswith(incomplete)]


def known_devices(incomplete: str) -> list[str]:
    """What ``plan report --device`` takes without a look into a database."""
    from fuseplan.planner.api.device import DEVICES
    from fuseplan.search.store.layered import shipped_devices

    return [name for name in (*DEVICES, *shipped_devices()) if name.startswith(incomplete)]


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str | int], int]:
    """What reads an option's whole number: plain digits, from ``least`` to ``most``."""
    return _reader(int, r"-?[0-9]{1,19}", "a whole number", least, most)


def decimal(least: float, most: float = 1e6) -> Callable[[str | float], float]:
    """What reads an option's number: plain digits, with a point or an exponent, from ``least`` to ``most``."""
    return _reader(float, r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", "a number", least, most)


def _reader(kind: type[N], form: str, what: str, least: N, most: N) -> Callable[[object], N]:
    def read(given: object) -> N:
        if not re.fullmatch(form, str(given)):
            text = repr(given)
            shown = text if len(text) <= 40 else f"{text[:37]}..."
            raise typer.BadParameter(f"{shown} is not {what}, from {least} to {most}")
        number = kind(str(given))
        if not least <= number <= most:
            raise typer.BadParameter(f"{number} is not in the range from {least} to {most}")
        return number

    return read


Device: TypeAlias = Literal["auto", Kind]
DbOption: TypeAlias = Annotated[str | None, Option(
    "--db", metavar="URL",
    help="Tuning database: a file path or a SQLAlchemy URL. Default: tuning.db in your user data folder.",
)]
DeviceOption: TypeAlias = Annotated[Device, Option(
    help="Device to use; auto takes CUDA where PyTorch sees a GPU, else the CPU.")]
RegimeChoice: TypeAlias = Literal["eager", "graph"]
ManifestOption: TypeAlias = Annotated[Path | None, Option(
    "--manifest", metavar="FILE", help="Models that are tuned together: a TOML file.")]
#: The files of a ``tls://`` scheduler: the certificate that signs, that of this side, and its private key.
TlsFiles: TypeAlias = tuple[Path | None, Path | None, Path | None]
NO_TLS: TlsFiles = (None, None, None)

#: What names a model and its workloads, by field of :class:`~fuseplan.planner.models.manifest.ModelArguments`.
MODEL: Mapping[str, Any] = {
    "model": Annotated[str | None, Option(
        metavar="NAME", autocompletion=known_models,
        help="A preset: llama, llama-3.2-1b, llama-3.1-8b, llama-3.1-70b.")],
    "config": Annotated[Path | None, Option(
        metavar="FILE", help="A local Hugging Face config.json (weights are random).")],
    "module": Annotated[str | None, Option(
        metavar="PKG.MOD:FACTORY", help="Your own: FACTORY() returns (nn.Module, example inputs). Runs that code.")],
    "pattern": Annotated[str | None, Option(
        metavar="NAME", autocompletion=known_patterns,
        help="A pattern such as swiglu, with --shape; see `plan patterns`.")],
    "shape": Annotated[str | None, Option(metavar="32x4096", help="Shape of the pattern's activations.")],
    "decode": Annotated[str | None, Option(
        metavar="1,8", help="Decode batch sizes: one new token per sequence.")],
    "kv_len": Annotated[int | None, Option(
        parser=whole(2), metavar="N", help="Length of the static KV cache in decode.")],
    "prefill": Annotated[str | None, Option(
        metavar="128,4x512", help="Prefill sizes: sequence, or batch x sequence.")],
    "dtype": Annotated[str | None, Option(
        help="bfloat16, float16 or float32 (a --module's inputs too); by default the model's own.")],
    "layers": Annotated[int | None, Option(parser=whole(1), metavar="N", help="Keep only the first N layers.")],
    "calls": Annotated[bool, Option(
        "--calls/--no-calls",
        help="Also calls of these sizes with an attention mask, position ids or embeddings, the last logits alone, and "
             "Hugging Face's generate().")],
    "pack_weights": Annotated[bool, Option(
        "--pack-weights",
        help="Linear ops that read one value (Q, K and V; gate and up) are one op, as with the option pack_weights.")],
    "numerics": Annotated[Literal["fp32", "eager"], Option(
        help="fp32 keeps a kernel's intermediates in fp32; eager rounds where PyTorch does.")],
    "regime": Annotated[RegimeChoice | None, Option(
        help="eager: launched from Python; the default. graph: replayed from a CUDA graph (CUDA only).")],
}
TLS: Mapping[str, Any] = {
    "tls_ca": Annotated[Path | None, Option(
        metavar="FILE", help="For a tls:// scheduler: the certificate that signs those of the fleet (PEM).")],
    "tls_cert": Annotated[Path | None, Option(
        metavar="FILE", help="For a tls:// scheduler: the certificate of this side (PEM).")],
    "tls_key": Annotated[Path | None, Option(
        metavar="FILE", help="For a tls:// scheduler: the private key of --tls-cert, if that has it not.")],
}


def fleet_kind(workers: str, device: str) -> Kind:
    """The type of device that ``--workers`` tune for; :class:`ConfigError` where Dask is not installed."""
    from fuseplan.planner.fleet.terms import needs_dask

    needs_dask()
    from fuseplan.planner.fleet.run import fleet_kind as kind_of

    return kind_of(workers, device)


def use_tls(context: typer.Context, workers: str | None, files: TlsFiles) -> None:
    """Use these files for all that a command asks of a fleet; ConfigError where they, or Dask, cannot be used."""
    if not any(files):
        return
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.fleet.terms import needs_dask

    needs_dask()
    from fuseplan.planner.fleet.cluster import LOCAL
    from fuseplan.planner.fleet.security import tls_files

    if workers in (None, LOCAL):
        raise ConfigError("--tls-ca, --tls-cert and --tls-key go with the tls:// address of a scheduler; "
                          "--workers local has a key of its own")
    context.with_resource(tls_files(*files))
