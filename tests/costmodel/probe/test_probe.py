"""The probe end to end: for real on this CPU (small sizes), with a scripted clock for CUDA."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from fuseplan.costmodel.device import DeviceSpec, Latency, Peak
from fuseplan.costmodel.identity import DeviceIdentity, current_identity
from fuseplan.costmodel.probe import cpu, cuda, measurements
from fuseplan.costmodel.probe.fit import RateTiming, StreamTiming, peaks
from fuseplan.costmodel.probe.measurements import Measurements, _stream_call, stream_sizes
from fuseplan.costmodel.probe.probe import MachineLoad, doubts, losses, probe
from fuseplan.costmodel.probe.timing import UNLIMITED, TimeBudget, Timing
from fuseplan.costmodel.probe.yardstick import Yardstick
from fuseplan.costmodel.roofline import lower_bound, predict
from fuseplan.costmodel.work import Work
from fuseplan.search.store.rows import device_spec

MIB = 2**20


@pytest.fixture(scope="module")
def probed() -> tuple[DeviceSpec, list[tuple[float, str]], int]:
    steps: list[tuple[float, str]] = []
    launches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_largest_bytes", lambda identity: 2 * MIB)
        patch.setattr(cpu, "_MATMUL_SIZES", (64,))
        spec = probe(
            "cpu", progress=lambda fraction, label: steps.append((fraction, label)),
            kernel_call=lambda: launches.append(1),
        )
    return spec, steps, len(launches)


def test_cpu_probe_measures_every_number(probed) -> None:
    spec, _, launches = probed
    assert spec.identity == current_identity("cpu")
    assert set(spec.launch) == {"eager", "kernel"}
    assert spec.latency("kernel").source == "our own launcher"
    assert launches > 0
    assert set(spec.peaks) == {"fp32", "fp64", "sfu", "fp32_matmul", "bf16_matmul", "fp16_matmul"}
    assert spec.bandwidth.points[-1].footprint_bytes == 2 * MIB
    assert (spec.thread_bandwidth is None) == (torch.get_num_threads() == 1)
    assert {"eager", "launch:neg", "launch:add"} <= set(spec.fits)
    assert spec.noise >= 0.0 and spec.versions["torch"] == torch.__version__
    assert device_spec(json.loads(spec.to_json())) == spec


@pytest.mark.slow
def test_cpu_probe_predicts(probed) -> None:
    spec, _, _ = probed
    work = Work({"fp32": 1e6, "sfu": 1e4}, dram_bytes=1e6, launches=1)
    assert 0 < lower_bound(work, spec, "kernel") <= predict(work, spec, "kernel") < math.inf


@pytest.mark.slow
def test_cpu_probe_reports_progress_and_restores_threads(probed) -> None:
    _, steps, _ = probed
    fractions = [fraction for fraction, _ in steps]
    assert fractions == sorted(fractions)
    assert steps[-1] == (1.0, "done")
    assert {"memory bandwidth", "launch latency", "arithmetic"} <= {label for _, label in steps}
    assert torch.get_num_threads() == current_identity("cpu").cores


def test_largest_footprint_follows_cache_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (DeviceIdentity("cpu", "x", 1, cache, 0) for cache in (MIB, 128 * MIB))
    monkeypatch.setattr(cpu.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 2**20}.__getitem__)
    # 4 GiB are free, a quarter of which is 1 GiB: 256 MiB, or four times a larger cache.
    assert cpu._largest_bytes(small) == 256 * MIB
    assert cpu._largest_bytes(large) == 512 * MIB
    monkeypatch.setattr(cpu.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 2**13}.__getitem__)
    assert cpu._largest_bytes(large) == 8 * MIB  # a quarter of 32 MiB


def test_one_thread_bounds_the_device_from_both_sides() -> None:
    stalled = RateTiming("fp32", 1e6, Timing(1000.0, 1000.0, 0.0))  # 1e9 / s, with all threads in each other's way
    single = RateTiming("fp32", 1e6, Timing(10.0, 10.0, 0.0))  # 1e11 / s
    peak = peaks([stalled, *cpu._from_one_thread([single], 4)])["fp32"]
    assert peak.per_s == pytest.approx(1e11)
    assert peak.best_per_s == pytest.approx(4e11)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'xpu'"):
        probe("xpu")


def test_sizes_double_from_4_kib() -> None:
    assert stream_sizes(32 * 1024, 2.0) == [4096, 8192, 16384, 32768]
    assert stream_sizes(8192, 2.0**0.5) == [4096, 6144, 8192]  # 4 * sqrt(2) KiB rounds to 6


def test_sizes_are_denser_where_a_cache_ends() -> None:
    assert stream_sizes(64 * 1024, 4.0, 30 * 1024) == [4096, 12 * 1024, 16 * 1024, 20 * 1024, 24 * 1024, 64 * 1024]
    assert max(stream_sizes(16 * 1024, 2.0, 30 * 1024)) == 16 * 1024  # never beyond the largest
    assert min(stream_sizes(16 * 1024, 2.0, 3 * 1024)) == 4096


@pytest.mark.parametrize("pattern", ["copy", "neg", "add", "read"])
@pytest.mark.parametrize("size", [4096, 5 * 1024, 96 * 1024])
def test_a_stream_touches_its_footprint_and_nothing_else(pattern: str, size: int) -> None:
    buffer, total = torch.rand(size // 4 + 3 * 256), torch.empty(())
    before = buffer.clone()
    _stream_call(pattern, size, buffer, total)()
    parts = {"copy": 2, "neg": 2, "add": 3, "read": 1}[pattern]
    length = size // 4 // parts
    pitch = (length + 255) // 256 * 256
    expected = before.clone()
    first = before[:length]
    if pattern == "copy":
        expected[pitch : pitch + length] = first
    elif pattern == "neg":
        expected[pitch : pitch + length] = -first
    elif pattern == "add":
        expected[2 * pitch : 2 * pitch + length] = first + before[pitch : pitch + length]
    else:
        assert total.item() == pytest.approx(first.double().sum().item(), rel=1e-4)
    assert torch.equal(buffer, expected)


# -- CUDA, with everything that needs a GPU replaced ------------------------------------------------------------


class ScriptedTimer:
    """Runs each call once, then claims that it took 1 us + its bytes at 1000 GB/s, or 100 us for other calls."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def prepare(self, call, limit_us):
        call()
        nbytes = 0
        if isinstance(call, partial) and call.func in (torch.neg, torch.add, torch.sum):
            nbytes = sum(arg.nbytes for arg in (*call.args, call.keywords.get("out")) if isinstance(arg, torch.Tensor))
            return lambda limit_us: [1.0 + nbytes * 1e-6]
        return lambda limit_us: [100.0]


