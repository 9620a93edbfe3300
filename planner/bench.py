"""Measurements to publish: our plan beside its peers, in one run, with everything that the numbers depend on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from fuseplan.planner.report import geometric_mean, markdown_table
from fuseplan.planner.session import Session
from fuseplan.search.jobs import clocks_mhz
from fuseplan.search.measure import Contest, contest
from fuseplan.search.record import now
from fuseplan.search.timers import Operands, Run, Sampler, Timer

#: Contestants by the names that tables use.
OURS, EAGER, INDUCTOR, MAX_AUTOTUNE = "fuseplan", "eager", "inductor", "inductor max-autotune"
PEERS = (EAGER, INDUCTOR, MAX_AUTOTUNE)


@dataclass(frozen=True)
class BenchRow:
    """One contestant's time for one thing.

    Attributes:
        workload: Sizes (``decode 1 @ 256``).
        subject: What was timed: ``model``, or a group's label.
        contestant: Who.
        mode: ``"eager"``: launched from Python. ``"graph"``: replayed from a CUDA graph.
        median_us: Median over the interleaved rounds; None when it failed.
        p20_us: 20th percentile.
        p80_us: 80th percentile.
        rounds: Interleaved rounds.
        noise: Relative A/A noise of the run.
        gain: Median paired gain of ours over this contestant, relative to it; positive when ours is faster.
        error: Normwise relative error: of a group against float64, of a model against eager. None where unknown.
        compile_s: Seconds until the first call had returned.
        note: What was special, or why it failed.
        key: Workload key of a group.
    """

    workload: str
    subject: str
    contestant: str
    mode: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    rounds: int = 0
    noise: float | None = None
    gain: float | None = None
    error: float | None = None
    compile_s: float | None = None
    note: str = ""
    key: str = ""


class _Prepared(Timer):
    """Hands out samplers that were prepared one by one, so that a failure is its contestant's alone."""

    def __init__(self, timer: Timer, samplers: Mapping[int, Sampler]) -> None:
        self._samplers = samplers
        self.regime = timer.regime  # type: ignore[misc]

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        return self._samplers[id(run)]


def fair_contest(
    timer: Timer, runs: Mapping[str, Run], operands: Operands, seconds: float
) -> tuple[Contest | None, dict[str, str]]:
    """Time all contestants in interleaved rounds, without those that fail.

    Returns:
        The samples (None when nobody is left), and why each of the others failed.
    """
    samplers: dict[int, Sampler] = {}
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            samplers[id(run)] = timer.prepare(run, operands)
        except Exception as error:  # such as an op that cannot be captured in a CUDA graph
            failed[name] = failure(error)
    standing = {name: run for name, run in runs.items() if name not in failed}
    if not standing:
        return None, failed
    twice = EAGER if EAGER in standing else None
    return contest(_Prepared(timer, samplers), standing, operands, seconds, twice), failed


def failure(error: Exception) -> str:
    """An error as a short note for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def mode_rows(
    timer: Timer, runs: Mapping[str, Run], operands: Operands, seconds: float, facts: Mapping[str, Mapping[str, Any]],
    **common: Any,
) -> list[BenchRow]:
    """Time ``runs`` in one mode: a row for every contestant, whatever happens to it.

    Args:
        timer: How to time; its regime is the mode.
        runs: Contestants.
        operands: Operand sets.
        seconds: Time to spend on rounds.
        facts: Fields that each contestant brings along.
        common: Fields that all rows share.
    """
    result, failed = fair_contest(timer, runs, operands, seconds)
    rows = rows_of(result, **common) if result is not None else {}
    rows |= {name: BenchRow(contestant=name, mode=timer.regime, **common) for name in failed}
    return [
        replace(rows[name], **{**facts[name], **({"note": failed[name]} if name in failed else {})}) for name in runs
    ]


def rows_of(result: Contest, **common: Any) -> dict[str, BenchRow]:
    """A row for every contestant of an interleaved run; ``common`` fills the fields that all share."""
    found: dict[str, BenchRow] = {}
    for name, samples in result.samples.items():
        low, high = _percentile(samples, 0.2), _percentile(samples, 0.8)
        gain = result.gain(OURS, name) if OURS in result.samples and name != OURS else None
        found[name] = BenchRow(
            contestant=name, mode=result.regime, median_us=statistics.median(samples), p20_us=low, p80_us=high,
            rounds=len(samples), noise=result.noise, gain=gain, **common,
        )
    return found


def _percentile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bench_frame(rows: Iterable[BenchRow]) -> pd.DataFrame:
    """One row per measurement."""
    return pd.DataFrame([asdict(row) for row in rows], columns=list(BenchRow.__dataclass_fields__))


def comparison(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per subject and mode, a column per contestant (median us), and how ours compares with each peer.

    ``vs_<peer>`` is the peer's time over ours: above 1, ours is faster.
    """
    names = list(dict.fromkeys(frame["contestant"]))
    rows = []
    for (workload, subject, mode, _), part in frame.groupby(["workload", "subject", "mode", "key"], sort=False):
        times = {str(row["contestant"]): row["median_us"] for row in part.to_dict("records")}
        ours = times.get(OURS)
        row: dict[str, Any] = {"workload": workload, "subject": subject, "mode": mode}
        row |= {f"{name}_us": times.get(name) for name in names}
        if ours is not None:
            row |= {f"vs_{name}": times[name] / ours for name in names if name != OURS and times.get(name) is not None}
        rows.append(row)
    return pd.DataFrame(rows)


