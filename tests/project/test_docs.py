"""README and docs/: their snippets run, their commands exist, their outputs are what is printed, their links lead on.

A page is run from top to bottom in one folder, as a reader would: snippets and commands of a page share it. There is a
small model in ``my-llama``, and the default database knows this machine and the plans of that model. Nothing is timed:
the device's numbers are given, searches try one configuration, and a call counts as long as the ATen ops it makes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import report_samples as samples
import torch
from doc_pages import Block, blocks, is_like, links, name, pages, parse, why_only_parsed
from inline_executor import InlineExecutor
from paths import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

import fuseplan.planner
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.planner.cli import main
from fuseplan.planner.runtime import resolve
from fuseplan.planner.tuning import session
from fuseplan.planner.tuning.settings import PlanSettings
from fuseplan.search.store.location import default_path
from fuseplan.search.timing.timers import CpuTimer, Operands, Run, Sampler
from fuseplan.search.tune import tuner

#: Those of a model and of a database; the others have tests beside what they show.
EXAMPLES = [ROOT / "examples" / f"{one}.py" for one in ("compile_a_llama", "generate_static_cache", "ship_a_database")]
#: The tune that the default database has of ``my-llama``.
TUNE = ("tune", "--config", "my-llama", "--prefill", "16", "--no-calls")
#: Hardly any search: what is found is no matter here.
QUICK = tuner.Budget(trials=1, steep_trials=1, seconds=0.1, screen_s=0.002, decide_s=0.01, finalists=1)
#: Words of README, counted as ``wc -w`` does.
MOST_WORDS = 900


@dataclass
class Reader:
    """What a reader has, and what was run for all pages."""

    folder: Path
    tuned: Path
    tune_output: str
    executed: list[str] = field(default_factory=list)
    parsed: list[str] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    def sit_down(self, page: Path, patch: pytest.MonkeyPatch) -> None:
        """Go to a page's folder, with the model, the examples and a database of its own."""
        here = self.folder / page.stem
        shutil.copytree(self.folder / "my-llama", here / "my-llama")
        (here / "examples").symlink_to(ROOT / "examples")
        patch.setenv("XDG_DATA_HOME", str(here / "data"))
        shutil.copytree(self.tuned, default_path().parent)
        patch.chdir(here)


def counted(self: CpuTimer, run: Run, operands: Operands) -> Sampler:
    """In the place of a timer: a microsecond, and five for each op that ATen runs."""
    ops = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal ops
            ops += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        run(*operands[0])
    return lambda: 1.0 + 5.0 * ops


def run_plan(*argv: str) -> str:
    """What a command prints; it has to end well."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main.run(argv)
        except SystemExit as end:
            status = int(end.code or 0)
    assert status == 0, f"plan {' '.join(argv)}: exit status {status}\n{err.getvalue()}"
    return out.getvalue()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
            patch.setenv(variable, str(folder / variable))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(session, "probe", lambda kind, *_: replace(samples.SPEC, identity=current_identity(kind)))
        patch.setattr(tuner, "make_pool", lambda _: InlineExecutor())
        patch.setattr(tuner.Budget, "on", lambda *_: QUICK)
        patch.setattr(PlanSettings, "measured_on", lambda *_: 1)
        patch.setattr(CpuTimer, "prepare", counted)
        patch.setattr(CpuTimer, "steady", lambda _: True)
        patch.setattr(CpuTimer, "disturbances", lambda _: 0)
        patch.setattr(probe, "machine_load", lambda: probe.MachineLoad(0.0, 2))
        patch.chdir(folder)
        LlamaConfig(
            architectures=["LlamaForCausalLM"], dtype="bfloat16", hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
            max_position_embeddings=512, eos_token_id=None,
        ).save_pretrained("my-llama")
        samples.known_machine(default_path())
        output = run_plan(*TUNE)
        yield Reader(folder, default_path().parent, output)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled or counted yet."""
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    resolve._LOGGED.clear()
    resolve._WARNED.clear()
    yield
    torch._dynamo.reset()


def run_example(reader: Reader, script: str, settings: dict[str, str] | None = None) -> str:
    """What an example prints in a process of its own. It is run once for all who ask for no settings of their own."""
    if settings or script not in reader.examples:
        arguments = []
        if Path(script).stem == "ship_a_database":  # its database knows the machine, which takes long to measure
            arguments = [str(reader.folder / "shipped")]
            (reader.folder / "shipped").mkdir()
            samples.known_machine(reader.folder / "shipped" / "tuning.db")
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, check=False, timeout=300,
            cwd=reader.folder, env=os.environ | (settings or {}),
        )
        assert done.returncode == 0, f"{script}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        reader.examples[script] = done.stdout + done.stderr
    return reader.examples[script]


