"""What a fresh process shows: by TORCH_LOGS, in the log of TORCH_TRACE, and with the option ``debug``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from fuseplan.planner.runtime.logs import KERNELS, PLANS

SCRIPT = """
import sys, torch
x = torch.ones(3, 8)
def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up
def run(**options):
    with torch.no_grad():
        torch.compile(swiglu, backend="fuseplan", options={"db": sys.argv[1], **options})(x, x)
run()
"""

DEBUG = """
print("-- debug --", file=sys.stderr, flush=True)
torch._dynamo.reset()
run(debug=True)
"""


LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=31)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    compiled = torch.compile(model, backend="fuseplan", options={"db": sys.argv[1]})
    compiled(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)
"""


def shown(tmp_path: Path, script: str = SCRIPT, **variables: str) -> str:
    """Standard error of a process that compiles a function; from the root of the checkout all our modules are found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "t.db")], cwd=ROOT,
        env={**kept, "XDG_CACHE_HOME": str(tmp_path), **variables}, capture_output=True, text=True, check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def artifacts(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Ours in a structured trace, the first of each name: each line is a prefix and JSON; lines of its payload follow,
    each behind a tab.
    """
    (log,) = folder.glob("dedicated_log_torch_trace_*.log")
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for entry in re.split(r"\n(?!\t)", log.read_text()):
        head, _, payload = entry.partition("\n")
        told = json.loads(head[head.index("{"):]) if "{" in head else {}
        name = told.get("artifact", {}).get("name", "")
        if name.startswith("fuseplan"):
            found.setdefault(name, (told, "\n".join(line.removeprefix("\t") for line in payload.split("\n"))))
    return found


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A trace of the function and then of a Llama, and what was shown meanwhile."""
    folder = tmp_path_factory.mktemp("traced")
    said = shown(folder, script=SCRIPT + LLAMA, TORCH_LOGS=f"{PLANS},{KERNELS}", TORCH_TRACE=str(folder / "trace"))
    return folder / "trace", said


def test_plans_and_kernels_are_artifacts_of_torch_logs_and_of_the_trace(traced: tuple[Path, str]) -> None:
    trace, said = traced
    assert "[0/0] plan of graph 0/0" in said
    assert "silu+mul 3x8 float32: fused by cpp" in said and "by the cost model" in said
    assert "kernel of silu+mul" in said and "fuseplan_sigmoid_mul" in said

    found = artifacts(trace)
    assert all((told["frame_id"], told["frame_compile_id"]) == (0, 0) for told, _ in found.values())
    told, payload = found[PLANS]
    assert told["artifact"]["encoding"] == "json"
    (region,) = json.loads(payload)["regions"]
    (group,) = region["groups"]
    assert (region["source"], region["times"]) == ("model", 1)
    assert (group["label"], group["implementation"]) == ("silu+mul 3x8 float32", "cpp")
    assert "by the cost model" in region["evidence"]["reason"]
    assert "fuseplan_sigmoid_mul" in found[KERNELS][1]
    assert "fused_0_silu_mul" in found["fuseplan_graph"][1]


def test_tlparse_shows_plans_kernels_and_the_fused_graph_of_a_llama(
    traced: tuple[Path, str], tmp_path: Path
) -> None:
    tlparse = shutil.which("tlparse", path=str(Path(sys.executable).parent))
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    (log,) = traced[0].glob("dedicated_log_torch_trace_*.log")
    site = tmp_path / "site"
    subprocess.run([tlparse, str(log), "-o", str(site), "--no-browser"], check=True, capture_output=True, timeout=300)
    index = (site / "index.html").read_text()
    pages = {name: list(site.rglob(f"{name}_*")) for name in (PLANS, KERNELS, "fuseplan_graph")}
    assert [len(found) for found in pages.values()] == [2, 2, 2]  # of the function, and of the Llama
    assert all(str(page.relative_to(site)) in index for found in pages.values() for page in found)
    plans = [json.loads(page.read_text()) for page in pages[PLANS]]
    places = [place for plan in plans for region in plan["regions"] for place in region["places"]]
    assert "model.layers.*.mlp: act_fn -> (itself)  x2" in places
    assert all("fuseplan_" in page.read_text() for page in pages[KERNELS])


def test_a_level_for_all_of_fuseplan_does_not_ask_for_artifacts(tmp_path: Path) -> None:
    said = shown(tmp_path, TORCH_LOGS="+fuseplan")
    assert "no tuned plan for silu+mul" in said and "fused graph" in said
    assert "plan of graph" not in said and "kernel of" not in said
    assert "no tuned plan" not in shown(tmp_path / "other", TORCH_LOGS="-fuseplan")


def test_debug_is_shown_without_any_set_up(tmp_path: Path) -> None:
    plain, debug = shown(tmp_path, SCRIPT + DEBUG).split("-- debug --\n")
    marks = ("plan of graph 0/0", "fused graph", "differs from its ATen ops")
    assert [[text in said for text in marks] for said in (plain, debug)] == [[False] * 3, [True] * 3]
    assert ["plan tune --misses" in line for line in plain.splitlines()] == [True]


def test_the_names_of_artifacts_are_modules_that_are_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    assert sorted(listed) == sorted([PLANS, KERNELS])
    assert all((ROOT / f"{name}.py").is_file() for name in listed)
