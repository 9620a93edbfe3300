"""What views are views of: storage offsets that no guard fixes, and tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collapsed_views import check_same, names
from dispatch_samples import compiled, fresh_start
from fake_traces import traced
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseplan.planner
from fuseplan.planner.runtime import dispatch, executor

fresh = pytest.fixture(autouse=True)(fresh_start)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("where", [(3,), (0,), ()])
def test_as_strided_counts_from_where_the_storage_begins(first: int, where: tuple[int, ...]) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.cos(x.t()[1:].as_strided((2, 2), (1, 2), *where).t()),)

    inputs = [torch.randn(4, 12)[first:]]
    better = check_same(traced(run, *inputs), inputs)
    assert ("as_strided" in names(better)) == bool(where)


def test_a_compiled_graph_does_not_know_its_inputs_offsets(tmp_path: Path) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x.as_strided((2, 2), (1, 2), 3))

    call = compiled(run, tmp_path / "db")
    for first in (0, 1, 2):
        x = torch.randn(6, 5)[first : first + 4]
        torch.testing.assert_close(call(x), run(x))


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(F.linear(x.t()[1:], self.weight.t()[1:]))


def test_a_parameter_may_get_other_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 does not compile the graph again then; newer ones do, so the first one is called itself."""
    seen: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def keep(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        made = executor.executable(*args, **kwargs)

        def call(*given: Any) -> Any:
            seen.append((made, given))
            return made(*given)

        return call

    monkeypatch.setattr(dispatch, "executable", keep)
    module, x = Part(), torch.randn(6, 6)
    call = compiled(module, tmp_path / "db")
    torch.testing.assert_close(call(x), module(x))
    first, given = seen[0]
    assert any("reinterpret" in name for name in first.__globals__)  # type: ignore[attr-defined]
    for weight in (torch.randn(6, 6).t(), torch.randn(12, 6)[::2]):
        module.weight.data = weight
        torch.testing.assert_close(call(x), module(x))
        torch.testing.assert_close(first(*given)[0], module(x))


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(torch.tanh(x * 2), w).view(2, 2, 3).transpose(0, 1)[1:] * 2).view(-1)


@pytest.mark.parametrize("function", [chain, lambda x, w: torch.cos(x.view(2, 2, 6).transpose(0, 1)[1:])])
def test_a_caller_with_fake_tensors_gets_fake_tensors(function: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    call, inputs = compiled(function, tmp_path / "db"), (torch.randn(4, 6), torch.randn(3, 6))
    expected = function(*inputs)
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake = call(*map(mode.from_tensor, inputs))
        assert fake.fake_mode is mode and fake.shape == expected.shape and fake.stride() == expected.stride()
        torch.testing.assert_close(call(*inputs), expected)
    assert any("FakeTensor" in reason for reason in fuseplan.planner.stats().fallbacks)
