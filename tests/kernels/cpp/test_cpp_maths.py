"""Elementary functions of generated CPU code against float64: units in the last place over the whole range."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ir_samples as samples
import pytest
import torch
from graphs import Builder

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ir.ops import OPS, torch_dtype
from fuseplan.planner.lowering.lower import lower

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 1)
CORNERS = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-40, -1e-38, 1.1754944e-38, 3.4e38, -3.4e38, 1.0, -1.0,
    0.5, -0.5, 1.5, -2.5, 4194304.5, -4194303.5,
    88.7, 88.8, -87.4, -103.9, -104.1, 127.9, 128.0, -149.0, -150.5, 8388607.5, 16777216.0, 1e5,
    100000.01, 3e9, -1e20, 0.55, 0.7, 3.95, 9.1, math.pi / 2, math.pi, -88.73,
]
UNARY = sorted(name for name, op in OPS.items() if op.arity == 1 and name not in ("logical_not", "as_float"))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> CppBackend:
    return CppBackend(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    """Corner cases, every magnitude, and the everyday range; 3 is left over after whole vectors."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    near = (torch.rand(200_000, generator=generator) - 0.5) * 12
    far = (torch.rand(100_000, generator=generator) - 0.5) * 2e5
    return torch.cat([torch.tensor(CORNERS), bits, near, far, torch.ones(3 + 16 - (len(CORNERS) % 16))])


def apply_all(
    backend: CppBackend, ops: Sequence[str], operands: list[torch.Tensor], stored: str | None = None
) -> dict[str, torch.Tensor]:
    """Run ops, as one kernel with an output each, on 1-d operands of one type."""
    dtype = str(operands[0].dtype).removeprefix("torch.")
    count = operands[0].numel()
    buffers = [samples.contiguous(f"x{n}", dtype, (count,)) for n in range(len(operands))]
    for op in ops:
        result = "bool" if OPS[op].result == "bool" else stored or dtype
        buffers.append(samples.contiguous(op, result, (count,), True))
    b = samples.Body(buffers, (), count)
    loaded = [b.load(f"x{n}", b.at) for n in range(len(operands))]
    for op in ops:
        b.store(op, b.at, b(op, *loaded))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    made = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(*operands)
    return dict(zip(ops, made if isinstance(made, tuple) else (made,), strict=True))


def apply(backend: CppBackend, op: str, operands: list[torch.Tensor], stored: str | None = None) -> torch.Tensor:
    return apply_all(backend, [op], operands, stored)[op]


