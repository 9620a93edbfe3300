"""Options and helpers that every ``plan`` command shares. Imports nothing heavy, so that ``--help`` is quick."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from fuseplan.search.errors import plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from fuseplan.search.store.database import Database


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


DbOption = Annotated[str | None, typer.Option(
    "--db", metavar="URL",
    help="Tuning database: a file path or a SQLAlchemy URL. Default: tuning.db in your user data folder.",
)]
DeviceOption = Annotated[
    Device, typer.Option("--device", help="Device to use; auto takes CUDA where PyTorch sees a GPU, else the CPU.")
]

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


def device_type(device: Device) -> Literal["cpu", "cuda"]:
    """``"cpu"`` or ``"cuda"``, with ``auto`` resolved; DeviceError where PyTorch sees no GPU that is asked for."""
    from fuseplan.planner.api.device import device_kind

    return device_kind(device.value)


def open_database(url: str | None, write: bool = True) -> Database:
    """The tuning database. One that cannot be used is an error."""
    from fuseplan.search.store.database import Database

    return Database(url, mode="write" if write else "inspect")


def console(stderr: bool = False) -> Console:
    """A rich console; wide when the output is not a terminal, so that piped tables keep their columns."""
    from rich.console import Console

    screen = Console(stderr=stderr, highlight=False)
    return screen if screen.is_terminal else Console(stderr=stderr, highlight=False, width=220)


#: Characters of a text column before it wraps.
_WIDEST = 44


def print_frame(frame: pd.DataFrame, title: str = "", digits: int = 2, spare: Sequence[str] = ()) -> None:
    """Print a frame as a table: text to the left, numbers to the right, floats with ``digits`` decimals.

    The columns ``spare`` are left out, in this order, until the table fits the terminal.
    """
    import pandas as pd
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console()
    texts = {str(name): [_cell_text(value, digits) for value in frame[name]] for name in frame.columns}
    widths = {name: min(_WIDEST, max(map(len, [name, *cells]))) for name, cells in texts.items()}
    for name in spare:
        if sum(widths.values()) + 3 * len(widths) <= screen.width:
            break
        widths.pop(name, None)
    heading = Text(plain(title)) if title else None
    table = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in widths:
        is_number = pd.api.types.is_numeric_dtype(frame[name])
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for row in zip(*(texts[name] for name in widths), strict=True):
        table.add_row(*map(Text, row))
    screen.print(table)


def _cell_text(value: object, digits: int) -> str:
    """Numbers at ``digits`` decimals, nothing for a missing value, text without what a terminal obeys."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return f"{value:,.{digits}f}" if isinstance(value, float) else plain(str(value))


def print_text(text: str) -> None:
    """Print lines that may hold stored text, without what a terminal obeys."""
    typer.echo("\n".join(map(plain, text.split("\n"))))


def write_text(path: Path, text: str) -> None:
    """Write a file, making its folder; an unwritable one is an :class:`OSError` that names it."""
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
