"""Operands that eager refuses for their dtypes: a compiled program raises the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from in_place_backend import InPlaceBackend
from reference_backend import use

import fuseplan.planner

pytestmark = pytest.mark.uncovered  # many cases of code that other tests cover

FLOATS = (torch.float32, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool)
Program = Callable[..., Any]

#: Of two operands, 4 x 8 and 2 x 8, and two places in the first.
OF_TWO: dict[str, Program] = {
    "index_copy_": lambda a, b, at: a.index_copy_(0, at, torch.abs(b)) * 1,
    "index_copy_ at": lambda a, b, at: a.index_copy_(0, b[:, 0], a[:2] * 1) * 1,
    "index_select": lambda a, b, at: a.index_select(0, b[:, 0]) * 1,
    "gather": lambda a, b, at: a.gather(0, b) * 1,
    "embedding": lambda a, b, at: F.embedding(b, a) * 1,
    "layer_norm": lambda a, b, at: F.layer_norm(a, (8,), b[0], b[1]) * 1,
    "group_norm": lambda a, b, at: F.group_norm(a, 2, b[0], b[1]) * 1,
    "batch_norm": lambda a, b, at: F.batch_norm(a, b[0], b[1].abs() + 1, b[0], b[0]) * 1,
    "sub": lambda a, b, at: (a - b[:1]) * 1,
    "rsub": lambda a, b, at: torch.rsub(a, b[:1]) * 1,
    "masked_fill": lambda a, b, at: a.masked_fill(a > 0, b[0, 0]) * 1,
    "where": lambda a, b, at: torch.where(b[:1], a, a) * 1,
    "lerp": lambda a, b, at: torch.lerp(a, b[:1], 0.5) * 1,
    "linear": lambda a, b, at: F.linear(a, b) * 1,
}
OF_ONE: dict[str, Program] = {
    "floor": lambda a, b, at: a.floor() * 1,
    "ceil": lambda a, b, at: a.ceil() * 1,
    "round": lambda a, b, at: a.round() * 1,
    "relu": lambda a, b, at: a.relu() * 1,
    "neg": lambda a, b, at: -a * 1,
    "upsample": lambda a, b, at: F.interpolate(a[None, None], scale_factor=2) * 1,
    "gelu": lambda a, b, at: F.gelu(a) * 1,
    "argmax": lambda a, b, at: a.argmax(-1) * 1,
    "mean": lambda a, b, at: a.mean(-1) * 1,
}
CASES = [
    *((name, dtype, other) for name in OF_TWO for dtype in DTYPES for other in DTYPES),
    *((name, dtype, dtype) for name in OF_ONE for dtype in DTYPES),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> InPlaceBackend:
    made = InPlaceBackend()
    use(monkeypatch, made)
    return made


def operands(dtype: torch.dtype, other: torch.dtype) -> tuple[torch.Tensor, ...]:
    def made(kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(kind) if kind.is_floating_point else torch.randint(0, 2, shape).to(kind)

    return made(dtype, 4, 8), made(other, 2, 8), torch.tensor([3, 1])


def outcome(function: Program, given: tuple[torch.Tensor, ...]) -> tuple[Any, Exception | None]:
    try:
        return function(*(one.clone() for one in given)), None
    except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:
        return None, error


#: Of integers and a number.
WITH_NUMBERS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "add": lambda a, n: (a + n) | 0,
    "alpha": lambda a, n: torch.add(a, a, alpha=n) | 0,
    "compared": lambda a, n: (a > n) | (a == n),
    "where": lambda a, n: torch.where(a > 0, a, n) | 0,
    "masked_fill": lambda a, n: a.masked_fill(a > 0, n) | 0,
    "full": lambda a, n: torch.full_like(a, n) | 0,
    "clamp": lambda a, n: a.clamp(max=n) | 0,
    "floor_divide": lambda a, n: (a // n) | 0,
    "pad": lambda a, n: F.pad(a, (1, 1), value=n) | 0,
    "shift": lambda a, n: (a >> n) | 0,
}


#: Each program with two of the types, in turn: one without a sign or of 8 bits, and a wider one.
_NARROW, _WIDE = (torch.uint8, torch.int8), (torch.int16, torch.int32)


@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param(name, kinds[at % 2], id=f"{name}-{kinds[at % 2]}")
    for at, name in enumerate(WITH_NUMBERS) for kinds in (_NARROW, _WIDE)
])
def test_a_number_beyond_an_integer_type(
    name: str, dtype: torch.dtype, tmp_path: Path, kernels: InPlaceBackend
) -> None:
    limits, function = torch.iinfo(dtype), WITH_NUMBERS[name]
    a = torch.tensor([0, 1, 5, limits.max, limits.min], dtype=dtype)
    for number in (limits.max, limits.min - 3, 2**33 + 1):
        expected, error = outcome(lambda a, n=number: function(a, n), (a,))
        torch._dynamo.reset()
        run = compiled(lambda a, n=number: function(a, n), tmp_path / "tuning.db", dynamic=False)
        result, raised = outcome(run, (a,))
        assert (error is None) == (raised is None), (number, error, raised)
        if error is None:
            assert torch.equal(result, expected), number


@pytest.mark.parametrize("name", [*OF_TWO, *OF_ONE])
def test_what_eager_refuses_is_refused(name: str, tmp_path: Path, kernels: InPlaceBackend) -> None:
    function = {**OF_TWO, **OF_ONE}[name]
    refused = 0
    for _, dtype, other in (case for case in CASES if case[0] == name):
        given = operands(dtype, other)
        _, error = outcome(function, given)
        if error is None:
            continue
        refused += 1
        torch._dynamo.reset()
        made, raised = outcome(compiled(function, tmp_path / "tuning.db"), given)
        assert raised is not None, f"{name} of {dtype} and {other} gives {made}; eager raises {error}"
    assert refused


@pytest.mark.parametrize(("name", "dtype", "other"), [
    ("index_copy_", torch.float32, torch.float64), ("index_copy_ at", torch.float32, torch.int32),
    ("index_select", torch.float32, torch.float32), ("sub", torch.float32, torch.bool),
    ("layer_norm", torch.float32, torch.float64), ("floor", torch.bool, torch.bool),
])
def test_the_error_is_eager_s(
    name: str, dtype: torch.dtype, other: torch.dtype, tmp_path: Path, kernels: InPlaceBackend
) -> None:
    function, given = {**OF_TWO, **OF_ONE}[name], operands(dtype, other)
    _, error = outcome(function, given)
    for dynamic in (False, True):
        torch._dynamo.reset()
        _, raised = outcome(compiled(function, tmp_path / "tuning.db", dynamic=dynamic), given)
        assert error is not None and str(error) in str(raised)


@pytest.mark.parametrize(("name", "dtype", "other"), [
    ("layer_norm", torch.bfloat16, torch.float32), ("layer_norm", torch.float16, torch.float16),
    ("group_norm", torch.float16, torch.float32), ("batch_norm", torch.bfloat16, torch.float32),
    ("index_copy_", torch.int64, torch.int64), ("index_select", torch.bfloat16, torch.int32),
    ("sub", torch.int64, torch.uint8), ("masked_fill", torch.float32, torch.float64),
    ("masked_fill", torch.int64, torch.int64),
])
def test_what_eager_takes_stays_fused(
    name: str, dtype: torch.dtype, other: torch.dtype, tmp_path: Path, kernels: InPlaceBackend
) -> None:
    function, given = OF_TWO[name], operands(dtype, other)
    result = compiled(function, tmp_path / "tuning.db")(*(one.clone() for one in given))
    torch.testing.assert_close(result, function(*(one.clone() for one in given)))
    assert kernels.calls and fuseplan.planner.stats().fallbacks == {}
