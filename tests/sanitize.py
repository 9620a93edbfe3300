"""The GPU tests under compute-sanitizer's memcheck, side by side in slices.

    python tests/sanitize.py [--slices 14] [--minutes 8] [--tests tests/gpu] [--caching PATTERN ...] [-k WORDS]

Every slice is a pytest process of its own, with cache folders of its own, and so is each process that its tests start
(``--target-processes all``). Prints one row a slice: tests passed, failed, skipped and not reached within the time, and
the errors that memcheck found in all of its processes; then the errors themselves. Exits with status 1 when memcheck
found an error, a test failed, or a test was not reached. pytest does not collect it: it takes minutes and needs a GPU.

PyTorch's caching allocator cuts tensors out of large blocks, where memcheck cannot see a kernel run over a tensor's
end. So the slices run with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``: each tensor is an allocation of its own. While a CUDA
graph is captured nothing can be allocated that way, so tests whose id matches a ``--caching`` pattern keep the
allocator (:data:`CACHING`), and a test that fails without it runs once more with it. There, only accesses outside the
allocator's blocks are seen. Left out are tests marked ``faulty``, which fault on purpose, and ``timed``. Errors that
the CUDA API returns are not counted: PyTorch and the tests provoke some and handle them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

#: Tests that capture CUDA graphs, by id: whole files, and single tests that say so in their names.
CACHING = ("*test_cuda_graphs_gpu.py*", "*test_bench_gpu.py*", "*test_costmodel_gpu.py*", "*test_gpu_search.py*",
           "*test_overlap_gpu.py*", "*test_a_model_gives*", "*allocator*", "*graph*", "*captur*")
#: Exit status of compute-sanitizer when it found something.
FOUND = 86
_RESULT = re.compile(r"^(\S+\.py::.*?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_STARTED = re.compile(r"^(\S+\.py::.*?) *$")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_WRONG = re.compile(r"={3,} +(Invalid|Error:|Internal|.*out of bounds|.*access)")
_CACHES = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_PYTEST = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
_SHOWN = 12


@dataclass
class Slice:
    """Some tests, run in one process.

    Attributes:
        name: As the table names it.
        tests: Their ids.
        caching: Whether PyTorch's allocator caches.
        results: Outcome by id, of the tests that ended.
        running: The test that the time limit stopped; empty when none.
        errors: What memcheck counted in all processes; None when no process left a summary.
        complaints: The lines that it wrote about them.
        status: Exit status; None when the slice was stopped.
        seconds: How long it took.
    """

    name: str
    tests: list[str]
    caching: bool
    results: dict[str, str] = field(default_factory=dict)
    running: str = ""
    errors: int | None = None
    complaints: list[str] = field(default_factory=list)
    status: int | None = None
    seconds: float = 0.0

    def count(self, *outcomes: str) -> int:
        return sum(outcome in outcomes for outcome in self.results.values())

    @property
    def failed(self) -> list[str]:
        return [test for test, outcome in self.results.items() if outcome in ("FAILED", "ERROR")]

    @property
    def unreached(self) -> list[str]:
        return [test for test in self.tests if test not in self.results]

    @property
    def row(self) -> str:
        kind = "caching" if self.caching else "one by one"
        errors = "none read" if self.errors is None else str(self.errors)
        return (
            f"{self.name:8} {kind:11} {self.count('PASSED', 'XFAIL', 'XPASS'):6} {len(self.failed):6} "
            f"{self.count('SKIPPED'):7} {len(self.unreached):11} {errors:>10} {self.seconds:6.0f} s"
        )


def collect(folders: Sequence[str], words: str) -> list[str]:
    """Ids of the tests to run: all but those that fault on purpose, and those that compare times."""
    chosen = ["-m", "not faulty and not timed", *(["-k", words] if words else [])]
    command = [*_PYTEST, "--collect-only", "-q", *chosen, *folders]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    tests = [line.strip() for line in found.stdout.splitlines() if re.match(r"\S+\.py::", line)]
    if not tests:
        sys.exit(f"no tests were collected: {found.stdout[-500:]}{found.stderr[-500:]}")
    return tests


def slices_of(tests: Sequence[str], count: int, caching: Sequence[str]) -> list[Slice]:
    """At most ``count`` slices, each all of one kind; neighbours, which are alike, go to different ones."""
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for test in tests:
        kinds[any(fnmatchcase(test, pattern) for pattern in caching)].append(test)
    parts: list[Slice] = []
    for kind, members in kinds.items():
        share = max(1, round(count * len(members) / len(tests)))
        share = min(share, count - 1) if count > 1 and len(members) < len(tests) else share
        letter = "c" if kind else "n"
        parts += [Slice(f"{letter}{n + 1}", members[n::share], kind) for n in range(min(share, len(members)))]
    return parts


def run(part: Slice, folder: Path, limit_s: float, tool: str) -> Slice:
    """Run a slice to its end or its time limit, and read what memcheck wrote."""
    own = folder / part.name
    logs = own / "logs"
    logs.mkdir(parents=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment |= {name: str(own / name.lower()) for name in _CACHES}
    if part.caching:
        environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
    else:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [
        tool, "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no",
        "--error-exitcode", str(FOUND), "--log-file", str(logs / "%p.log"),
        *_PYTEST, "-v", "--tb=line", "--color=no", *part.tests,
    ]
    start = time.monotonic()
    output = own / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            part.status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
    part.seconds = time.monotonic() - start
    _read_results(part, output.read_text(errors="replace"))
    _read_logs(part, logs)
    return part


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a slice: politely first, so that memcheck writes its summary; its workers end with it."""
    for signal_number, patience_s in ((15, 10.0), (9, 10.0)):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        return


