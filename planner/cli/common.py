"""Options and readers of options that every ``plan`` command shares. Imports nothing heavy: ``--help`` is quick."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias, TypeVar

import typer

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
DbOption: TypeAlias = Annotated[str | None, typer.Option(
    "--db", metavar="URL",
    help="Tuning database: a file path or a SQLAlchemy URL. Default: tuning.db in your user data folder.",
)]
DeviceOption: TypeAlias = Annotated[Device, typer.Option(
    help="Device to use; auto takes CUDA where PyTorch sees a GPU, else the CPU.")]

N = TypeVar("N", int, float)


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
