"""A reader of the pages: has a small model and a tuned database, and runs the commands and snippets as they stand.

What is only different here: times are given (`given_times.py`), `make` calls programs that note what they are told, and
the server of a database's URL is the tests' own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import doc_pages
import pandas as pd
import pytest
import report_samples as samples
import torch
from distributed import Client, Security
from fleet_here import workers_here
from packaging.requirements import Requirement
from paths import ROOT
from postgres_server import Server

from fuseplan.planner import reset_stats
from fuseplan.planner.cli import main
from fuseplan.search.store.location import default_path

#: The tunes that the default database has: of ``my-llama``, and of the preset.
TUNES = (("tune", "--config", "my-llama", "--prefill", "16", "--no-calls"), ("tune", "--model", "llama"))
#: Notes its name and its words, a line each call.
_STUB = '#!/bin/sh\n{ printf "%s\\037" "$(basename "$0")" "$@"; echo; } >> "$(dirname "$0")/calls"\n'
#: Programs that the Makefile calls.
_PROGRAMS = ("python", "plan", "mkdocs", "ruff", "mypy")
#: Schedulers that pages name: without TLS, and with the key that the page has made.
_SCHEDULER, _LOCKED = "tcp://scheduler:8786", "tls://10.0.0.5:8786"
_SERVER = re.compile(r"(?P<driver>postgresql(?:\+\w+)?)://[^\s/]+@host/(?P<name>\w+)")


def run_plan(*argv: str, status: int = 0) -> str:
    """What a command prints, and its complaint where it is to end with another status."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            ended = main.run(argv)
        except SystemExit as end:
            ended = int(end.code or 0)
    assert ended == status, f"plan {' '.join(argv)}: exit status {ended}\n{err.getvalue()}"
    return err.getvalue() if status else out.getvalue()


@dataclass
class Reader:
    """What a reader has, and what was run for all pages.

    ``server`` gives the PostgreSQL of the tests, None where none is installed. ``not_run`` are commands with reasons.
    """

    folder: Path
    tuned: Path
    server: Callable[[], Server | None]
    run: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    _examples: dict[str, str] = field(default_factory=dict)
    _hosts: dict[str, str] = field(default_factory=dict)
    _databases: dict[str, str] = field(default_factory=dict)

    def sit_down(self, page: Path, patch: pytest.MonkeyPatch) -> None:
        """Go to a page's folder, with the model, the examples and a database of its own."""
        here = self.folder / page.stem
        shutil.copytree(self.folder / "my-llama", here / "my-llama")
        (here / "examples").symlink_to(ROOT / "examples")
        patch.setenv("XDG_DATA_HOME", str(here / "data"))
        shutil.copytree(self.tuned, default_path().parent)
        patch.chdir(here)
        self._databases.clear()

    def at_home(self, text: str) -> str:
        """The text with the tests' server in URLs; LookupError where there is none. A page's databases begin empty."""

        def own(found: re.Match[str]) -> str:
            server = self.server()
            if server is None:
                raise LookupError("PostgreSQL is not installed")
            if found["name"] not in self._databases:
                self._databases[found["name"]] = server.url(found["name"])
            return self._databases[found["name"]].replace("postgresql", found["driver"], 1)

        return _SERVER.sub(own, text)

    def command(self, line: str) -> str:
        """Run a line of a ``bash`` block; what it prints. One whose server is missing is noted in ``not_run``."""
        try:
            calls = doc_pages.calls(self.at_home(line))
        except LookupError as why:
            self.not_run.append(f"{line}  ({why})")
            return ""
        self.run.append(line)
        return "".join([self._call(settings, words) for settings, words in calls])

    def snippet(self, block: doc_pages.Block, page: Path, names: dict[str, Any]) -> str:
        """Run a Python block in a page's namespace; what it prints."""
        out = io.StringIO()
        if block.title:
            Path(block.title).write_text(block.body)
        try:
            body = "\n" * (block.line - 1) + self.at_home(block.body)
        except LookupError as why:
            self.not_run.append(f"{doc_pages.name(page)}:{block.line}  ({why})")
            return ""
        with contextlib.redirect_stdout(out):
            exec(compile(body, doc_pages.name(page), "exec"), names)
        return out.getvalue()

    def example(self, script: str, settings: Mapping[str, str] | None = None) -> str:
        """What an example prints: in a process of its own where it has settings, else run once for all who ask."""
        if settings:
            done = subprocess.run(
                [sys.executable, str(ROOT / script)], capture_output=True, text=True, check=False, timeout=300,
                cwd=self.folder, env=os.environ | settings,
            )
            assert done.returncode == 0, f"{script}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}"
            return done.stdout + done.stderr
        if script not in self._examples:
            self._examples[script] = self._example_here(ROOT / script)
        return self._examples[script]

    def _example_here(self, script: Path) -> str:
        """What an example prints in this process. Times are given, to the commands that it runs, too."""
        folder = self.folder / script.stem
        folder.mkdir()
        samples.known_machine(folder / "tuning.db")
        out, run = io.StringIO(), subprocess.run

        def here(command: list[str], **given: Any) -> object:
            if command[:3] != [sys.executable, "-m", "fuseplan.planner"]:
                return run(command, **given)
            with contextlib.chdir(given["cwd"]):
                return print(run_plan(*command[3:]))

        torch._dynamo.reset()
        reset_stats()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(subprocess, "run", here)
            patch.setattr(sys, "argv", [str(script), *([str(folder)] if script.stem == "ship_a_database" else [])])
            runpy.run_path(str(script), run_name="__main__")
        return out.getvalue()

    def _call(self, settings: Mapping[str, str], words: list[str]) -> str:
        match words:
            case ["plan", *argv]:
                return self._plan(argv)
            case ["make", *argv]:
                return "".join([self._made(call) for call in make_calls(argv)])
            case ["python", script]:
                return self.example(script, settings)
            case ["pip", "install", *wanted]:
                check_install(wanted)
            case ["dask", "scheduler" | "worker" as program, *argv]:  # those below
                check_options(program, argv)
            case ["openssl" | "chmod", *_]:
                subprocess.run(words, check=True, capture_output=True, timeout=120)
            case ["ufw", "allow", *_]:  # a firewall is the machine's
                pass
            case ["git", "clone", *_]:
                subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), "fuseplan"], check=True)
            case ["cd", folder]:
                assert Path(folder).is_dir()
            case _:
                raise AssertionError(f"a page shows {' '.join(words)!r}: say here how the tests run it")
        return ""

    def _plan(self, argv: list[str]) -> str:
        named, shown = {"local", _SCHEDULER, _LOCKED}.intersection(argv), " ".join(argv)
        if named:
            # This CPU is the fleet: two workers that measure nothing, and for a moment those that a host would start.
            files = {f"tls_{role}_{what}": f"fleet.{end}" for role in ("client", "scheduler", "worker")
                     for what, end in (("cert", "pem"), ("key", "key"))}
            security = Security(True, tls_ca_file="fleet.pem", **files) if _LOCKED in named else None
            with pytest.MonkeyPatch.context() as patch, workers_here(patch, 2, security) as client:
                argv = [client.scheduler.address if word in named else word for word in argv]
                if argv[:2] != ["fleet", "worker"]:
                    return self._planned(argv)
                if shown not in self._hosts:  # several pages start the same one
                    self._hosts[shown] = run_host(client, argv)
                return self._hosts[shown]
        return self._planned(argv)

    def _planned(self, argv: list[str]) -> str:
        if argv[0] == "tune" and "graph" in argv:
            # CUDA graphs are a GPU's. The command says so here, and all else that it asks for is done without them.
            assert "needs CUDA graphs" in run_plan(*argv, status=2)
            at = argv.index("--regime")
            argv = argv[:at] + argv[at + 2 :]
        before = set(Path("results").rglob("*.csv"))
        printed = run_plan(*argv)
        if argv[0] == "bench":
            check_results(set(Path("results").rglob("*.csv")) - before)
        return printed

    def _made(self, call: list[str]) -> str:
        match call:
            case ["plan", *argv]:
                return self._plan(argv)
            case ["python", "-m", "pip", "install", *wanted]:
                check_install(wanted)
            case [program, *_]:  # the tests, the checkers and the site have tests of their own
                assert program == "python" or shutil.which(program, path=str(Path(sys.executable).parent)), program
        return ""


