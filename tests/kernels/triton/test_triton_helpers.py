"""Device functions as text: their arithmetic on torch tensors, which have the operations that the text uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuseplan.kernels.triton.helpers import helper_sources, plain_helper_sources

TL = SimpleNamespace(
    float32=torch.float32, float64=torch.float64, where=torch.where, floor=torch.floor, sin=torch.sin, cos=torch.cos,
    abs=torch.abs, exp=torch.exp, exp2=torch.exp2, rsqrt=torch.rsqrt, erf=torch.erf, log=torch.log,
    minimum=lambda x, limit, propagate_nan: x.clamp(max=limit), PropagateNan=SimpleNamespace(ALL=True),
)


def helper(name: str, plain: bool) -> Any:
    namespace: dict[str, Any] = {"tl": TL, "ntl": TL, "triton": SimpleNamespace(jit=lambda function: function)}
    for source in (plain_helper_sources if plain else helper_sources)(f"y = {name}(x)"):
        exec(source, namespace)
    return namespace[name]


def angles() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.linspace(-8, 6, 200_000, dtype=torch.float64)
    signs = torch.where(torch.rand(len(sizes), generator=generator) < 0.5, -1.0, 1.0)
    quarters = torch.arange(-2000, 2000, dtype=torch.float64) * torch.pi / 2
    return torch.cat([sizes * signs, quarters, torch.arange(0.0, 131072.0)]).float()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_trigonometry_is_right_to_the_last_places_whatever_the_angle(name: str, plain: bool) -> None:
    x = angles()
    expected = getattr(torch, name)(x.double())
    found = helper(f"_{name}", plain)(x)
    assert found.dtype == torch.float32
    assert float((found.double() - expected).abs().max()) < 1.5e-7
    # Near its zeros the sine keeps its relative accuracy.
    small = (x.abs() < 1e-3) & (x != 0)
    if name == "sin":
        relative = (found.double() - expected).abs()[small] / expected.abs()[small]
        assert float(relative.max()) < 1.5e-7


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_trigonometry_of_what_is_no_angle(name: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0])
    found = helper(f"_{name}", False)(x)
    assert found[:3].isnan().all()
    assert torch.equal(found[3:], getattr(torch, name)(x[3:]))
    assert torch.equal(found[3:].signbit(), getattr(torch, name)(x[3:]).signbit())


@pytest.mark.parametrize("plain", [False, True])
def test_the_logarithm_of_one_plus_a_small_number_is_that_number(plain: bool) -> None:
    sizes = 10.0 ** torch.linspace(-37, 38, 200_001, dtype=torch.float64)
    x = torch.cat([sizes, -sizes[sizes < 1]]).float()
    found, expected = helper("_log1p", plain)(x).double(), torch.log1p(x.double())
    assert float(((found - expected).abs() / expected.abs()).max()) < 4 * 2.0**-24
    edges = torch.tensor([0.0, -1.0, -2.0, float("inf"), float("nan")])
    assert torch.equal(helper("_log1p", plain)(edges).nan_to_num(nan=7.0), torch.log1p(edges).nan_to_num(nan=7.0))
    assert helper("_log1p", plain)(torch.tensor([-0.0, 0.0])).signbit().tolist() == [True, False]


def test_double_precision_keeps_the_librarys() -> None:
    x = torch.linspace(-100, 100, 1001, dtype=torch.float64)
    assert torch.equal(helper("_sin", False)(x), torch.sin(x))


def numbers() -> torch.Tensor:
    """Floats of every size that matters to an exponential, of both signs."""
    sizes = 10.0 ** torch.linspace(-30, 2.3, 100_001, dtype=torch.float64)
    return torch.cat([sizes, -sizes, torch.linspace(-20, 20, 100_001, dtype=torch.float64)]).float()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "erf"])
def test_exponential_functions_keep_their_relative_accuracy(name: str, plain: bool) -> None:
    x = numbers()
    expected = getattr(torch, name)(x.double())
    found = helper(f"_{name}", plain)(x).double()
    normal = (expected.abs() > 1e-37) & (expected.abs() < 3e38)
    relative = ((found - expected).abs() / expected.abs())[normal]
    # The argument is rounded once more, as it is scaled for exp2.
    allowed = 8 * 2.0**-24 if name in ("tanh", "erf") else 5 * 2.0**-24 + x.double().abs()[normal] * 2.0**-23
    assert bool((relative <= allowed).all()), float((relative / allowed).max())
    assert float(found[expected.abs() <= 1e-37].abs().amax() if name in ("exp", "sigmoid") else 0.0) <= 1e-37


@pytest.mark.parametrize(
    ("name", "limits"),
    [("exp", (0.0, torch.inf)), ("sigmoid", (0.0, 1.0)), ("tanh", (-1.0, 1.0)), ("erf", (-1.0, 1.0))],
)
def test_exponential_functions_at_infinity(name: str, limits: tuple[float, float]) -> None:
    found = helper(f"_{name}", False)(torch.tensor([-torch.inf, torch.inf, -1e30, 1e30, torch.nan]))
    assert found[:4].tolist() == [*limits, *limits]
    assert bool(found[4].isnan())


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "erf"])
def test_exponential_functions_in_double_precision(name: str) -> None:
    x = torch.linspace(-40, 40, 10_001, dtype=torch.float64)
    torch.testing.assert_close(helper(f"_{name}", False)(x), getattr(torch, name)(x), rtol=2e-14, atol=0)
