"""Device identity, bandwidth curve, and the device spec's JSON."""

from __future__ import annotations

import dataclasses
import doctest
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from curves import curve_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.costmodel import accuracy, device_report, identity
from fuseplan.costmodel.curve import BandwidthCurve, BandwidthPoint
from fuseplan.costmodel.device import Calibration, DeviceSpec, DeviceSpecError, Latency, LinearFit, Peak
from fuseplan.costmodel.identity import (
    DeviceIdentity,
    current_identity,
    current_versions,
    parse_cache_bytes,
    parse_cpu_name,
)
from fuseplan.costmodel.work import Work
from fuseplan.search.errors import RecordError
from fuseplan.search.store.rows import device_spec

H200 = DeviceIdentity("cuda", "NVIDIA H200", 132, 60 * 2**20, 140 * 2**30)


def make_spec() -> DeviceSpec:
    return DeviceSpec(
        identity=H200,
        bandwidth=BandwidthCurve((BandwidthPoint(1e6, 8000.0, 9000.0), BandwidthPoint(1e9, 4000.0, 4200.0))),
        launch={"eager": Latency(5.0, 4.5, "a"), "kernel": Latency(3.0, 2.5, "b"), "graph": Latency(1.0, 0.7, "")},
        peaks={"fp32": Peak(5e13, 6e13), "bf16_matmul": Peak(7e14, 8e14)},
        noise=0.01,
        measured_at="2026-01-02T03:04:05+00:00",
        versions={"torch": "2.11.0"},
        thread_bandwidth=None,
        fits={"memory": LinearFit(2.2, None, 0.01, 7)},
        calibrations={"triton": Calibration(1.1, 0.9, 1.0, 12, 0.03, None)},
        problems=("busy",),
    )


def test_work_adds_field_by_field() -> None:
    a = Work({"fp32": 10.0, "sfu": 1.0}, dram_bytes=100.0, l2_bytes=5.0, launches=1)
    b = Work({"fp32": 2.0, "fp64": 3.0}, dram_bytes=11.0, launches=2)
    total = a + b
    assert total == Work({"fp32": 12.0, "fp64": 3.0, "sfu": 1.0}, dram_bytes=111.0, l2_bytes=5.0, launches=3)
    assert total.total_flops == 16.0  # 12 + 3 + 1


def test_work_rejects_an_unknown_unit() -> None:
    with pytest.raises(ValueError, match="int4"):
        Work({"int4": 1.0})


def test_json_round_trip_is_exact() -> None:
    spec = make_spec()
    assert device_spec(json.loads(spec.to_json())) == spec
    older = json.loads(replace(spec, view_us=1.5).to_json())
    assert device_spec(older).view_us == 1.5
    del older["view_us"]
    assert device_spec(older).view_us == 0.0
    threaded = dataclasses.replace(spec, thread_bandwidth=curve_of([(1024.0, 10.0)]))
    assert device_spec(json.loads(threaded.to_json())) == threaded
    assert "NaN" not in spec.to_json()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.update(schema_version=99), "schema version 99"),
        (lambda data: data.pop("schema_version"), "schema version None"),
        (lambda data: data.pop("peaks"), "missing.*peaks"),
        (lambda data: data["identity"].update(colour="red"), "unknown.*colour"),
        (lambda data: data.update(bandwidth=None), "bandwidth: expected an object"),
        (lambda data: data["bandwidth"].update(points=[]), "at least one point"),
        (lambda data: data["launch"]["eager"].update(us=-1.0), "best_us <= us"),
        (lambda data: data["peaks"].update(int4={"per_s": 1.0, "best_per_s": 1.0}), "int4"),
        (lambda data: data["launch"].update(warp={"us": 1.0, "best_us": 1.0, "source": ""}), "warp"),
    ],
)
def test_damaged_json_is_refused_with_a_reason(damage, message: str) -> None:
    data = json.loads(make_spec().to_json())
    damage(data)
    with pytest.raises(RecordError, match=message):
        device_spec(data)


def test_missing_mode_and_peak_name_what_there_is() -> None:
    spec = dataclasses.replace(make_spec(), launch={"eager": Latency(1.0, 1.0, "")})
    assert "graph" not in spec.launch
    with pytest.raises(DeviceSpecError, match=r"no launch mode 'graph'; it has: eager"):
        spec.latency("graph")
    with pytest.raises(DeviceSpecError, match=r"'fp8_matmul'; it has: bf16_matmul, fp32.*plan probe"):
        spec.peak("fp8_matmul")


def test_latency_properties_and_with_calibration() -> None:
    spec = make_spec()
    assert (spec.launch["eager"].us, spec.launch["kernel"].us, spec.launch["graph"].us) == (5.0, 3.0, 1.0)
    more = spec.with_calibration("ninetoothed", Calibration(2.0))
    assert set(more.calibrations) == {"triton", "ninetoothed"}
    assert set(spec.calibrations) == {"triton"}


@pytest.mark.parametrize("values", [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf)])
def test_peak_rejects_impossible_rates(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="best_per_s"):
        Peak(*values)


# -- bandwidth curve --------------------------------------------------------------------------------------------


def test_interpolation_is_linear_in_log_log() -> None:
    curve = curve_of([(100.0, 10.0), (10_000.0, 1000.0)])
    # Half way between 1e2 and 1e4 on a log axis is 1e3; half way between 10 and 1000 is 100.
    assert curve.gbps(1000.0) == pytest.approx(100.0)
    assert curve.gbps(100.0) == pytest.approx(10.0)
    assert curve.gbps(10_000.0) == pytest.approx(1000.0)


