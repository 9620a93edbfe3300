"""What every back end inherits from the contract."""

from __future__ import annotations

from collections.abc import Sequence

import ir_samples as samples
import pytest
import torch
from kernel_reference import run_reference

from fuseplan.kernels.ir.backend import Backend, CompiledKernel, Config, Resources, Target, Tunable, config_key
from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.kernels.ir.ir import KernelIR

TARGET = Target("cpu", "native", 1)


class ReferenceKernel(CompiledKernel):
    """Runs the reference interpreter into the outputs it is given."""

    resources = Resources()

    def __init__(self, ir: KernelIR) -> None:
        self._ir = ir

    def __call__(self, *args: torch.Tensor | int) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        inputs = tensors[: len(self._ir.inputs)]
        sizes = dict(zip(self._ir.symbols, args[len(tensors) :], strict=True))
        results = run_reference(self._ir, inputs, sizes)  # type: ignore[arg-type]
        for output, result in zip(tensors[len(inputs) :], results, strict=True):
            output.copy_(result)


class ReferenceBackend(Backend):
    name = "reference"
    device_type = "cpu"

    def unavailable(self) -> str | None:
        return None

    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        return None

    def tunables(self, ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
        return ()

    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        return None

    def default_config(self, ir: KernelIR, target: Target) -> Config:
        return {}

    def source(self, ir: KernelIR, config: Config) -> str:
        return ""

    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        return Resources()

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        return ReferenceKernel(ir)


def as_sequence(result: torch.Tensor | tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(
    "sample",
    [samples.rms_norm(2, 8), samples.add_rms_norm(2, 8, "bfloat16"), samples.transposed_copy(3, 5),
     *samples.dynamic_samples()],
    ids=samples.label,
)
def test_a_fused_callable_allocates_what_the_ir_says(sample: samples.Sample) -> None:
    backend, inputs = ReferenceBackend(), sample.inputs()
    call = backend.fused_callable(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
    results = as_sequence(call(*inputs, *(sample.symbols[name] for name in sample.ir.symbols)))
    buffers = sample.ir.bind(sample.symbols).outputs
    expected = run_reference(sample.ir, inputs, sample.symbols)
    for result, buffer, wanted in zip(results, buffers, expected, strict=True):
        assert (tuple(result.shape), result.stride(), result.dtype) == (
            buffer.shape, buffer.strides, torch_dtype(buffer.dtype)
        )
        torch.testing.assert_close(result, wanted.to(result.dtype))


def test_a_config_s_key_ignores_the_order_of_its_names() -> None:
    assert config_key({"b": 2, "a": "x"}) == config_key({"a": "x", "b": 2}) == "a=x,b=2"