def run_host(client: Client, argv: list[str]) -> str:
    """What a host says that joins a fleet, and is ended once its worker is there."""
    command = [sys.executable, "-m", "fuseplan.planner", *argv, "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as host:
        there = len(client.scheduler_info()["workers"])
        try:
            client.wait_for_workers(there + 1, timeout=240)
        finally:
            host.terminate()
            printed, _ = host.communicate(timeout=120)
        assert host.returncode == 143, printed
    return printed


def check_options(program: str, argv: list[str]) -> None:
    """Whether a command of Dask's has the options that a page gives it."""
    params = importlib.import_module(f"distributed.cli.dask_{program}").main.params
    known = {name for one in params for name in (*one.opts, *one.secondary_opts)}
    unknown = [word for word in argv if word.startswith("--") and word not in known]
    assert not unknown, f"dask {program} has no {', '.join(unknown)}"


def make_calls(argv: Sequence[str]) -> list[list[str]]:
    """The commands that ``make`` runs in a new environment, in whose place programs only note what they are told."""
    with TemporaryDirectory() as environment:
        programs = Path(environment) / "bin"
        programs.mkdir()
        for name in _PROGRAMS:
            (programs / name).write_text(_STUB)
            (programs / name).chmod(0o755)
        # Nothing of a make that runs these tests.
        ours = {name: value for name, value in os.environ.items() if not re.match(r"MAKE|MFLAGS|BIN$|VENV$", name)}
        done = subprocess.run(
            ["make", "--quiet", f"VENV={environment}", *argv], cwd=ROOT, env=ours, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split("\x1f")[:-1] for line in (programs / "calls").read_text().splitlines()]


@cache
def _project() -> Mapping[str, Any]:
    project: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


#: Options of ``pip install`` that are followed by a value.
_WITH_VALUE = ("--index-url", "--retries", "--timeout")


def check_install(words: Sequence[str]) -> None:
    """Whether what is to be installed exists: extras of this project, and versions that it takes."""
    project = _project()
    takes = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    asked = [word for before, word in zip(["", *words], words, strict=False) if before not in _WITH_VALUE]
    for word in (one for one in asked if not one.startswith("-")):
        wanted = Requirement(f"{project['name']}{word[1:]}" if word.startswith(".") else word)
        assert wanted.name in {project["name"], *takes}, f"{word} is no package that this project takes"
        unknown = wanted.extras - set(project["optional-dependencies"])
        assert not unknown, f"{word}: pyproject.toml has no extra {', '.join(unknown)}"
        assert all(takes[wanted.name].contains(one.version) for one in wanted.specifier), word


def check_results(files: set[Path]) -> None:
    """Whether a bench wrote down times of everybody."""
    assert files
    for file in files:
        frame = pd.read_csv(file)
        times = frame.get("median_us", frame.get("host_us", pd.Series(1.0)))
        assert times.notna().all(), f"{file}: {frame[times.isna()].to_string()}"
