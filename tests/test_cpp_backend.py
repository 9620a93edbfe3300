"""Generated CPU kernels against the float64 reference: every sample, several configurations, poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator

import ir_samples as samples
import pytest
import torch
from fuseplan.kernels.backend import Config, Target
from fuseplan.kernels.cpp_backend import CppBackend
from fuseplan.kernels.reference import run_reference

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 2)
TILED = [samples.swiglu(3, 1500), samples.geglu(2, 1027, "bfloat16"), samples.broadcast_add(3, 1100)]
SAMPLES = [
    pytest.param(one, id=samples.label(one))
    for one in [*samples.static_samples(), *samples.dynamic_samples(), *TILED]
]


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CppBackend]:
    yield CppBackend(tmp_path_factory.mktemp("kernels"))


def assert_close(sample: samples.Sample, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the float64 result within a few roundings of the stored type; integers exactly."""
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, expected.to(actual.dtype))
        return
    floats = {buffer.dtype for buffer in sample.ir.buffers if "float" in buffer.dtype}
    registers = 1e-14 if floats == {"float64"} else 2e-7
    tolerance = {"rtol": 20 * registers + torch.finfo(actual.dtype).eps, "atol": 10 * registers}
    torch.testing.assert_close(actual.double(), expected.double(), equal_nan=True, **tolerance)


def check(backend: CppBackend, sample: samples.Sample, config: Config) -> None:
    inputs, outputs = sample.inputs(), sample.outputs()
    kernel = backend.load(sample.ir, config, TARGET)
    kernel(*inputs, *outputs, *(sample.symbols[name] for name in sample.ir.symbols))
    for actual, expected in zip(outputs, run_reference(sample.ir, inputs, sample.symbols), strict=True):
        assert_close(sample, actual, expected)


@pytest.mark.parametrize("sample", SAMPLES)
def test_default_config_matches_the_reference(backend: CppBackend, sample: samples.Sample) -> None:
    check(backend, sample, backend.default_config(sample.ir, TARGET))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("sample", SAMPLES)
def test_other_configs_match_the_reference(backend: CppBackend, sample: samples.Sample, stage: int) -> None:
    config = {"threads": 2, "rows_per_task": 1, "col_tile": 64, "unroll": 4 - 3 * stage, "stage": stage}
    check(backend, sample, config)


@pytest.mark.parametrize("sample", SAMPLES)
def test_fused_callable_allocates_as_the_ir_says(backend: CppBackend, sample: samples.Sample) -> None:
    call = backend.fused_callable(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
    result = call(*sample.inputs(), *(sample.symbols[name] for name in sample.ir.symbols))
    made = result if isinstance(result, tuple) else (result,)
    for tensor, like in zip(made, sample.outputs(), strict=True):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    for actual, expected in zip(made, run_reference(sample.ir, sample.inputs(), sample.symbols), strict=True):
        assert_close(sample, actual, expected)
