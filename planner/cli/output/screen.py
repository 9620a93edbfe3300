"""Where a command prints: its document as ``--format``, ``--out`` and ``--quiet`` say, and what it is doing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fuseplan.planner.cli.output.progress_log import ProgressLog
from fuseplan.planner.cli.output.tables import fitted, left_out_line, shortened
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.reports.document import Document, DocumentPart, Facts, Sentence, Table, apart, write_text
from fuseplan.search.errors import plain

if TYPE_CHECKING:
    from rich.console import Console

    from fuseplan.planner.tuning.progress import TuneEvents


class Screen(Document):
    """A command's output, printed at once or written at the end as a file of one format, and its progress.

    Args:
        style: ``"table"``, ``"csv"``, ``"markdown"``, ``"json"`` or ``"html"``.
        out: The file to write; None for the standard output.
        quiet: Only the answer, errors and warnings.
        terminal: The console of a person; None for a pipe.
        log: The standard error as a log; None where that is a terminal.
    """

    def __init__(
        self, style: str = "table", out: Path | None = None, quiet: bool = False, terminal: Console | None = None,
        log: ProgressLog | None = None,
    ) -> None:
        super().__init__()
        self.style, self.quiet = style, quiet
        self._out, self._terminal, self.log = out, terminal, None if quiet else log
        self._page = ""
        self._last: DocumentPart | None = None

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
        return any(isinstance(part, Table) for part in self.parts)

    def show(self, document: Document) -> None:
        """A whole answer."""
        self.title, self.main = document.title, document.main
        for part in document.parts:
            self.add(part)

    def add(self, part: DocumentPart) -> None:
        """A part of the answer."""
        shown = "always" if isinstance(part, Facts) else part.shown
        if not self.at_once:
            super().add(part)
        elif shown == "always" or (shown == "talk" and not self.quiet):
            self._print(part)

    def say(self, line: str, aside: bool = False) -> None:
        """Print a line besides the answer, not with ``--quiet``: on standard error where a program reads the answer, or
        with ``aside``.
        """
        if self.quiet:
            return
        if self.is_terminal and not aside:
            self._print(Sentence(line))
        else:
            typer.echo("\n".join(Sentence(line).lines()), err=aside or (self.style != "table" and self._out is None))

    def code(self, text: str, language: str) -> None:
        """A program's text, highlighted on a terminal; files have it in a table."""
        if not self.at_once:
            return
        if self._terminal is None:
            self._print(Sentence(text))
            return
        from rich.syntax import Syntax

        shown = "\n".join(Sentence(text).lines())
        self._terminal.print(Syntax(shown, language, background_color="default", word_wrap=True))

    def page(self, text: str, otherwise: Path) -> None:
        """The whole answer as a page, which goes to the file, or to ``otherwise``."""
        self._page, self._out = text, self._out if self._out is not None else otherwise

    @contextmanager
    def status(self, what: str) -> Iterator[Callable[[str], None]]:
        """What takes long: on a terminal a line that vanishes, in a log a line now and then."""
        log = ProgressLog(lambda line: None) if self.quiet else self.log
        if log is None:
            from rich.console import Console

            with Console(stderr=True, highlight=False).status(plain(what)) as shown:
                yield shown.update
        else:
            log.phase(what)
            yield log.update

    def tuning(self) -> AbstractContextManager[TuneEvents]:
        """A bar on a terminal, lines in a log."""
        from fuseplan.planner.cli.progress import TuneBar, TuneLog
        from fuseplan.planner.tuning.progress import SILENT

        if self.log is not None:
            return nullcontext(TuneLog(self.log))
        return SILENT.tuning() if self.quiet else TuneBar()

    def note(self, text: str) -> None:
        """Something to know, on the standard error; not with ``--quiet``."""
        if not self.quiet:
            typer.echo(plain(text), err=True)

    def warn(self, text: str) -> None:
        """Something that makes answers doubtful."""
        typer.echo(f"plan: warning: {plain(text)}", err=True)

    def finish(self) -> None:
        """Write what was not printed yet."""
        if self.at_once:
            return
        renderers = {"table": self.text, "csv": self.csv, "markdown": self.markdown, "json": self.json}
        text = self._page or renderers[self.style]()
        if self._out is not None:
            write_text(self._out, text)
            self.say(f"written to {self._out}")
        elif text:
            # A pipe gets what is stored; a terminal would obey it.
            text = text.removesuffix("\n")
            typer.echo(text if self._terminal is None else "\n".join(Sentence(text).lines()))

    def _print(self, part: DocumentPart) -> None:
        if self._terminal is not None and isinstance(part, Table) and not part.rows:
            return
        if apart(self._last, part):
            typer.echo("")
        self._last = part
        if self._terminal is None or isinstance(part, Facts):  # facts are for pasting: nothing wraps them
            typer.echo("\n".join(part.lines()))
        elif isinstance(part, Table):
            _print_table(part, self._terminal)
        else:
            from rich.text import Text

            self._terminal.print(Text("\n".join(part.lines())), no_wrap=part.one_line,
                                 overflow="ellipsis" if part.one_line else None)


def _print_table(table: Table, terminal: Console) -> None:
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


def check_writable(path: Path, option: str) -> None:
    """A :class:`ConfigError` that names the option and the file where that cannot be written; makes its folder."""
    from fuseplan.search.store.location import spare_database

    path = path.expanduser()
    try:
        spare_database(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        if not path.is_fifo():  # its reader would take this for the end
            path.open("ab").close()  # permissions alone say nothing to root
        if is_new:
            path.resolve().unlink()
    except OSError as error:
        where = "" if str(error.filename) == str(path) else f"{error.filename}: "
        raise ConfigError(
            f"cannot write {option} {path} ({where}{error.strerror}); give a file that can be written") from None
