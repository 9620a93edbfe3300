"""The GPU tests in pytest-xdist's workers beside each other, each under a compute-sanitizer (memcheck) of its own.

    python tests/checks/sanitize.py [--slices 14] [--minutes 8] [--out results/DEVICE/memcheck.md] [-k WORDS]

Says how many tests ran, which failed and why, and what memcheck found in every process that they started. Exits with
status 1 when memcheck found an error, a test failed or was not reached, or a process left no summary. pytest does not
collect it: it needs a GPU, and minutes.

The tests run in up to four passes over shared caches, empty at first:

    plain       without the tool: tests that have compilers build for long (``WARM``)
    one by one  each tensor is an allocation of its own: PyTorch's allocator cuts tensors out of large blocks, where
                memcheck cannot see a kernel run over a tensor's end
    caching     with the allocator: tests that need it (``CACHED``), and those that failed one by one
    plain       those that failed under memcheck, so that the report can say what the failure depends on

A test that takes longer than ``--test-seconds`` fails; one that does not come back from C code goes down with its
worker, and so does one that crashes: another worker goes on. Left out, and listed, are tests marked ``faulty``, which
fault on purpose, and ``timed``, which compare times. Errors that the CUDA API returns are not counted: PyTorch and the
tests provoke some and handle them. Whether memcheck sees what it should is tried with a kernel that writes behind a
tensor, in a process and in a worker of the search.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from sanitize_plugin import PROCESS, RESULTS, SECONDS, TESTS

SUPPORT = Path(__file__).resolve().parents[1] / "support"
#: Marks of tests that are left out.
LEFT_OUT = ("faulty", "timed")
#: Tests that capture CUDA graphs or look at the allocator, by id. And those with attention masks of odd lengths: cuDNN,
#: as eager PyTorch calls it too, reads a mask four bytes at a time, up to two bytes past its end.
CACHED = ("*test_cuda_graphs_gpu.py*", "*test_bench_gpu.py*", "*test_costmodel_gpu.py*", "*test_gpu_search.py*",
          "*test_overlap_gpu.py*", "*test_overlapping_inputs_gpu.py*", "*test_a_model_gives*",
          "*test_masked_attention*", "*allocator*", "*graph*", "*captur*", "*record*")
#: Tests that have compilers build for long (FlashInfer's kernels with nvcc, TorchInductor's, a tune's).
WARM = ("*test_bench_gpu.py*", "*test_gpu_search.py*")
#: Tests that take long, which begin first.
LONG = (*WARM, "*test_decode_steps*", "*test_offsets_beyond*", "*test_dispatch_gpu.py*", "*test_capture_gpu.py*",
        "*test_cuda_graphs_gpu.py*", "*test_in_place_gpu.py*")
PLAIN, SINGLE, CACHING = "plain", "one by one", "caching"
_CACHES = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
#: Titles of what memcheck reports; what belongs to one is indented below it.
_WRONG = re.compile(
    r"^={9} (?! |Target|Tracking|Default)"
    r"((?:Invalid|Misaligned|Illegal|Internal|Stack|Hardware|Program hit|Device|Fatal|Malloc/[Ff]ree)\b.*"
    r"|.*(?:out of bounds|access).*)$",
    re.MULTILINE,
)
#: The tool itself says that it could not do its work.
_TROUBLE = re.compile(r"^={9} (Error: No attachable process.*|.*Sanitizer encountered an error.*)$", re.MULTILINE)
#: How Python begins to say what ends a worker, in the middle of pytest's line of dots.
_LAST_WORDS = re.compile(r"Fatal Python error|Timeout \(\d")
_SHOWN, _SLOWEST = 14, 12


@dataclass(frozen=True)
class Attempt:
    """One run of a test: ``outcome`` is ``"passed"``, ``"failed"`` or ``"skipped"``; ``process`` is a pid."""

    kind: str
    outcome: str
    seconds: float
    message: str
    process: int


@dataclass
class Findings:
    """What memcheck's logs say: processes with a summary, errors, the first lines of each, the tool's own trouble.

    Errors are counted by the summaries, or by their descriptions where a process was killed and left none.
    """

    summaries: set[int] = field(default_factory=set)
    errors: int = 0
    descriptions: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)


def read_logs(folder: Path) -> Findings:
    found = Findings()
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        counts = [int(count) for count in _SUMMARY.findall(text)]
        titles = list(_WRONG.finditer(text))
        found.summaries |= {int(log.stem)} if counts else set()
        found.errors += max(sum(counts), len(titles))
        found.trouble += [f"{log.name}: {match[1]}" for match in _TROUBLE.finditer(text)]
        if titles or any(counts):
            lines = text[titles[0].start() if titles else 0 :].splitlines()
            found.descriptions.append("\n".join([f"{log.name}:", *lines[:_SHOWN]]))
    return found


@dataclass
class Run:
    """Everything about one run: its tests, what became of each, what was left out, what memcheck said."""

    names: Sequence[str]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    blind: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def last(self, name: str) -> Attempt:
        """The last attempt under memcheck."""
        checked = [one for one in self.attempts.get(name, []) if one.kind != PLAIN]
        return checked[-1] if checked else Attempt("", "not reached", 0.0, "", 0)

    def those(self, outcome: str) -> list[str]:
        return [name for name in self.names if self.last(name).outcome == outcome]

    @property
    def unread(self) -> list[str]:
        """Tests that passed in a process of which memcheck left no summary."""
        return [name for name in self.those("passed") if self.last(name).process not in self.findings.summaries]

    @property
    def clean(self) -> bool:
        wrong = self.those("failed") or self.those("not reached") or self.unread or self.findings.trouble
        return bool(self.those("passed")) and not (wrong or self.findings.errors or any(self.blind.values()))

    @property
    def summary(self) -> str:
        failed, skipped, missed = (len(self.those(one)) for one in ("failed", "skipped", "not reached"))
        parts = [
            f"{len(self.those('passed'))} of {len(self.names)} tests passed under memcheck", f"{failed} failed",
            f"{skipped} skipped", f"{missed} not reached", f"{self.findings.errors} memcheck errors",
        ]
        parts += [f"{len(self.unread)} without a summary"] if self.unread else []
        parts += [f"{len(names)} left out ({mark})" for mark, names in self.left_out.items() if names]
        return f"{'clean' if self.clean else 'NOT CLEAN'}: {', '.join(parts)}; {self.seconds:.0f} s"

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Titles, and what is below them; empty ones are left out."""
        yield "memcheck errors", self.findings.descriptions
        for name, attempts in self.attempts.items():
            wrong = [one for one in attempts if one.outcome == "failed"]
            failed = [f"[{one.kind}, {one.seconds:.0f} s]\n{one.message}" for one in wrong]
            last = self.last(name)
            if last.outcome == "failed":
                plain = next((one.outcome for one in reversed(attempts) if one.kind == PLAIN), "")
                without = {"": "not tried without memcheck", "failed": "fails without memcheck too"}
                yield f"failed: {name} ({without.get(plain, f'{plain} without memcheck')})", failed
            elif failed:
                yield f"failed and passed ({last.kind}): {name}", failed
        yield "not reached", self.those("not reached")
        yield "passed, but memcheck left no summary", self.unread
        reasons = Counter(self.last(name).message for name in self.those("skipped"))
        yield "skipped", [f"{count} x {reason}" for reason, count in reasons.items()]
        yield "left out", [f"{name} ({mark})" for mark, names in self.left_out.items() for name in names]
        yield "the tool's own trouble", self.findings.trouble
        yield "a kernel that memcheck has to see", [f"{where}: {why or 'seen'}" for where, why in self.blind.items()]
        slow = sorted((-one.seconds, one.kind, name) for name in self.attempts for one in self.attempts[name])
        yield "slowest", [f"{-seconds:6.1f} s {kind:11} {name}" for seconds, kind, name in slow[:_SLOWEST]]

    def markdown(self, facts: Sequence[str]) -> str:
        command = shlex.join(["python", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)])
        lines = ["# GPU tests under compute-sanitizer", "", f"{'; '.join(facts)}.", "", f"`{command}`", "",
                 f"**{self.summary}**"]
        for title, body in self.sections():
            lines += ["", f"## {title[0].upper()}{title[1:]}", "", "```", *body, "```"] if body else []
        return "\n".join(lines) + "\n"


