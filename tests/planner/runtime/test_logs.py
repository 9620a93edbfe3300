"""What a compiled model shows in PyTorch's ways: log artifacts, structured traces, ranges of profilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import torch
def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up
fast = torch.compile(swiglu, backend="fuseplan", options={options})
with torch.no_grad():
    x = torch.randn(4, 64)
    torch.testing.assert_close(fast(x, x), swiglu(x, x))
"""
ROOT = Path(__file__).parents[3]


def run(tmp_path: Path, more: str = "", **variables: str) -> str:
    """What a fresh process that compiles SwiGLU writes to standard error."""
    options = f"{{'db': {str(tmp_path / 'tuning.db')!r}{more}}}"
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{options}", options)], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={**own, **variables}, timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_plans_are_shown_by_name(tmp_path: Path) -> None:
    shown = run(tmp_path, TORCH_LOGS="fuseplan_plans")
    assert "plan of graph" in shown and "silu+mul" in shown and "kernel of" not in shown


def test_kernels_are_shown_by_name(tmp_path: Path) -> None:
    shown = run(tmp_path, TORCH_LOGS="fuseplan_kernels")
    assert "kernel of silu+mul" in shown and "plan of graph" not in shown


@pytest.mark.parametrize("logs", ["-fuseplan", "fuseplan", "+dynamo"])
def test_nothing_is_shown_that_was_not_asked_for(tmp_path: Path, logs: str) -> None:
    shown = run(tmp_path, TORCH_LOGS=logs)
    assert "plan of graph" not in shown and "kernel of" not in shown
    assert "WARNING: Unknown" not in shown


def test_a_level_for_all_of_fuseplan(tmp_path: Path) -> None:
    assert "fused graph" in run(tmp_path, TORCH_LOGS="+fuseplan")


def test_debug_shows_plans_without_any_set_up(tmp_path: Path) -> None:
    assert "silu+mul" in run(tmp_path, ", 'debug': True")
    assert run(tmp_path) == ""


def test_a_structured_trace_has_plans_and_kernels(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    run(tmp_path, TORCH_TRACE=str(traces))
    (log,) = traces.iterdir()
    artifacts: dict[str, str] = {}
    lines = log.read_text(encoding="utf-8").splitlines()
    for at, line in enumerate(lines):
        # A line of glog's kind with JSON behind it; what belongs to it follows, indented by tabs.
        if '"artifact"' in line:
            told = json.loads(line[line.index("{"):])["artifact"]
            own = []
            for follower in lines[at + 1:]:
                if not follower.startswith("\t"):
                    break
                own.append(follower[1:])
            artifacts[told["name"]] = "\n".join(own)
    plans = json.loads(artifacts["fuseplan_plans"])
    assert any("silu+mul" in group["label"] for region in plans["regions"] for group in region["groups"])
    assert "silu" in artifacts["fuseplan_kernels"] and "def forward" in artifacts["fuseplan_graph"]


def test_profilers_see_groups_by_name(tmp_path: Path) -> None:
    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    torch._dynamo.reset()
    fast = torch.compile(swiglu, backend="fuseplan", options={"db": str(tmp_path / "tuning.db")})
    x = torch.randn(4, 64)
    with torch.no_grad():
        for _ in range(2):
            fast(x, x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            for _ in range(3):
                result = fast(x, x)
        torch.testing.assert_close(fast(x, x), result)
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["fuseplan::silu+mul"] == 3
    torch.testing.assert_close(result, swiglu(x, x))
