"""Options and helpers that every ``plan`` command shares. Imports nothing heavy, so that ``--help`` is quick."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fuseplan.costmodel.devices import Kind
from fuseplan.planner.cli.output.options import current
from fuseplan.planner.cli.output.screen import Status
from fuseplan.planner.reports.document import Shown, Table, table_of

if TYPE_CHECKING:
    import pandas as pd

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


def device_type(device: Device) -> Kind:
    """``"cpu"`` or ``"cuda"``, with ``auto`` resolved; DeviceError where PyTorch sees no GPU that is asked for."""
    from fuseplan.planner.api.device import device_kind

    return device_kind(device.value)


def open_database(url: str | None, write: bool = True) -> Database:
    """The tuning database. One that cannot be used is an error."""
    from fuseplan.search.store.database import Database

    return Database(url, mode="write" if write else "inspect")


def print_frame(
    frame: pd.DataFrame, title: str = "", digits: int = 2, spare: Sequence[str] = (), keep: Sequence[str] = (),
    name: str = "", shown: Shown = "always",
) -> None:
    """A frame as a table of the answer (:class:`~fuseplan.planner.reports.document.Table` says what it takes)."""
    current().add(table_of(frame, name or "table", title, digits, spare, keep, shown))


def print_rows(
    name: str, columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", spare: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> None:
    """The same of rows that are in no frame."""
    current().add(Table(name, tuple(columns), tuple(map(tuple, rows)), title, spare=tuple(spare), keep=tuple(keep)))


def print_text(text: str) -> None:
    """Lines of the answer, which may hold stored text: without what a terminal obeys."""
    current().tell(text)


def print_line(line: str) -> None:
    """A line of the answer that a terminal shows without its middle where it is too long."""
    current().tell(line, one_line=True)


def say(line: str) -> None:
    """What is not the answer: where it is stored, what was written. Not with ``--quiet``."""
    current().say(line)


def status(text: str) -> AbstractContextManager[Status]:
    """What takes long, for the standard error; its ``update`` takes what is done now."""
    return current().status(text)
