"""What kernels of a region cost each other in the cache: against the model's own bandwidths, by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from costmodel_samples import CPU, GPU
from graphs import Builder
from reference_backend import ReferenceBackend

from fuseplan.costmodel.curve import BandwidthCurve
from fuseplan.costmodel.device import DeviceSpec, Peak
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.kernels.backend import Target
from fuseplan.planner.candidates import enumerate_candidates
from fuseplan.planner.graph import DataflowGraph, Region
from fuseplan.planner.neighbours import Neighbours
from fuseplan.planner.partition import Choice, RegionProblem, predicted_partition, region_problem
from fuseplan.planner.prices import GroupBook, ModelPrices
from fuseplan.planner.regions import find_regions

#: 8 TB/s for what a cache of 32 MB holds, half of it for twice as much.
KNEE = dataclasses.replace(
    GPU, bandwidth=BandwidthCurve.of([(32e6, 8000.0), (64e6, 4000.0)]),
    identity=dataclasses.replace(GPU.identity, l2_bytes=40_000_000), peaks={"fp32": Peak(1e14, 1e14)},
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


def test_a_kernel_pays_for_the_footprint_of_its_region() -> None:
    graph, region = two_scaled(4000)  # 16 MB each: x, y and both results
    neighbours = Neighbours(graph, region)
    assert neighbours.footprint_bytes == 4 * 16_000_000 + 4000
    (first, *_) = graph
    # 32 MB: 4 us at 8 TB/s by itself, 8 us at the 4 TB/s of 64 MB.
    delay_us = neighbours.delay_us(megabytes(32), KNEE, "graph", first.inputs, first.outputs)
    assert delay_us == pytest.approx(4.0, rel=0.01)


def test_one_kernel_for_all_pays_nothing() -> None:
    graph, region = two_scaled(4000)
    delay_us = Neighbours(graph, region).delay_us(megabytes(64.1), KNEE, "graph", graph.inputs, graph.outputs)
    assert delay_us == 0.0


def test_what_the_region_makes_for_itself_is_in_the_cache() -> None:
    b = Builder(x=torch.empty(4000, 1000, device="meta"))
    middle = b("aten.exp.default", "x")
    graph = b.graph(b("aten.tanh.default", middle))
    graph.fresh = frozenset({"x"})
    (region,) = find_regions(graph)
    neighbours = Neighbours(graph, region)
    assert neighbours.footprint_bytes == 32_000_000
    # An op that read x and wrote a result of the region would wait for all of its bytes.
    first, second = graph
    whole, half = (
        neighbours.delay_us(megabytes(16), KNEE_LOW, "graph", inputs, outputs)
        for inputs, outputs in ((("x",), second.outputs), (first.inputs, first.outputs))
    )
    assert whole > 0
    assert half == pytest.approx(whole / 2)


#: The same knee where 16 MB still fit and 32 MB do not.
KNEE_LOW = dataclasses.replace(KNEE, bandwidth=BandwidthCurve.of([(16e6, 8000.0), (32e6, 4000.0)]))


def test_weights_do_not_count() -> None:
    graph, region = two_scaled(4000)
    graph.fresh = frozenset({"x", "f"})
    assert Neighbours(graph, region).footprint_bytes == 3 * 16_000_000 + 4000


@pytest.mark.parametrize("spec", [CPU, dataclasses.replace(KNEE, bandwidth=BandwidthCurve.of([(1e6, 8000.0)]))])
def test_no_delay_on_cpus_or_where_bandwidth_does_not_fall(spec: DeviceSpec) -> None:
    graph, region = two_scaled(4000)
    (first, *_) = graph
    mode = "kernel" if spec is CPU else "graph"
    assert Neighbours(graph, region).delay_us(megabytes(32), spec, mode, first.inputs, first.outputs) == 0.0


def test_bandwidth_that_rises_with_the_footprint_is_no_gain() -> None:
    rising = dataclasses.replace(KNEE, bandwidth=BandwidthCurve.of([(32e6, 4000.0), (64e6, 8000.0)]))
    graph, region = two_scaled(4000)
    (first, *_) = graph
    assert Neighbours(graph, region).delay_us(megabytes(32), rising, "graph", first.inputs, first.outputs) == 0.0


# -- prices ---------------------------------------------------------------------------------------------------


class Gpu(ReferenceBackend):
    device_type = "cuda"
    name = "triton"


def prices_of(rows: int, among: bool) -> tuple[RegionProblem, ModelPrices]:
    graph, region = two_scaled(rows)
    book = GroupBook(graph, "fp32", "cuda")
    problem = region_problem(graph, region, enumerate_candidates(graph, region, legal=book.legal))
    target = Target("cuda", "sm_90", 100, l2_bytes=40_000_000)
    return problem, ModelPrices(book, KNEE, "graph", (Gpu(),), target, region if among else None)


def fused(problem: RegionProblem, size: int) -> Choice:
    return next(one for one in problem.choices if one.fused and len(one.group.ops) == size)


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
    alone, beside = (predict(megabytes(32), KNEE, "graph", beside_bytes=one).time_us for one in (0.0, 32e6))
    assert beside - alone == pytest.approx(4.0)
