"""The GPU tests under compute-sanitizer's memcheck, in processes beside each other.

    python tests/checks/sanitize.py [--slices 14] [--minutes 8] [--out results/DEVICE/memcheck.md] [-k WORDS]

Prints a row for each process: tests that passed, failed and were skipped in it, those that have to be run again since
it ended without memcheck's summary, and the errors that memcheck found in it and in all processes that its tests
started. Then, for each failure, the message and whether the test fails without memcheck too. Exits with status 1 when
memcheck found an error, a test failed, or a test was not reached. pytest does not collect it: it needs a GPU, and
minutes.

Every process is handed one test after the other, the long ones first, until there are none (``sanitize_work.py``).
All share cache folders, empty at first; tests that build for long run once without the tool before. A test that takes
longer than ``--test-seconds`` (twice that while it builds) fails; one that does not come back from C code goes down
with its process, and the others of that process are run again. When ``--minutes`` are over no test is begun any more,
and those that run have a quarter of a minute left.

PyTorch's caching allocator cuts tensors out of large blocks, where memcheck cannot see a kernel run over a tensor's
end. So processes run with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``: each tensor is an allocation of its own. While a CUDA
graph is captured nothing can be allocated that way, so tests whose id matches a ``--caching`` pattern keep the
allocator, and a test that fails without it runs once more with it. There, only accesses outside the allocator's blocks
are seen. Left out, and listed, are tests marked ``faulty``, which fault on purpose, and ``timed``, which compare times.
Errors that the CUDA API returns are not counted: PyTorch and the tests provoke some and handle them. Whether memcheck
sees what it should is tried with a kernel that writes behind a tensor, in a process and in a worker of the search.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import sanitize_report
from sanitize_process import Process
from sanitize_tool import Settings, collect, control
from sanitize_work import CACHED, PLAIN, WARM, Queue, cases_of

#: Marks of tests that are left out.
LEFT_OUT = ("faulty", "timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", nargs="+", default=["tests/gpu"], help="files or folders")
    parser.add_argument("--slices", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes at a time")
    parser.add_argument("--minutes", type=float, default=8.0, help="no test is begun after")
    parser.add_argument("--test-seconds", type=float, default=120.0, help="limit of one test")
    parser.add_argument("--retire-seconds", type=float, default=100.0, help="a process takes no more tests after")
    parser.add_argument("--grace-seconds", type=float, default=15.0, help="beyond a limit, before a process is stopped")
    parser.add_argument("--caching", nargs="*", default=list(CACHED), help="ids of tests that keep the allocator")
    parser.add_argument("--warm", nargs="*", default=list(WARM), help="ids of tests to run without the tool before")
    parser.add_argument("--no-control", action="store_true", help="do not try whether memcheck sees a wrong kernel")
    parser.add_argument("--out", type=Path, help="write a report there, as Markdown")
    parser.add_argument("--keep", type=Path, help="copy what processes and memcheck wrote into this folder")
    parser.add_argument("-k", default="", dest="words", help="as pytest takes it")
    args = parser.parse_args()
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        sys.exit("compute-sanitizer was found neither on PATH nor in /usr/local/cuda/bin")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sanitize-", ignore_cleanup_errors=True) as folder:
        threads = max(1, (os.cpu_count() or 1) // args.slices)
        limits = args.test_seconds, args.retire_seconds, args.grace_seconds
        settings = Settings(tool, Path(folder), args.tests, *limits, threads)
        found = collect(settings, args.words)
        left_out = {mark: [name for name, marks in found if mark in marks] for mark in LEFT_OUT}
        names = [name for name, marks in found if not set(marks) & set(LEFT_OUT)]
        cases = cases_of(names, args.caching, args.warm)
        run = sanitize_report.Run(cases, {mark: some for mark, some in left_out.items() if some})
        work(run, settings, Queue(cases, start + 60 * args.minutes), args.slices, not args.no_control)
        run.seconds = time.monotonic() - start
        if args.keep:
            keep(settings.folder, args.keep)
        print(sanitize_report.text(run))
        if args.out:
            args.out.write_text(sanitize_report.markdown(run, tool))
    sys.exit(0 if run.clean else 1)


def keep(folder: Path, kept: Path) -> None:
    for path in (*folder.glob("*/output.txt"), *folder.glob("*/logs/*.log"), *folder.glob("control-*/*.log")):
        target = kept / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def work(run: sanitize_report.Run, settings: Settings, queue: Queue, slices: int, controls: bool) -> None:
    """Keep ``slices`` processes busy until there is nothing to do."""
    lock = threading.Lock()
    counts = dict.fromkeys("pcn", 0)
    print(sanitize_report.HEAD, flush=True)

    def keep_one() -> None:
        while (kind := queue.choose()) is not None:
            letter = "p" if kind == PLAIN else "c" if kind == "caching" else "n"
            with lock:
                counts[letter] += 1
                process = Process(f"{letter}{counts[letter]}", kind, settings, queue)
                run.processes.append(process)
            try:
                process.run()
            except BaseException:
                queue.stop()
                raise
            with lock:
                print(process.row, flush=True)

    with ThreadPoolExecutor(slices + 2) as pool:
        places = ("here", "worker") if controls else ()
        tried = {where: pool.submit(control, settings, where) for where in places}
        try:
            for kept in [pool.submit(keep_one) for _ in range(slices)]:
                kept.result()
        except BaseException:
            queue.stop()  # interrupted: what runs is stopped a little later
            raise
        run.controls = {where: future.result() for where, future in tried.items()}


if __name__ == "__main__":
    main()
