"""``.data`` and its like inside a compiled function: eager's numbers, and no fake tensor in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from reference_backend import ReferenceBackend, use
from torch import Tensor, nn

import fuseplan.planner

WEIGHT, SCALE = nn.Parameter(torch.linspace(-2, 3, 64).view(8, 8)), torch.linspace(0.5, 2, 8).view(8, 1)
BUFFER = torch.zeros(3, 8)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(monkeypatch, ReferenceBackend())
    yield from fresh_start()


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(3):
        x = (x * 2).data
    return F.silu(x)


def of_what_an_operand_became(x: Tensor) -> Tensor:
    y = x * 2
    y.data.mul_(3)
    return F.silu(y) + 1


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.data * 2
    return F.silu(y) * WEIGHT.data[0]


def written_buffer(x: Tensor) -> Tensor:
    BUFFER.data.copy_(x * 3)
    return F.silu(BUFFER) * 2


def written_argument(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return F.silu(x) + 1


FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda x: F.silu(WEIGHT.data / SCALE) * 2 + x.sum(),
    "argument": lambda x: F.silu(x.data / 2) * 2,
    "intermediate": lambda x: F.silu((x * 2).data) + 1,
    "buffer": lambda x: F.silu(BUFFER.data + x) * 2,
    "detach": lambda x: F.silu(x.detach() / 2) * 2,
    "parameter in a product": lambda x: F.silu(WEIGHT.data / SCALE).to(x.dtype) @ x.t(),
    "requires_grad_": lambda x: F.silu(x.data.requires_grad_(False) / 2) * 2,
    "literal": lambda x: F.silu(x.data + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])) * 2,
    "new_tensor": lambda x: F.silu(x.data + x.new_tensor([1.0, 2, 3, 4, 5, 6, 7, 8])) * 2,
    **{one.__name__: one for one in (
        in_a_loop, of_what_an_operand_became, under_no_grad, written_buffer, written_argument)},
}


def new_parameter(x: Tensor) -> Tensor:
    return F.linear(x, nn.Parameter(WEIGHT.data / SCALE, requires_grad=False))


def given_to_an_intermediate(x: Tensor) -> Tensor:
    y = x * 1.5
    y.data = y.data * 3
    return F.silu(y) + 1


def given_to_an_argument(x: Tensor) -> Tensor:
    x.data = x.data * 3
    return F.silu(x) + 1


def set_to_an_argument(x: Tensor) -> Tensor:
    y = x * 2
    y.set_(x)
    y.mul_(3)
    return F.silu(x) + y


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_data_is_read_as_a_detached_tensor(name: str, dynamic: bool, tmp_path: Path) -> None:
    function = FUSED[name]
    fast = compiled(function, tmp_path / "tuning.db", dynamic=dynamic)
    for _ in range(2):  # the first call of a kernel is guarded
        x = torch.randn(3, 8)
        expected, given, its = function(own := x.clone()), x.clone(), BUFFER.clone()
        torch.testing.assert_close(fast(given), expected)
        torch.testing.assert_close((given, BUFFER), (own, its))
    done = fuseplan.planner.stats()
    assert done.groups_fused and not done.fallbacks


@pytest.mark.parametrize(
    "function", [new_parameter, given_to_an_intermediate, given_to_an_argument, set_to_an_argument]
)
def test_other_memory_for_a_tensor_is_as_in_eager(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    fast = compiled(function, tmp_path / "tuning.db")
    for _ in range(2):
        x = torch.randn(3, 8)
        own, given = x.clone(), x.clone()
        torch.testing.assert_close(fast(given), function(own))
        torch.testing.assert_close(given, own)


def test_memory_given_to_an_argument_is_a_reason(tmp_path: Path) -> None:
    compiled(given_to_an_argument, tmp_path / "tuning.db")(torch.randn(3, 8))
    (reason,) = fuseplan.planner.stats().fallbacks
    assert "x.data = y" in reason and "copy_" in reason


class Quantised(nn.Linear):
    """A linear layer as quantisation libraries wrap it: weights of 8 bits, widened or swapped in for each call."""

    def __init__(self, swaps: bool) -> None:
        super().__init__(8, 8)
        self.swaps = swaps
        self.scale = nn.Parameter(torch.rand(8, 1) / 50 + 0.01, requires_grad=False)
        self.codes = nn.Parameter(torch.randint(-128, 127, (8, 8), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        span = x.data.abs().amax(-1, keepdim=True) / 127  # W8A8: each row of activations has a scale
        x = (x / span).round().clamp(-128, 127) * span
        weight = self.codes.data.to(x.dtype) * self.scale.data
        if not self.swaps:
            return F.linear(x, weight, self.bias)
        before = self.weight.data.clone()
        self.weight.data = weight
        result = F.linear(x, self.weight, self.bias)
        self.weight.data = before
        return result


@pytest.mark.parametrize("swaps", [False, True])
def test_a_quantised_layer_gives_what_it_gives_in_eager(swaps: bool, tmp_path: Path) -> None:
    layer = nn.Sequential(Quantised(swaps), nn.SiLU(), Quantised(swaps))
    fast = compiled(layer, tmp_path / "tuning.db")
    for rows in (1, 3, 127):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), layer(x))


@torch._dynamo.allow_in_graph
def hidden(x: Tensor) -> Tensor:
    """``.data``, where neither Dynamo nor a trace sees it."""
    return x.data * 1


@pytest.mark.parametrize("writes", [False, True])
def test_a_trace_with_a_fake_tensor_is_refused(writes: bool, tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        if writes:
            x.add_(hidden(x * 2))
            return F.silu(x)
        return F.silu(hidden(x * 2)) + 1

    fast = compiled(function, tmp_path / "tuning.db")
    x = torch.randn(3, 8)
    torch.testing.assert_close(fast(x.clone()), function(x.clone()))
    assert len(fuseplan.planner.stats().fallbacks) == 1
