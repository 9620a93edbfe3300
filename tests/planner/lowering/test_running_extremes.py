"""Running extremes with their positions, and running logarithms of sums of exponentials: against what they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dispatch_samples import fresh_start
from graphs import Builder
from lower_oracle import check

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import SM90, Target
from fuseplan.kernels.ir.ir import KernelIR, Scan
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner import stats
from fuseplan.planner.lowering.lower import lower

TARGET = Target("cpu", "native", 2)
NEEDS_COMPILER = pytest.mark.skipif(CppBackend().unavailable() is not None, reason="no C++ compiler")
OPS = {"cummax": 2, "cummin": 2, "logcumsumexp": 1}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CppBackend]:
    yield CppBackend(tmp_path_factory.mktemp("kernels"))


def results(op: str, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Of eager mode."""
    found = getattr(torch, op)(x, dim)
    return (found,) if OPS[op] == 1 else tuple(found)


def extremes(row: list[float], largest: bool) -> list[tuple[float, int]]:
    """Of each element and those before it the extreme, and where the last of equal ones is; NaN is the most extreme."""
    found: list[tuple[float, int]] = []
    for end in range(1, len(row) + 1):
        numbers = [at for at in range(end) if math.isnan(row[at])]
        best = (max if largest else min)(row[:end]) if not numbers else math.nan
        at = numbers[-1] if numbers else max(at for at in range(end) if row[at] == best)
        found.append((row[at], at))
    return found


def logarithms(row: list[float]) -> list[float]:
    """As of one sum, from the largest number so far."""
    found: list[float] = []
    for end in range(1, len(row) + 1):
        top = math.nan if any(map(math.isnan, row[:end])) else max(row[:end])
        found.append(top if not math.isfinite(top) else top + math.log(sum(math.exp(x - top) for x in row[:end])))
    return found


def expected(op: str, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Values in float64 (or integers), positions as int64."""
    rows = x.movedim(dim, -1)
    flat = rows.reshape(-1, rows.shape[-1]).tolist()
    if op == "logcumsumexp":
        made = (torch.tensor([logarithms(row) for row in flat], dtype=torch.float64),)
    else:
        pairs = [extremes(row, op == "cummax") for row in flat]
        dtype = torch.float64 if x.is_floating_point() else x.dtype
        made = (torch.tensor([[value for value, _ in row] for row in pairs], dtype=dtype),
                torch.tensor([[at for _, at in row] for row in pairs]))
    return tuple(one.reshape(rows.shape).movedim(-1, dim) for one in made)


def agree(op: str, found: tuple[torch.Tensor, ...], x: torch.Tensor, dim: int) -> None:
    exact = expected(op, x, dim)
    assert len(found) == len(exact)
    most = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        if op != "logcumsumexp":
            assert torch.equal(one.to(other.dtype).nan_to_num(7.5), other.nan_to_num(7.5))
        else:
            off = most[one.dtype]
            torch.testing.assert_close(one.double(), other, rtol=off, atol=off, equal_nan=True)


def lowered(op: str, x: torch.Tensor, dim: int) -> KernelIR:
    b = Builder(x=x)
    results = b.many(f"aten.{op}.default", "x", outputs=OPS[op], dim=dim)
    graph = b.graph(*results)
    return lower(graph, {node.name for node in graph}, "fp32", results).ir


def run(backend: CppBackend, op: str, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    ir = lowered(op, x, dim)
    found = tuple(torch.empty_strided(one.shape, one.strides, dtype=getattr(torch, one.dtype)) for one in ir.outputs)
    backend.load(ir, backend.default_config(ir, TARGET), TARGET)(x, *found)
    return found


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """With many equal ones; floats with NaN and infinities in some rows."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 3).round()
    if dtype == torch.bool:
        return x > 1
    if not dtype.is_floating_point:
        return x.to(dtype)
    for number, value in enumerate((math.nan, math.inf, -math.inf, math.nan)):
        x.view(-1)[[at * 37 % x.numel() for at in range(number, x.numel(), 200)]] = value
    return x.to(dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_order_of_special_numbers_is_as_in_eager_mode(op: str, dim: int, backend: CppBackend) -> None:
    rows = list(itertools.product([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5], repeat=4))
    x = torch.tensor(rows) if dim else torch.tensor(rows).T.contiguous()
    agree(op, results(op, x, dim), x, dim)
    if backend.unavailable() is None:
        agree(op, run(backend, op, x, dim), x, dim)


@NEEDS_COMPILER
@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op in OPS for dtype in (*FLOATS, *INTEGERS)
                                           if op != "logcumsumexp" or dtype in FLOATS])
