"""A group that cannot be made costs itself only: the rest of its region is planned, priced and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from costmodel_samples import CPU, GPU
from in_place_backend import InPlaceBackend
from model_families import build, inputs
from scripted_tuner import ScriptedTuner, compute_nodes
from step_programs import NothingStored
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.kernels.ir.backend import SM90, Target
from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.trace import record
from fuseplan.planner.graph.dataflow import DataflowGraph, bind_graph
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.groups.regions import find_regions, parts_to_plan
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import Versions

DEVICES = [pytest.param(SM90, GPU, id="gpu"), pytest.param(Target("cpu", "native", 2), CPU, id="cpu")]


def writes_what_it_reads(cache: torch.Tensor, x: torch.Tensor) -> Any:
    """``copy_`` from an opaque op's result, which may lie in the memory that is written."""
    turned = torch.asinh(cache * 2)
    turned[:1].copy_(turned[1:2])
    return (turned * x).sin(), (turned + 1).exp() * x


def writes_a_view_of_itself(cache: torch.Tensor, x: torch.Tensor) -> Any:
    cache[:2].copy_(cache[1:3])
    return (cache * x + 1).sin()


def fills_a_result_in_parts(cache: torch.Tensor, x: torch.Tensor) -> Any:
    """As DeepSeek-V3 puts queries together."""
    made = torch.empty_like(x)
    made[:2] = x[:2] * 2
    made[2:] = torch.asinh(cache)[2:]
    made[:1].copy_(torch.asinh(made)[:1])
    return (made * x + 1).sin() * cache


PROGRAMS = [writes_what_it_reads, writes_a_view_of_itself, fills_a_result_in_parts]


def traced(function: Callable[..., Any]) -> DataflowGraph:
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(torch.randn(4, 6)) for _ in range(2)]
        return normalise(make_fx(function, pre_dispatch=True)(*given)).graph


def check_plans(planner: Planner, graph: DataflowGraph) -> int:
    """The number of kernels in plans of all regions of a graph; none of these fails."""
    failed: list[str] = []
    plan = planner.plan_graph(graph, on_failure=lambda region, error: failed.append(str(error)))
    assert not failed
    planned = {name for one in plan.regions for name in one.region.ops}
    regions = find_regions(graph)
    if planner.tuner is None:  # nothing is measured: what lies between matmuls is planned, and they are ATen's
        known = planner.look_up_all(graph, regions)
        regions = [part for region in regions for part in parts_to_plan(graph, region, known)]
    assert planned.issuperset(name for region in regions for name in region.ops)
    return sum(choice.is_kernel for one in plan.regions for choice in one.record.groups)


@pytest.mark.parametrize(("target", "spec"), DEVICES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_op_that_only_aten_runs(program: Callable[..., Any], target: Target, spec: DeviceSpec) -> None:
    planner = Planner(NothingStored(), spec, "none", target, (InPlaceBackend(),))
    assert check_plans(planner, traced(program))


@pytest.mark.parametrize(("target", "spec"), DEVICES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_where_everything_is_measured(
    program: Callable[..., Any], target: Target, spec: DeviceSpec, tmp_path: Path
) -> None:
    database = Database(tmp_path / "tuning.db", "write", Versions.current(target.device_type))
    tuner = ScriptedTuner(database, lambda subject: 2.0 + len(compute_nodes(subject)))
    planner: Any = Planner(database, spec, "dev", target, (InPlaceBackend(),), tuner=tuner)  # type: ignore[arg-type]
    assert check_plans(planner, traced(program))


def test_a_prompt_of_deepseek_v3() -> None:
    torch._dynamo.reset()
    (graph,) = [bind_graph(one.graph) for one in record(build("deepseek-v3"), (), inputs("deepseek-v3", 2, 9))]
    assert check_plans(Planner(NothingStored(), GPU, "none", SM90, (InPlaceBackend(),)), graph) > 10


def test_a_group_at_which_the_lowering_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with_a_sine(graph: DataflowGraph, ops: Sequence[str], numerics: str = "fp32") -> Lowered:
        if any(graph.op(name).op == "aten.sin.default" for name in ops):
            raise ZeroDivisionError("a fault of the lowering")
        return lower_group(graph, ops, numerics)

    monkeypatch.setattr("fuseplan.planner.implementations.group_table.lower_group", fails_with_a_sine)
    graph = traced(lambda x, y: torch.sin((x * y + 1).exp()) * y + 2)
    assert check_plans(Planner(NothingStored(), None, "none", SM90, (InPlaceBackend(),)), graph)