def ulps(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance from the exact value in units of its last place; infinite where only one of them is finite."""
    info = torch.finfo(actual.dtype)
    mantissa = round(-math.log2(info.eps))
    magnitude = exact.abs().clamp(min=info.tiny, max=info.max)
    unit = torch.exp2(torch.floor(torch.log2(magnitude)) - mantissa)
    rounded = exact.to(actual.dtype)
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    distance = (actual.double() - exact).abs() / unit
    return torch.where(same, 0.0, torch.where(rounded.isfinite() & actual.isfinite(), distance, math.inf))


@pytest.fixture(scope="module")
def unary(backend: CppBackend, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    return apply_all(backend, UNARY, [numbers])


@pytest.mark.parametrize("op", UNARY)
def test_float_functions_are_within_two_ulps(
    unary: dict[str, torch.Tensor], numbers: torch.Tensor, op: str
) -> None:
    actual, exact = unary[op], OPS[op].reference(numbers.double())
    distance = ulps(actual, exact)
    if op == "sigmoid":
        # 1 / (1 + exp(-x)) flushes results below 2**-127 to zero, as ATen's does.
        distance = torch.where(exact < 3e-39, 0.0, distance)
    worst = int(distance.argmax())
    assert distance[worst] <= 2.01, f"{op}({numbers[worst]}) = {actual[worst]}, exactly {exact[worst]}"


@pytest.mark.parametrize("op", ["sin", "tanh", "erf", "floor", "ceil", "round", "neg", "sqrt"])
def test_the_sign_of_zero_survives(unary: dict[str, torch.Tensor], numbers: torch.Tensor, op: str) -> None:
    zeros = numbers[:2]
    assert torch.equal(torch.signbit(unary[op][:2]), torch.signbit(OPS[op].reference(zeros)))


def test_double_functions_agree_with_torch(backend: CppBackend) -> None:
    x = torch.tensor([*CORNERS[:5], 0.3, -1.7, 12.5, 700.0, -740.0, 1e300, 2.0**52 + 0.5], dtype=torch.float64)
    for op, actual in apply_all(backend, UNARY, [x]).items():
        assert ulps(actual, OPS[op].reference(x)).max() <= 4, op


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_binary_functions_agree_with_torch(backend: CppBackend, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 3.25, 1e-40, 2.0], dtype=dtype)
    a, b = values.repeat_interleave(10), values.repeat(10)
    results = apply_all(backend, ["add", "sub", "mul", "div", "maximum", "minimum", "pow"], [a, b])
    for op, actual in results.items():
        assert ulps(actual, OPS[op].reference(a, b).double()).max() <= 1, op


def power_operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Corner cases with each other, random bits, and bases near 1 with results near the ends of the range."""
    generator = torch.Generator().manual_seed(1)
    corners = torch.tensor([*CORNERS, 2.0, -2.0, 3.0, -3.0, 16777215.0, -8388607.0, 1 / 3])
    bits = torch.randint(-(2**31), 2**31, (2, 100_003), generator=generator).to(torch.int32).view(torch.float32)
    near = 1 + torch.randn(50_000, generator=generator) * 1e-3
    steep = torch.randn(50_000, generator=generator) * 5e4
    whole = torch.randint(-40, 40, (50_000,), generator=generator).float()
    bases = [corners.repeat_interleave(len(corners)), bits[0], near, torch.randn(50_000, generator=generator) * 3]
    return torch.cat(bases), torch.cat([corners.repeat(len(corners)), bits[1], steep, whole])


def assert_powers(actual: torch.Tensor, base: torch.Tensor, exponent: torch.Tensor, most: float = 1.0) -> None:
    exact = torch.pow(base.double(), exponent.double())
    distance = ulps(actual, exact)
    worst = int(distance.argmax())
    power = f"{base[worst]} ** {exponent.expand_as(base)[worst]}"
    assert distance[worst] <= most, f"{power} = {actual[worst]}, exactly {exact[worst]}"
    zero = (actual == 0) & (exact == 0)
    assert torch.equal(actual[zero].signbit(), exact[zero].signbit())


def test_powers_are_within_an_ulp(backend: CppBackend) -> None:
    base, exponent = power_operands()
    assert_powers(apply(backend, "pow", [base, exponent]), base, exponent)


def test_what_divisions_leave_is_exact(backend: CppBackend) -> None:
    """Of random bits, of whole multiples and their neighbours, and of quotients around those that vectors divide."""
    generator = torch.Generator().manual_seed(2)
    a, b = power_operands()
    divisor = torch.randn(60_000, generator=generator)
    steps = torch.exp2(torch.rand(60_000, generator=generator) * 26).round()
    multiple = divisor * steps
    beside = [multiple.nextafter(torch.tensor(to)) for to in (math.inf, -math.inf)]
    a, b = torch.cat([a, multiple, *beside]), torch.cat([b, divisor, divisor, divisor])
    # In float32 ATen's own gives NaN for large quotients.
    actual, exact = apply(backend, "fmod", [a, b]), torch.fmod(a.double(), b.double()).float()
    torch.testing.assert_close(actual, exact, rtol=0, atol=0, equal_nan=True)
    zero = exact == 0
    assert torch.equal(actual[zero].signbit(), exact[zero].signbit())
    rounded = apply(backend, "floordiv", [a, b])
    exact = torch.div(a.double(), b.double(), rounding_mode="floor").float()
    known = (torch.div(a, b).abs() < 2**22) | a.isinf() | b.eq(0) | b.isinf()  # one more or less than of others shows
    torch.testing.assert_close(rounded[known], exact[known], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rounded, torch.where(exact.isnan(), rounded, exact), equal_nan=True)


@pytest.mark.parametrize("exponent", [4, 5, 11, 64, -2, -3, -7, 1.7, -0.25, 0.5, -0.5])
@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_powers_with_a_known_exponent(
    backend: CppBackend, numbers: torch.Tensor, exponent: float, stored: str
) -> None:
    count = numbers.numel()
    b = samples.Body(
        [samples.contiguous("x", "float32", (count,)), samples.contiguous("y", stored, (count,), True)], (), count)
    b.store("y", b.at, b("pow", b.load("x", b.at), b.const(exponent, "float32")))
    ir = KernelIR(tuple(b.buffers), (b.segment(),))
    actual = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(numbers)
    exact = torch.pow(numbers.double(), torch.full((), exponent, dtype=torch.float32).double())  # no root of ATen's
    if stored == "float32":
        assert_powers(actual, numbers, torch.full((), exponent), 2.0 if exponent == -0.5 else 1.0)
    else:  # a few units of float32 beside a tie
        assert ulps(actual, exact).max() <= 0.51


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool"])
def test_comparisons_are_exact(backend: CppBackend, dtype: str) -> None:
    values = torch.tensor([0, 1, -1, 7, 2**31 - 1, -(2**31)], dtype=torch.int64).to(torch_dtype(dtype))
    if dtype.startswith("float"):
        values[4:] = math.nan
    a, b = values.repeat_interleave(6), values.repeat(6)
    for op, actual in apply_all(backend, ["eq", "ne", "lt", "le", "gt", "ge"], [a, b]).items():
        assert torch.equal(actual, OPS[op].reference(a, b)), op


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_arithmetic_is_exact(backend: CppBackend, dtype: torch.dtype) -> None:
    low = torch.iinfo(dtype).min
    values = torch.tensor([1, -1, 2, 7, -7, 5, -5, 100, low + 1], dtype=dtype)
    a, b = values.repeat_interleave(9), values.repeat(9)
    ops = ["int_floordiv", "int_remainder", "maximum", "minimum", "add", "sub", "mul"]
    for op, actual in apply_all(backend, ops, [a, b]).items():
        assert torch.equal(actual, OPS[op].reference(a, b)), op


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bit_operations_are_exact(backend: CppBackend, dtype: torch.dtype) -> None:
    values = torch.tensor([1, -1, 2, 15, -7, 0x0F0F, torch.iinfo(dtype).min], dtype=dtype)
    a, b = values.repeat_interleave(7), values.repeat(7)
    ops = ["bit_and", "bit_or", "bit_xor"]
    for op, actual in apply_all(backend, ops, [a, b]).items():
        assert torch.equal(actual, OPS[op].reference(a, b)), op
    by = torch.arange(49, dtype=dtype) % 32
    for op, actual in apply_all(backend, ["shift_left", "shift_right"], [a, by]).items():
        assert torch.equal(actual, OPS[op].reference(a, by)), op


def test_division_by_zero_does_not_trap(backend: CppBackend) -> None:
    a, zero = torch.tensor([5, -5, 0] * 7), torch.zeros(21, dtype=torch.int64)
    assert apply(backend, "int_floordiv", [a, zero]).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_survives_a_round_trip(backend: CppBackend, dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    halves = bits.view(dtype)
    back = apply(backend, "neg", [apply(backend, "neg", [halves])])
    assert torch.equal(back.isnan(), halves.isnan())
    assert torch.equal(back.view(torch.int16)[~halves.isnan()], bits[~halves.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stores_round_to_nearest_even(backend: CppBackend, numbers: torch.Tensor, dtype: torch.dtype) -> None:
    """Against torch's conversion, on random bits and on exact ties; denormals and NaN included."""
    step = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    ties = (1 + step * torch.arange(1, 400, 2)) * 2.0 ** torch.randint(-160, 20, (200,))
    tiny = torch.arange(1, 3000) * 2.0**-27
    x = torch.cat([numbers, ties, -ties, tiny])
    actual = apply(backend, "neg", [x], stored=str(dtype).removeprefix("torch."))
    expected = (-x).to(dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    real = ~expected.isnan()
    assert torch.equal(actual.view(torch.int16)[real], expected.view(torch.int16)[real])


def test_every_float8_survives_a_round_trip(backend: CppBackend) -> None:
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = bits.view(torch.float8_e4m3fn)
    assert torch.equal(apply(backend, "abs", [numbers], "float32").nan_to_num(), numbers.float().abs().nan_to_num())
    back = apply(backend, "neg", [apply(backend, "neg", [numbers])])
    real = ~numbers.float().isnan()
    assert torch.equal(back.float().isnan(), ~real)
    assert torch.equal(back.view(torch.uint8)[real], bits[real])


def test_float8_stores_round_to_nearest_even_and_saturate(backend: CppBackend, numbers: torch.Tensor) -> None:
    """Against torch's conversion of the clamped number: random bits, exact ties, subnormals and NaN."""
    ties = (1 + torch.arange(1, 16, 2) / 16)[:, None] * 2.0 ** torch.arange(-9, 9)
    tiny = torch.arange(0, 64) * 2.0**-12
    x = torch.cat([numbers, ties.flatten(), -ties.flatten(), tiny, -tiny, torch.tensor([447.9, 448.1, 464.0, 480.0])])
    actual = apply(backend, "neg", [x], stored="float8_e4m3fn")
    expected = (-x).clamp(-448, 448).to(torch.float8_e4m3fn)
    real = ~expected.float().isnan()
    assert torch.equal(actual.float().isnan(), ~real)
    assert torch.equal(actual.view(torch.uint8)[real], expected.view(torch.uint8)[real])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_erf_of_halves_is_exact_within_a_rounding(backend: CppBackend, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert ulps(apply(backend, "erf", [x]), torch.erf(x.double())).max() <= 0.51


def test_scalars_of_a_row_agree_with_vectors(backend: CppBackend) -> None:
    """A row-level value goes through libm, a column through the vector code: both within rounding of float64."""
    buffers = [samples.contiguous("x", "float32", (5, 1))]
    buffers += [samples.contiguous(op, "float32", (5, 40), True) for op in UNARY]
    b = samples.Body(buffers, (5,), 40)
    x = b.load("x", (b.at[0], Index(0)))
    for op in UNARY:
        b.store(op, b.at, b(op, x))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    values = torch.tensor([[0.25], [-3.5], [1e-3], [40.0], [math.nan]])
    made = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(values)
    for op, actual in zip(UNARY, made, strict=True):
        assert ulps(actual, OPS[op].reference(values.double()).expand(5, 40)).max() <= 2, op


@pytest.mark.parametrize("exponent", [0.5, -0.5, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roots_are_those_of_aten(backend: CppBackend, dtype: torch.dtype, exponent: float) -> None:
    """Of negative infinity and zero they depend on the type."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 4.0, -4.0, 0.25, 1e-6] * 4).to(dtype)
    b = Builder(x=x)
    root = b("aten.pow.Tensor_Scalar", "x", exponent=exponent)
    ir = lower(b.graph(root), [root], "fp32", (root,)).ir
    actual = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(x)
    torch.testing.assert_close(actual, b.tensors[root], equal_nan=True)
    zero = actual == 0
    assert torch.equal(actual[zero].signbit(), b.tensors[root][zero].signbit())
