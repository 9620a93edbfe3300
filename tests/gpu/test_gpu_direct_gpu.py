"""Direct launches on a CUDA device: the same results as Triton's launcher, on every stream, thread and device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_samples as samples
import pytest
import torch
from ir_samples import Sample

from fuseplan.kernels.gpu import launch as gpu_launch
from fuseplan.kernels.gpu.build import load_file
from fuseplan.kernels.gpu.direct import find_launcher, launcher_problem
from fuseplan.kernels.gpu.launch import Geometry, GpuKernel, Loader, Variant
from fuseplan.kernels.gpu.targets import Nvidia
from fuseplan.kernels.ir.backend import Resources
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.gpu
ROWS, COLS = 33, 130


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TritonBackend:
    if (problem := launcher_problem()) is not None:
        pytest.skip(problem)
    return TritonBackend(tmp_path_factory.mktemp("gpu"))


def fused(backend: TritonBackend, sample: Sample, **config: int) -> Callable[..., Any]:
    target = local_target("cuda")
    return backend.fused_callable(sample.ir, {**backend.default_config(sample.ir, target), **config}, target)


def inputs(sample: Sample) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in sample.inputs()]


def is_direct(call: Any) -> bool:
    return type(call.__self__).__name__ == "Kernel"


@pytest.mark.parametrize("sample", samples.static_samples(), ids=samples.label)
def test_direct_calls_agree_with_triton_launches(
    sample: Sample, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refused := backend.refuse(sample.ir, local_target("cuda")):
        pytest.skip(refused)
    call, args = fused(backend, sample), inputs(sample)
    assert is_direct(call)
    monkeypatch.setattr(gpu_launch, "find_launcher", lambda: None)
    slow = fused(backend, sample)
    expected = slow(*args)
    for _ in range(3):
        torch.testing.assert_close(call(*args), expected, rtol=0, atol=0, equal_nan=True)


def test_dynamic_sizes_agree_with_triton_launches(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = samples.dynamic_samples()[4]
    call = fused(backend, sample)
    monkeypatch.setattr(gpu_launch, "find_launcher", lambda: None)
    slow = fused(backend, sample)
    for rows in (5, 128, 5, 1, 128, 77, 5):
        x = torch.randn(rows, 96, device="cuda")
        torch.testing.assert_close(call(x, rows), slow(x, rows), rtol=0, atol=0)


def test_unaligned_inputs(backend: TritonBackend) -> None:
    sample = samples.swiglu(ROWS, COLS)
    call, args = fused(backend, sample), inputs(sample)
    expected = call(*args)
    for shift in (0, 1, 0, 1, 3):
        storage = [torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device="cuda") for tensor in args]
        moved = [
            one[shift:].view(tensor.shape).copy_(tensor) for one, tensor in zip(storage, args, strict=True)
        ]
        torch.testing.assert_close(call(*moved), expected, rtol=0, atol=0)


def test_calls_follow_the_current_stream(backend: TritonBackend) -> None:
    sample = samples.swiglu(4096, 4096)
    call, (x, *rest) = fused(backend, sample), inputs(sample)
    expected = call(x * 2, *rest)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = x
        for _ in range(20):  # keeps the stream busy: a launch elsewhere would read before the product is there
            result = x * 2
        result = call(result, *rest)
    stream.synchronize()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_calls_are_captured(backend: TritonBackend) -> None:
    sample = samples.swiglu(ROWS, COLS)
    call, args = fused(backend, sample), inputs(sample)
    call(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*args)
    args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    torch.testing.assert_close(result, call(*args), rtol=0, atol=0)


def test_a_new_thread_can_call(backend: TritonBackend) -> None:
    sample = samples.swiglu(ROWS, COLS)
    call, args = fused(backend, sample), inputs(sample)
    expected, results = call(*args), []
    threads = [threading.Thread(target=lambda: results.extend(call(*args) for _ in range(20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60 and all(torch.equal(result, expected) for result in results)


def test_calls_on_another_device(backend: TritonBackend) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    sample = samples.swiglu(ROWS, COLS)
    call, args = fused(backend, sample), inputs(sample)
    expected = call(*args)
    others = [tensor.to("cuda:1") for tensor in args]
    for current in (0, 1, 0, 1):
        with torch.cuda.device(current):
            for given in (args, others, args, others):
                result = call(*given)
                assert result.device == given[0].device
                torch.testing.assert_close(result.cpu(), expected.cpu(), rtol=0, atol=0)


def test_a_dropped_kernel_can_be_loaded_again(backend: TritonBackend) -> None:
    sample = samples.swiglu(ROWS, COLS)
    args = inputs(sample)
    expected = fused(backend, sample)(*args)
    for _ in range(3):
        call = fused(backend, sample)
        assert all(torch.equal(call(*args), expected) for _ in range(3))


def test_a_launcher_is_found_once(backend: TritonBackend) -> None:
    assert find_launcher() is find_launcher() is not None
    target = local_target("cuda")
    ir = samples.swiglu(ROWS, COLS).ir
    kernel = backend.load(ir, backend.default_config(ir, target), target)
    assert isinstance(kernel, GpuKernel)


def test_outputs_come_from_the_allocator_of_pytorch(backend: TritonBackend) -> None:
    sample = samples.swiglu(4096, 4096)
    call, args = fused(backend, sample), inputs(sample)
    call(*args)
    before = torch.cuda.memory_allocated()
    result = call(*args)
    assert torch.cuda.memory_allocated() - before == result.nbytes
    limit = (torch.cuda.memory_reserved() + 2**20) / torch.cuda.get_device_properties(0).total_memory
    held = [result]
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                held.append(call(*args))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    count = len(held)
    del result, held
    assert torch.cuda.memory_allocated() == before and count >= 1


# -- overlapped launches --------------------------------------------------------------------------------------

#: Every program lets the next launch begin at once, and then waits for the one in front before it reads.
_OVERLAPPED = """
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

