"""Commands under compute-sanitizer, and what it writes; for ``sanitize.py``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sanitize_plugin import COLLECT, TEST_SECONDS
from sanitize_work import CACHING, PLAIN, SINGLE

#: Exit status of compute-sanitizer when it found something.
FOUND = 86
SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
_CACHES = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
#: Titles of what memcheck reports; what belongs to one is indented below it.
_WRONG = re.compile(
    r"^={9} (?! |Target|Tracking|Default)"
    r"((?:Invalid|Misaligned|Illegal|Internal|Stack|Hardware|Program hit|Device|Fatal|Malloc/[Ff]ree)\b.*"
    r"|.*(?:out of bounds|access).*)$",
    re.MULTILINE,
)
#: The tool itself says that it could not do its work.
_TROUBLE = re.compile(r"^={9} (Error: No attachable process.*|.*Sanitizer encountered an error.*)$", re.MULTILINE)
_SHOWN = 14


@dataclass(frozen=True)
class Settings:
    """What all processes have in common.

    Attributes:
        tool: Path of compute-sanitizer.
        folder: For caches, logs and outputs.
        tests: Files and folders with the tests.
        test_s: Limit of one test.
        retire_s: A process takes no more tests after this long: what is lost with one stays small.
        grace_s: For a test to fail by itself, and for running ones to end, beyond a limit.
        threads: For PyTorch's operations on the CPU.
    """

    tool: str
    folder: Path
    tests: Sequence[str]
    test_s: float
    retire_s: float
    grace_s: float
    threads: int

    def limit_s(self, kind: str) -> float:
        """Of one test in a process of this kind; without the tool, tests build what the others need."""
        return self.test_s * (2 if kind == PLAIN else 1)

    def environment(self, kind: str) -> dict[str, str]:
        """Caches are shared by all processes (each of them is safe to share), and empty at first."""
        made = {
            **os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "MAX_JOBS": "4",
            "OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE",
            TEST_SECONDS: f"{self.limit_s(kind)}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])),
        }
        made |= {name: str(self.folder / "cache" / name.lower()) for name in _CACHES}
        made.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
        return made | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if kind == SINGLE else {})

    def under_tool(self, logs: Path) -> list[str]:
        """The command in front of what is to run under memcheck.

        No backtraces of the host: collecting one at each launch is slow, and keeps Python's frames alive, with the
        tensors in them.
        """
        return [
            self.tool, "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no",
            "--require-cuda-init", "no", "--launch-timeout", "300", "--show-backtrace", "device",
            "--error-exitcode", str(FOUND), "--log-file", str(logs / "%p.log"),
        ]


def pytest_command(tests: Sequence[str], *more: str) -> list[str]:
    return [
        sys.executable, "-m", "pytest", "-p", "sanitize_plugin", "-p", "no:xdist", "-p", "no:cacheprovider", "-q",
        "--tb=short", "--color=no", *more, *tests,
    ]


@dataclass
class Findings:
    """What memcheck's logs say.

    Attributes:
        summaries: Processes that left a summary.
        errors: Errors: by the summaries, or by their descriptions where a process was killed and left none.
        descriptions: The first lines of each.
        trouble: What the tool itself complains of.
    """

    summaries: int = 0
    errors: int = 0
    descriptions: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)


def read_logs(folder: Path) -> Findings:
    found = Findings()
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        counts = [int(count) for count in SUMMARY.findall(text)]
        titles = list(_WRONG.finditer(text))
        found.summaries += bool(counts)
        found.errors += max(sum(counts), len(titles))
        found.trouble += [f"{log.name}: {match[1]}" for match in _TROUBLE.finditer(text)]
        if titles or any(counts):
            lines = text[titles[0].start() if titles else 0 :].splitlines()
            found.descriptions.append("\n".join([f"{log.name}:", *lines[:_SHOWN]]))
    return found


def collect(settings: Settings, words: str) -> list[tuple[str, list[str]]]:
    """Ids of all tests, with their marks."""
    path = settings.folder / "tests.json"
    command = pytest_command(settings.tests, "--collect-only", *(["-k", words] if words else []))
    environment = {**settings.environment(CACHING), COLLECT: str(path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode or not path.exists():
        sys.exit(f"no tests were collected: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return [(name, marks) for name, marks in json.loads(path.read_text())]


def control(settings: Settings, where: str) -> str:
    """Why memcheck's silence means nothing: it did not see a wrong kernel. Empty when it did."""
    logs = settings.folder / f"control-{where}"
    logs.mkdir()
    script = Path(__file__).with_name("sanitize_control.py")
    command = [*settings.under_tool(logs), sys.executable, str(script), where]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=180.0, env=settings.environment(SINGLE),
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return "the control did not end within 180 s"
    findings = read_logs(logs)
    if findings.errors:
        return ""
    return "\n".join([*findings.trouble, *(done.stdout + done.stderr).splitlines()[-8:]]) or "memcheck reported nothing"