class Checker:
    """Runs commands under memcheck or not, with caches of their own.

    Args:
        tool: Path of compute-sanitizer.
        folder: For caches, logs and outputs.
        end: When everything is to have ended, as :func:`time.monotonic` tells it.
    """

    def __init__(self, tool: str, folder: Path, args: argparse.Namespace, end: float) -> None:
        self.tool, self.folder, self.args, self.end = tool, folder, args, end
        self.passes = 0

    def environment(self, kind: str) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // self.args.slices))
        path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        made = {
            **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "MAX_JOBS": "4", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE",
        }
        made |= {name: str(self.folder / "cache" / name.lower()) for name in _CACHES}
        made.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
        return made | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if kind == SINGLE else {})

    def checked_python(self, folder: Path) -> Path:
        """A script that is called as Python is, and runs it under a tool of its own: ``folder/PROCESS.log``.

        One tool over pytest and all its workers never came to a test. No backtraces of the host: collecting one at each
        launch is slow, and keeps Python's frames alive, with the tensors in them.
        """
        command = [
            self.tool, "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no",
            "--require-cuda-init", "no", "--launch-timeout", "300", "--show-backtrace", "device",
            "--error-exitcode", "86", "--log-file",
        ]
        folder.mkdir(parents=True, exist_ok=True)
        script, log = folder / "python", f"{shlex.quote(str(folder))}/$$.log"
        script.write_text(
            f'#!/bin/sh\nexport {PROCESS}=$$\nexec {shlex.join(command)} {log} {shlex.quote(sys.executable)} "$@"\n')
        script.chmod(0o755)
        return script

    def run(self, kind: str, command: Sequence[str], output: Path, limit_s: float, **more: str) -> int | None:
        """The exit status of a command; None where it took too long, and was killed."""
        with output.open("w") as file, subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**self.environment(kind), **more}, start_new_session=True,
        ) as process:
            try:
                return process.wait(limit_s)
            except BaseException as error:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.send_signal(signal.SIGINT)  # pytest ends its workers, and memcheck writes summaries
                    process.wait(self.args.grace_seconds)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return None

    def collect(self, marks: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, *self.args.tests]
        command += ["-k", self.args.words] if self.args.words else []
        said = subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment(PLAIN))
        if said.returncode not in (0, 5):
            sys.exit(f"no tests were collected: {said.stdout[-1500:]}{said.stderr[-500:]}")
        return [line for line in said.stdout.splitlines() if "::" in line]

    def test(self, run: Run, kind: str, names: Sequence[str]) -> None:
        """One pass; what it finds is added to ``run``."""
        left_s = self.end - time.monotonic()
        if not names or left_s <= 0:
            return
        self.passes += 1
        folder = self.folder / f"{self.passes}-{kind.replace(' ', '-')}"
        python, slices = self.checked_python(folder), min(self.args.slices, len(names))
        tests, results, output = folder / "tests.txt", folder / "results.jsonl", folder / "output.txt"
        tests.write_text("\n".join(sorted(names, key=lambda name: not _matches(name, LONG))))
        limit_s = self.args.test_seconds * (2 if kind == PLAIN else 1)
        command = [
            sys.executable, "-m", "pytest", "-p", "sanitize_plugin", "--dist", "load", "--tx",
            f"{slices}*popen" + ("" if kind == PLAIN else f"//python={python}"), "--maxschedchunk", "1",
            "--max-worker-restart", "100", "-p", "no:cacheprovider", "-q", "--tb=short", "--color=no",
            f"--timeout={limit_s}", *self.args.tests,
        ]
        more = {TESTS: str(tests), RESULTS: str(results), SECONDS: str(limit_s + self.args.grace_seconds)}
        self.run(kind, command, output, left_s, **more)
        said: dict[str, list[Attempt]] = {}
        for line in results.read_text().splitlines() if results.exists() else []:
            name, *rest = json.loads(line)
            said.setdefault(name, []).append(Attempt(kind, *rest))
        words = output.read_text(errors="replace").splitlines()
        starts = [number for number, line in enumerate(words) if _LAST_WORDS.search(line)]
        fatal = ["\n".join(words[start : start + 2 * _SHOWN]) for start in starts]
        for name, reports in said.items():
            worst = next((one for one in reports if one.outcome == "failed"), reports[-1])
            message = "\n".join(one.message for one in reports if one.message)
            if "crashed while running" in message:
                function = name.partition("[")[0].rpartition("::")[2]
                message = "\n".join([message, *(one for one in fatal if f" in {function}\n" in one)])
            seconds = sum(one.seconds for one in reports)
            run.attempts.setdefault(name, []).append(Attempt(kind, worst.outcome, seconds, message, worst.process))
        counts = Counter(attempts[-1].outcome for name, attempts in run.attempts.items() if name in said)
        print(f"{kind}: {len(names)} tests, {dict(counts)}" + ("" if said else f"\n{words[-20:]}"), flush=True)

    def control(self, where: str) -> str:
        """Why memcheck's silence means nothing: it did not see a wrong kernel. Empty when it did."""
        output = self.folder / f"control-{where}" / "output.txt"
        python = self.checked_python(output.parent)
        self.run(SINGLE, [str(python), str(SUPPORT / "sanitize_control.py"), where], output, 180.0)
        found = read_logs(output.parent)
        return "" if found.errors else "\n".join([*found.trouble, *output.read_text().splitlines()[-8:]]) or "nothing"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def facts(tool: str) -> list[str]:
    """Device, versions, commit, date: what can be found out."""
    found = []
    for command in (
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        ["git", "-C", str(SUPPORT), "describe", "--always", "--dirty", "--exclude=*"], [tool, "--version"],
    ):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            found += said[:1] if command[0] != tool else [line for line in said if line.startswith("Version")][:1]
    return [*found, f"torch {version('torch')}", time.strftime("%Y-%m-%d")]


