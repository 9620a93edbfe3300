"""Whole commands in a terminal of some width: no row wraps, and the first screen of a report has the answer."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import report_samples as samples
from rich.cells import cell_len
from rich.console import Console

from fuseplan.planner.cli import main
from fuseplan.planner.cli.output import options
from fuseplan.planner.cli.output.screen import Screen

Shown = Callable[..., list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """The lines that a command shows in a terminal of some width, which wraps what is longer."""

    def run(width: int, *argv: str | Path) -> list[str]:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=width, highlight=False, color_system=None)
        monkeypatch.setattr(options, "_screen", lambda style, file, quiet: Screen(style, file, quiet, console))
        # What is not printed by the console: empty lines, and talk.
        monkeypatch.setattr("typer.echo", lambda text="", err=False: err or print(text, file=out))
        assert main.run(list(map(str, argv))) == 0, capsys.readouterr().err
        return out.getvalue().splitlines()

    return run


@pytest.mark.parametrize("width", [60, 80, 132])
@pytest.mark.parametrize("line", [
    "patterns", "backends", "report --device sample --db {db}", "report steps --device sample --db {db}",
    "report accuracy --device sample --db {db}", "report --device h100 --db {db}", "db ls --db {db}",
])
def test_no_line_is_wider_than_the_terminal(shown: Shown, tmp_path: Path, width: int, line: str) -> None:
    db = tmp_path / "tuning.db"
    samples.sample_database(db).close()
    argv = [word.format(db=db) for word in line.split()]
    lines = [one for one in shown(width, *argv) if one != str(db)]
    assert len(lines) > 3
    assert [one for one in lines if cell_len(one) > width] == []


def test_a_report_begins_with_steps_and_the_groups_that_save_most(shown: Shown, tmp_path: Path) -> None:
    samples.sample_database(tmp_path / "tuning.db").close()
    first = shown(80, "report", "--device", "h100", "--db", tmp_path / "tuning.db")[:28]
    steps = [at for at, line in enumerate(first) if re.match(r"\S.*: [\d.]+ -> [\d.]+ ms a step \([\d.]+x, ", line)]
    saves = [at for at, line in enumerate(first) if line.startswith("    saves ")]
    assert first[0].startswith("llama-3.1-8b on cuda-nvidia-h100")
    assert len(steps) == 7 and len(saves) == 5 and saves[0] > steps[-1]  # an answer takes three lines
    amounts = [float(first[at].split()[1]) for at in saves]
    assert amounts == sorted(amounts, reverse=True)


def test_in_a_wide_terminal_every_column_is_there(shown: Shown, tmp_path: Path) -> None:
    db = tmp_path / "tuning.db"
    samples.sample_database(db).close()
    wide, narrow = (shown(width, "db", "ls", "--db", db) for width in (400, 80))
    assert not any("left out" in line for line in wide) and any("left out" in line for line in narrow)
    assert any("a" * 64 in line for line in wide) and not any("a" * 64 in line for line in narrow)
