"""What kernels of a region cost each other in the cache: against the model's own bandwidths, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pattern_predictions
import pytest
import torch
from costmodel_samples import CPU, GPU
from curves import curve_of
from graphs import Builder
from pattern_predictions import predicted_us
from reference_backend import ReferenceBackend
from scripted_tuner import ScriptedTuner, compute_nodes

from fuseplan.costmodel.device import DeviceSpec, Mode, Peak
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.cost.shared_cache import SharedCache
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups import compute_graph
from fuseplan.planner.groups.candidates import enumerate_candidates
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.choices import Choice, RegionProblem, implementations_for, region_problem
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.lowering.lower import Lowered, lower
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.partition.guided_loop import predicted_partition
from fuseplan.planner.tuning.planner import Planner, PlanSettings
from fuseplan.planner.work.group_work import hot_inputs, kernel_work, op_work
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import PlanRecord, Versions

pytestmark = pytest.mark.usefixtures("any_gain")

#: 8 TB/s for what a cache of 32 MB holds, half of it for twice as much.
KNEE = dataclasses.replace(
    GPU, bandwidth=curve_of([(32e6, 8000.0), (64e6, 4000.0)]),
    identity=dataclasses.replace(GPU.identity, l2_bytes=40_000_000),
    peaks={"fp32": Peak(1e15, 1e15), "sfu": Peak(1e14, 1e14)},
)


def two_scaled(rows: int, device: str = "cuda") -> tuple[DataflowGraph, Region]:
    """``x * f`` and ``y * f``: two ops that only share a small factor. ``x`` and ``y`` have just been made."""
    b = Builder(x=torch.empty(rows, 1000, device="meta"), y=torch.empty(rows, 1000, device="meta"),
                f=torch.empty(1000, device="meta"))
    graph = b.graph(b("aten.mul.Tensor", "x", "f"), b("aten.mul.Tensor", "y", "f"))
    graph.fresh = frozenset({"x", "y", "f"})
    (region,) = find_regions(graph)
    return graph, region


def megabytes(count: float) -> Work:
    return Work({}, count * 1e6, launches=1)


def neighbours_of(graph: DataflowGraph) -> SharedCache:
    (region,) = find_regions(graph)
    return SharedCache(GroupTable(graph, "fp32", "cuda"), region)


def delays_us(graph: DataflowGraph, spec: DeviceSpec | None = None, mode: Mode = "graph") -> list[float]:
    """Of each compute op by itself."""
    neighbours, found = neighbours_of(graph), []
    for node in graph:
        if kind_of(node, graph.specs) != "view":
            lowered = lower_group(graph, (node.name,))
            work = kernel_work(lowered.ir, hot_inputs(graph, lowered.inputs))
            found.append(neighbours.delay_us(work, KNEE if spec is None else spec, mode, lowered))
    return found


def whole_delay_us(graph: DataflowGraph) -> float:
    """Of all ops as one kernel."""
    lowered = lower_group(graph, [node.name for node in graph if kind_of(node, graph.specs) != "view"])
    work = kernel_work(lowered.ir, hot_inputs(graph, lowered.inputs))
    return neighbours_of(graph).delay_us(work, KNEE, "graph", lowered)


def test_a_kernel_pays_for_the_footprint_of_its_region() -> None:
    graph, _ = two_scaled(4000)  # 16 MB each: x, y and both results
    assert neighbours_of(graph).footprint_bytes == 4 * 16_000_000 + 4000
    # 48 MB are asked for, f for every row: 6 us at 8 TB/s by itself. 32 MB are moved: 8 us at the 4 TB/s of 64 MB.
    assert delays_us(graph) == pytest.approx([2.0, 2.0], rel=0.01)


def test_one_kernel_for_all_pays_nothing() -> None:
    assert whole_delay_us(two_scaled(4000)[0]) == 0.0


def test_what_the_region_makes_for_itself_is_in_the_cache() -> None:
    b = Builder(x=torch.empty(8000, 1000, device="meta"), y=torch.empty(8000, 1000, device="meta"))
    middle = b("aten.exp.default", "x")
    graph = b.graph(b("aten.mul.Tensor", middle, "y"))
    graph.fresh = frozenset({"x", "y"})
    assert neighbours_of(graph).footprint_bytes == 3 * 32_000_000
    spec = dataclasses.replace(KNEE, bandwidth=curve_of([(64e6, 8000.0), (96e6, 4000.0)]))
    # exp: 64 MB, of which the half that it makes is read right away. mul moves as much as the region: nothing beside.
    first, second = delays_us(graph, spec)
    assert first == pytest.approx((64e6 / 4000e9 - 64e6 / 8000e9) * 1e6 / 2)
    assert second == 0.0


def test_weights_pass_through_the_cache_and_are_not_delayed() -> None:
    """``x * w`` and ``y * v``: two kernels of 24 MB move what one of 48 does, weights or not."""
    b = Builder(**{name: torch.empty(2000, 1000, device="meta") for name in ("x", "y", "v", "w", "s")})
    graph = b.graph(
        b("aten.mul.Tensor", b("aten.mul.Tensor", "x", "s"), "w"), b("aten.mul.Tensor", b("aten.mul.Tensor", "y", "s"),
                                                                    "v")
    )
    graph.fresh = frozenset({"x", "y", "s"})
    footprint_bytes = neighbours_of(graph).footprint_bytes
    graph.fresh = frozenset({"x", "y", "s", "v", "w"})
    assert footprint_bytes == neighbours_of(graph).footprint_bytes == 7 * 8_000_000
    assert whole_delay_us(graph) == 0.0


@pytest.mark.parametrize("case", ["slice", "expand", "lookup"])
def test_only_what_is_read_counts(case: str) -> None:
    if case == "slice":
        b = Builder(x=torch.empty(40000, 1000, device="meta"))
        graph = b.graph(b("aten.exp.default", b("aten.slice.Tensor", "x", dim=0, start=0, end=4000)))
        read_bytes = 16_000_000
    elif case == "expand":
        b = Builder(x=torch.empty(1, 1000, device="meta").expand(4000, 1000))
        graph = b.graph(b("aten.exp.default", "x"))
        read_bytes = 4000
    else:
        ids = torch.empty(4000, dtype=torch.int64, device="meta")
        b = Builder(x=torch.empty(100_000, 1000, device="meta"), ids=ids)
        graph = b.graph(b("aten.embedding.default", "x", "ids"))
        read_bytes = 16_000_000 + 32_000
    graph.fresh = frozenset(graph.inputs)
    assert neighbours_of(graph).footprint_bytes == read_bytes + 16_000_000
    assert delays_us(graph) == [0.0]


def test_what_two_ops_read_alike_counts_once_and_halves_add_up() -> None:
    b = Builder(x=torch.empty(4000, 2000, device="meta"))
    low, high = (b("aten.slice.Tensor", "x", dim=1, start=at, end=at + 1000) for at in (0, 1000))
    graph = b.graph(
        b("aten.add.Tensor", b("aten.exp.default", low), b("aten.tanh.default", low)), b("aten.neg.default", high)
    )
    graph.fresh = frozenset({"x"})
    assert neighbours_of(graph).footprint_bytes == 32_000_000 + 2 * 16_000_000


@pytest.mark.parametrize("spec", [CPU, dataclasses.replace(KNEE, bandwidth=curve_of([(1e6, 8000.0)]))])
def test_no_delay_on_cpus_or_where_bandwidth_does_not_fall(spec: DeviceSpec) -> None:
    assert delays_us(two_scaled(4000)[0], spec, "kernel" if spec is CPU else "graph") == [0.0, 0.0]


def test_bandwidth_that_rises_with_the_footprint_is_no_gain() -> None:
    rising = dataclasses.replace(KNEE, bandwidth=curve_of([(32e6, 4000.0), (64e6, 8000.0)]))
    assert delays_us(two_scaled(4000)[0], rising) == [0.0, 0.0]


# -- prices ---------------------------------------------------------------------------------------------------


class Gpu(ReferenceBackend):
    device_type = "cuda"


def prices_of(rows: int, among: bool) -> tuple[RegionProblem, ModelPrices]:
    graph, region = two_scaled(rows)
    table = GroupTable(graph, "fp32", "cuda")
    target = Target("cuda", "sm_90", 100, l2_bytes=40_000_000)
    ways = implementations_for("graph", (Gpu(),), target)
    problem = region_problem(table, region, enumerate_candidates(graph, region, legal=table.legal), ways)
    return problem, ModelPrices(table, KNEE, region if among else None)


def fused(problem: RegionProblem, size: int) -> Choice:
    return next(one for one in problem.choices if one.implementation.backends and len(one.group.ops) == size)


def test_two_kernels_are_no_better_off_in_a_cache_than_one() -> None:
    """By themselves two of 32 MB would take half as long as one of 64 MB. They move the same bytes."""
    problem, alone = prices_of(4000, among=False)
    assert 2 * alone.predict_s(fused(problem, 1)) < 0.9 * alone.predict_s(fused(problem, 2))
    assert len(predicted_partition(problem, alone.predict_s).chosen) == 2
    problem, among = prices_of(4000, among=True)
    assert 2 * among.predict_s(fused(problem, 1)) > among.predict_s(fused(problem, 2))
    assert len(predicted_partition(problem, among.predict_s).chosen) == 1


def test_small_regions_are_priced_as_before() -> None:
    (problem, alone), (_, among) = (prices_of(4, among) for among in (False, True))
    assert [alone.predict_s(one) for one in problem.choices] == [among.predict_s(one) for one in problem.choices]
    assert all(among.delay_us(one) == 0.0 for one in problem.choices)


def test_the_price_in_a_region_is_never_below_the_bound() -> None:
    problem, among = prices_of(4000, among=True)
    for one in problem.choices:
        assert among.bound_s(one) <= among.predict_s(one)
        assert among.delay_us(one) >= 0.0


def test_a_prediction_beside_other_data_is_that_of_a_larger_footprint() -> None:
    alone, beside = (predict(megabytes(32), KNEE, "graph", beside_bytes=one) for one in (0.0, 32e6))
    assert beside - alone == pytest.approx(4.0)


def test_the_bench_predicts_a_plan_as_the_planner_does() -> None:
    graph, _ = two_scaled(4000)
    names = [node.name for node in graph]
    apart, together = (
        [PlannedGroup(tuple(ops), GeneratedKernel((TritonBackend(),)), {"overlap": "none"}) for ops in divided]
        for divided in ([names[:1], names[1:]], [names])
    )
    alone_us = predict(kernel_work(lower_group(graph, names[:1]).ir), KNEE, "graph")
    assert predicted_us(graph, apart, KNEE, "graph") == pytest.approx(2 * (alone_us + 2.0), rel=0.001)
    mixed_us = predicted_us(graph, apart[:1], KNEE, "graph")
    op_us = predict(op_work(graph, names[1]), KNEE, "graph") + delay_of_op_us(graph, names[1])
    assert mixed_us == pytest.approx(alone_us + 2.0 + op_us, rel=0.001)
    assert predicted_us(graph, together, KNEE, "graph") == pytest.approx(
        predict(kernel_work(lower_group(graph, names).ir, (True,) * 3), KNEE, "graph")
    )


def test_the_bench_predicts_a_plan_in_its_own_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = two_scaled(4000)
    asked: list[str] = []

    def noted(graph: DataflowGraph, ops: Sequence[str], numerics: str, *more: Any) -> Lowered:
        asked.append(numerics)
        return lower(graph, ops, numerics, *more)

    for module in (pattern_predictions, compute_graph):
        monkeypatch.setattr(module, "lower", noted)
    for numerics in ("eager", "fp32"):
        asked.clear()
        predicted_us(graph, (), KNEE, "graph", numerics)
        assert set(asked) == {numerics}


def delay_of_op_us(graph: DataflowGraph, name: str) -> float:
    return neighbours_of(graph).delay_us(op_work(graph, name), KNEE, "graph", lower_group(graph, (name,)))


# -- records --------------------------------------------------------------------------------------------------


def planned(folder: Path, joint_us: float) -> PlanRecord:
    """Two kernels of 6.5 us, or one of ``joint_us``; ATen ops of 7 us; by themselves."""
    graph, _ = two_scaled(4000)
    database = Database(folder / "t.db", "write", Versions.current("cpu"))
    tuner = ScriptedTuner(database, lambda one: joint_us if len(compute_nodes(one)) == 2 else 6.5, unfused_us=7.0)
    target = Target("cuda", "sm_90", 100, l2_bytes=40_000_000)
    settings = PlanSettings(regime="graph")
    planner = Planner(database, KNEE, "dev", target, (Gpu(),), settings, tuner)  # type: ignore[arg-type]
    return planner.plan_graph(graph).regions[0].record


def test_kernels_that_look_cheaper_alone_lose_to_one_for_all(tmp_path: Path) -> None:
    record = planned(tmp_path, 15.0)  # two alone: 13 us; in the region 2 us more each
    assert [len(group.ops) for group in record.groups] == [2]
    assert record.groups[0].delay_us == 0.0
    apart = [one for one in record.rejected if one.implementation != "aten"]
    assert [one.delay_us for one in apart] == pytest.approx([2.0] * len(apart), rel=0.01)


def test_a_record_has_times_alone_and_says_what_was_added(tmp_path: Path) -> None:
    record = planned(tmp_path, 20.0)
    assert [len(group.ops) for group in record.groups] == [1, 1]
    assert [group.measured_us for group in record.groups] == pytest.approx([6.5, 6.5])
    assert [group.delay_us for group in record.groups] == pytest.approx([2.0, 2.0], rel=0.01)
    assert record.planned_us == pytest.approx(13.0)
    assert record.unfused_us == pytest.approx(14.0)
    assert record.margin == pytest.approx(1 - 13.0 / 14.0)
