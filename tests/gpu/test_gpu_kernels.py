"""GPU back ends on a CUDA device: every sample kernel, alignment, streams, graphs, several devices."""

from __future__ import annotations

import interpret_kernels
import ir_samples as samples
import pytest
import torch
from ir_samples import Sample, label
from kernel_reference import run_reference

from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.ir.backend import Backend
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.gpu
BACKENDS = [TritonBackend, NinetoothedBackend]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GpuBackend:
    made = request.param(tmp_path_factory.mktemp("gpu"))
    assert isinstance(made, GpuBackend)
    return made


def run(backend: Backend, sample: Sample, config: dict[str, int | str] | None = None) -> float:
    """Error of one run on poisoned outputs, in units of the tolerance."""
    target = local_target("cuda")
    inputs, outputs = sample.inputs(), [tensor.cuda() for tensor in sample.outputs()]
    kernel = backend.load(sample.ir, config or backend.default_config(sample.ir, target), target)
    kernel(*(_on_device(tensor) for tensor in inputs), *outputs, *(sample.symbols[name] for name in sample.ir.symbols))
    reference = run_reference(sample.ir, inputs, sample.symbols)
    return interpret_kernels.worst_error(sample.ir, [tensor.cpu() for tensor in outputs], reference)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides (``.cuda()`` would drop overlapping ones)."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span if tensor.numel() else 0,), (1,)).cuda()
    return flat.as_strided(tensor.shape, tensor.stride())


@pytest.mark.parametrize("sample", samples.static_samples() + samples.dynamic_samples(), ids=label)
def test_every_kernel_is_right(sample: Sample, backend: GpuBackend) -> None:
    target = local_target("cuda")
    refused = backend.refuse(sample.ir, target)
    if refused:
        pytest.skip(refused)
    for config in interpret_kernels.configs(backend, sample.ir):
        # The device's own exp and rsqrt are good to two units in the last place of fp32.
        assert run(backend, sample, dict(config)) <= 4.0, config


@pytest.mark.parametrize(
    "sample",
    [samples.add_rms_norm(512, 4096, "bfloat16"), samples.swiglu(512, 14336, "bfloat16"),
     samples.rope(2, 512, 32, 8, 128, "bfloat16")],
    ids=label,
)
def test_llama_sizes_are_right(sample: Sample, backend: GpuBackend) -> None:
    assert run(backend, sample) <= 1.5


def test_unaligned_tensors_are_right(backend: GpuBackend) -> None:
    sample, target = samples.swiglu(5, 256, "bfloat16"), local_target("cuda")
    kernel = backend.load(sample.ir, backend.default_config(sample.ir, target), target)
    (gate_up,) = sample.inputs()
    storage = torch.zeros(gate_up.numel() + 1, dtype=gate_up.dtype, device="cuda")
    shifted = storage[1:].view_as(gate_up)
    shifted.copy_(gate_up)
    out = torch.full((5, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernel(shifted, out)
    assert interpret_kernels.worst_error(sample.ir, [out.cpu()], run_reference(sample.ir, [gate_up])) <= 1.5


def test_a_kernel_runs_on_the_current_stream_and_in_a_graph(backend: GpuBackend) -> None:
    sample, target = samples.rms_norm(64, 2048, "bfloat16"), local_target("cuda")
    call = backend.fused_callable(sample.ir, backend.default_config(sample.ir, target), target)
    inputs = [tensor.cuda() for tensor in sample.inputs()]
    expected = call(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*inputs)
    assert isinstance(captured, torch.Tensor) and isinstance(expected, torch.Tensor)
    inputs[0].mul_(-1)
    graph.replay()
    torch.testing.assert_close(captured, -expected)


def test_outputs_follow_the_inputs_device(backend: GpuBackend) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    sample, target = samples.rms_norm(8, 512), local_target("cuda")
    call = backend.fused_callable(sample.ir, backend.default_config(sample.ir, target), target)
    first = call(*(tensor.cuda(0) for tensor in sample.inputs()))
    second = call(*(tensor.cuda(1) for tensor in sample.inputs()))
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    assert second.device.index == 1
    torch.testing.assert_close(first.cpu(), second.cpu())


def test_offsets_beyond_32_bits_are_right() -> None:
    sample = samples.swiglu(2**19 + 3, 4096, "bfloat16")
    backend, target = TritonBackend(), local_target("cuda")
    kernel = backend.load(sample.ir, backend.default_config(sample.ir, target), target)
    gate_up = torch.zeros((2**19 + 3, 8192), dtype=torch.bfloat16, device="cuda")
    gate_up[-1] = 1.0
    out = torch.full((2**19 + 3, 4096), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernel(gate_up, out)
    assert bool((out[:-1] == 0).all())
    torch.testing.assert_close(out[-1].float().cpu(), torch.full((4096,), 0.7311), rtol=4e-3, atol=0)
