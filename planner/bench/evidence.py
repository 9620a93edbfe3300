"""What published numbers depend on, and the files they are published in."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.bench.rows import comparison
from fuseplan.planner.reports.document import table_of
from fuseplan.planner.reports.drawing import templates
from fuseplan.planner.tuning.session import Session
from fuseplan.search.store.record import now, package_version
from fuseplan.search.workers.jobs import clocks_mhz

#: What stands below tables of contestants side by side.
LEGEND = "Times are medians in microseconds over interleaved rounds; `vs_x` is the time of x over ours."


def environment(session: Session, model: str) -> dict[str, Any]:
    """Device, versions, clocks and commit, as JSON."""
    import torch

    device = session.target.device_type
    spec = session.spec
    identity = asdict(spec.identity) if spec is not None else {"key": session.device}
    return {
        "created": now(),
        # Published evidence names files, not where they lie on one machine.
        "command": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]],
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
    import torch

    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in ("fuseplan", "torch", "triton", "ninetoothed", "transformers", "liger-kernel", "flashinfer-python"):
        if installed := package_version(package):
            found[package] = installed
    if is_gpu(device_type):
        found["cuda"] = str(torch.version.cuda)
    return found


def commit(folder: Path) -> str:
    """``git describe`` of the source tree, empty where there is none."""
    command = ["git", "describe", "--always", "--dirty", "--tags"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def write_results(
    folder: Path, name: str, frames: Mapping[str, pd.DataFrame], facts: Mapping[str, Any], words: Sequence[str],
    tables: Mapping[str, pd.DataFrame] | None = None, legend: str = LEGEND,
) -> list[Path]:
    """Write ``<name>-<part>.csv`` for every frame; ``<name>-<parts>.md`` with all tables, and its ``.json`` of facts.

    ``words`` stand above the tables, which are those of ``tables``, else contestants side by side, or raw rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    together = "-".join((name, *frames))
    texts = {f"{name}-{part}.csv": frame.to_csv(index=False) for part, frame in frames.items()}
    shown = {part: comparison(frame) if "median_us" in frame and part not in (tables or {}) else frame
             for part, frame in frames.items()} | dict(tables or {})
    parts = {part: table_of(frame, part).markdown() for part, frame in shown.items()}
    page = templates().get_template("results.md.j2")
    texts[f"{together}.md"] = page.render(name=name, facts=facts, words=words, parts=parts, legend=legend)
    texts[f"{together}.json"] = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in texts]


def folder_name(device_key: str) -> str:
    """Folder of a device's results: ``nvidia-h200`` of ``cuda-nvidia-h200-f15dd9b4c7e2``."""
    parts = device_key.split("-")
    return "-".join(parts[1:-1]) or device_key


def file_name(model: str) -> str:
    """A model's name as the start of a file name: ``llama-3.2-1b-2L`` of ``llama-3.2-1b:2L``."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in model).strip("-")
