"""Attention of one query position by our own kernel: right under the interpreter, refused where it is none of its."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Builder

from fuseplan.planner.implementations.subject import op_group
from fuseplan.planner.libraries.decode_attention import SplitAttention

SUPPORT = Path(__file__).parents[2] / "support"
ATTENTION = "aten.scaled_dot_product_attention.default"


def test_it_is_right_under_the_interpreter_and_repeats_itself() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "interpret_attention.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 72
    wrong = [one for one in found if not (one["right"] and one["same"] and one["strides"])]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize(("changed", "reason"), [
    ({"positions": 2}, "several query positions"), ({"width": 24}, "heads are not of"),
    ({"dtype": torch.float64}, "float64"), ({"is_causal": True}, "causal"),
])
def test_what_it_does_not_run_is_refused(changed: dict[str, Any], reason: str) -> None:
    sizes = {"positions": 1, "width": 16, "dtype": torch.float32, "is_causal": False, **changed}
    query = torch.randn(1, 4, sizes["positions"], sizes["width"], dtype=sizes["dtype"])
    b = Builder(q=query, k=torch.randn(1, 4, 9, sizes["width"], dtype=sizes["dtype"]))
    graph = b.graph(b(ATTENTION, "q", "k", "k", is_causal=sizes["is_causal"]))
    group = op_group(graph, [node.name for node in graph], graph.outputs, "cuda")
    assert reason in (SplitAttention().refuse(group) or "")