def run_command(reader: Reader, command: str) -> str:
    """Run a line of a page, or read it where it is long; what it prints, or would print of what the pages' tune did."""
    settings = dict(re.findall(r"(\b[A-Z_]+)=\"?([^\" ]*)\"? (?=.*\bpython )", command))
    _, *argv = words = [one for one in doc_pages.words(command) if "=" not in one or one.startswith(("-", "TORCH="))]
    if words[0] == "python":
        return run_example(reader, argv[0], settings)
    if words[0] not in ("plan", "make"):
        return ""
    if why := why_only_parsed(command):
        reader.parsed.append(f"{command}  ({why})")
        if words[0] == "plan":
            parse(argv)
            return reader.tune_output if argv[0] == "tune" else ""
        subprocess.run(["make", "--dry-run", *argv], cwd=ROOT, check=True, capture_output=True)
        return reader.tune_output if "tune" in argv else ""
    parse(argv) if "--version" not in argv and "--help" not in argv else None
    reader.executed.append(command)
    return run_plan(*argv)


def run_snippet(block: Block, page: Path, names: dict[str, Any]) -> str:
    """Run a Python snippet in a page's namespace. What it prints."""
    if block.title:
        Path(block.title).write_text(block.body)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (block.line - 1) + block.body, name(page), "exec"), names)
    return out.getvalue()


def missing(shown: str, printed: str) -> list[str]:
    """The lines of an output on a page that are of another form than every line that was printed."""
    found = printed.splitlines()
    return [line for line in shown.splitlines() if line.strip() and not any(is_like(line, one) for one in found)]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=name)
def test_a_page_does_what_it_says(page: Path, reader: Reader, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.sit_down(page, monkeypatch)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page):
        if block.kind == "python":
            printed = run_snippet(block, page, names)
        elif block.kind == "bash":
            printed = "\n".join([run_command(reader, command) for command in block.commands])
        elif block.kind == "text":
            wrong = missing(block.body, printed)
            assert not wrong, f"{name(page)}:{block.line}: nothing like these is printed:\n" + "\n".join(
                [*wrong, "but:", printed])
        elif block.kind == "toml" and block.title:
            Path(block.title).write_text(block.body)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_an_example_runs(example: Path, reader: Reader) -> None:
    printed = run_example(reader, name(example))
    assert "0 groups fell back to unfused ops" in printed, printed


@pytest.mark.slow
def test_what_was_run_and_what_was_only_read(reader: Reader) -> None:
    """The commands of the pages above that take too long, in the list of warnings: each has a reason."""
    if reader.executed:
        said = [f"{len(reader.executed)} commands of the pages were run, {len(reader.parsed)} were only parsed:",
                *sorted(set(reader.parsed))]
        warnings.warn("\n  ".join(said), stacklevel=1)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_in_sentences_exist(page: Path) -> None:
    for command in doc_pages.named_commands(page):
        try:
            parse(command.removesuffix(" ...").split()[1:])
        except Exception as error:  # a command is named without what it is given
            if type(error).__name__ != "MissingParameter":
                raise AssertionError(f"{name(page)}: {command}: {error}") from error


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in doc_pages.anchors(target)):
            wrong.append(link)
    named = re.findall(r"`((?:results|examples|tests|docs)/[^`\s*<]*)`", page.read_text())
    wrong += [path for path in named if not (ROOT / path).exists()]
    assert not wrong


def test_every_page_can_be_reached_from_the_first_one() -> None:
    first = ROOT / "docs" / "index.md"
    reached, ahead = set(), [first]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.is_file() and page.parent == first.parent:
            reached.add(page)
            ahead += [(page.parent / link.split("#")[0]).resolve() for link in links(page) if link.endswith(".md")]
    assert reached == set((ROOT / "docs").glob("*.md"))


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False, timeout=300,
    )
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    pages_built = list(tmp_path.rglob("*.html"))
    from_elsewhere = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]*)")
    fetched = {address for page in pages_built for address in from_elsewhere.findall(page.read_text())}
    assert len(pages_built) > len(pages()) and not fetched, fetched
    assert 'id="fuseplan.planner.dispatch_stats.stats"' in (tmp_path / "api" / "index.html").read_text()


def test_readme_is_short() -> None:
    assert len(doc_pages.README.read_text().split()) <= MOST_WORDS


def test_each_figure_of_readme_is_in_the_file_that_its_row_names() -> None:
    """Times of the table of results; what is rounded there is looked for among the rounded figures of the file."""
    rows = re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\| \[.*\]\((results/[^)]+)\) \|$",
                      doc_pages.README.read_text(), re.M)
    assert len(rows) >= 6
    for what, _, theirs, ours, gain, file in rows:
        figures = [float(one) for one in re.findall(r"\d+\.\d+", (ROOT / file).read_text())]
        for cell in (theirs, ours):
            scale = 1000 if "ms" in cell and max(figures) > 1000 and "to" not in cell else 1
            for number in re.findall(r"\d[\d.]*", cell):
                digits = len(number.partition(".")[2])
                assert any(round(one / scale, digits) == float(number) for one in figures), (what, number, file)
        first, second = (float(re.findall(r"\d[\d.]*", cell)[0]) for cell in (theirs, ours))
        assert float(gain.strip().strip("x")) == pytest.approx(first / second, abs=0.02), what