def test_outside_the_range_the_nearest_point_holds() -> None:
    curve = curve_of([(100.0, 10.0), (1000.0, 20.0)])
    assert curve.gbps(0.0) == curve.gbps(1.0) == pytest.approx(10.0)
    assert curve.gbps(1e12) == pytest.approx(20.0)


def test_ideal_is_the_best_of_this_footprint_and_larger_ones() -> None:
    curve = BandwidthCurve(
        (BandwidthPoint(1e3, 5.0, 6.0), BandwidthPoint(1e4, 50.0, 60.0), BandwidthPoint(1e5, 8.0, 9.0))
    )
    assert curve.ideal_gbps(0.0) == pytest.approx(60.0)
    assert curve.ideal_gbps(1e3) == pytest.approx(60.0)
    assert curve.ideal_gbps(1e4) == pytest.approx(60.0)
    # Between 1e4 and 1e5 the cache of 1e4 may be too small: sqrt(60 * 9) half way, which still beats 9.
    assert curve.ideal_gbps(10**4.5) == pytest.approx(math.sqrt(540.0))
    assert curve.ideal_gbps(1e9) == pytest.approx(9.0)
    assert curve.memory_gbps == 8.0


def test_at_least_takes_the_faster_of_two_curves_at_each_point() -> None:
    slow_start = BandwidthCurve((BandwidthPoint(1e3, 5.0, 6.0), BandwidthPoint(1e5, 50.0, 60.0)))
    flat = BandwidthCurve((BandwidthPoint(1e2, 10.0, 12.0), BandwidthPoint(1e4, 10.0, 12.0)))
    raised = slow_start.at_least(flat)
    assert [point.footprint_bytes for point in raised.points] == [1e3, 1e5]
    assert [point.gbps for point in raised.points] == pytest.approx([10.0, 50.0])
    assert [point.best_gbps for point in raised.points] == pytest.approx([12.0, 60.0])


@pytest.mark.parametrize("points", [[], [(1.0, 1.0), (1.0, 2.0)]])
def test_curve_needs_distinct_sizes(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="strictly increasing"):
        curve_of(points)


@pytest.mark.parametrize("point", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, math.inf)])
def test_point_rejects_impossible_numbers(point: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="footprint_bytes > 0"):
        BandwidthPoint(*point)


sizes = st.floats(1.0, 1e12)
rates = st.floats(1e-2, 1e5)


@given(st.lists(st.tuples(sizes, rates), min_size=1, max_size=6, unique_by=lambda point: point[0]), sizes)
@settings(max_examples=100, deadline=None)
def test_curve_stays_between_neighbours_and_ideal_never_increases(points, size: float) -> None:
    curve = curve_of(points)
    points = sorted(points)
    left = max((point for point in points if point[0] <= size), default=points[0])
    right = min((point for point in points if point[0] >= size), default=points[-1])
    low, high = sorted((left[1], right[1]))
    assert low * (1 - 1e-9) <= curve.gbps(size) <= high * (1 + 1e-9)
    assert curve.ideal_gbps(size) >= curve.gbps(size) * (1 - 1e-9)
    assert curve.ideal_gbps(size * 1.5) <= curve.ideal_gbps(size) * (1 + 1e-9)


# -- identity ---------------------------------------------------------------------------------------------------


def test_key_distinguishes_every_field() -> None:
    variants = [
        H200,
        dataclasses.replace(H200, name="NVIDIA H100"),
        dataclasses.replace(H200, cores=66),
        dataclasses.replace(H200, l2_bytes=50 * 2**20),
        dataclasses.replace(H200, memory_bytes=80 * 2**30),
        dataclasses.replace(H200, device_type="cpu"),
    ]
    assert len({variant.key() for variant in variants}) == len(variants)
    assert H200.key() == dataclasses.replace(H200).key()
    assert H200.key().startswith("cuda-nvidia-h200-")


def test_cpu_identity_is_stable_and_counts_torch_threads() -> None:
    here = current_identity("cpu")
    assert here == current_identity("cpu")
    assert here.device_type == "cpu"
    assert here.cores == torch.get_num_threads()
    assert here.name


def test_cuda_identity_reads_the_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, L2_cache_size=60 * 2**20, total_memory=140 * 2**30 - 12345
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert current_identity("cuda") == H200  # 140 GiB less a driver's reserve rounds to 140 GiB


def test_unknown_or_absent_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'tpu'"):
        current_identity("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        current_identity("cuda")


def test_versions_name_torch_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_versions("cpu")["torch"] == torch.__version__
    assert "cuda" not in current_versions("cpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert current_versions("cuda")["cuda"] == "13.0"


def test_cpu_name_is_the_first_processors() -> None:
    text = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Xeon\n\nprocessor : 1\nmodel name\t: Other\n"
    assert parse_cpu_name(text) == "Xeon (family 6, model 207)"
    assert parse_cpu_name("model name : Arm thing\n") == "Arm thing"
    assert parse_cpu_name("CPU implementer : 0x41\n") is None


@pytest.mark.parametrize(
    ("text", "nbytes"), [("48K\n", 49152), ("32M", 33554432), ("1G", 2**30), ("512", 512), ("", 0), ("huge", 0)]
)
def test_cache_sizes(text: str, nbytes: int) -> None:
    assert parse_cache_bytes(text) == nbytes


@pytest.mark.parametrize("module", [identity, accuracy, device_report])
def test_docstring_examples(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
