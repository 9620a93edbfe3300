"""Checks that can fail: a bug is planted in a copy of the code, and the check that is there to notice it must fail.

    python tests/checks/check_checks.py [--jobs 2] [-k WORDS] [--list]

Takes the bugs of ``tests/support/planted_bugs.py`` one at a time. Each check runs once without a bug, too, and must
pass then. Exits with status 1 when a bug is not noticed, when a check fails without one, or when the text that a bug
replaces does not stand in its file exactly once: then the code has changed, and so must the row. pytest runs a few.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from planted_bugs import BUGS, Bug

_ROOT = Path(__file__).resolve().parents[2]
#: What of the checkout the checks need.
_PARTS = (
    "costmodel", "kernels", "planner", "search", "tests", ".typecheck", "pyproject.toml", "fuseplan_kernels.py",
    "fuseplan_plans.py",
)
#: Says where each package comes from.
_WHERE = "import fuseplan.costmodel as a, fuseplan.kernels as b, fuseplan.planner as c, fuseplan.search as d; " \
    "print(*(next(iter(one.__path__)) for one in (a, b, c, d)), sep='\\n')"


@dataclass(frozen=True)
class Ran:
    """How a check ended: ``failed`` is None where it took longer than its limit."""

    failed: bool | None
    seconds: float
    said: str


class Copy:
    """The code in a folder of its own, laid out as the checkout, with caches and data of its own.

    Processes that :meth:`run` starts import ``fuseplan`` from the copy, by the link in ``.typecheck``.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        self._folder = folder
        self.root.mkdir(parents=True)
        for name in _PARTS:
            source, target = _ROOT / name, self.root / name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        where = subprocess.run(
            [sys.executable, "-c", _WHERE], env=self._environment("where"), cwd=folder, capture_output=True, text=True,
            check=True,
        ).stdout.split()
        if not where or not all(Path(one).resolve().is_relative_to(self.root.resolve()) for one in where):
            sys.exit(f"the copy of the code is not what runs, but {', '.join(where)}")

    def _environment(self, name: str) -> dict[str, str]:
        own = self._folder / name
        own.mkdir(exist_ok=True)
        # Bytecode is told from its source by second and size, which a planted bug and the sound code may share.
        return {
            **os.environ, "PYTHONPATH": str(self.root / ".typecheck"), "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(own / "cache"), "XDG_DATA_HOME": str(own / "data"),
            "TMPDIR": str(own),
        }

    def run(self, check: Sequence[str], limit_s: float, bug: Bug | None = None) -> Ran:
        """Run a check, with a bug in the copy or without."""
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *check]
        if check[0].startswith("tests/checks/"):
            command = [sys.executable, *check]
        name = f"run-{time.monotonic_ns()}"
        start = time.monotonic()
        try:
            with ExitStack() as stack:
                if bug is not None:
                    stack.callback((self.root / bug.file).write_text, (self.root / bug.file).read_text())
                    (self.root / bug.file).write_text(planted((self.root / bug.file).read_text(), bug))
                done = subprocess.run(
                    command, env=self._environment(name), cwd=self.root, capture_output=True, text=True, check=False,
                    timeout=limit_s,
                )
        except subprocess.TimeoutExpired:
            return Ran(None, time.monotonic() - start, "")
        finally:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        return Ran(done.returncode != 0, time.monotonic() - start, (done.stdout + done.stderr)[-1500:])


def planted(text: str, bug: Bug) -> str:
    """A file's text with a bug; ValueError where what it replaces does not stand there exactly once, and
    SyntaxError where the bug is no Python, which any check would notice.
    """
    if (times := text.count(bug.old)) != 1:
        raise ValueError(f"its text stands {times} times in {bug.file}; change its row of planted_bugs.py")
    made = text.replace(bug.old, bug.new)
    if bug.file.endswith(".py"):
        ast.parse(made)
    return made


def misplaced(bugs: Sequence[Bug], root: Path = _ROOT) -> list[str]:
    """What keeps bugs from being planted."""
    found = []
    for bug in bugs:
        try:
            planted((root / bug.file).read_text(), bug)
        except (OSError, ValueError, SyntaxError) as error:
            found.append(f"{bug.name}: {error}")
    return found


def judged(bugs: Sequence[Bug], jobs: int, folder: Path) -> Iterator[tuple[str, str, str, str, float]]:
    """Rows of the table: a bug, its file, its check, what became of it, and seconds. First, checks without a bug."""
    limits = {bug.check: bug.limit_s for bug in bugs}
    work: list[tuple[Sequence[str], float, Bug | None]] = [(check, limit, None) for check, limit in limits.items()]
    work += [(bug.check, bug.limit_s, bug) for bug in bugs]
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(folder / str(number)))

    def one(job: tuple[Sequence[str], float, Bug | None]) -> Ran:
        copy = copies.get()
        try:
            return copy.run(*job)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(jobs) as pool:
        for (check, limit, bug), ran in zip(work, pool.map(one, work), strict=True):
            verdict = _verdict(bug, ran, limit)
            if verdict not in ("noticed", "passes"):
                print(ran.said, file=sys.stderr)
            yield bug.name if bug else "(none)", bug.file if bug else "", " ".join(check), verdict, ran.seconds


def _verdict(bug: Bug | None, ran: Ran, limit_s: float) -> str:
    if ran.failed is None:
        # Whoever waits for a check that hangs has noticed something, but learns nothing.
        return f"NOT within {limit_s:.0f} s"
    if bug is None:
        return "FAILS" if ran.failed else "passes"
    return "noticed" if ran.failed else "NOT"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="checks at a time")
    parser.add_argument("-k", default="", dest="words", help="only bugs with one of these in their names")
    parser.add_argument("--list", action="store_true", help="show the bugs, and run nothing")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if any(word in bug.name for word in options.words.split(","))]
    if options.list:
        print("\n".join(f"{bug.name}: {bug.file}\n    - {bug.old!r}\n    + {bug.new!r}" for bug in bugs))
        return 0
    wrong = misplaced(bugs)
    print("\n".join(wrong), end="\n" if wrong else "")
    start, missed = time.monotonic(), 0
    print(f"{'bug':<52} {'file':<36} {'':<12} {'seconds':>7}  check")
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        there = [bug for bug in bugs if not misplaced([bug])]
        for name, file, check, verdict, seconds in judged(there, options.jobs, Path(folder)):
            missed += verdict not in ("noticed", "passes")
            print(f"{name:<52} {file:<36} {verdict:<12} {seconds:>7.0f}  {check}", flush=True)
    print(f"{len(bugs)} bugs, {missed} rows not as they should be, {len(wrong)} bugs without a place, "
          f"{time.monotonic() - start:.0f} s")
    return 1 if missed or wrong or not bugs else 0


if __name__ == "__main__":
    sys.exit(main())
