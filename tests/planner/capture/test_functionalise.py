"""In-place ops on values that nobody sees are ops like others; those that somebody sees stay writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from reference_backend import ReferenceBackend, use
from torch import Tensor
from tracing import check, ops, ordered

import fuseplan.planner


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def residual(x: Tensor, y: Tensor) -> Tensor:
    made = torch.sigmoid(x)
    made += y
    return F.relu(made, inplace=True)


def normalises_itself(x: Tensor, y: Tensor) -> Tensor:
    best = torch.topk(x * y, 2).values
    best /= best.sum(dim=-1, keepdim=True)
    return best * 2.0


def read_before(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    made = x * y
    total = (made + 1.0).sum(-1)
    made.mul_(3.0)
    return total, made - y


def masked(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).masked_fill_(y > 0, -1.0).clamp_(-0.5, 0.5)


def transposed(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x.t()).add_(y.t())


def after_a_write(x: Tensor, y: Tensor) -> Tensor:
    """What graph convolutions do to the degrees of their nodes."""
    made = torch.zeros(5).index_add_(0, torch.tensor([0, 2, 2]), x[:, 0].square())
    root = made.pow_(-0.5)
    root.masked_fill_(root == float("inf"), 0)
    return root * y


def filled(x: Tensor, y: Tensor) -> Tensor:
    """How some models make the mask of attention to what came before."""
    mask = torch.empty(3, 5).fill_(float("-inf")).triu_(1)
    return x * y + mask + torch.empty(5).zero_()


def through_a_view(x: Tensor, y: Tensor) -> Tensor:
    made = x * y
    return made.view(15).add_(1.0).mul_(2.0).tanh()


UNSEEN: list[Callable[[Tensor, Tensor], Any]] = [
    residual, normalises_itself, read_before, masked, transposed, through_a_view, filled,
]


def on_an_input(x: Tensor, y: Tensor) -> Tensor:
    x.relu_()
    return x + y


def in_part_of_memory(x: Tensor, y: Tensor) -> Tensor:
    made = x * y
    return made[:2].add_(1.0).as_strided((3, 5), (5, 1)).exp()


def on_a_view(x: Tensor, y: Tensor) -> Tensor:
    made = x * y
    made[1].add_(1.0)
    return made.tanh()


def under_a_view(x: Tensor, y: Tensor) -> Tensor:
    made = x * y
    row = made[1]
    made.add_(1.0)
    return row * 2.0


def of_another_type(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x.bfloat16()).add_(y)


def of_another_layout(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_strided((3, 5), (10, 2)).copy_(x).mul_(y).exp()


SEEN: list[Callable[[Tensor, Tensor], Any]] = [
    on_an_input, on_a_view, under_a_view, of_another_type, of_another_layout, in_part_of_memory,
]


def writes(function: Callable[[Tensor, Tensor], Any]) -> list[str]:
    graph = check(function, torch.randn(3, 5), torch.randn(3, 5)).graph
    return [op.split(".")[1] for op in ops(graph) if op.split(".")[1].endswith("_")]


@pytest.mark.parametrize("function", UNSEEN)
def test_a_write_that_nobody_sees_is_none(function: Callable[[Tensor, Tensor], Any]) -> None:
    assert writes(function) == []


@pytest.mark.parametrize("function", SEEN)
def test_a_write_that_somebody_sees_stays(function: Callable[[Tensor, Tensor], Any]) -> None:
    assert writes(function) != []


def test_what_follows_a_write_may_be_none() -> None:
    assert writes(after_a_write) == ["index_add_"]


def test_a_result_that_is_returned_twice_is_one_tensor() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x * 2.0
        return made, made.add_(1.0)

    trace = check(function, torch.randn(3, 5))
    assert writes(lambda x, _: function(x)) == []
    assert trace.graph.outputs[0] == trace.graph.outputs[1]


def test_readers_of_the_old_value_come_before_what_may_write_over_it() -> None:
    graph = check(read_before, torch.randn(3, 5), torch.randn(3, 5)).graph
    assert len(ordered(graph)) == 1
    # Where data flow orders them, nothing else has to: they may be one group.
    assert ordered(check(normalises_itself, torch.randn(3, 5), torch.randn(3, 5)).graph) == set()


@pytest.mark.parametrize("on_miss", ["unfused", "model"])
@pytest.mark.parametrize("function", [*UNSEEN, *SEEN, after_a_write])
def test_results_strides_and_inputs_are_eagers(
    function: Callable[[Tensor, Tensor], Any], on_miss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, ReferenceBackend())
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    expected_x, actual_x = x.clone(), x.clone()
    expected = function(expected_x, y)
    fast = compiled(function, tmp_path / "tuning.db", on_miss=on_miss)
    for _ in range(2):
        actual_x.copy_(x)
        actual = fast(actual_x, y)
        torch.testing.assert_close(actual, expected, rtol=8e-3, atol=8e-3, check_stride=True)
        torch.testing.assert_close(actual_x, expected_x, rtol=0, atol=0)


def test_a_write_is_fused_with_what_made_its_operand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ReferenceBackend())
    compiled(residual, tmp_path / "tuning.db")(torch.randn(3, 5), torch.randn(3, 5))
    stats = fuseplan.planner.stats()
    assert (stats.groups_fused, stats.regions, dict(stats.fallbacks)) == (1, 1, {})
