"""What starts without PyTorch: help, listings, completion. Nothing is timed: what was imported says enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import report_samples as samples

HEAVY = ("torch", "transformers", "optuna", "scipy", "matplotlib", "pandas", "numpy", "sympy", "networkx")
CODE = """
import contextlib, io, json, sys
from fuseplan.planner.cli.main import run
found = []
for line in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = run(line.split())
    found.append([status, out.getvalue(), [name for name in sys.argv[1].split(",") if name in sys.modules]])
print(json.dumps(found))
"""


def printed(*lines: str) -> list[str]:
    """The outputs of commands, one after the other in a process that does nothing else, and imports nothing heavy."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, ",".join(HEAVY), *lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(zip(lines, json.loads(done.stdout), strict=True))
    assert {line: (status, names) for line, (status, _, names) in found.items()} == dict.fromkeys(lines, (0, []))
    return [out for _, out, _ in found.values()]


def test_help_and_listings_import_nothing_heavy() -> None:
    assert all(out.strip() for out in printed(
        "--version", "--help", "tune --help", "explain --help", "bench --help", "report --help", "db --help",
        "env --help", "patterns", "patterns --format json", "patterns --format markdown",
    ))


def test_looking_into_a_database_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    samples.sample_database(path).close()
    words = ("ls", "ls --format csv", "misses", "show silu", f"export {tmp_path}/out.jsonl")
    assert all(out.strip() for out in printed(*(f"db {one} --db {path}" for one in words)))


def test_a_command_that_needs_pytorch_says_so_first(tmp_path: Path) -> None:
    samples.sample_database(tmp_path / "tuning.db").close()
    done = subprocess.run(
        [sys.executable, "-m", "fuseplan.planner", "report", "--device", "h200", "--db", str(tmp_path / "tuning.db")],
        capture_output=True, text=True, check=True,
    )
    assert "PyTorch" in done.stderr.splitlines()[0] and "h200" in done.stdout
    quiet = subprocess.run(
        [sys.executable, "-m", "fuseplan.planner", "backends", "--quiet"], capture_output=True, text=True, check=True,
    )
    assert quiet.stderr == "" and "cpp" in quiet.stdout


@pytest.mark.parametrize(("words", "expected", "not_expected"), [
    ("plan ", {"tune", "report", "env", "completion", "db"}, set()),
    ("plan db ", {"ls", "show", "verify"}, {"tune"}),
    ("plan tune --mod", {"--model", "--module"}, {"--decode"}),
    ("plan tune --model llama-3", {"llama-3.2-1b", "llama-3.1-8b"}, {"llama"}),
    ("plan tune --pattern swiglu_", {"swiglu_fp8_token"}, {"swiglu", "rope"}),
    ("plan bench patterns --pattern rope", {"rope", "rope_partial"}, {"swiglu"}),
    ("plan report --format ", {"table", "csv", "markdown", "json", "html"}, set()),
    ("plan tune --format ", {"json"}, {"html"}),
    ("plan report ", {"groups", "steps", "accuracy"}, set()),
    ("plan tune --regime ", {"eager", "graph"}, set()),
    ("plan completion ", {"bash", "zsh", "fish"}, set()),
])
def test_what_bash_is_offered(words: str, expected: set[str], not_expected: set[str]) -> None:
    """As bash asks: the words so far and the place of the cursor in variables."""
    code = (
        "import atexit, sys; from fuseplan.planner.cli.main import main; "
        "heavy = sys.argv[1].split(','); "
        "atexit.register(lambda: print('imported', *[name for name in heavy if name in sys.modules])); "
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(HEAVY)], capture_output=True, text=True, check=False,
        env={**os.environ, "_PLAN_COMPLETE": "complete_bash", "COMP_WORDS": words,
             "COMP_CWORD": str(len(words.split(" ")) - 1)},
    )
    *offered, last = done.stdout.split("\n")[:-1]
    assert expected <= set(offered) and not not_expected & set(offered), done.stdout + done.stderr
    assert last.split() == ["imported"]


def test_the_scripts_are_for_their_shells(tmp_path: Path) -> None:
    shells = ("bash", "zsh", "fish")
    scripts = dict(zip(shells, printed(*(f"completion {shell}" for shell in shells)), strict=True))
    assert all("_PLAN_COMPLETE=complete_" + shell in text for shell, text in scripts.items())
    subprocess.run(["bash", "-n"], input=scripts["bash"], text=True, check=True)
    # bash itself completes with it.
    plan = tmp_path / "plan"
    plan.write_text(f'#!/bin/sh\nexec {sys.executable} -m fuseplan.planner "$@"\n')
    plan.chmod(0o755)
    asked = f'{scripts["bash"]}\nCOMP_WORDS=(plan db l) COMP_CWORD=2\n_plan_completion plan\necho "${{COMPREPLY[@]}}"\n'
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.stdout.split() == ["ls"]
