"""What scans cost on an H200: near to what was measured there, so that untuned ones are kernels where ATen is slow."""

from __future__ import annotations

import pytest

from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.candidates import single_candidates
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.choices import Choice
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.tuning.plans import PlanSettings
from fuseplan.planner.tuning.session import Session, session_on
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import shipped_devices


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Session:
    device = next(one for one in shipped_devices() if "h200" in one)
    database = Database(tmp_path_factory.mktemp("none") / "none.db", "read")
    return session_on(device, Target("cuda", "sm_90", 132), database, PlanSettings(regime="graph"))


def scan(op: str, *shape: int) -> DataflowGraph:
    spec = TensorSpec.contiguous(shape, "float32")
    node = OpNode(f"aten.{op}.default", ("x",), ("y",), {"dim": -1})
    return DataflowGraph([node], {"x": spec, "y": spec}, ("x",), ("y",))


@pytest.mark.parametrize(("op", "shape", "measured_us"), [
    ("cumsum", (4096, 4096), 175.0), ("cumsum", (64, 20000), 28.0), ("cumsum", (16, 100000), 128.0),
    ("cumsum", (16, 128256), 164.0), ("logcumsumexp", (4096, 4096), 277.0), ("logcumsumexp", (4, 128256), 356.0),
])
def test_aten_goes_along_rows_in_turns(h200: Session, op: str, shape: tuple[int, ...], measured_us: float) -> None:
    graph = scan(op, *shape)
    table, ways = GroupTable(graph, "fp32", "cuda"), h200.dispatcher().implementations
    (group,) = (one for region in find_regions(graph) for one in single_candidates(graph, region))
    prices = ModelPrices(table, h200.spec)
    aten_us, kernel_us = (prices.predict_s(Choice(group, way)) * 1e6 for way in (ways.aten, ways.kernel))
    assert measured_us / 2.5 < aten_us < measured_us * 1.5
    assert kernel_us < aten_us / 2