class FakeKernel:
    """A Triton kernel that records its grid."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeKernel]:
    pytest.importorskip("triton")
    kernels = {
        name: FakeKernel() for name in ("nothing", "only_wait", "wait_and_negate", "fma_chain", "exp2_chain")
    }
    from fuseplan.costmodel.probe import kernels as probe_kernels

    for name, kernel in kernels.items():
        monkeypatch.setattr(probe_kernels, name, kernel)
    monkeypatch.setattr(cuda, "GraphTimer", ScriptedTimer)
    monkeypatch.setattr(cuda, "HostCallTimer", ScriptedTimer)
    monkeypatch.setattr(cuda, "_DEVICE", "cpu")
    monkeypatch.setattr(cuda, "_MATMUL_SIZES", (16, 16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    return kernels


def test_cuda_measurements_cover_every_unit(cuda_on_cpu: dict[str, FakeKernel]) -> None:
    identity = DeviceIdentity("cuda", "fake", 10, MIB, 64 * MIB)
    measured = cuda.measure_cuda(identity, True, lambda: None, UNLIMITED)
    assert {rate.unit for rate in measured.rates} == {
        "fp32", "fp64", "sfu", "fp32_matmul", "bf16_matmul", "fp16_matmul"
    }
    flops = {rate.unit: rate.flops for rate in measured.rates}
    assert flops["bf16_matmul"] == 2 * 16**3
    # 32 blocks on each of 10 multiprocessors, 1024 elements each, 2048 steps: one exp2 or two flops a step.
    assert flops["sfu"] == 32 * 10 * 1024 * 2048
    assert flops["fp32"] == 2 * flops["sfu"]
    assert cuda_on_cpu["fma_chain"].grids[0] == (320,)
    assert measured.kernel == Timing(100.0, 100.0, 0.0)
    assert measured.view == Timing(100.0, 100.0, 0.0)
    assert measured.graph_node == Timing(100.0, 100.0, 0.0)
    assert measured.overlapped_node is None and measured.overlapped_kernel is None
    assert not cuda_on_cpu["only_wait"].grids
    assert max(stream.footprint_bytes for stream in measured.streams) == 8 * MIB  # an eighth of the memory
    assert not any(stream.typical for stream in measured.streams if stream.pattern == "read")


def test_cuda_probe_assembles(cuda_on_cpu: dict[str, FakeKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    identity = DeviceIdentity("cuda", "fake", 10, MIB, 64 * MIB)
    monkeypatch.setattr("fuseplan.costmodel.probe.probe.current_identity", lambda device_type: identity)
    spec = probe("cuda")
    assert spec.bandwidth.memory_gbps == pytest.approx(1000.0, rel=0.01)
    assert spec.launch["graph"].us == pytest.approx(1.0, rel=0.01)
    assert spec.latency("kernel").best_us == 0.0
    assert device_spec(json.loads(spec.to_json())) == spec


def test_overlapped_launches_are_measured_where_there_are_any(
    cuda_on_cpu: dict[str, FakeKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = DeviceIdentity("cuda", "fake", 10, MIB, 64 * MIB)
    monkeypatch.setattr("fuseplan.costmodel.probe.probe.current_identity", lambda device_type: identity)
    monkeypatch.setattr(cuda, "_fp8_matmul", lambda size: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    spec = probe("cuda")
    assert cuda_on_cpu["only_wait"].grids and cuda_on_cpu["wait_and_negate"].grids
    assert spec.latency("overlapped").us == 100.0
    assert "overlapped" in spec.launch
    assert device_spec(json.loads(spec.to_json())) == spec


@pytest.mark.parametrize("name", ["only_wait", "wait_and_negate"])
def test_overlapped_kernels_wait_before_they_touch_memory(name: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fuseplan.costmodel.probe import kernels as probe_kernels

    kernel = getattr(probe_kernels, name)
    signature = {"x_ptr": "*fp32", **({"y_ptr": "*fp32", "block": "constexpr"} if name != "only_wait" else {})}
    source = ASTSource(kernel, signature, constexprs={"block": 1024} if name != "only_wait" else {})
    options = {"num_warps": 4, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait")
    assert "ld.global" not in before and "st.global" not in before
    assert ("ld.global" in after) == (name != "only_wait")


def test_fp8_is_left_out_where_it_fails(cuda_on_cpu: dict[str, FakeKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object, **kwargs: object) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    assert "fp8_matmul" not in cuda._matmul_calls(16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: None)
    assert cuda._matmul_calls(16)["fp8_matmul"][0] == 2 * 16**3


@pytest.mark.parametrize(
    ("name", "dtype", "instruction"),
    [("fma_chain", "fp32", "fma.rn.f32"), ("fma_chain", "fp64", "fma.rn.f64"), ("exp2_chain", "fp32", "ex2.approx")],
)
def test_arithmetic_kernels_compile_to_the_instruction_they_time(name: str, dtype: str, instruction: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fuseplan.costmodel.probe import kernels as probe_kernels

    kernel = getattr(probe_kernels, name)
    signature = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "steps": "i32", "block": "constexpr"}
    source = ASTSource(kernel, signature, constexprs={"block": 1024})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    # 1024 elements on 128 threads are 8 each, and the loop's body takes 4 steps.
    assert ptx.count(f"{instruction}") >= 8 * 4


# -- a busy machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("average", "cores", "noise", "doubtful"),
    [
        (0.3, 2, 0.02, []), (2.0, 2, 0.02, []), (62.0, 96, 0.02, []), (62.0, 2, 0.02, ["62.0 on 2 cores"]),
        (0.3, 2, 0.3, ["30%"]), (62.0, 2, 0.3, ["62.0 on 2 cores", "30%"]),
        (0.3, 2, 1.0, ["one sample only"]),
    ],
)
def test_load_and_noise_make_a_probe_doubtful(average: float, cores: int, noise: float, doubtful: list[str]) -> None:
    found = list(doubts(noise, MachineLoad(average, cores)))
    assert len(found) == len(doubtful) and all(word in line for word, line in zip(doubtful, found, strict=True))


def test_a_probe_on_a_busy_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked before it keeps the cores busy itself."""
    order: list[str] = []
    quiet = Measurements(
        [StreamTiming("neg", 4096 * 2**step, Timing(2.0**step, 2.0**step, 0.0), True) for step in range(12)],
        {256: Timing(4.0, 3.0, 0.0), 4096: Timing(4.1, 3.0, 0.0)}, [RateTiming("fp32", 1e6, Timing(10.0, 10.0, 0.0))],
    )
    monkeypatch.setattr(cpu, "measure_cpu", lambda *_: order.append("measured") or quiet)

    def load() -> MachineLoad:
        order.append("asked")
        return MachineLoad(62.0, 2)

    spec = probe("cpu", load=load)
    assert order == ["asked", "measured"]
    assert any("62.0 on 2 cores" in problem for problem in spec.problems)
    assert not any("busy" in problem for problem in probe("cpu", load=lambda: MachineLoad(0.1, 2)).problems)


