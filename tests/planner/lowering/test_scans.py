"""Running sums and products: what they lower to, and C++ kernels of them against eager mode in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from dispatch_samples import fresh_start
from graphs import Builder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_samples import Sample
from kernel_reference import run_reference
from lower_oracle import check
from recipe_samples import recipe_samples

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import SM90, Target
from fuseplan.kernels.ir.ir import Scan
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner import stats
from fuseplan.planner.lowering.lower import NotLowerable, lower

TARGET = Target("cpu", "native", 2)
NEEDS_COMPILER = pytest.mark.skipif(CppBackend().unavailable() is not None, reason="no C++ compiler")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 2e-6, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CppBackend]:
    yield CppBackend(tmp_path_factory.mktemp("kernels"))


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """``expected`` is of float64, or of integers."""
    assert found.shape == expected.shape
    if found.is_floating_point():
        expected = expected.to(found.dtype).double()  # what is too large for the type is infinite there
        tolerance = TOLERANCE[found.dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert torch.equal(found, expected)


@st.composite
def operands(draw: st.DrawFn) -> torch.Tensor:
    """Of any sizes and strides, with a few numbers that sums do not forget."""
    rank = draw(st.integers(1, 4))
    shape = [draw(st.sampled_from([1, 2, 3, 17, 40])) for _ in range(rank)]
    order = draw(st.permutations(range(rank)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn([shape[dim] for dim in order], generator=generator) * 2
    for number, value in enumerate(draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), max_size=2))):
        x.view(-1)[number * 7 % x.numel()] = value
    x = x.permute([order.index(dim) for dim in range(rank)])
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
                                  torch.int32, torch.uint8, torch.bool]))
    x = x if dtype.is_floating_point else x.nan_to_num(0, 9, -9).abs()
    return (x > 1) if dtype == torch.bool else x.to(dtype)


@NEEDS_COMPILER
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture,
                                                                HealthCheck.too_slow])
@given(x=operands(), dim=st.integers(-4, 3), product=st.booleans(), numerics=st.sampled_from(["fp32", "eager"]))
def test_a_scan_of_any_dimension_is_that_of_eager_mode(
    backend: CppBackend, x: torch.Tensor, dim: int, product: bool, numerics: str
) -> None:
    dim = dim % x.dim() if dim >= 0 else -1 - (-1 - dim) % x.dim()
    b = Builder(x=x)
    value = b("aten.cumprod.default" if product else "aten.cumsum.default", "x", dim=dim)
    result = b("aten.neg.default", value)
    graph = b.graph(result)
    lowered = lower(graph, {node.name for node in graph}, numerics, (result,))
    (made,) = lowered.ir.outputs
    found = torch.empty_strided(made.shape, made.strides, dtype=getattr(torch, made.dtype))
    backend.load(lowered.ir, backend.default_config(lowered.ir, TARGET), TARGET)(x, found)
    wide = x.double() if x.is_floating_point() else x
    equal(found, -(wide.cumprod(dim) if product else wide.cumsum(dim)))


def test_what_is_before_and_after_a_scan_shares_its_kernel() -> None:
    b = Builder(x=torch.randn(3, 9, 11), y=torch.randn(11))
    shifted = b("aten.add.Tensor", "x", "y")
    running = b("aten.cumsum.default", shifted, dim=1)
    share = b("aten.div.Tensor", running, b("aten.sum.dim_IntList", shifted, dim=(1,), keepdim=True))
    (segment,) = check(b, running, share, b("aten.amax.default", running, dim=(1,)), shifted).ir.segments
    assert (segment.rows, segment.cols) == ((3, 11), 9)


def test_scans_follow_one_another_and_folds() -> None:
    b = Builder(x=torch.randn(5, 33))
    twice = b("aten.cumsum.default", b("aten.cumprod.default", "x", dim=1), dim=1)
    (segment,) = check(b, b("aten.cumsum.default", b("aten.softmax.int", twice, dim=1), dim=1)).ir.segments
    assert sum(isinstance(instr, Scan) for instr in segment.body) == 3


def test_constants_and_positions_are_scanned() -> None:
    b = Builder(row=torch.randn(7, 1), mask=torch.rand(3, 20) > 0.5)
    check(b, b("aten.cumsum.default", b("aten.expand.default", "row", size=(7, 33)), dim=1))
    b = Builder(mask=torch.rand(3, 20) > 0.5)
    counts = b("aten.cumsum.default", b("aten.to.dtype", "mask", dtype="int64"), dim=-1)
    positions = b("aten.sub.Tensor", counts, other=1)
    check(b, b("aten.masked_fill.Scalar", positions, b("aten.logical_not.default", "mask"), value=1))


@pytest.mark.parametrize("shape", [(6, 6, 6), (6, 6, 5), (6, 5, 6), (5, 6, 6)])
def test_scanned_sizes_that_other_dimensions_have_too_are_told_apart(shape: tuple[int, ...]) -> None:
    for dim in range(3):
        b = Builder(x=torch.randn(shape))
        turned = b("aten.transpose.int", b("aten.cumsum.default", "x", dim=dim), dim0=0, dim1=2)
        check(b, b("aten.mul.Tensor", turned, other=2.0), b("aten.sum.dim_IntList", "x", dim=(dim,)))


def refused(b: Builder, output: str) -> str:
    graph = b.graph(output)
    with pytest.raises(NotLowerable) as reason:
        lower(graph, {node.name for node in graph}, "fp32", (output,))
    return str(reason.value)


def test_what_cannot_be_scanned_with_others_says_why() -> None:
    b = Builder(x=torch.randn(6, 6), y=torch.randn(3, 6, 6))
    running = b("aten.cumsum.default", "x", dim=1)
    assert "not the columns" in refused(b, b("aten.cumsum.default", running, dim=0))
    b = Builder(x=torch.randn(6, 6), y=torch.randn(3, 6, 6))
    assert "again" in refused(b, b("aten.add.Tensor", b("aten.cumsum.default", "x", dim=1), "y"))
    b = Builder(x=torch.randn(6, 9), w=torch.randn(4, 9))
    assert "scanned" in refused(b, b("aten.linear.default", b("aten.cumsum.default", "x", dim=1), "w"))
    b = Builder(x=torch.randn(60, 9))
    assert "different lengths" in refused(
        b, b("aten.sum.dim_IntList", b("aten.cumsum.default", "x", dim=1), dim=(0,)))


def test_a_cat_of_scans_is_refused_and_a_scan_of_a_cat_is_not() -> None:
    b = Builder(x=torch.randn(3, 16), y=torch.randn(3, 16))
    check(b, b("aten.cumsum.default", b("aten.cat.default", "x", "y", dim=1), dim=1))
    b = Builder(x=torch.randn(3, 16), y=torch.randn(3, 16))
    assert refused(b, b("aten.cat.default", b("aten.cumsum.default", "x", dim=1), "y", dim=1))


@NEEDS_COMPILER
@pytest.mark.parametrize(("shape", "dim"), [((3, 4097), 1), ((4097, 3), 0), ((4097, 130), 0), ((1, 127), 1)])
def test_a_long_scan_is_as_exact_as_that_of_eager_mode(
    backend: CppBackend, shape: tuple[int, ...], dim: int
) -> None:
    """A sum in float32 alone would be off by far more than half a unit in the last place."""
    x = torch.rand(shape) + 1
    b = Builder(x=x)
    ir = lower(b.graph(value := b("aten.cumsum.default", "x", dim=dim)), {value}, "fp32", (value,)).ir
    config = backend.default_config(ir, TARGET)
    one, other = torch.empty(shape), torch.empty(shape)
    backend.load(ir, {**config, "unroll": 1}, TARGET)(x, one)
    backend.load(ir, {**config, "rows_per_task": 4}, TARGET)(x, other)
    expected = x.double().cumsum(dim)
    torch.testing.assert_close(one.double(), expected, rtol=7e-8, atol=0)  # of 24 bits, half of the last is 6e-8
    assert torch.equal(one, other)


@NEEDS_COMPILER
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("numerics", ["fp32", "eager"])
def test_compiled_functions_scan_in_kernels(dim: int, dynamic: bool, numerics: str, tmp_path: Path) -> None:
    def statistics(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return z.clamp(-1, 1).cumsum(dim) * 2, (z > 0).cumsum(dim, dtype=torch.float32)

    for _ in fresh_start():
        options = {"db": str(tmp_path / "t.db"), "numerics": numerics}
        call: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = torch.compile(
            statistics, backend="fuseplan", options=options, dynamic=dynamic)
        for shape in ((5, 33), (127, 40), (3, 4097)):
            x = torch.randn(shape)
            for found, expected in zip(call(x), statistics(x.double()), strict=True):
                equal(found, expected.double())
        assert stats().groups_fused and not stats().fallbacks


def test_empty_and_single_dimensions_are_as_in_eager_mode(tmp_path: Path) -> None:
    for _ in fresh_start():
        for x in (torch.randn(0, 3), torch.randn(3, 0), torch.randn(3, 1), torch.tensor(2.0)):
            call = torch.compile(lambda z: z.exp().cumsum(-1) + 1, backend="fuseplan",
                                 options={"db": str(tmp_path / "t.db")}, dynamic=False)
            torch.testing.assert_close(call(x), x.exp().cumsum(-1) + 1)


WIDE = [(torch.float32, (64, 20000), 1), (torch.int64, (2048, 2048), 1), (torch.bool, (2048, 2048), 0),
        (torch.bfloat16, (8, 4096, 64), 1), (torch.float64, (64, 4096), 1)]


@pytest.mark.parametrize(("dtype", "shape", "dim"), WIDE)
def test_default_tiles_are_small_and_compile_for_sm90_without_spills(
    dtype: torch.dtype, shape: tuple[int, ...], dim: int, tmp_path: Path
) -> None:
    with torch.device("meta"):
        b = Builder(x=torch.empty(shape, dtype=dtype))
        ir = lower(b.graph(value := b("aten.cumsum.default", "x", dim=dim)), {value}, "fp32", (value,)).ir
    triton = TritonBackend(tmp_path)
    config = triton.default_config(ir, SM90)
    resources = triton.prepare(ir, config, SM90)
    assert resources.spill_bytes == 0 and resources.registers is not None and resources.registers <= 128
    assert triton.infeasible(ir, config, SM90) is None


def test_ninetoothed_leaves_scans_to_others() -> None:
    from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend

    scans: list[Sample] = [one for one in recipe_samples() if one.name == "scanned"]
    assert all("running sum" in (NinetoothedBackend().refuse(one.ir, SM90) or "") for one in scans)


def test_the_oracle_scans_whole_rows() -> None:
    x = torch.randn(3, 5)
    b = Builder(x=x)
    ir = lower(b.graph(value := b("aten.cumsum.default", "x", dim=0)), {value}, "fp32", (value,)).ir
    torch.testing.assert_close(run_reference(ir, [x])[0], x.double().cumsum(0))
