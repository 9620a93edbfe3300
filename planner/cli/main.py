"""The ``plan`` command: one entry point, one place where errors become one line and an exit code."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, TextIO

import typer
from typer._completion_classes import completion_init

from fuseplan.planner.cli import database, explain, fleet, machine, source, tune
from fuseplan.planner.cli.bench import command as bench
from fuseplan.search.errors import (
    Argument,
    Command,
    CorruptDatabaseError,
    MachineFailureError,
    NothingCompilesError,
    SpelledError,
    plain,
)

#: Exit statuses after Ctrl-C, after SIGTERM, and where nobody reads the output any more, as shells have them.
_INTERRUPTED, _TERMINATED, _NO_READER = 130, 143, 141
#: Every package's family of errors, by name: importing all of them would import torch.
_FAMILIES = {"FuseplanError", "SearchError", "DeviceSpecError", "BuildError"}
INTERRUPTED = "interrupted; finished work is stored, run the same command to go on"

app = typer.Typer(
    name="plan",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    help="Plan and tune the fusion of a PyTorch model's ops for the device at hand.\n\n"
    "Start with `plan tune --model llama`; then torch.compile(model, backend='fuseplan') uses what was stored.",
)
app.command("tune", short_help="Plan a model's fusion, tune it on this device, store it.")(tune.tune)
app.command("explain", short_help="Say why each boundary is where it is.")(explain.explain)
app.command("bench", short_help="Measure the plan beside eager and TorchInductor.")(bench.bench)
app.command("report", short_help="Show what is stored: tables or an HTML page.")(explain.report)
app.command("probe", short_help="Measure this device for the cost model.")(machine.probe)
app.command("patterns", short_help="List the named patterns, with their shapes and formulas.")(explain.patterns)
app.command("backends", short_help="Say which kernel back ends work here, and why not.")(machine.backends)
app.command("env", short_help="Say what is installed and found here, for a bug report.")(machine.env)
app.command("completion", short_help="Print the script that completes commands in your shell.")(source.completion)
app.add_typer(fleet.app, name="fleet", short_help="Tune on many devices: start workers, see what they do.")
app.add_typer(database.app, name="db", short_help="List, show, export, import, verify and prune records.")


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"fuseplan {importlib.metadata.version('fuseplan')}")
        raise typer.Exit()


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options that stand before or after any command."""
    context.obj.append(context.invoked_subcommand)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status.

    0 is done, 1 a fault of ours or of the machine, 2 a user's mistake, 130 Ctrl-C, 141 where nobody reads the output
    any more; a process that SIGTERM ends has 143.
    """
    debug = "--debug" in argv
    args = [arg for arg in argv if arg != "--debug"]
    begun: list[str | None] = []
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            status = int(app(args=args, prog_name="plan", standalone_mode=False, obj=begun) or 0)
        except (KeyboardInterrupt, typer.Abort):
            status = _INTERRUPTED
        except BaseException as error:  # a library may leave with SystemExit, whose status is not ours
            if isinstance(error, SystemExit) and not begun:  # a shell has asked how a line can go on
                return int(error.code or 0)
            if isinstance(error.__context__, BrokenPipeError) and _nobody_reads():
                return _NO_READER
            if debug:
                traceback.print_exc()
            if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: the message is its help
                typer.echo(str(error), err=True)
                return 2
            line, status = describe(error)
            typer.echo(f"plan: error: {line}", err=True)
    if status == _INTERRUPTED:
        typer.echo(INTERRUPTED, err=True)
    return status


def _nobody_reads() -> bool:
    """Whether the process that read the standard output has closed it."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def describe(error: BaseException) -> tuple[str, int]:
    """One line for people, and the exit status: 2 for what the user can mend, 1 for a defect of ours or the machine."""
    families = {base.__name__ for base in type(error).__mro__ if base.__module__.startswith("fuseplan")}
    if any(base.__name__ == "ClickException" for base in type(error).__mro__):
        message: str = getattr(error, "format_message", error.__str__)()
        return _one_line(message), 2
    if families & _FAMILIES:
        # No mistake in the command: the machine fails it.
        message = error.spelled(_option) if isinstance(error, SpelledError) else str(error)
        message += f"; {error.cure}" if isinstance(error, CorruptDatabaseError) else ""
        return _one_line(message), 1 if isinstance(error, (MachineFailureError, NothingCompilesError)) else 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the output cannot be written: {error.strerror}", 1
    return f"{type(error).__name__}: {_one_line(str(error))} (add --debug for the traceback)", 1


def _option(argument: Argument) -> str:
    """How the command line writes an argument, or a command.

    >>> _option(Argument("kv_len")), _option(Command("tune"))
    ('--kv-len', '`plan tune`')
    """
    name = argument.replace("_", "-")
    return f"`plan {name}`" if isinstance(argument, Command) else f"--{name}"


def _one_line(text: str) -> str:
    """Text on one line, without what pydantic, which checks options for typer, puts before an error's message.

    >>> _one_line("Invalid value for '--device': Value error, 'tpu' is not one of 'cpu', 'cuda'.")
    "Invalid value for '--device': 'tpu' is not one of 'cpu', 'cuda'."
    """
    return plain(" ".join(text.replace("Value error, ", "").split())) or "no message"


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings as one line; what the libraries warn about is not for this command's user."""
    root, path = Path(__file__).resolve().parents[2], Path(filename).resolve()
    ours = any(path.is_relative_to(root / package) for package in ("costmodel", "kernels", "planner", "search"))
    if issubclass(category, UserWarning) and ours:
        typer.echo(f"plan: warning: {_one_line(str(message))}", err=True)


def main() -> None:
    """Entry point of the ``plan`` script."""
    # Importing makes objects by the hundred thousand, all to stay: looking for garbage among them takes half a second.
    gc.set_threshold(50_000, 20, 20)
    terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        """Everything ends as after Ctrl-C; only the exit status is another."""
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this: no file of ours may get its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    signal.signal(signal.SIGTERM, terminate)
    completion_init()
    status = run(sys.argv[1:])
    sys.exit(_TERMINATED if terminated else status)


if __name__ == "__main__":
    main()