class SlowClock:
    """A look at it takes ``tick_s``, and moving a gibibyte one second. Nothing else takes any time."""

    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def seconds(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def nanoseconds(self) -> int:
        return round(self.seconds() * 1e9)

    def stream(self, pattern: str, footprint_bytes: int, *_: object) -> Callable[[], None]:
        def call() -> None:
            self.now_s += footprint_bytes / 2**30

        return call


@pytest.mark.parametrize("tick_s", [1e-3, 1e-2])
def test_a_cpu_probe_ends_in_time_however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch, tick_s: float) -> None:
    clock = SlowClock(tick_s)
    monkeypatch.setattr(time, "perf_counter", clock.seconds)
    monkeypatch.setattr(time, "perf_counter_ns", clock.nanoseconds)
    monkeypatch.setattr(measurements, "_stream_call", clock.stream)
    monkeypatch.setattr(cpu, "processor_yardstick", lambda: Yardstick(lambda: None, clock.seconds))
    monkeypatch.setattr(cpu, "_largest_bytes", lambda identity: 128 * MIB)
    monkeypatch.setattr(cpu, "_MATMUL_SIZES", (16, 32))
    steps: dict[str, float] = {}
    spec = probe(
        "cpu", kernel_call=lambda: None, load=lambda: MachineLoad(0.0, 2), budget=TimeBudget.of(20.0, clock.seconds),
        progress=lambda fraction, label: steps.update({label: clock.now_s}),
    )
    assert set(spec.launch) == {"eager", "kernel"} and {"fp32", "fp64", "sfu", "bf16_matmul"} <= set(spec.peaks)
    assert device_spec(json.loads(spec.to_json())) == spec
    # When the time is up, one sample is taken of what has none yet: four patterns at 16 sizes, ten looks each.
    assert clock.now_s < 20.0 + 64 * 10 * tick_s + 4 * 2 * 128 / 1024
    assert min(at_s for step, at_s in steps.items() if step.startswith("arithmetic")) < 12.0
    assert any("cut short" in problem and "memory bandwidth" in problem for problem in spec.problems)
    largest = 128 * MIB if tick_s < 1e-2 else 64 * MIB
    assert 16 * MIB <= spec.bandwidth.points[-1].footprint_bytes <= largest


def test_losses_are_what_got_clearly_worse(probed) -> None:
    spec = probed[0]
    assert losses(spec, spec) == []
    slow = replace(spec, peaks={unit: Peak(peak.per_s / 3, peak.best_per_s) for unit, peak in spec.peaks.items()})
    assert len(losses(slow, spec)) == len(spec.peaks) and losses(spec, slow) == []
    late = replace(spec, launch={**spec.launch, "eager": Latency(spec.launch["eager"].us * 2, 0.0, "busy")})
    assert len(losses(late, spec)) == 1 and "launch, eager" in losses(late, spec)[0]
    other = replace(spec, peaks={})  # what was not measured is no loss
    assert losses(other, spec) == []
