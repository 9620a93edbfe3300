"""Kernels that write over their inputs, on a CUDA device: the same bits, whatever the tile, many times over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import ir_samples as samples
import pytest
import torch
from interpret_in_place import choices
from ir_samples import Sample, label
from torch import nn

import fuseplan.planner
from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.ir.backend import Config, fused_call
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.gpu
#: A race between threads does not show every time.
_REPEATS = 20


@pytest.fixture(scope="module", params=[TritonBackend, NinetoothedBackend], ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GpuBackend:
    made = request.param(tmp_path_factory.mktemp("gpu"))
    assert isinstance(made, GpuBackend)
    return made


def large_samples() -> list[Sample]:
    return [
        samples.add_rms_norm(513, 2048, "bfloat16"), samples.add_rms_norm(33, 4097), samples.rms_norm(7, 40_000),
        samples.layer_norm(129, 5120, "bfloat16"), samples.softmax(65, 4096, "bfloat16"),
        samples.geglu(127, 8192, "bfloat16"), samples.early_store(33, 1027), samples.rms_norm(4099, 127, "float16"),
    ]


def few_configs(backend: GpuBackend, sample: Sample) -> Iterator[Config]:
    """The default, and each parameter at each of its choices in turn, where that is worth compiling."""
    target = local_target("cuda")
    default = backend.default_config(sample.ir, target)
    yield default
    for tunable in backend.tunables(sample.ir, target):
        for choice in tunable.choices:
            config = {**default, tunable.name: choice}
            if backend.infeasible(sample.ir, config, target) is None:
                yield config


@pytest.mark.parametrize("sample", large_samples(), ids=label)
def test_results_over_inputs_are_the_same_bits(sample: Sample, backend: GpuBackend) -> None:
    target, ir = local_target("cuda"), sample.ir
    if reason := backend.refuse(ir, target):
        pytest.skip(reason)
    inputs = [tensor.cuda() for tensor in sample.inputs()]
    tried = 0
    for config in few_configs(backend, sample):
        options = backend.reuse_options(ir, config)
        kernel = backend.load(ir, config, target)
        expected = [tensor.cuda() for tensor in sample.outputs()]
        kernel(*inputs, *expected)
        for reuse in choices(options):
            call = fused_call(kernel, ir, reuse)
            for _ in range(_REPEATS):
                own = [tensor.clone() for tensor in inputs]
                made = call(*own)
                results = [made] if isinstance(made, torch.Tensor) else list(made)
                assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), (config, reuse)
                assert all(results[output] is own[source] for output, source in reuse.items())
                tried += 1
    assert tried


class Block(nn.Module):
    """Projection, add, norm, gated projection: what dies in a decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.first, self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(3):
            residual = residual + self.first(x)
            normal = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            x = self.down(torch.nn.functional.silu(self.gate(normal)) * self.up(normal))
        return x, residual


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_model_gives_the_same_bits_with_and_without(cuda_graphs: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Block(512).to("cuda", torch.bfloat16)
    inputs = [torch.randn(129, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    found = {}
    for in_place in (True, False):
        torch._dynamo.reset()
        fuseplan.planner.reset_stats()
        options = {"db": str(tmp_path / "tuning.db"), "in_place": in_place, "cuda_graphs": cuda_graphs}
        with torch.no_grad():
            call = torch.compile(model, backend="fuseplan", options=options)
            found[in_place] = [tuple(one.clone() for one in call(*inputs)) for _ in range(5)]
        done = fuseplan.planner.stats()
        assert (done.in_place > 0) == in_place and done.fallbacks == {}
        assert bool(done.recordings) == cuda_graphs
    for one, other in itertools.product(found[True], found[False]):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
