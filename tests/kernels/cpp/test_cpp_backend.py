"""Generated CPU kernels against the float64 reference: every sample, several configurations, poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ir_samples as samples
import pytest
import torch
from graphs import Builder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_reference import run_reference
from recipe_samples import recipe_samples
from well_formed import validate

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.types import STORAGE_TYPE
from fuseplan.kernels.ir.backend import SM90, BuildError, Config, Target
from fuseplan.kernels.ir.index import symbol
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.groups.compute_graph import lower_group

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 2)
TILED = [samples.swiglu(3, 1500), samples.geglu(2, 1027, "bfloat16"), samples.broadcast_add(3, 1100)]
SAMPLES = [
    pytest.param(one, id=samples.label(one))
    for one in [*samples.static_samples(), *samples.dynamic_samples(), *TILED, *recipe_samples()]
]

ONE_OF_EACH = [*{one.values[0].name: one for one in SAMPLES}.values()]
#: All, of which the fast core takes one of each: the others have another dtype or size.
FEW_FIRST = [one if one in ONE_OF_EACH else pytest.param(*one.values, id=one.id, marks=pytest.mark.slow)
             for one in SAMPLES]


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


@pytest.mark.parametrize("sample", FEW_FIRST)
def test_default_config_matches_the_reference(backend: CppBackend, sample: samples.Sample) -> None:
    check(backend, sample, backend.default_config(sample.ir, TARGET))


@pytest.mark.parametrize("sample", ONE_OF_EACH)
def test_another_config_matches_the_reference(backend: CppBackend, sample: samples.Sample) -> None:
    check(backend, sample, {"threads": 2, "rows_per_task": 1, "col_tile": 64, "unroll": 4, "stage": 1, "stream": 1})


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("sample", [samples.layer_norm(3, 257, "bfloat16"), samples.softmax(2, 1000)])
def test_every_pass_can_be_recomputed(backend: CppBackend, sample: samples.Sample, unroll: int) -> None:
    check(backend, sample, {"threads": 1, "rows_per_task": 3, "col_tile": 4096, "unroll": unroll, "stage": 0})


@pytest.mark.parametrize("sample", FEW_FIRST)
def test_fused_callable_allocates_as_the_ir_says(backend: CppBackend, sample: samples.Sample) -> None:
    call = backend.fused_callable(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
    result = call(*sample.inputs(), *(sample.symbols[name] for name in sample.ir.symbols))
    made = result if isinstance(result, tuple) else (result,)
    for tensor, like in zip(made, sample.outputs(), strict=True):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    for actual, expected in zip(made, run_reference(sample.ir, sample.inputs(), sample.symbols), strict=True):
        assert_close(sample, actual, expected)


def test_one_dynamic_kernel_serves_every_size(backend: CppBackend) -> None:
    sample = samples.layer_norm(symbol("n"), symbol("m"), "bfloat16", {"n": 1, "m": 1})
    kernel = backend.load(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
    for rows, cols in ((1, 1), (2, 15), (3, 16), (0, 5), (2, 129), (300, 300)):
        sized = replace(sample, symbols={"n": rows, "m": cols})
        inputs, outputs = sized.inputs(), sized.outputs()
        # The symbols are sorted by name: m, then n.
        kernel(*inputs, *outputs, cols, rows)
        assert_close(sized, outputs[0], run_reference(sized.ir, inputs, sized.symbols)[0])


def test_a_long_row_is_staged_outside_the_stack(backend: CppBackend) -> None:
    check(backend, samples.softmax(2, 40_000), {
        "threads": 2, "rows_per_task": 1, "col_tile": 4096, "unroll": 2, "stage": 1, "stream": 0,
    })


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_nan_reaches_the_result_of_a_reduction(backend: CppBackend, kind: str) -> None:
    buffers = [samples.contiguous("x", "float32", (3, 70)), samples.contiguous("y", "float32", (3,), True)]
    b = samples.Body(buffers, (3,), 70)
    b.store("y", b.at[:1], b.reduce(kind, b.load("x", b.at)))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    kernel = backend.load(ir, backend.default_config(ir, TARGET), TARGET)
    for place in (0, 16, 37, 63, 64, 69):
        x = torch.randn(3, 70)
        x[1, place] = math.nan
        y = torch.zeros(3)
        kernel(x, y)
        assert y.isnan().tolist() == [False, True, False]


def test_booleans_reduce_to_any_and_all(backend: CppBackend) -> None:
    buffers = [samples.contiguous("x", "bool", (4, 40)), samples.contiguous("any", "bool", (4,), True),
               samples.contiguous("all", "bool", (4,), True)]
    b = samples.Body(buffers, (4,), 40)
    x = b.load("x", b.at)
    b.store("any", b.at[:1], b.reduce("max", x))
    b.store("all", b.at[:1], b.reduce("min", x))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    x_value = torch.zeros(4, 40, dtype=torch.bool)
    x_value[1], x_value[2, 39], x_value[3, :39] = True, True, True
    some, every = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(x_value)
    assert torch.equal(some, x_value.any(1))
    assert torch.equal(every, x_value.all(1))


@given(rows=st.integers(0, 9), cols=st.integers(0, 70), seed=st.integers(0, 99), dtype=st.sampled_from(
    ["float32", "bfloat16", "float16"]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_and_columns_of_a_dynamic_softmax(
    backend: CppBackend, rows: int, cols: int, seed: int, dtype: str
) -> None:
    sample = samples.softmax(symbol("n"), symbol("m"), dtype, False, {"n": rows, "m": cols})
    call = backend.fused_callable(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
    x = sample.inputs(seed)[0]
    result = call(x, cols, rows)
    assert isinstance(result, torch.Tensor)
    assert_close(sample, result, torch.softmax(x.double(), -1))


def test_refuses_other_devices(backend: CppBackend) -> None:
    sample = samples.rms_norm(2, 8)
    assert backend.refuse(sample.ir, TARGET) is None
    assert "cuda" in (backend.refuse(sample.ir, SM90) or "")


def test_a_kernel_that_stores_nothing_is_malformed() -> None:
    sample = samples.rms_norm(2, 8)
    with pytest.raises(ValueError, match="segment 0 stores nothing"):
        validate(KernelIR(sample.ir.buffers, (replace(sample.ir.segments[0], stores=()),)))


def test_prepare_compiles_what_load_uses(tmp_path: Path) -> None:
    backend, sample = CppBackend(tmp_path), samples.rms_norm(2, 8)
    config = backend.default_config(sample.ir, TARGET)
    prepared = backend.prepare(sample.ir, config, TARGET)
    (library,) = tmp_path.glob("*.so")
    stamp = library.stat().st_mtime_ns
    assert backend.load(sample.ir, config, TARGET).resources == prepared
    assert library.stat().st_mtime_ns == stamp


def test_run_time_parameters_share_one_binary(tmp_path: Path) -> None:
    backend, sample = CppBackend(tmp_path), samples.swiglu(4, 2048)
    base = dict(backend.default_config(sample.ir, TARGET))
    for changes, binaries in (({}, 1), ({"threads": 2, "rows_per_task": 4, "col_tile": 1024}, 1), ({"unroll": 4}, 2)):
        backend.prepare(sample.ir, {**base, **changes}, TARGET)
        assert len(list(tmp_path.glob("*.so"))) == binaries


def test_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    backend, sample = CppBackend(tmp_path, ("no-such-compiler",)), samples.rms_norm(2, 8)
    assert "no-such-compiler" in (backend.unavailable() or "")
    with pytest.raises(BuildError, match="install"):
        backend.load(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)


@pytest.mark.parametrize("count", [9, 24])
def test_many_buffers_of_every_type(backend: CppBackend, count: int) -> None:
    """Each input is copied to an output of its own type: no name of a buffer may hide that of a type."""
    kinds = [dtype for dtype in STORAGE_TYPE if dtype != "float8_e4m3fn"]
    dtypes = [kinds[number % len(kinds)] for number in range(count)]
    buffers = [samples.contiguous(f"x{number}", dtype, (3, 5)) for number, dtype in enumerate(dtypes)]
    buffers += [samples.contiguous(f"y{number}", dtype, (3, 5), True) for number, dtype in enumerate(dtypes)]
    b = samples.Body(buffers, (3,), 5)
    for number in range(count):
        b.store(f"y{number}", b.at, b.load(f"x{number}", b.at))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    inputs = [torch.randint(0, 2, (3, 5)).to(getattr(torch, dtype)) for dtype in dtypes]
    made = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(*inputs)
    for one, other in zip(made, inputs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sample", samples.dynamic_samples(), ids=samples.label)
def test_a_dynamic_size_may_be_zero(backend: CppBackend, sample: samples.Sample) -> None:
    """Whatever divides by the size does so where there is an element; a row of no elements folds to the identity."""
    for name in sample.symbols:
        empty = replace(sample, symbols={**sample.symbols, name: 0})
        if (sample.name, name) != ("row_statistics", "m"):
            check(backend, empty, backend.default_config(sample.ir, TARGET))
            continue
        inputs, outputs = empty.inputs(), empty.outputs()
        kernel = backend.load(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
        kernel(*inputs, *outputs, *(empty.symbols[name] for name in sample.ir.symbols))
        assert [one.flatten().tolist() for one in outputs] == [[one] * 4 for one in (0.0, -math.inf, math.inf, 0)]


def test_integers_are_rounded_already(backend: CppBackend) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        b = Builder(x=torch.arange(-3, 34).to(dtype))
        values = [b(f"aten.{name}.default", "x") for name in ("floor", "ceil", "round", "neg", "abs")]
        ir = lower_group(b.graph(*values), values).ir
        made = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(b.tensors["x"])
        for one, value in zip(made, values, strict=True):
            assert torch.equal(one, b.tensors[value])
