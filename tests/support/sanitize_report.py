"""What a run of ``sanitize.py`` found, as text and as a page of Markdown."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sanitize_process import Process
from sanitize_work import PLAIN, SINGLE, Case

HEAD = f"{'process':8} {'allocations':11} passed failed skipped lost    errors   took"
_SLOWEST = 12


@dataclass
class Run:
    """Everything about one run.

    Attributes:
        cases: The tests.
        left_out: Marks for which tests are left out, with their ids.
        processes: Those that ran tests.
        controls: Why memcheck did not see what it had to, by the control's name; empty texts where it did.
        seconds: How long the run took.
    """

    cases: Sequence[Case]
    left_out: dict[str, list[str]]
    processes: list[Process] = field(default_factory=list)
    controls: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def with_outcome(self, outcome: str) -> list[Case]:
        return [case for case in self.cases if case.outcome == outcome]

    @property
    def unread(self) -> list[Case]:
        """Tests that passed, in a process of which memcheck left no summary."""
        silent = {process.name for process in self.processes if process.silent}
        return [case for case in self.with_outcome("passed") if case.checked[-1].process in silent]

    @property
    def errors(self) -> int:
        return sum(process.findings.errors for process in self.processes)

    @property
    def trouble(self) -> list[str]:
        return [f"{process.name}: {line}" for process in self.processes for line in process.findings.trouble]

    @property
    def blind(self) -> list[str]:
        return [f"{name}: {reason}" for name, reason in self.controls.items() if reason]

    @property
    def clean(self) -> bool:
        wrong = self.with_outcome("failed") or self.with_outcome("not reached") or self.unread
        return bool(self.with_outcome("passed")) and not (wrong or self.errors or self.trouble or self.blind)

    @property
    def summary(self) -> str:
        counts = {one: len(self.with_outcome(one)) for one in ("passed", "failed", "skipped", "not reached")}
        parts = [
            f"{counts['passed']} of {len(self.cases)} tests passed under memcheck", f"{counts['failed']} failed",
            f"{counts['skipped']} skipped", f"{counts['not reached']} not reached", f"{self.errors} memcheck errors",
        ]
        parts += [f"{len(self.unread)} without a summary"] if self.unread else []
        parts += [f"{len(names)} left out ({mark})" for mark, names in self.left_out.items()]
        return f"{'clean' if self.clean else 'NOT CLEAN'}: {', '.join(parts)}; {self.seconds:.0f} s"


def sections(run: Run) -> Iterator[tuple[str, list[str]]]:
    """Titles, and what is below them; empty ones are left out."""
    for process in run.processes:
        if process.findings.descriptions:
            tests = [f"  first seen after {name}: {count}" for name, count in process.seen.items()]
            tests = tests or ["  seen when its last test had ended"]
            yield f"memcheck errors in {process.name}", [*tests, *process.findings.descriptions]
    for case in run.with_outcome("failed"):
        without = {"": "not tried without memcheck", "failed": "fails without memcheck too"}.get(
            case.without, f"{case.without} without memcheck"
        )
        yield f"failed: {case.id} ({without})", _attempts(case, ("failed",))
    for case in run.with_outcome("passed"):
        if any(attempt.outcome == "failed" for attempt in case.attempts):
            last = case.checked[-1]
            yield f"failed and passed ({last.kind}): {case.id}", _attempts(case, ("failed",))
    yield "not reached", [case.id for case in run.with_outcome("not reached")]
    yield "passed, but memcheck left no summary", [case.id for case in run.unread]
    yield "skipped", _skipped(run)
    yield "left out", [f"{name} ({mark})" for mark, names in run.left_out.items() for name in names]
    yield "the tool's own trouble", run.trouble
    yield "a kernel that memcheck has to see went unseen", run.blind
    ended = [f"{process.name}: {process.ended}" for process in run.processes if "\n" in process.ended]
    yield "processes that did not get to a test", ended
    slow = sorted(
        ((attempt.seconds, attempt.kind, case.id) for case in run.cases for attempt in case.attempts), reverse=True
    )
    yield "slowest", [f"{seconds:6.1f} s {kind:11} {name}" for seconds, kind, name in slow[:_SLOWEST]]


def _attempts(case: Case, outcomes: Sequence[str]) -> list[str]:
    said: dict[str, list[str]] = {}
    for attempt in case.attempts:
        if attempt.outcome in outcomes:
            said.setdefault(attempt.message, []).append(f"{attempt.kind}, {attempt.seconds:.0f} s, {attempt.process}")
    return [f"[{'; '.join(where)}]\n{message}" for message, where in said.items()]


def _skipped(run: Run) -> list[str]:
    reasons: dict[str, int] = {}
    for case in run.with_outcome("skipped"):
        reasons[case.checked[-1].message] = reasons.get(case.checked[-1].message, 0) + 1
    return [f"{count} x {reason}" for reason, count in reasons.items()]


def text(run: Run) -> str:
    """For the terminal: the rows were printed as processes ended."""
    parts = ["\n".join([f"-- {title}", *lines]) for title, lines in sections(run) if lines]
    return "\n\n".join(["", *parts, run.summary])


def markdown(run: Run, tool: str) -> str:
    """A page that can be kept beside other results."""
    single = sum(process.kind == SINGLE for process in run.processes)
    plain = sum(process.kind == PLAIN for process in run.processes)
    controls = ", ".join(f"{name}: {'not seen' if reason else 'seen'}" for name, reason in run.controls.items())
    lines = [
        "# GPU tests under compute-sanitizer", "",
        f"{'; '.join(facts(tool))}.", "",
        f"`{_command()}`: memcheck, in every process that the tests start. {single} processes"
        f" with an allocation for each tensor, {len(run.processes) - single - plain} with PyTorch's allocator, {plain}"
        " without the tool (builds, and second looks at failures). A write one element behind a tensor, which memcheck"
        f" has to see: {controls or 'not tried'}.",
        "", f"**{run.summary}**", "", "```", HEAD, *(process.row.splitlines()[0] for process in run.processes), "```",
    ]
    for title, body in sections(run):
        if body:
            lines += ["", f"## {title[0].upper()}{title[1:]}", "", "```", *body, "```"]
    return "\n".join(lines) + "\n"


def _command() -> str:
    """Published evidence names files, not where they lie on one machine."""
    return shlex.join(["python", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)])


def facts(tool: str) -> list[str]:
    """Device, versions, commit, date: what can be found out."""
    found = []
    for command in (
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
    ):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            found += [f"commit {said[0]}" if command[0] == "git" else f"{said[0]} (device, driver)"] if said else []
    for name in ("torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    with contextlib.suppress(OSError):
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
        found += [line.strip() for line in said if line.strip().lower().startswith("version")][:1]
    return [*found, time.strftime("%Y-%m-%d")]
