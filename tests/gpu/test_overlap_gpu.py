"""Overlapped kernels on a CUDA device: right by themselves, and in chains where each depends on all before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import interpret_kernels
import pytest
import torch
from ir_samples import Sample, label
from kernel_reference import run_reference
from overlap_samples import one_of_each, step, stepped

from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.gpu.overlap import OVERLAP_CHOICES
from fuseplan.kernels.ir.backend import CompiledKernel, Config, Target
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.gpu
LENGTH, REPLAYS = 12, 20
#: Fewer programs than multiprocessors, about one wave, and many waves; odd sizes too.
SIZES = [(1, 127), (3, 4097), (512, 4096), (4097, 1024)]
Call = Callable[..., object]


@pytest.fixture(scope="module")
def target() -> Target:
    found = replace(local_target("cuda"), in_graph=True)
    if not found.gpu.overlaps:
        pytest.skip(f"{found.arch} cannot overlap kernels")
    return found


@pytest.fixture(scope="module", params=[TritonBackend, NinetoothedBackend], ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GpuBackend:
    made = request.param(tmp_path_factory.mktemp("gpu"))
    assert isinstance(made, GpuBackend)
    return made


def kernel_of(
    backend: GpuBackend, size: tuple[int, int], reduces: bool, target: Target, overlap: str, flips: bool = True,
    **more: int,
) -> CompiledKernel:
    ir = step(*size, reduces, flips)
    config: Config = {**backend.default_config(ir, target), "overlap": overlap, **more}
    return backend.load(ir, config, target)


def recorded(work: Call) -> torch.cuda.CUDAGraph:
    """``work`` as a CUDA graph, run once before."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def integers(size: tuple[int, int], seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 2**20, size, generator=generator, device="cuda").float()