def verdict(frame: pd.DataFrame, what: str) -> list[str]:
    """Sentences: geometric mean of ours against each peer, and cells that ours loses beyond the noise."""
    table = comparison(frame)
    lines = []
    for name in dict.fromkeys(frame["contestant"]):
        column = f"vs_{name}"
        if column not in table:
            continue
        rivals = frame[(frame["contestant"] == name) & frame["gain"].notna()]
        lost = int((rivals["gain"] < -rivals["noise"].clip(lower=0.01)).sum())
        mean = geometric_mean(table[column].dropna())
        lines.append(f"{what}: {mean:.2f}x {name} (geometric mean of {len(rivals)}); {lost} slower beyond noise")
    return lines


# -- what the numbers depend on ------------------------------------------------------------------------------


def environment(session: Session, model: str, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Device, versions, clocks and commit, as JSON."""
    import torch

    device = session.target.device_type
    spec = session.spec
    identity = asdict(spec.identity) if spec is not None else {"key": session.device}
    return {
        "created": now(),
        "command": list(sys.argv if command is None else command)[1:],
        "model": model,
        "device": identity,
        "device_key": session.device,
        "regime": session.settings.regime,
        "numerics": session.settings.numerics,
        "probe_noise": spec.noise if spec is not None else None,
        "clocks_mhz": clocks_mhz(device),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": commit(Path(__file__).parent),
        "versions": versions(device),
    }


def quietness(facts: Mapping[str, Any]) -> list[str]:
    """A sentence when other programs kept the processor busy, for then CPU times say little."""
    load, cores = facts["load_average"], os.cpu_count() or 1
    # The bench itself keeps up to all cores busy, so only more than that is somebody else.
    if load <= 1.25 * cores:
        return []
    return [f"the machine was busy (load average {load} on {cores} cores): times on the CPU are not to be trusted"]


def versions(device_type: str) -> dict[str, str]:
    """Software that matters to the times."""
    import importlib.metadata

    import torch

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("fuseplan", "torch", "triton", "ninetoothed", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device_type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


def commit(folder: Path) -> str:
    """``git describe`` of the source tree, empty where there is none."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--tags"], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# -- files -----------------------------------------------------------------------------------------------------


def write_results(
    folder: Path, name: str, frames: Mapping[str, pd.DataFrame], facts: Mapping[str, Any], words: Sequence[str]
) -> list[Path]:
    """Write ``<name>-<part>.csv`` for every frame, one ``<name>.md`` with all tables, one ``<name>.json``.

    Args:
        folder: Made when missing.
        name: Start of the file names.
        frames: Raw rows by part (``model``, ``groups``, ``planner``).
        facts: What the numbers depend on.
        words: Sentences to stand above the tables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for part, frame in frames.items():
        written.append(folder / f"{name}-{part}.csv")
        frame.to_csv(written[-1], index=False)
    written.append(folder / f"{name}.md")
    written[-1].write_text(_markdown(name, frames, facts, words), encoding="utf-8")
    written.append(folder / f"{name}.json")
    written[-1].write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return written


def _markdown(
    name: str, frames: Mapping[str, pd.DataFrame], facts: Mapping[str, Any], words: Sequence[str]
) -> str:
    device = facts.get("device", {})
    lines = [f"# {name}", ""]
    lines += [f"{device.get('name', facts.get('device_key', ''))}, {facts['created']}, commit {facts['commit'] or '-'}"]
    lines += [", ".join(f"{package} {version}" for package, version in facts["versions"].items()), ""]
    lines += [f"* {line}" for line in words]
    for part, frame in frames.items():
        table = comparison(frame) if "contestant" in frame else frame
        lines += ["", f"## {part}", "", markdown_table(table)]
    lines += ["Times are medians in microseconds over interleaved rounds; `vs_x` is the time of x over ours.", ""]
    return "\n".join(lines)


def folder_name(device_key: str) -> str:
    """Folder of a device's results: its key without type and hash.

    >>> folder_name("cuda-nvidia-h200-f15dd9b4c7e2")
    'nvidia-h200'
    """
    parts = device_key.split("-")
    return "-".join(parts[1:-1]) or device_key


def file_name(model: str) -> str:
    """A model's name as the start of a file name.

    >>> file_name("llama-3.2-1b:2L")
    'llama-3.2-1b-2L'
    """
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in model).strip("-")
