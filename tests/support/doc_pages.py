"""README and the pages of docs/: their snippets, commands and outputs, and how a command line is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

README = ROOT / "README.md"
_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w+)?(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)``` *$", re.M | re.S)
_TITLE = re.compile(r'title="([^"]+)"')
#: Addresses of links and pictures.
_LINK = re.compile(r"\]\(([^)\s]+)\)")
#: The name of a workload, with that of its model.
_WORKLOAD = r"(?:\S+ )?(?:decode|prefill|generate) [\dx]+(?: @ \d+)?"


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is the first of its body; ``title`` the file that it shows, if any."""

    kind: str
    body: str
    line: int
    title: str = ""
    info: str = ""

    @property
    def commands(self) -> list[str]:
        """The command lines of a ``bash`` block; a backslash joins lines."""
        lines = self.body.replace("\\\n", " ").splitlines()
        return [one for one in lines if one.strip() and not one.lstrip().startswith("#")]


def pages() -> list[Path]:
    """README, and every page of docs/."""
    return [README, *sorted((ROOT / "docs").glob("*.md"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["info"])
        body = "\n".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines()) + "\n"
        found.append(Block(match["kind"] or "", body, text.count("\n", 0, match.start("body")) + 1,
                           title[1] if title else "", match["info"].strip()))
    return found


def links(path: Path) -> list[str]:
    """Addresses that a page links to, code aside."""
    return _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))


def named_commands(path: Path) -> list[str]:
    """``plan`` commands that a page names in its sentences and tables; not ``plan db`` and ``plan fleet`` alone."""
    return re.findall(r"`(plan (?!db`|fleet`)[^`<$]+)`", _FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """What a page's headings are called in addresses."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", head) for head in re.findall(r"^#+ +(.+?) *$", text, re.M)]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in plain}


def calls(command: str) -> list[tuple[dict[str, str], list[str]]]:
    """What a command line calls: the settings before each program, and its words.

    >>> calls("cd clone && A=1 plan report  # all of it")
    [({}, ['cd', 'clone']), ({'A': '1'}, ['plan', 'report'])]
    """
    found = []
    for part in command.split(" && "):
        words = shlex.split(part, comments=True)
        first = next(at for at, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
        found.append((dict(word.split("=", 1) for word in words[:first]), words[first:]))
    return found


def parse(argv: Sequence[str]) -> None:
    """Read a ``plan`` command line as the command does, without running it: every command, option and value exists.

    Raises:
        Exception: What typer says of it.
    """
    import typer

    from fuseplan.planner.cli.main import app

    command, context, called, rest = typer.main.get_command(app), None, "plan", list(argv)
    while True:
        context = command.make_context(called, rest, parent=context)
        rest = [*context._protected_args, *context.args]
        if not hasattr(command, "resolve_command"):
            assert not rest, f"too many words: {rest}"
            return
        assert rest, f"no command in {' '.join(argv)}"
        called, command, rest = command.resolve_command(context, rest)


def shape(line: str) -> str:
    """A line of output without its numbers, and without the names of groups, which are a model's own.

    >>> shape("decode 1 @ 256: 64.9 -> 48.0 ms a step (1.35x); floor 16.6 ms; within the noise of 42%")
    'W: # -> # U a step (#x); floor # U'
    >>> shape("decode 1 @ 256: 64.9 -> 48.0 ms a step (1.35x; torch.compile 52.1 ms); floor 16.6 ms")
    'W: # -> # U a step (#x); floor # U'
    >>> shape("    saves 2.3 ms of prefill 1x16, 2 x (4.39 us -> 850 us): model.mlp  x2 (silu+mul 1x128 float32)")
    'saves # U of W, # x (# U -> # U): G'
    >>> shape("    saves 2.3 ms of prefill 1x16, 2 x (4.39 us -> 850 us): model.mlp  x2 (silu+…")
    'saves # U of W, # x (# U -> # U): G'
    >>> shape("decode 1 @ 256  linear 1x1x8192 bfloat16  32  28,891.42")
    'W  G  #  #'
    """
    # Said where it is so.
    line = re.sub(r"; (?:within the noise of|excludes|memory was read at) [^;…]*", "", line.strip())
    line = re.sub(r" \(the step is [^)…]*\)", "", line)
    line = re.sub(r"; torch\.compile [\d.]+ (?:us|ms|s)(?=\))", "", line)  # and this where it was asked
    line = line.replace(" unsteady: ", " ")
    line = re.sub(rf"^{_WORKLOAD}", "W", line)
    line = re.sub(r"[\w.+…]+ (?:\d+x)*\d+ (?:bfloat16|float16|float32|int64|bool)", "G", line)
    line = re.sub(rf" of {_WORKLOAD}, (\d+ x \([^)]*\)): .*", r" of W, \1: G", line)
    line = re.sub(r"(?:(?<=\s)-)?\d[\d.,]*", "#", line)
    return re.sub(r"# (us|ms|s)\b", "# U", line)


def is_like(shown: str, printed: str) -> bool:
    """Whether a line of a page has the form of one that was printed: numbers and names of groups may differ.

    A line or a cell that ends with ``…`` need only begin like it. Of a table's columns some may be left out.

    >>> is_like("part       saved_us", "workload\tpart\tsaved_us")
    True
    >>> is_like("decode 1 @ 256: 6 -> 5 ms a st…", "prefill 1x16: 812 -> 330 us a step (2.46x)")
    True
    >>> is_like("part       gained_us", "workload\tpart\tsaved_us")
    False
    """
    there = iter(_cells(printed))
    return all(any(_begins(cell, other) for other in there) for cell in _cells(shown))


def _cells(line: str) -> list[str]:
    return [part for part in re.split(r"\t| {2,}", shape(line)) if part]


def _begins(shown: str, printed: str) -> bool:
    return printed.startswith(shown.rstrip("…").rstrip()) if shown.endswith("…") else shown == printed