def test_sizes_strides_and_types(op: str, dtype: torch.dtype, backend: CppBackend) -> None:
    for shape, dim in (((3, 127), 1), ((127, 3), 0), ((127, 3), -1), ((1, 4), 0), ((2, 65, 3), 1)):
        agree(op, run(backend, op, numbers(shape, dtype), dim), numbers(shape, dtype), dim)
    turned = numbers((40, 33), dtype).T
    agree(op, run(backend, op, turned, 1), turned, 1)
    agree(op, run(backend, op, turned[::2], 0), turned[::2], 0)


@NEEDS_COMPILER
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("shape", "dim"), [((2, 1537), 1), ((1537, 2), 0), ((1537, 70), 0)])
def test_long_rows(op: str, shape: tuple[int, int], dim: int, backend: CppBackend) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    for one, other in zip(run(backend, op, x, dim), results(op, x.double(), dim), strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_before_and_after_shares_its_kernel(op: str, dim: int) -> None:
    b = Builder(x=torch.randn(9, 11), y=torch.randn(11))
    found = b.many(f"aten.{op}.default", b("aten.add.Tensor", "x", "y"), outputs=OPS[op], dim=dim)
    after = [b("aten.mul.Tensor", one, other=2) for one in found]
    (segment,) = check(b, *after, b("aten.amax.default", found[0], dim=(dim,))).ir.segments
    assert sum(isinstance(one, Scan) for one in segment.body) == OPS[op]


@pytest.mark.parametrize("op", ["cummax", "cummin"])
def test_positions_that_nobody_reads_are_not_scanned(op: str) -> None:
    b = Builder(x=torch.randn(5, 33))
    value, _ = b.many(f"aten.{op}.default", "x", outputs=2, dim=1)
    (segment,) = check(b, b("aten.mul.Tensor", value, other=2.0)).ir.segments
    assert sum(isinstance(one, Scan) for one in segment.body) == 1


@NEEDS_COMPILER
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("numerics", ["fp32", "eager"])
def test_compiled_functions_scan_in_kernels(dim: int, dynamic: bool, numerics: str, tmp_path: Path) -> None:
    def statistics(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = z.round() * 2
        return *scaled.cummax(dim), scaled.cummin(dim)[1] + 1, scaled.logcumsumexp(dim).neg()

    for _ in fresh_start():
        options = {"db": str(tmp_path / "t.db"), "numerics": numerics}
        call = torch.compile(statistics, backend="fuseplan", options=options, dynamic=dynamic)
        for shape in ((67, 257), (127, 140), (30, 4097)):
            x = torch.randn(shape)
            for found, exact in zip(call(x), statistics(x.double()), strict=True):
                torch.testing.assert_close(found, exact.to(found.dtype), rtol=2e-6, atol=1e-5)
        assert stats().groups_fused and not stats().fallbacks


@pytest.mark.parametrize("op", OPS)
def test_empty_and_single_dimensions_are_as_in_eager_mode(op: str, tmp_path: Path) -> None:
    for _ in fresh_start():
        for x in (torch.randn(0, 3), torch.randn(3, 0), torch.randn(3, 1), torch.tensor(2.0), torch.randn(70, 1) > 0):
            if op == "logcumsumexp" and x.dtype == torch.bool:
                continue
            def function(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return results(op, z, -1)

            call = torch.compile(function, backend="fuseplan", options={"db": str(tmp_path / "t.db")}, dynamic=False)
            torch.testing.assert_close(call(x), function(x))


@pytest.mark.parametrize(("op", "dtype", "shape", "dim"), [
    ("cummax", torch.float32, (4096, 4096), 1), ("cummax", torch.float32, (4096, 4096), 0),
    ("cummin", torch.int64, (4096, 4096), 1), ("cummin", torch.float64, (2048, 2048), 0),
    ("cummax", torch.bool, (64, 20000), 1), ("cummax", torch.float32, (4, 128256), 1),
    ("logcumsumexp", torch.float32, (4096, 4096), 1), ("logcumsumexp", torch.float32, (4096, 4096), 0),
    ("logcumsumexp", torch.bfloat16, (8, 4096, 64), 1), ("logcumsumexp", torch.float32, (4, 128256), 1),
])
def test_default_tiles_compile_for_sm90_without_spills(
    op: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int, tmp_path: Path
) -> None:
    ir = lowered(op, torch.empty(shape, dtype=dtype, device="meta"), dim)
    triton = TritonBackend(tmp_path)
    config = triton.default_config(ir, SM90)
    resources = triton.prepare(ir, config, SM90)
    assert resources.spill_bytes == 0 and resources.registers is not None and resources.registers <= 128
    assert triton.infeasible(ir, config, SM90) is None
