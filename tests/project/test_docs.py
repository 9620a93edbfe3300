"""README and docs/: their snippets run, their commands exist, their outputs are what is printed, their links lead on.

A page is run from top to bottom in one folder, as a reader would: snippets and commands of a page share it. There is a
small model in ``my-llama``, and the default database knows this machine and the plans of that model and of the preset.
Nothing is timed, and every model is small: ``given_times.py`` says what stands in the place of minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import report_samples as samples
import torch
from doc_pages import blocks, is_like, links, name, pages, parse
from given_times import give_times, write_model
from page_reader import TUNES, Reader, check_install, make_calls, run_plan
from paths import ROOT
from postgres_server import Server, binaries

from fuseplan.planner.runtime import logs
from fuseplan.search.store.location import default_path

pytestmark = pytest.mark.uncovered

#: Those of a model and of a database; the others have tests beside what they show.
EXAMPLES = [ROOT / "examples" / f"{one}.py" for one in ("compile_a_llama", "generate_static_cache", "ship_a_database")]
#: Words of README, counted as ``wc -w`` does.
MOST_WORDS = 700


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")

    def server() -> Server | None:
        try:
            found: Server = request.getfixturevalue("server")
            return found
        except pytest.skip.Exception:
            return None

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
            patch.setenv(variable, str(folder / variable))
        give_times(patch)
        patch.chdir(folder)
        write_model(folder / "my-llama")
        samples.known_machine(default_path())
        for tune in TUNES:
            run_plan(*tune)
        yield Reader(folder, default_path().parent, server)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled or logged yet."""
    torch._dynamo.reset()
    logs.SAID.clear()
    yield
    torch._dynamo.reset()


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
            printed = reader.snippet(block, page, names)
        elif block.kind == "bash":
            printed = "\n".join([reader.command(command) for command in block.commands])
        elif block.kind == "text":
            wrong = missing(block.body, printed)
            assert not wrong, f"{name(page)}:{block.line}: nothing like these is printed:\n" + "\n".join(
                [*wrong, "but:", printed])
        elif block.kind == "toml" and block.title:
            Path(block.title).write_text(block.body)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_an_example_runs(example: Path, reader: Reader) -> None:
    printed = reader.example(name(example))
    assert "misses, 0 groups, regions, graphs or calls fell back to unfused ops" in printed, printed


@pytest.mark.slow
def test_every_command_of_the_pages_was_run(reader: Reader) -> None:
    """Those of the pages that were tested above. Without PostgreSQL, a server's are listed in the warnings."""
    if reader.not_run:
        warnings.warn("\n  ".join([f"{len(reader.not_run)} were not run:", *reader.not_run]), stacklevel=1)
    assert all(binaries() is None and "PostgreSQL" in one for one in reader.not_run)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_in_sentences_exist(page: Path) -> None:
    for command in doc_pages.named_commands(page):
        try:
            parse(command.removesuffix(" ...").split()[1:])
        except Exception as error:  # a command is named without what it is given
            if type(error).__name__ != "MissingParameter":
                raise AssertionError(f"{name(page)}: {command}: {error}") from error
    for command in re.findall(r"`(make \w+|pip install [^`]+)`", page.read_text()):
        program, *words = doc_pages.calls(command)[0][1]
        assert make_calls(words) if program == "make" else not check_install(words[1:])


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
