"""Where a command prints: tables and sentences as ``--format``, ``--out`` and ``--quiet`` say, and what it is doing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import typer

from fuseplan.planner.cli.output.progress_log import ProgressLog
from fuseplan.planner.cli.output.tables import (
    Table,
    csv_text,
    fitted,
    json_rows,
    json_value,
    left_out_line,
    shortened,
    tab_lines,
)
from fuseplan.planner.errors import ConfigError
from fuseplan.search.errors import plain

if TYPE_CHECKING:
    from rich.console import Console


class Format(StrEnum):
    """How to write it."""

    TABLE = "table"
    CSV = "csv"
    MARKDOWN = "markdown"
    JSON = "json"


class PageFormat(StrEnum):
    """How to write it, where there is a page of it, too."""

    TABLE = "table"
    CSV = "csv"
    MARKDOWN = "markdown"
    JSON = "json"
    HTML = "html"


#: Where a part of an answer is: everywhere, not with ``--quiet`` in the terminal, or in files alone.
Shown = Literal["always", "talk", "files"]


@dataclass(frozen=True)
class _Facts:
    """Names and what they are."""

    name: str
    of: Mapping[str, object]


_Part: TypeAlias = Table | _Facts | str


class Screen:
    """One command's output. Tables and sentences are printed at once, or written at the end as a file of one format.

    Args:
        style: A value of :class:`PageFormat`.
        out: The file to write; None for the standard output.
        quiet: Only the answer, errors and warnings.
        terminal: Where it is printed for a person, a console; None for a pipe.
        log: What is going on, for who reads the standard error as a log; None where that is a terminal.
    """

    def __init__(
        self, style: str = "table", out: Path | None = None, quiet: bool = False, terminal: Console | None = None,
        log: ProgressLog | None = None,
    ) -> None:
        self.style, self.quiet = style, quiet
        self._out, self._terminal, self._log = out, terminal, log
        self._parts: list[_Part] = []
        self._page, self._title, self._main = "", "", ""
        self._last: _Part | None = None

    @property
    def at_once(self) -> bool:
        """Whether the answer is printed as it comes, not written at the end."""
        return self.style == "table" and self._out is None

    @property
    def is_terminal(self) -> bool:
        """Whether a person reads the answer as it comes."""
        return self._terminal is not None and self.at_once

    @property
    def has_tables(self) -> bool:
        """Whether there is anything to write at the end that took time to find."""
        return any(isinstance(part, Table) for part in self._parts)

    # -- what a command says

    def table(self, table: Table, shown: Shown = "always") -> None:
        """A table of the answer."""
        if not self.at_once:
            self._parts.append(table)
        elif shown == "always" or (shown == "talk" and not self.quiet):
            self._print(table)

    def facts(self, name: str, of: Mapping[str, object]) -> None:
        """A line for each name and what it is."""
        facts = _Facts(name, of)
        if self.at_once:
            self._print(facts)
        else:
            self._parts.append(facts)

    def tell(self, line: str, shown: Shown = "always", one_line: bool = False) -> None:
        """A sentence of the answer; a terminal shows ``one_line`` without its end where it is too long."""
        if not self.at_once:
            self._parts.append(line)
        elif shown == "always" or (shown == "talk" and not self.quiet):
            if one_line and self._terminal is not None:
                from rich.cells import cell_len, set_cell_size

                line, width = plain(line), self._terminal.width
                line = line if cell_len(line) <= width else f"{set_cell_size(line, width - 1).rstrip()}…"
            self._print(line)

    def say(self, line: str) -> None:
        """What else there is to say: not with ``--quiet``, and beside the answer where a program reads that."""
        if self.quiet:
            return
        if self.is_terminal:
            self._print(line)
        else:
            typer.echo("\n".join(_plain_lines(line)), err=self.style != "table" and self._out is None)

    def code(self, text: str, language: str) -> None:
        """A program's text, highlighted on a terminal; files have it in a table."""
        if not self.at_once:
            return
        if self._terminal is None:
            self._print(text)
            return
        from rich.syntax import Syntax

        shown = "\n".join(_plain_lines(text))
        self._terminal.print(Syntax(shown, language, background_color="default", word_wrap=True))

    def page(self, text: str, otherwise: Path) -> None:
        """The whole answer as a page, which goes to the file, or to ``otherwise``."""
        self._page, self._out = text, self._out if self._out is not None else otherwise

    def heading(self, title: str, main: str) -> None:
        """The title of a Markdown file, and the table that CSV has; without one it is the first."""
        self._title, self._main = title, main

    # -- what it is doing

    def status(self, text: str) -> AbstractContextManager[Status]:
        """What takes long: on a terminal a line that vanishes, in a log a line now and then."""
        if self.quiet:
            return _Silent()
        return _logged(self.log, text) if self.log is not None else stderr_console().status(plain(text))

    @property
    def log(self) -> ProgressLog | None:
        """Where progress goes that is read as a log; None on a terminal, which has bars, and with ``--quiet``."""
        return None if self.quiet else self._log

    # -- the end

    def finish(self) -> None:
        """Write what was not printed yet."""
        if self.at_once:
            return
        text = self._page or self._text()
        if self._out is not None:
            write_text(self._out, text)
            self.say(f"written to {self._out}")
        elif text:
            # A pipe gets what is stored; a terminal would obey it.
            text = text.removesuffix("\n")
            typer.echo(text if self._terminal is None else "\n".join(_plain_lines(text)))

    def _text(self) -> str:
        tables = [part for part in self._parts if isinstance(part, Table)]
        if self.style == Format.CSV:
            main = next((one for one in tables if one.name == self._main), tables[0] if tables else None)
            facts = next((part for part in self._parts if isinstance(part, _Facts)), None)
            if main is None and facts is not None:
                main = Table(facts.name, ("name", "value"), tuple(facts.of.items()))
            return csv_text(main) if main is not None else ""
        if self.style == Format.JSON:
            return json.dumps(self._as_json(), indent=2, allow_nan=False) + "\n"
        if self.style == Format.MARKDOWN:
            return "\n".join([f"# {self._title}\n"] * bool(self._title) + [*map(_markdown, self._parts), ""])
        lines: list[str] = []
        for before, part in zip([None, *self._parts], self._parts, strict=False):
            lines += [""] * _apart(before, part) + _plain_lines(part)
        return "\n".join([*lines, ""])

    def _as_json(self) -> dict[str, Any]:
        facts = {part.name: {name: json_value(value) for name, value in part.of.items()}
                 for part in self._parts if isinstance(part, _Facts)}
        tables = {part.name: json_rows(part) for part in self._parts if isinstance(part, Table)}
        return {**facts, **tables, "sentences": [part for part in self._parts if isinstance(part, str) and part]}

    def _print(self, part: _Part) -> None:
        if self._terminal is not None and isinstance(part, Table) and not part.rows:
            return
        if _apart(self._last, part):
            typer.echo("")
        self._last = part
        if self._terminal is None or isinstance(part, _Facts):  # facts are for pasting: nothing wraps them
            typer.echo("\n".join(_plain_lines(part)))
        elif isinstance(part, str):
            from rich.text import Text

            self._terminal.print(Text("\n".join(_plain_lines(part))))
        else:
            self._print_table(part, self._terminal)

    def _print_table(self, table: Table, terminal: Console) -> None:
        from rich.text import Text

        def line(text: str, style: str = "") -> None:
            terminal.print(Text(text, style), no_wrap=True, overflow="ignore", crop=False)

        shown = fitted(table, terminal.width)
        if table.title:
            line(shortened(plain(table.title), terminal.width), "italic")
        line(shown.heading, "bold")
        for row in shown.lines:
            line(row)
        if shown.left_out:
            line(left_out_line(shown.left_out, terminal.width), "dim")


