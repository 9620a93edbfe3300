"""Short rows put in order by our own kernel: right under the interpreter, and refused where it is none of its."""

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

from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.tunable_group import op_group
from fuseplan.planner.libraries.short_rows import MOST_COLUMNS, ShortRows
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.tuning.session import session_on
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import shipped_devices

SUPPORT = Path(__file__).parents[2] / "support"
TOPK = {"k": 3, "dim": -1, "largest": True, "sorted": True}


def test_it_is_right_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "short_rows_samples.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) > 200
    assert not [one for one in found if one["wrong"]][:3]


@pytest.mark.parametrize(("source", "op", "attrs", "reason"), [
    (torch.randn(4, 5), "aten.topk.default", {**TOPK, "dim": 0}, "another dimension than the last"),
    (torch.randn(2, MOST_COLUMNS + 1), "aten.topk.default", TOPK, "513 elements"),
    (torch.randn(4, 1), "aten.sort.default", {}, "1 elements"),
    (torch.randn(4097, 64), "aten.topk.default", TOPK, "4097 rows of 64"),
    (torch.randn(0, 5), "aten.sort.default", {}, "orders 2 to"),
    (torch.randn(4, 5), "aten.topk.default", {**TOPK, "k": 0}, "keeps no element"),
    (torch.randn(4, 5) > 0, "aten.sort.default", {}, "bool"),
    (torch.randn(3, 4, 5).transpose(0, 1), "aten.topk.default", TOPK, "evenly apart"),
    (torch.randn(5, 4).t(), "aten.sort.stable", {"stable": True, "dim": -1}, "row by row"),
])
def test_what_it_refuses(source: torch.Tensor, op: str, attrs: dict[str, Any], reason: str) -> None:
    b = Builder(x=source)
    made = b.many(op, "x", outputs=2, **attrs)
    refusal = ShortRows().refuse(op_group(b.graph(*made), [made[0]], made, "cuda"))
    assert refusal is not None and reason in refusal


def routed() -> DataflowGraph:
    """The experts of 8 tokens, and their tokens in the order of experts, as mixtures of experts choose them."""
    b = Builder(logits=torch.randn(8, 64))
    weights = b("aten.softmax.int", "logits", dim=-1, dtype=torch.float32)
    values, experts = b.many("aten.topk.default", weights, outputs=2, **{**TOPK, "k": 8})
    flat = b("aten.view.default", experts, size=(64,))
    found = b.many("aten.sort.default", flat, outputs=2, dim=-1, descending=False)
    return b.graph(values, *found)


def test_it_runs_on_a_gpu_that_nobody_tuned(tmp_path: Path) -> None:
    device = next(one for one in shipped_devices() if "h200" in one)
    Database(tmp_path / "none.db", "write").close()
    session = session_on(device, Target("cuda", "sm_90", 132), Database(tmp_path / "none.db", "read"))
    graph = routed()
    assert {kind_of(node, graph.specs) for node in graph if "topk" in node.op or "sort" in node.op} == {"anchor"}
    plans = session.planner().plan_graph(graph, regions=find_regions(graph)).regions
    names = [group.implementation for one in plans for group in one.record.groups]
    assert names.count(ShortRows().name) == 2
