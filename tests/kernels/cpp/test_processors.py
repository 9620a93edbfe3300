"""Kernels written by hand, and conversions, are right with each set of vector instructions that this processor has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from graphs import Builder

from fuseplan.kernels.attention.few_rows import FewRowsAttention
from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.config import run_settings
from fuseplan.kernels.cpp.launch import load_kernel
from fuseplan.kernels.cpp.matmul import FewRows
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.ir.ir import Buffer
from fuseplan.kernels.native.build import Compiler, required_compiler
from fuseplan.planner.lowering.lower import lower

#: Processors by the flag that tells one: with vectors of 16 bytes, AVX2, AVX-512, and its products of bf16.
PROCESSORS = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512bw", "cooperlake": "avx512_bf16"}
pytestmark = pytest.mark.slow
TARGET = Target("cpu", "native", 2)
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=PROCESSORS)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """One that builds for another processor, whose instructions this one has."""
    told = Path("/proc/cpuinfo")
    if not told.exists() or PROCESSORS[request.param] not in told.read_text().split():
        pytest.skip(f"this processor has no {PROCESSORS[request.param]}")
    return replace(required_compiler(), native=(f"-march={request.param}",))


def assert_close(result: torch.Tensor, exact: torch.Tensor) -> None:
    assert (result - exact).norm() <= 2 * torch.finfo(result.dtype).eps * exact.norm() + 1e-6


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols", "inner"), [(1, 33, 127), (16, 7, 1031)])
def test_matmuls_of_few_rows(rows: int, cols: int, inner: int, dtype: torch.dtype, compiler: Compiler) -> None:
    torch.manual_seed(rows)
    x, w, bias = (torch.randn(shape, dtype=dtype) for shape in ((rows, inner), (cols, inner), (cols,)))
    name = str(dtype).removeprefix("torch.")
    call = FewRows(rows, cols, inner, inner, name, True, (rows, cols)).build(compiler)
    assert_close(call(x, w, bias), F.linear(x.double(), w.double(), bias.double()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("positions", "keys", "width"), [(2, 67, 33), (4, 1100, 64)])
def test_attention_of_few_rows(positions: int, keys: int, width: int, dtype: torch.dtype, compiler: Compiler) -> None:
    torch.manual_seed(keys)
    query = torch.randn(1, 2, positions, width, dtype=dtype)
    key, value = (torch.randn(1, 2, keys, width, dtype=dtype) for _ in range(2))
    mask = torch.rand(1, 1, positions, keys) > 0.5
    mask[..., 0] = True
    operands = {"query": query, "key": key, "value": value, "out": query}
    buffers = [Buffer(name, str(dtype).removeprefix("torch."), tuple(one.shape), one.stride(), name == "out")
               for name, one in operands.items()]
    masked, name = Buffer("mask", "bool", tuple(mask.shape), mask.stride()), buffers[0].dtype
    kernel = FewRowsAttention(name, *buffers, masked, (0, 0, keys, 1), width**-0.5)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask)
    assert_close(kernel.build(compiler)(query, key, value, mask), exact)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_conversions(dtype: torch.dtype, compiler: Compiler, tmp_path: Path) -> None:
    """Every number of 16 bits, and numbers half way between two of them and right beside that."""
    numbers = torch.arange(2**16).to(torch.int16).view(dtype).float()
    middle = (numbers + torch.arange(1, 2**16 + 1).to(torch.int16).view(dtype).float()) / 2
    beside = [middle.nextafter(torch.tensor(to)) for to in (torch.inf, -torch.inf)]
    x = torch.cat([numbers, middle, *beside, torch.tensor([5e-46, 65519.99, 65520.0])])
    b = Builder(x=x)
    rounded = b("aten.to.dtype", "x", dtype=str(dtype).removeprefix("torch."))
    outputs = (rounded, b("aten.neg.default", b("aten.to.dtype", rounded, dtype="float32")))
    ir = lower(b.graph(*outputs), [node.name for node in b.nodes], "eager", outputs).ir
    backend = CppBackend(tmp_path)
    config = backend.default_config(ir, TARGET)
    made = [torch.empty_like(x, dtype=dtype), torch.empty_like(x)]
    load_kernel(ir, backend.source(ir, config), run_settings(ir, config, TARGET), compiler, tmp_path)(x, *made)
    for result, expected in zip(made, (x.to(dtype), -x.to(dtype).float()), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        real = ~expected.isnan()
        assert torch.equal(result[real].signbit(), expected[real].signbit())


def float_graph(x: torch.Tensor, y: torch.Tensor) -> tuple[Builder, list[str]]:
    """Functions whose code depends on the vectors: powers, divisions with a rest, flips, rolls, transposed operands."""
    b = Builder(x=x, y=y, t=y.t().contiguous())
    made = [b("aten.pow.Tensor_Tensor", "x", "y"), b("aten.pow.Tensor_Scalar", "x", exponent=5),
            b("aten.pow.Tensor_Scalar", "y", exponent=-3), b("aten.fmod.Tensor", "x", "y"),
            b("aten.remainder.Tensor", "x", "y"), b("aten.div.Tensor_mode", "x", "y", rounding_mode="floor"),
            b("aten.floor.default", "x"), b("aten.ceil.default", "x"), b("aten.round.default", "x"),
            b("aten.flip.default", "x", dims=[1]), b("aten.roll.default", "x", shifts=[3], dims=[1]),
            b("aten.add.Tensor", "x", b("aten.t.default", "t"))]
    return b, made


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_functions(dtype: torch.dtype, compiler: Compiler, tmp_path: Path) -> None:
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 2.5, -0.5, 7.0, -3.0])
    x, y = torch.randn(67, 131) * 5, torch.randn(67, 131) * 3
    x[0, :121], y[0, :121] = special.repeat_interleave(11), special.repeat(11)
    b, made = float_graph(x.to(dtype), y.to(dtype))
    wide, _ = float_graph(x.to(dtype).double(), y.to(dtype).double())
    backend = CppBackend(tmp_path)
    for name in made:
        lowered = lower(b.graph(name), [name], "fp32", (name,))
        config = backend.default_config(lowered.ir, TARGET)
        out, exact = torch.empty_like(b.tensors[name]), wide.tensors[name].to(dtype)
        kernel = load_kernel(lowered.ir, backend.source(lowered.ir, config), run_settings(lowered.ir, config, TARGET),
                             compiler, tmp_path)
        kernel(*(b.tensors[value] for value in lowered.inputs), out)
        torch.testing.assert_close(out, exact, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True,
                                   msg=lambda text, name=name: f"{name}: {text}")
        zero = exact == 0
        assert torch.equal(out[zero].signbit(), exact[zero].signbit()), name
