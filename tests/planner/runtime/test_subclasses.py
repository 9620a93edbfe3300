"""Tensors of other classes than PyTorch's own: those that only add attributes are fused, others run as in eager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from reference_backend import ReferenceBackend, use
from torch import Tensor, nn

import fuseplan.planner


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(monkeypatch, ReferenceBackend())
    yield from fresh_start()


class Scaled(nn.Parameter):
    """As serving engines and quantisation libraries have: attributes and methods, and nothing about ops."""

    scale: float = 1.0

    def load(self, other: Tensor) -> None:
        self.data.copy_(other)


class Sharded(Scaled):
    pass


class Loud(nn.Parameter):
    """Decides itself what ops give."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return result + 1 if function is torch.mul or function is Tensor.mul else result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def run(model: nn.Module, x: Tensor, db: Path) -> tuple[Tensor, int]:
    """The result, and how many groups were fused."""
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    with torch.no_grad():
        return compiled(model, db)(x), fuseplan.planner.stats().groups_fused


@pytest.mark.parametrize("kinds", [(Scaled,), (Sharded, Scaled)], ids=["one class", "two classes"])
def test_parameters_that_only_add_attributes_are_fused(kinds: tuple[type[Scaled], ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(5, 24)
    plain, groups = run(model, x, tmp_path / "tuning.db")
    for number, module in enumerate(model.modules()):
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, kinds[number % len(kinds)](value.data, requires_grad=value.requires_grad))
    found, same_groups = run(model, x, tmp_path / "tuning.db")
    assert groups == same_groups > 0 and not fuseplan.planner.stats().fallbacks
    assert type(found) is Tensor and torch.equal(found, plain)
    torch.testing.assert_close(found.double(), model.double()(x.double()), atol=1e-5, rtol=1e-5)


def test_classes_that_decide_what_functions_do_run_as_in_eager(tmp_path: Path) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(torch.mul(x, weight)) * 2

    x, weight = torch.randn(3, 8), Loud(torch.randn(8), requires_grad=False)
    found, wanted = compiled(function, tmp_path / "tuning.db")(x, weight), function(x, weight)
    assert type(found) is type(wanted) is Tensor
    torch.testing.assert_close(found, wanted)
    assert sum(fuseplan.planner.stats().fallbacks.values()) == 1
