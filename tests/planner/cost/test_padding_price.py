"""By the cost model, linear ops are padded where cuBLAS waits for single elements, and not where copies take longer."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder

from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.candidates import single_candidates
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.choices import Choice, implementations_for
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.tuning.plans import PlanSettings
from fuseplan.planner.tuning.session import session_on
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import shipped_devices


def linear(rows: int, k: int, n: int, read: bool) -> DataflowGraph:
    """A linear op whose result is returned, or read by another op."""
    builder = Builder(**{name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in
                         (("x", (rows, k)), ("w", (n, k)))})
    value = builder("aten.linear.default", "x", "w", bias=None)
    return builder.graph(builder("aten.relu.default", value) if read else value)


@pytest.mark.parametrize(("rows", "k", "n", "read", "is_padded"), [
    (2048, 1024, 50257, False, True),  # results/nvidia-h200/any-model.md: 2208 us, padded 523
    (4096, 768, 30522, False, True),  # 812 us, padded 578
    (16384, 196, 256, True, False),  # MLP-Mixer: 14 us, padded 9 and copies of 10
    (2048, 1024, 50257, True, True),
])
def test_padding_on_an_h200(
    rows: int, k: int, n: int, read: bool, is_padded: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    device = next(one for one in shipped_devices() if "h200" in one)
    database = Database(tmp_path_factory.mktemp("none") / "none.db", "read")
    session = session_on(device, Target("cuda", "sm_90", 132), database, PlanSettings())
    graph = linear(rows, k, n, read)
    table, ways = GroupTable(graph, "fp32", "cuda"), implementations_for("eager", (), session.target)
    (group,) = (one for region in find_regions(graph) for one in single_candidates(graph, region)
                if "linear" in graph.op(one.ops[0]).op)
    prices = ModelPrices(table, session.spec)
    (padded,) = (one for one in ways.by_rule if "padded" in one.name)
    times = [prices.predict_s(Choice(group, way)) for way in (padded, ways.aten)]
    assert (times[0] < times[1]) is is_padded
