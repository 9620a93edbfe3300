"""The options that every command answers by, and the screen of the command that runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, redirect_stdout
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import typer

from fuseplan.planner.cli.output.progress_log import ProgressLog
from fuseplan.planner.cli.output.screen import Screen, check_writable
from fuseplan.planner.cli.source import MODEL, TLS
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.models.manifest import ModelArguments

_CURRENT: ContextVar[Screen | None] = ContextVar("screen", default=None)
C = TypeVar("C", bound=Callable[..., Any])
#: Options of a command by name: the kind and the default of each.
Options: TypeAlias = dict[str, tuple[Any, Any]]
#: What a heavy import is announced with.
STARTING = "starting: importing PyTorch"


def current() -> Screen:
    """The screen of the command that runs; outside of any, one that prints tables for whom it finds there."""
    known = _CURRENT.get()
    return known if known is not None else _screen("table", None, False)


def _screen(style: str, out: Path | None, quiet: bool) -> Screen:
    terminal = None
    if sys.stdout.isatty():
        from rich.console import Console

        terminal = Console(highlight=False)
    log = None if sys.stderr.isatty() else ProgressLog(lambda line: typer.echo(line, err=True))
    return Screen(style, out, quiet, terminal, log)


def _answer_options(main: str, page: bool, out: bool, tables: bool) -> Options:
    """The options that say how a command answers."""
    kinds: Any = Literal["table", "csv", "markdown", "json"]
    if page:
        kinds = Literal[kinds, "html"]
    which = f"csv has one table: {main}." if main else "csv has the table."
    also = " html writes one self-contained page (fuseplan-report.html)." if page else ""
    options: Options = {}
    if tables:
        words = f"{which} json has everything, numbers in full.{also} A pipe gets a table as tab-separated lines."
        options["style"] = (Annotated[kinds, typer.Option("--format", help=words)], "table")
    if tables and out:
        words = "Write the answer to this file; one that exists is replaced."
        options["out"] = (Annotated[Path | None, typer.Option("--out", metavar="FILE", help=words)], None)
    words = "Print only the answer, errors and warnings."
    options["quiet"] = (Annotated[bool, typer.Option("--quiet", "-q", help=words)], False)
    return options


def answers(
    main: str = "", page: bool = False, out: bool = True, tables: bool = True, torch: bool = True,
    without: Collection[str] = (), beside: Callable[[Mapping[str, Any]], None] = lambda given: None,
) -> Callable[[C], C]:
    """A command gets the options ``--format``, ``--out`` and ``--quiet``, and a screen of its own while it runs.

    Its argument ``given`` takes the options of a model, its ``tls`` those of TLS.

    Args:
        main: What CSV has, in words.
        page, out, tables: Whether it writes an HTML page, takes ``--out``, and takes ``--format``.
        torch: It needs PyTorch, which is imported first, so that the user reads why nothing happens yet.
        without: Options of a model that ``given`` does not take.
        beside: What is begun while PyTorch is imported; called with the command's arguments.
    """
    options = _answer_options(main, page, out, tables)
    model = {name: (kind, getattr(ModelArguments, name)) for name, kind in MODEL.items() if name not in without}
    tls = {name: (kind, None) for name, kind in TLS.items()}

    def with_options(command: C) -> C:
        parameters = inspect.signature(command, eval_str=True).parameters

        @wraps(command)
        def run(**given: Any) -> Any:
            own = {name: given.pop(name, default) for name, (_, default) in options.items()}
            if (file := own.get("out")) is not None:
                if not str(file).strip():
                    raise ConfigError("--out is empty; give a file to write")
                check_writable(file, "--out")
            screen = _screen(str(own.get("style", "table")), file, bool(own["quiet"]))
            token = _CURRENT.set(screen)
            if "given" in parameters:
                given["given"] = ModelArguments(**{name: given.pop(name) for name in model})
            if "tls" in parameters:
                given["tls"] = tuple(given.pop(name) for name in tls)
            try:
                if torch and "torch" not in sys.modules:
                    beside(given)
                    with screen.status(STARTING):
                        # Where torch is the one to load numpy, a Ctrl-C meanwhile is lost and leaves half of it.
                        import_module("numpy")
                        import_module("torch")
                # What a user's own code prints is no part of an answer that a program reads.
                with nullcontext() if screen.at_once or file is not None else redirect_stdout(sys.stderr):
                    result = command(**given)
            except typer.Exit:  # the answer is that something is wrong
                screen.finish()
                raise
            except KeyboardInterrupt:  # a bench has an answer then, too
                if screen.has_tables:
                    screen.finish()
                raise
            finally:
                _CURRENT.reset(token)
            screen.finish()
            return result

        found: Options = {}
        for name, one in parameters.items():
            found |= {"given": model, "tls": tls}.get(name) or {name: (one.annotation, one.default)}
        found |= options
        # typer reads both.
        vars(run).update(__signature__=inspect.Signature([
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in found.items()]))
        run.__annotations__ = {name: kind for name, (kind, _) in found.items()}
        return cast(C, run)

    return with_options
