"""An answer as one document: tables, facts and sentences, and its text for a pipe or a file, as Markdown, CSV and JSON.

Imports nothing heavy. Terminals and pages have renderers of their own.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fuseplan.search.errors import plain

if TYPE_CHECKING:
    import pandas as pd

#: Where a part is shown: everywhere, not with ``--quiet`` in the terminal, or in files alone.
Shown = Literal["always", "talk", "files"]


@dataclass(frozen=True)
class Table:
    """Rows under names.

    Attributes:
        name: In JSON.
        title: Above it, where it is not the only one of its command.
        digits: Decimals of numbers, except in CSV and JSON.
        spare: Columns that a narrow terminal leaves out, in this order.
        keep: Columns with the answer: never left out, and cut only where nothing else is left to give way. Without any,
            the first and the last.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    title: str = ""
    digits: int = 2
    spare: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    shown: Shown = "always"

    def numeric(self, at: int) -> bool:
        """Whether a column has numbers alone."""
        values = [row[at] for row in self.rows if not missing(row[at])]
        return bool(values) and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)

    def lines(self) -> list[str]:
        """The title where there is one, the header and a line for each row, cells between tabs, nothing cut."""
        rows = [[cell_text(value, self.digits) for value in row] for row in self.rows]
        lines = ["\t".join(cells) for cells in [list(map(plain, self.columns)), *rows]]
        return [plain(self.title), *lines] if self.title else lines

    def markdown(self) -> str:
        """As GitHub shows it: numbers to the right with three decimals, ``|`` escaped; "" without rows."""
        rules = ["---:" if self.numeric(at) else "---" for at in range(len(self.columns))]
        lines = [self.columns, rules, *(map(_markdown_cell, row) for row in self.rows)] if self.rows else []
        text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        return f"## {plain(self.title)}\n\n{text}" if self.title and text else text

    def csv(self) -> str:
        """As :meth:`pandas.DataFrame.to_csv` writes it: numbers in full, nothing for a missing value."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if missing(value) else value for value in row] for row in self.rows)
        return out.getvalue()

    def json(self) -> list[dict[str, Any]]:
        """Rows as objects: numbers in full, null for a missing value or an infinite one."""
        return [dict(zip(self.columns, map(json_value, row), strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Facts:
    """Names and what they are."""

    name: str
    of: Mapping[str, object]

    def lines(self) -> list[str]:
        return [f"{name}: {plain(str(value))}" for name, value in self.of.items()]

    def markdown(self) -> str:
        return "".join(f"* {line}\n" for line in self.lines())

    def csv(self) -> str:
        return Table(self.name, ("name", "value"), tuple(self.of.items())).csv()

    def json(self) -> dict[str, Any]:
        return {name: json_value(value) for name, value in self.of.items()}


@dataclass(frozen=True)
class Sentence:
    """A sentence, or lines of text; a terminal shows ``one_line`` without its end where it is too long."""

    text: str
    shown: Shown = "always"
    one_line: bool = False

    def lines(self) -> list[str]:
        return [plain(line) for line in self.text.split("\n")]

    def markdown(self) -> str:
        return self.text


DocumentPart: TypeAlias = Table | Facts | Sentence


@dataclass
class Document:
    """The parts of an answer in the order in which they are read, the title of its Markdown, and the table in its CSV.

    Without a ``main`` table CSV has the first, or else the facts.
    """

    title: str = ""
    main: str = ""
    parts: list[DocumentPart] = field(default_factory=list)

    def add(self, part: DocumentPart) -> None:
        """Add a part."""
        self.parts.append(part)

    def tell(self, line: str, shown: Shown = "always", one_line: bool = False) -> None:
        """Add a sentence."""
        self.add(Sentence(line, shown, one_line))

    def table(self, frame: pd.DataFrame, name: str, title: str = "", **more: Any) -> None:
        """Add a frame, as :func:`table_of` makes it."""
        self.add(table_of(frame, name, title, **more))

    def text(self) -> str:
        """For a pipe: lines, with an empty one around tables."""
        lines = list(self.parts[0].lines()) if self.parts else []
        for before, part in pairwise(self.parts):
            lines += [""] * apart(before, part) + part.lines()
        return "\n".join([*lines, ""])

    def markdown(self) -> str:
        heading = [f"# {self.title}\n"] if self.title else []
        return "\n".join([*heading, *(part.markdown() for part in self.parts), ""])

    def csv(self) -> str:
        whole = [part for part in self.parts if isinstance(part, Table)] + [
            part for part in self.parts if isinstance(part, Facts)]
        main = next((part for part in whole if part.name == self.main), whole[0] if whole else None)
        return main.csv() if main is not None else ""

    def json(self) -> str:
        """Facts and tables by name, and ``sentences``."""
        found: dict[str, Any] = {part.name: part.json() for part in self.parts if isinstance(part, Facts)}
        found |= {part.name: part.json() for part in self.parts if isinstance(part, Table)}
        found["sentences"] = [part.text for part in self.parts if isinstance(part, Sentence) and part.text]
        return json.dumps(found, indent=2, allow_nan=False) + "\n"


def apart(before: DocumentPart | None, after: DocumentPart) -> bool:
    """Whether an empty line stands between two parts: around tables."""
    return before is not None and (isinstance(before, Table) or isinstance(after, Table))


def table_of(frame: pd.DataFrame, name: str, title: str = "", **more: Any) -> Table:
    """A frame's columns and rows, without its index; ``more`` are fields of :class:`Table`."""
    return Table(name, tuple(map(str, frame.columns)), tuple(frame_rows(frame)), title, **more)


def frame_rows(frame: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Rows of Python's own numbers, None where a value is missing: integers stay integers."""
    yield from frame.astype(object).where(frame.notna(), None).itertuples(index=False, name=None)


def write_text(path: str | Path, text: str) -> Path:
    """Write a file, whole or not at all, and its folder; what cannot be written, or is a database, is an OSError."""
    from fuseplan.search.store.location import replaced, spare_database

    target = Path(path).expanduser()
    try:
        spare_database(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as error:  # of a full disk, it names no file
        raise OSError(error.errno, error.strerror, str(target)) from None
    return target


def missing(value: object) -> bool:
    """Whether there is no value: None, or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def cell_text(value: object, digits: int, comma: str = "") -> str:
    """Numbers at ``digits`` decimals, nothing for a missing value, text without what a terminal obeys.

    A number that would be all zeros keeps three digits.
    """
    if missing(value):
        return ""
    if not isinstance(value, float):
        return plain(str(value))
    if value and abs(value) < 0.5 * 10.0**-digits:
        return f"{value:.3g}"
    return f"{value:{comma}.{digits}f}"


def json_value(value: Any) -> Any:
    """A cell as JSON has it."""
    item = getattr(value, "item", None)  # a numpy scalar
    value = item() if item is not None else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _markdown_cell(value: object) -> str:
    if missing(value):
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.4g}"
    return plain(str(value)).replace("|", "\\|").replace("<", "&lt;")