@triton.jit
def step(x, y, N: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_launch_dependents()
    gdc_wait()
    tl.store(y + at, tl.load(x + at, at < N) + 1, at < N)
"""
_BLOCK = 1024


@pytest.fixture
def step(backend: TritonBackend, tmp_path: Path) -> GpuKernel:
    """``step(x, y)``: y = x + 1, for 2^20 + 3 elements."""
    triton = pytest.importorskip("triton")
    path = tmp_path / "overlapped_step.py"
    path.write_text(_OVERLAPPED)
    function, numel = load_file(path).step, 2**20 + 3
    gpu = local_target("cuda").gpu

    def compile_variant(variant: Variant) -> Any:
        signature = {"x": "*fp32", "y": "*fp32", "N": "constexpr", "BLOCK": "constexpr"}
        source = triton.compiler.ASTSource(function, signature, {(2,): numel, (3,): _BLOCK}, {})
        target = triton.backends.compiler.GPUTarget(gpu.vendor, Nvidia().name_of(gpu), gpu.warp)
        return triton.compile(source, target=target, options={"launch_pdl": True})

    arguments = ((0, 0), (1, 0), (None, numel), (None, _BLOCK))
    geometry = Geometry(-(-numel // _BLOCK), wide=False)
    loader = Loader(compile_variant, lambda _: geometry, (), arguments, 2)
    return GpuKernel(loader, Resources(), find_launcher())


def _chain(step: GpuKernel, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
    for _ in range(count):
        step(x, y)
        step(y, x)


def test_overlapped_launches_wait_for_the_one_in_front(step: GpuKernel) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the device has no programmatic dependent launch")
    x = torch.zeros(2**20 + 3, device="cuda")
    y = torch.full_like(x, float("nan"))
    _chain(step, x, y, 100)
    assert is_direct(step.run) and bool((x == 200).all())


def test_captured_overlapped_launches_wait_for_the_one_in_front(step: GpuKernel) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the device has no programmatic dependent launch")
    start, x = torch.zeros(2**20 + 3, device="cuda"), torch.empty(2**20 + 3, device="cuda")
    y = torch.empty_like(x)
    _chain(step, x, y, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(start)  # a kernel behind a copy, behind a library's kernel, and at the start of a graph
        _chain(step, x, y, 50)
        torch.mul(x, 2, out=x)
        _chain(step, x, y, 1)
    for value in (0, 7, 3):
        start.fill_(value)
        graph.replay()
        assert bool((x == (value + 100) * 2 + 2).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _chain(step, x, y, 1)
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        assert bool((x == value + 2).all())
