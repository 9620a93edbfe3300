"""Views in compiled graphs: storage offsets that no guard fixes, tensors without memory, results of kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_functions import compiled as built
from dispatch_samples import compiled, fresh_start
from in_place_backend import InPlaceBackend
from reference_backend import ReferenceBackend
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseplan.planner
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.implementations import aten
from fuseplan.planner.runtime import dispatch, executor

fresh = pytest.fixture(autouse=True)(fresh_start)


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


def chained(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two groups with views between them and a matmul."""
    normal = torch.softmax(x * 2 + 1, -1)
    heads = F.linear(normal.view(3, 2, 4).transpose(0, 1), w)
    return (torch.tanh(heads * 3).transpose(0, 1), heads.sum())


@pytest.mark.parametrize("kernels", [ReferenceBackend(), InPlaceBackend(), ReferenceBackend(fails_in_call=True)])
def test_views_of_what_kernels_make(kernels: Any) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 8), torch.randn(4, 4)]
    call = built(chained, inputs, kernels, Tally())
    with torch.no_grad():
        for _ in range(3):
            for one, other in zip(call(*inputs), chained(*inputs), strict=True):
                torch.testing.assert_close(one, other)
                assert one.stride() == other.stride()


def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def test_ops_in_place_of_a_kernel_lay_results_out_like_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels after a group were compiled for the strides of what its kernel allocates."""
    usual = aten.chain_module

    def elsewhere(*args: Any, **kwargs: Any) -> fx.GraphModule:
        chain = usual(*args, **kwargs)
        (end,) = chain.graph.find_nodes(op="output")
        with chain.graph.inserting_before(end):
            end.args = fx.map_arg(end.args, lambda one: chain.graph.call_function(by_columns, (one,)))
        chain.recompile()
        return chain

    def doubled(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.tanh(F.linear(torch.softmax(x * 2 + 1, -1).sin(), w) * 3), torch.exp(x + 1))

    inputs, tally = [torch.randn(3, 8), torch.randn(4, 8)], Tally()
    call = built(doubled, inputs, ReferenceBackend(fails_in_call=True), tally)
    with torch.no_grad():
        expected = doubled(*inputs)
        monkeypatch.setattr(aten, "chain_module", elsewhere)
        for _ in range(2):
            for one, other in zip(call(*inputs), expected, strict=True):
                torch.testing.assert_close(one, other)
                assert one.stride() == other.stride()
    assert tally.snapshot().fallbacks