def check_replays(
    work: Call, expected: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, poisoned: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """``work`` takes ``x`` and leaves ``out``: launched by itself, and replayed with ever changing inputs."""
    graph = recorded(work)
    for number in range(REPLAYS):
        fresh = integers(tuple(x.shape), number)  # type: ignore[arg-type]
        for call in (work, graph.replay):
            for tensor in poisoned:
                tensor.fill_(torch.nan)
            x.copy_(fresh)
            call()
            assert torch.equal(out, expected(fresh)), (number, call)
    results = []
    for call, pause in ((work, torch.cuda.synchronize), (graph.replay, int)):  # replays right behind each other, too
        x.copy_(fresh)
        for _ in range(5):
            call()
            pause()
        results.append(out.clone())
    assert torch.equal(*results)


def repeated(times: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = stepped(x)
        return x

    return run


@pytest.mark.parametrize("sample", one_of_each(), ids=label)
def test_every_overlap_is_right(sample: Sample, backend: GpuBackend, target: Target) -> None:
    if refused := backend.refuse(sample.ir, target):
        pytest.skip(refused)
    inputs = [_on_device(tensor) for tensor in sample.inputs()]
    sizes = [sample.symbols[name] for name in sample.ir.symbols]
    reference = run_reference(sample.ir, sample.inputs(), sample.symbols)
    plain: list[torch.Tensor] = []
    for overlap in ("none", *OVERLAP_CHOICES):
        config = {**backend.default_config(sample.ir, target), "overlap": overlap}
        kernel = backend.load(sample.ir, config, target)
        outputs = [tensor.cuda() for tensor in sample.outputs()]
        graph = recorded(lambda: kernel(*inputs, *outputs, *sizes))  # noqa: B023
        for tensor, poisoned in zip(outputs, sample.outputs(), strict=True):
            tensor.copy_(poisoned)
        graph.replay()
        found = [tensor.cpu() for tensor in outputs]
        # The device's own exp and rsqrt are good to two units in the last place of fp32.
        assert interpret_kernels.worst_error(sample.ir, found, reference) <= 4.0, overlap
        plain = plain or found
        for mine, other in zip(found, plain, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides (``.cuda()`` would drop overlapping ones)."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span if tensor.numel() else 0,), (1,)).cuda()
    return flat.as_strided(tensor.shape, tensor.stride())


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("overlap", OVERLAP_CHOICES)
def test_each_reads_what_the_one_before_wrote_and_overwrites_what_it_read(
    overlap: str, size: tuple[int, int], reduces: bool, backend: GpuBackend, target: Target
) -> None:
    kernel = kernel_of(backend, size, reduces, target, overlap)
    x, y = integers(size, 0), integers(size, 0)

    def work() -> None:
        for _ in range(LENGTH // 2):
            kernel(x, y)
            kernel(y, x)

    check_replays(work, repeated(LENGTH), x, [y], x)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kinds_of_overlap_follow_each_other(size: tuple[int, int], backend: GpuBackend, target: Target) -> None:
    kernels = [
        kernel_of(backend, size, reduces, target, overlap)
        for overlap in ("early", "none", "late", "early", "early", "wait") for reduces in (False, True)
    ]
    tensors = [integers(size, 0) for _ in range(3)]

    def work() -> None:
        for number, kernel in enumerate(kernels):
            kernel(tensors[number % 3], tensors[(number + 1) % 3])

    check_replays(work, repeated(len(kernels)), tensors[0], tensors[1:], tensors[len(kernels) % 3])


@pytest.mark.parametrize("stages", [1, 3])
def test_looped_reductions_overlap(stages: int, target: Target) -> None:
    size = (131, 4097)
    for overlap in OVERLAP_CHOICES:
        kernel = kernel_of(TritonBackend(), size, True, target, overlap, block_cols=1024, num_stages=stages)
        x, y = integers(size, 0), integers(size, 0)

        def work() -> None:
            kernel(x, y)  # noqa: B023
            kernel(y, x)  # noqa: B023

        check_replays(work, repeated(2), x, [y], x)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("overlap", OVERLAP_CHOICES)
def test_aten_kernels_copies_and_fills_between(
    overlap: str, size: tuple[int, int], backend: GpuBackend, target: Target
) -> None:
    kernel = kernel_of(backend, size, False, target, overlap)
    x, y, z, out = (integers(size, 0) for _ in range(4))

    def work() -> None:
        kernel(x, y)
        torch.add(y, 1.0, out=x)  # a kernel that reads what was written, and overwrites what was read
        kernel(x, y)
        z.copy_(y)  # a memory copy
        kernel(z, x)
        z.zero_()  # a memory fill over what the kernel ahead still reads
        kernel(x, y)
        torch.mul(z, y, out=x)
        kernel(y, out)
        y.fill_(torch.nan)

    check_replays(work, lambda value: repeated(5)(value) + 1, x, [y, z, out], out)


def test_products_of_a_library_between(backend: GpuBackend, target: Target) -> None:
    size = (64, 1024)
    kernel = kernel_of(backend, size, False, target, "early")
    swap = torch.eye(size[1], device="cuda").flip(0)  # exact: each product is a copy of one column
    x, y, out = (integers(size, 0) for _ in range(3))

    def work() -> None:
        for _ in range(4):
            kernel(x, y)
            torch.mm(y, swap, out=x)
        kernel(x, out)

    def expected(value: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            value = stepped(value).flip(1)
        return stepped(value)

    check_replays(work, expected, x, [y, out], out)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("overlap", OVERLAP_CHOICES)
def test_outputs_that_lie_in_their_inputs(
    overlap: str, size: tuple[int, int], backend: GpuBackend, target: Target
) -> None:
    flip, add = (kernel_of(backend, size, False, target, overlap, flips) for flips in (True, False))
    x, y = integers(size, 0), integers(size, 0)

    def work() -> None:
        for source, other in ((x, y), (y, x)):
            add(source, source)
            flip(source, other)
            add(other, other)
            add(other, other)

    def expected(value: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            value = stepped(value + 1) + 2
        return value

    check_replays(work, expected, x, [y], x)


@pytest.mark.parametrize("overlap", OVERLAP_CHOICES)
def test_streams_that_fork_and_join(overlap: str, backend: GpuBackend, target: Target) -> None:
    size = (33, 1000)
    kernel = kernel_of(backend, size, False, target, overlap)
    x, left, right, both, out = (integers(size, 0) for _ in range(5))
    side = torch.cuda.Stream()

    def work() -> None:
        kernel(x, both)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kernel(both, right)
        kernel(both, left)
        torch.cuda.current_stream().wait_stream(side)
        kernel(left, both)  # directly after the join: it must have waited for the other stream too
        torch.add(both, right, out=left)
        kernel(left, out)

    def expected(value: torch.Tensor) -> torch.Tensor:
        return stepped(repeated(3)(value) + repeated(2)(value))

    check_replays(work, expected, x, [left, right, both, out], out)