def check(checker: Checker, controls: bool) -> Run:
    """All passes."""
    start = time.monotonic()
    run = Run(checker.collect(" and ".join(f"not {mark}" for mark in LEFT_OUT)))
    run.left_out = {mark: checker.collect(mark) for mark in LEFT_OUT}
    run.blind = {where: checker.control(where) for where in ("here", "worker")} if controls else {}
    checker.test(run, PLAIN, [name for name in run.names if _matches(name, checker.args.warm)])
    cached = [name for name in run.names if _matches(name, checker.args.caching)]
    checker.test(run, SINGLE, [name for name in run.names if name not in cached])
    checker.test(run, CACHING, [*cached, *run.those("failed")])
    checker.test(run, PLAIN, run.those("failed"))
    for found in map(read_logs, sorted(checker.folder.glob("[0-9]*"))):
        run.findings.summaries |= found.summaries
        run.findings.errors += found.errors
        run.findings.descriptions += found.descriptions
        run.findings.trouble += found.trouble
    run.seconds = time.monotonic() - start
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", nargs="+", default=["tests/gpu"], help="files or folders")
    parser.add_argument("--slices", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes at a time")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of the whole run")
    parser.add_argument("--test-seconds", type=float, default=120.0, help="limit of one test")
    parser.add_argument("--grace-seconds", type=float, default=15.0, help="beyond a limit, before a process is ended")
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
    with tempfile.TemporaryDirectory(prefix="sanitize-", ignore_cleanup_errors=True) as folder:
        checker = Checker(tool, Path(folder), args, time.monotonic() + 60 * args.minutes)
        run = check(checker, not args.no_control)
        if args.keep:
            shutil.copytree(folder, args.keep, ignore=shutil.ignore_patterns("cache"), dirs_exist_ok=True)
        print("\n\n".join(["\n".join([f"-- {title}", *lines]) for title, lines in run.sections() if lines]))
        print(f"\n{run.summary}")
        if args.out:
            args.out.write_text(run.markdown(facts(tool)))
    sys.exit(0 if run.clean else 1)


if __name__ == "__main__":
    main()