def _read_results(part: Slice, text: str) -> None:
    for line in text.splitlines():
        ended, started = _RESULT.match(line), _STARTED.match(line)
        if ended and ended[1] in part.tests:
            part.results[ended[1]] = ended[2]
        elif started and started[1] in part.tests:
            part.running = started[1]
    if part.running in part.results or part.status is not None:
        part.running = ""
    if part.status not in (None, 0, 1, FOUND):
        tail = [line for line in text.splitlines() if line.strip()][-3:]
        part.complaints += [f"exit status {part.status}", *tail]


def _read_logs(part: Slice, logs: Path) -> None:
    for log in sorted(logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        counts = [int(match[1]) for line in lines if (match := _SUMMARY.search(line))]
        if counts:
            part.errors = (part.errors or 0) + counts[-1]
        wrong = [number for number, line in enumerate(lines) if _WRONG.search(line)]
        if wrong or any(counts):
            start = wrong[0] if wrong else 0
            part.complaints += [f"{log.name}:", *lines[start : start + _SHOWN]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", nargs="+", default=["tests/gpu"], help="files or folders")
    parser.add_argument("--slices", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of each slice, and of the second attempts")
    parser.add_argument("--caching", nargs="*", default=list(CACHING), help="ids of tests that keep the allocator")
    parser.add_argument("-k", default="", dest="words", help="as pytest takes it")
    args = parser.parse_args()
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        sys.exit("compute-sanitizer was found neither on PATH nor in /usr/local/cuda/bin")
    end = time.monotonic() + 60 * args.minutes
    parts = slices_of(collect(args.tests, args.words), args.slices, args.caching)
    print(f"{'slice':8} {'allocations':11} passed failed skipped not reached    errors   took", flush=True)
    with tempfile.TemporaryDirectory(prefix="sanitize-") as name:
        folder, lock = Path(name), threading.Lock()

        def done(part: Slice) -> Slice:
            finished = run(part, folder, max(1.0, end - time.monotonic()), tool)
            with lock:
                print(finished.row, flush=True)
            return finished

        with ThreadPoolExecutor(len(parts)) as pool:
            parts = list(pool.map(done, parts))
        again = [test for part in parts if not part.caching for test in part.failed]
        if again and end - time.monotonic() > 1:
            print(f"{len(again)} tests failed without the caching allocator; once more with it:", flush=True)
            second = done(Slice("again", again, True))
            for part in parts:
                part.results |= {test: second.results[test] for test in part.tests if test in second.results}
            parts.append(second)
    sys.exit(report(parts))


def report(parts: Sequence[Slice]) -> int:
    """Print what is wrong; the exit status."""
    results = {test: outcome for part in parts for test, outcome in part.results.items()}
    tests = list(dict.fromkeys(test for part in parts for test in part.tests))
    for part in parts:
        for line in ([f"stopped in {part.running}"] if part.running else []) + part.complaints:
            print(f"{part.name}: {line}")
    failed = [test for test in tests if results.get(test) in ("FAILED", "ERROR")]
    unreached = [test for test in tests if test not in results]
    for title, some in (("failed", failed), ("not reached", unreached)):
        for test in some[:40]:
            print(f"{title}: {test}")
    errors = sum(part.errors or 0 for part in parts)
    passed = sum(outcome in ("PASSED", "XFAIL", "XPASS") for outcome in results.values())
    silent = sum(part.errors is None for part in parts)
    print(
        f"{passed} of {len(tests)} tests passed, {len(failed)} failed, {len(unreached)} not reached; "
        f"{errors} memcheck errors" + (f"; no summary from {silent} slices" if silent else "")
    )
    return int(bool(errors or failed or unreached or silent))


if __name__ == "__main__":
    main()
