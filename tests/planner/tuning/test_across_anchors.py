"""Plans whose groups hold matmuls: enumerated, measured beside the plans of the parts, stored, found and run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from costmodel_samples import GPU
from dispatch_samples import Block, compiled
from graphs import Builder
from lower_oracle import rms_norm
from matmul_groups import gated, hidden
from quantised_groups import FORMATS, Written, quantised
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner

import fuseplan.planner
from fuseplan.kernels.ir.backend import SM90, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.anchored import anchored_candidates
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.groups.regions import find_regions, is_anchor, region_parts
from fuseplan.planner.implementations.choices import implementations_for
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.partition import across_anchors
from fuseplan.planner.partition.across_anchors import groups_around_anchors
from fuseplan.planner.tuning.planner import Planner, PlanSettings
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import Versions

pytestmark = pytest.mark.usefixtures("any_gain")


def block() -> DataflowGraph:
    """Add, norm, two projections, SwiGLU; the sum is a result too."""
    torch.manual_seed(0)
    weights = {name: torch.randn(65, 33) for name in ("gate", "up")}
    b = Builder(x=torch.randn(3, 33), residual=torch.randn(3, 33), gamma=torch.randn(33), **weights)
    hidden = b("aten.add.Tensor", "x", "residual")
    normed = rms_norm(b, hidden, "gamma", "float32")
    gate, up = (b("aten.linear.default", normed, name, bias=None) for name in weights)
    return b.graph(b("aten.mul.Tensor", b("aten.silu.default", gate), up), hidden)


def names(graph: DataflowGraph, ops: Any) -> list[str]:
    return sorted(graph.op(name).op.split(".")[1] for name in ops)


def test_groups_around_matmuls_reach_from_the_norm_to_the_activation() -> None:
    graph = block()
    (region,) = find_regions(graph)
    table, parts = GroupTable(graph, "fp32", "cpu"), region_parts(graph, region)
    enumerations = (table.enumerated(part) for part in parts if not is_anchor(graph, part))
    islands = [one for enumeration in enumerations for one in enumeration.candidates]
    found = anchored_candidates(graph, region, islands, table.legal)
    assert len({one.ops for one in found}) == len(found) and all("linear" in names(graph, one.ops) for one in found)
    held = [names(graph, one.ops) for one in found]
    assert any(one.count("linear") == 2 and {"rsqrt", "silu"} <= set(one) for one in held)
    assert all(table.legal(one.ops) is None for one in found)


def test_many_rows_keep_what_follows_a_pair_of_matmuls_and_leave_the_norm_apart(tmp_path: Path) -> None:
    b, outputs = gated(2048, 512, 64, torch.bfloat16)
    graph = b.graph(*outputs)
    (region,) = find_regions(graph)
    ways = implementations_for("graph", (TritonBackend(tmp_path),), SM90)
    _, found = groups_around_anchors(GroupTable(graph, "fp32", "cuda"), region, ways)
    held = [names(graph, one.ops) for one in found]
    assert ["linear", "linear", "mul", "silu"] in held and not any("rsqrt" in one for one in held)


def widest(graph: DataflowGraph) -> Candidate:
    """The group around matmuls that has the most ops."""
    (region,) = find_regions(graph)
    table = GroupTable(graph, "fp32", "cuda")
    islands = [part for part in region_parts(graph, region) if not is_anchor(graph, part)]
    enumerated = [one for part in islands for one in table.enumerated(part).candidates]
    return max(anchored_candidates(graph, region, enumerated, table.legal), key=lambda one: len(one.ops))


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_holds_all_that_makes_weights_of_what_is_stored(name: str) -> None:
    graph = quantised(name, 3, 256, 256, torch.float16).graph()
    found = widest(graph)
    assert found.outputs == graph.outputs and set(found.inputs) <= set(graph.inputs)


def test_a_group_holds_what_makes_the_weights_of_each_of_its_matmuls_and_the_norm_before_them() -> None:
    def gated(x: Any, gamma: Any, gate: Any, gate_scale: Any, up: Any, up_scale: Any) -> Any:
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * gamma
        made = F.linear(normed, gate.to(x.dtype) * gate_scale[:, None])
        return F.silu(made) * F.linear(normed, up.to(x.dtype) * up_scale[:, None])

    def packed() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(-128, 128, (256, 128), dtype=torch.int8), torch.rand(256).bfloat16()

    graph = Written(gated, hidden(3, inner=128), torch.rand(128).bfloat16(), *packed(), *packed()).graph()
    found = widest(graph)
    assert found.outputs == graph.outputs and set(found.inputs) == set(graph.inputs)


@pytest.mark.parametrize(("matmul_us", "whole"), [(8.0, True), (60.0, False)])
@pytest.mark.parametrize("name", ["int8, scaled before", "fp8, by blocks", "int4, as AWQ by shifts"])
def test_narrow_weights_are_read_by_the_matmul_where_that_pays(
    tmp_path: Path, name: str, matmul_us: float, whole: bool
) -> None:
    def fused_us(subject: Any) -> float:
        return matmul_us if any(op_of(node.op).is_contraction for node in subject.nodes) else 5.0

    graph = quantised(name, 3, 256, 256, torch.float16).graph()
    tuner = ScriptedTuner(Database(tmp_path / "t.db", "write", Versions.current("cpu")), fused_us)
    backends = (ReferenceBackend(matmuls=True),)
    planner = Planner(tuner.database, None, "dev", TARGET, backends, tuner=tuner)  # type: ignore[arg-type]
    (plan,) = planner.plan_graph(graph).regions
    assert (len(plan.record.groups) == 1) is whole


@pytest.mark.parametrize(("rows", "inside"), [(1, True), (3, True), (4096, False)])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bfloat16, widened"])
def test_few_rows_read_narrow_weights_in_the_matmul_untuned(
    tmp_path: Path, name: str, rows: int, inside: bool
) -> None:
    """Where that spares half of what the device takes at best: many rows keep it busy anyway."""
    graph = quantised(name, rows, 2048, 2048, torch.bfloat16).graph()
    planner = Planner(Database(tmp_path / "t.db", "write", Versions.current("cpu")), GPU, "dev", SM90,
                      (TritonBackend(tmp_path),), PlanSettings())
    (plan,) = planner.plan_graph(graph, regions=find_regions(graph)).regions
    (held,) = (plan.group_ops(one) for one in plan.record.groups
               if any(op_of(graph.op(op).op).is_contraction for op in plan.group_ops(one)))
    assert (len(held) > 1) is inside


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_linears_run_on_cpus(tmp_path: Path, name: str) -> None:
    """Untuned. A kernel that unpacks weights for its matmul keeps them in float32, eager mode rounds them."""
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    given = quantised(name, 3, 256, 256, torch.bfloat16).arguments
    function = FORMATS[name].function
    with torch.no_grad():
        found, eager = compiled(function, tmp_path / "t.db")(*given), function(*given)
        exact = function(*(one.double() if one.dtype == torch.bfloat16 else one for one in given))
    assert found.dtype == eager.dtype and found.shape == eager.shape
    assert (found - exact).norm() <= 1.1 * (eager - exact).norm()
    assert not fuseplan.planner.stats().fallbacks


@pytest.mark.parametrize(("matmul_us", "kept"), [(8.0, True), (60.0, False)])
def test_a_group_with_matmuls_has_to_beat_the_plans_of_the_parts(tmp_path: Path, matmul_us: float, kept: bool) -> None:
    graph = block()
    database = Database(tmp_path / "t.db", "write", Versions.current("cpu"))

    def fused_us(subject: Any) -> float:
        return matmul_us if any("linear" in str(node.op) for node in subject.nodes) else 5.0

    tuner = ScriptedTuner(database, fused_us)
    backends = (ReferenceBackend(matmuls=True),)
    planner = Planner(database, None, "dev", TARGET, backends, tuner=tuner)  # type: ignore[arg-type]
    (plan,) = planner.plan_graph(graph).regions
    held = [group for group in plan.record.groups if "linear" in names(graph, plan.group_ops(group))]
    assert any(len(group.ops) > 1 for group in held) is kept
    assert ("on the plans of its parts" in plan.record.evidence.reason) is kept
    if kept:
        assert plan.record.planned_us <= 5.0 + matmul_us
    again = Planner(database, None, "dev", TARGET, backends, PlanSettings())
    (found,) = again.plan_graph(block()).regions
    assert found.source == "database" and found.record.groups == plan.record.groups


def test_groups_with_matmuls_are_compiled_before_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(
        across_anchors, "groups_around_anchors",
        lambda table, region, *rest: (looked.append(region.key), groups_around_anchors(table, region, *rest))[1],
    )
    graph, on_gpu = block(), replace(TARGET, device_type="cuda")

    class AnyDevice(ReferenceBackend):
        def refuse(self, ir: KernelIR, target: Target) -> str | None:
            return None

    database = Database(tmp_path / "t.db", "write", Versions.current("cuda"))
    tuner = ScriptedTuner(database, lambda subject: 5.0)
    planner = Planner(database, None, "dev", on_gpu, (AnyDevice(),), PlanSettings(), tuner)  # type: ignore[arg-type]
    with planner.lookahead() or pytest.fail("nothing looks ahead") as lookahead:
        lookahead.send_whole(graph, planner.undecided(graph))
        parts = [part for part in region_parts(graph, find_regions(graph)[0]) if not is_anchor(graph, part)]
        lookahead.send(graph, parts)
        assert lookahead.problem(parts[0]) is not None  # one after the other
        prefetched = set(tuner.prefetched)
        planner.plan_graph(graph)
    screened = {label for label in tuner.screened if "linear" in label}
    assert screened and screened <= prefetched
    assert len(looked) == len(set(looked)) == 1
    nominal = next(label for label in tuner.prefetched if "linear" in label)
    assert nominal in tuner.soon[:2]  # again when its region's turn comes, with the sum that is left of the cover


def tuned_by_script(monkeypatch: pytest.MonkeyPatch, kernels: ReferenceBackend) -> None:
    """Sessions have one back end, and a tuner to which all kernels are equally fast."""
    monkeypatch.setattr("fuseplan.planner.tuning.session.backends_for", lambda device_type: (kernels,))
    monkeypatch.setattr(
        "fuseplan.planner.tuning.session.Session.tuner",
        lambda session, *args, **kwargs: nullcontext(ScriptedTuner(session.database, lambda subject: 5.0)),
    )
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()


@pytest.mark.parametrize("on_miss", ["model", "tune", "unfused"])
@pytest.mark.parametrize("takes_dynamic", [False, True])
def test_dynamic_sizes_are_served_by_the_plans_of_parts_where_kernels_with_matmuls_are_static(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_miss: str, takes_dynamic: bool
) -> None:
    """The norm and the activation must not run unfused for that."""

    class StaticMatmuls(ReferenceBackend):
        def refuse(self, ir: KernelIR, target: Target) -> str | None:
            static = takes_dynamic or not ir.symbols or not any(one.products for one in ir.segments)
            return None if static else "dynamic sizes"

    kernels, module = StaticMatmuls(matmuls=True), Block()
    tuned_by_script(monkeypatch, kernels)
    with torch.no_grad():
        for rows in (4, 16):
            torch._dynamo.reset()
            fast = compiled(module, tmp_path / "t.db", on_miss="tune", dynamic=False)
            fast(torch.randn(rows, 33), torch.randn(rows, 33))
        assert any(segment.products for ir in kernels.loaded for segment in ir.segments)
        kernels.loaded.clear()
        torch._dynamo.reset()
        fuseplan.planner.reset_stats()
        fast = compiled(module, tmp_path / "t.db", on_miss=on_miss, dynamic=True)
        for rows in (7, 9):
            given = torch.randn(rows, 33), torch.randn(rows, 33)
            torch.testing.assert_close(fast(*given), module(*given))
    stats = fuseplan.planner.stats()
    assert stats.groups_fused == 2 and not stats.fallbacks, stats
    assert any(segment.products for ir in kernels.loaded for segment in ir.segments) is takes_dynamic


def test_dispatch_runs_a_group_with_matmuls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceBackend(matmuls=True)
    tuned_by_script(monkeypatch, kernels)
    module = Block()
    with torch.no_grad():
        fast = compiled(module, tmp_path / "t.db", on_miss="tune")
        for seed in (1, 2):
            torch.manual_seed(seed)
            x, residual = torch.randn(3, 33), torch.randn(3, 33)
            torch.testing.assert_close(fast(x, residual), module(x, residual))
    stats = fuseplan.planner.stats()
    assert not stats.fallbacks and any(segment.products for ir in kernels.loaded for segment in ir.segments)