def _apart(before: _Part | None, after: _Part) -> bool:
    """Whether an empty line stands between two parts: around tables."""
    return before is not None and (isinstance(before, Table) or isinstance(after, Table))


def _plain_lines(part: _Part) -> list[str]:
    """For a pipe: a title where there is one, the header, and a line for each row."""
    if isinstance(part, str):
        return [plain(line) for line in part.split("\n")]
    if isinstance(part, _Facts):
        return [f"{name}: {plain(str(value))}" for name, value in part.of.items()]
    lines = tab_lines(part)
    return [plain(part.title), *lines] if part.title else lines


def _markdown(part: _Part) -> str:
    from fuseplan.planner.markdown import markdown_text

    if isinstance(part, str):
        return part
    if isinstance(part, _Facts):
        return "\n".join(f"* {name}: {plain(str(value))}" for name, value in part.of.items()) + "\n"
    if not part.rows:
        return ""
    numeric = [part.numeric(at) for at in range(len(part.columns))]
    text = markdown_text(part.columns, part.rows, numeric)
    return f"## {plain(part.title)}\n\n{text}" if part.title else text


class Status(Protocol):
    """Takes what is being done now."""

    def update(self, status: str) -> None: ...


class _Silent(AbstractContextManager[Status]):
    """Takes it, and says nothing."""

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def update(self, status: str) -> None:
        return None


@contextmanager
def _logged(log: ProgressLog, text: str) -> Iterator[Status]:
    log.phase(text)
    yield log


def stderr_console() -> Console:
    """A rich console on the standard error; wide where that is no terminal."""
    from rich.console import Console

    screen = Console(stderr=True, highlight=False)
    return screen if screen.is_terminal else Console(stderr=True, highlight=False, width=220)


def write_text(path: Path, text: str) -> None:
    """Write a file, making its folder; an unwritable one is an :class:`OSError` that names it."""
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def check_writable(path: Path, option: str) -> None:
    """A :class:`ConfigError` that names the option and the file where that cannot be written; makes its folder."""
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = errno.EISDIR if path.is_dir() else 0 if os.access(
            path if path.exists() else path.parent, os.W_OK) else errno.EACCES
        why = os.strerror(number) if number else ""
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    if why:
        raise ConfigError(f"cannot write {option} {path} ({why}); give a file that can be written")
