"""What a graph does with its arguments in a replay, and why it cannot be replayed. The meta device stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from tracing import check

from fuseplan.planner.runtime.replay_arguments import Roles, why_unrecordable

HELD = torch.zeros(3)


def trace(function: Callable[..., Any], *args: Any, mode: str = "fake") -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(function, tracing_mode=mode, pre_dispatch=True)(*args)


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_roles_of_arguments() -> None:
    def run(x: torch.Tensor, unused: torch.Tensor, weight: torch.Tensor, n: int, gone: torch.Tensor) -> Any:
        return (x * weight + n,)

    args = (torch.ones(3), torch.ones(2), torch.ones(3), 5, torch.ones(3))
    module = trace(run, *args, mode="symbolic")
    assert Roles.of(module, {2}) == Roles(kept=(2,), copied=(0,), sizes=(3,), shaped=(0, 1, 2, 4))
    module = trace(run, *args)
    assert Roles.of(module, {2}) == Roles(kept=(2,), copied=(0,), sizes=(3,))


def test_an_argument_that_is_returned_and_nothing_else_is_copied() -> None:
    assert Roles.of(trace(lambda x: (x,), torch.ones(3)), ()).copied == (0,)


def test_what_the_module_holds() -> None:
    module = trace(lambda x: (x + HELD,), torch.ones(3), mode="real")
    (held,) = Roles.of(module, ()).held
    assert held.data_ptr() == HELD.data_ptr()


def scatter(x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    view = cache.transpose(0, 1)[1:]
    view.index_copy_(1, at, x[:, None])
    return view.sum() + x


def writes_behind_dropout(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    same = torch.nn.functional.dropout(x, 0.5, training=False)
    same.add_(y)
    return same * 2.0


def reads_only(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = x + y
    made.mul_(2.0)
    return made


@pytest.mark.parametrize(
    ("function", "inputs", "written"),
    [
        (scatter, (torch.randn(3), torch.zeros(5, 4), torch.tensor([2])), {1}),
        (writes_behind_dropout, (torch.ones(3), torch.ones(1)), {0}),
        (reads_only, (torch.ones(3), torch.ones(3)), set()),
    ],
)
def test_arguments_that_the_graph_writes(function: Any, inputs: tuple[torch.Tensor, ...], written: set[int]) -> None:
    trace = check(function, *inputs)
    names = {position: name for name, position in trace.placeholders.items()}
    shapes = [tuple(trace.node_of[names[position]].meta["val"].shape) for position in sorted(trace.written)]
    assert shapes == [tuple(inputs[position].shape) for position in sorted(written)]


def test_nothing_speaks_against_plain_graphs() -> None:
    def run(x: torch.Tensor) -> Any:
        mask = torch.arange(3, device="meta") < 2
        frozen = torch.full((), 2.0) * 3.0  # a constant, wherever it is computed
        return torch.where(mask, x, frozen) + torch.rand_like(x), x.index_select(0, mask.to(torch.int64))

    assert why_unrecordable(trace(run, on_gpu(3)), "meta") is None


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda x, n: (x * n,), (on_gpu(3), torch.ones(())), "argument n_1 is on the CPU: its value would be frozen"),
        (lambda x: (x.cpu() * 2.0,), (on_gpu(3),), "copies to the CPU"),
        (lambda x: (x + torch.rand(()),), (on_gpu(3),), "draws random numbers on the CPU"),
        (lambda x: (x + torch.zeros(()).add_(1.0),), (on_gpu(3),), "writes to a CPU tensor"),
        (lambda x: (x + 1.0, torch.ones(2)), (on_gpu(3),), "it returns a tensor that is not on the GPU"),
    ],
)
def test_what_would_be_frozen(function: Any, args: tuple[Any, ...], reason: str) -> None:
    found = why_unrecordable(trace(function, *args), "meta")
    assert found is not None and reason in found


def test_an_unused_argument_may_be_anywhere() -> None:
    assert why_unrecordable(trace(lambda x, n: (x + 1.0,), on_gpu(3), torch.ones(())), "meta") is None


def test_data_that_the_host_reads() -> None:
    module = trace(lambda x: (x * x.sum().item(),), torch.ones(3), mode="symbolic")
    reason = why_unrecordable(module, "cpu")
    assert reason is not None and reason.endswith("hands data to the host")
