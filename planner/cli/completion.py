"""``plan completion``: what a shell needs to complete the command line, and what some options can be."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer import Argument


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Argument(help="The shell to complete in.")]) -> None:
    """Print the script that completes commands, options and their values in a shell.

    bash: eval "$(plan completion bash)" in ~/.bashrc. zsh: eval "$(plan completion zsh)" in ~/.zshrc, after compinit.
    fish: plan completion fish > ~/.config/fish/completions/plan.fish.
    """
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="plan", complete_var="_PLAN_COMPLETE", shell=shell))


def models(incomplete: str) -> list[str]:
    """Presets that begin so."""
    from fuseplan.planner.models.sources import ALIASES, PRESETS

    return [name for name in (*ALIASES, *PRESETS) if name.startswith(incomplete)]


def patterns(incomplete: str) -> list[str]:
    """Named patterns that begin so."""
    from fuseplan.planner.patterns.listing import LISTING

    return [name for name in LISTING if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """What ``plan report --device`` takes without a look into a database."""
    from fuseplan.planner.api.device import DEVICES
    from fuseplan.search.store.layered import shipped_devices

    return [name for name in (*DEVICES, *shipped_devices()) if name.startswith(incomplete)]
