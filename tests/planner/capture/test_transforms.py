"""Models that take derivatives, map over a batch, or hold ops that no trace sees through: the rest is fused."""

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

import fuseplan.planner
from fuseplan.planner import FusionConfig, FusionScheduler, OpNode, SubGraph
from fuseplan.planner.capture.transforms import modes_restored


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    """Interpreted kernels in place of compiled ones."""
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


def gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y + 1


@torch.library.custom_op("fuseplan_tests::scale_", mutates_args={"x"})
def scale_(x: Tensor, by: float) -> None:
    x.mul_(by)


@scale_.register_fake
def _(x: Tensor, by: float) -> None:
    return None


@torch.library.custom_op("fuseplan_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def gradient(x: Tensor, y: Tensor) -> Tensor:
    return gated(x, y) + torch.func.grad(lambda t: (t.sin() * y).sum())(x) * 2


def hessian_diagonal(x: Tensor, y: Tensor) -> Tensor:
    return gated(torch.vmap(torch.vmap(torch.func.grad(torch.func.grad(lambda t: t.sin() ** 2))))(x), y)


def jacobian(x: Tensor, y: Tensor) -> Tensor:
    return gated(x, y) + torch.func.jacrev(lambda t: t.sum(0).sin())(x).sum((0, 1))


def pulled_back(x: Tensor, y: Tensor) -> Tensor:
    out, pull = torch.func.vjp(lambda t: t.sin() * y, x)
    (once,) = pull(gated(out, y))
    return gated(pull(once)[0] + out, y)


def forward_derivative(x: Tensor, y: Tensor) -> Tensor:
    return gated(*torch.func.jvp(lambda t: t.sin() * y, (x,), (y,)))


def mapped(x: Tensor, y: Tensor) -> Tensor:
    return gated(x, torch.vmap(lambda a, b: (a * b).softmax(-1))(x, y))


def mapped_numbers(x: Tensor, y: Tensor) -> Tensor:
    return gated(torch.vmap(lambda a: torch.where(a.sum() > 2, a.sum() * 2, 1.5) / 3)(x)[:, None], y)


def scanned(x: Tensor, y: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    return gated(x, associative_scan(lambda a, b: a + b, y, 0, combine_mode="generic"))


def flexible(x: Tensor, y: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q = x[None, None]
    return gated(x, y) * flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))[0, 0]


def branching(x: Tensor, y: Tensor) -> Tensor:
    return gated(torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)), y)


def checkpointed(x: Tensor, y: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(gated, x, y, use_reentrant=False) * 2


def written_by_a_custom_op(x: Tensor, y: Tensor) -> Tensor:
    made = gated(x, y)
    before = made * 3
    scale_(made, 2.0)
    return (made + 1).relu() * y + before


def custom(x: Tensor, y: Tensor) -> Tensor:
    return gated(doubled(gated(x, y)), y)


def negated(x: Tensor, y: Tensor) -> Tensor:
    opposite = torch.complex(x, y).conj().imag  # y with the sign of another bit than its own
    return gated(x, opposite) + F.linear(x, opposite[:3]).sum() + gated(y, opposite.t().t())


def taken_apart(x: Tensor, y: Tensor) -> Tensor:
    return gated(x, y) + sum(x[:0].unbind(), 1.0)


FUNCTIONS = [
    gradient, hessian_diagonal, jacobian, pulled_back, forward_derivative, mapped, mapped_numbers, scanned, flexible,
    branching, checkpointed, written_by_a_custom_op, custom, taken_apart,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_around_an_unusual_op_is_fused(
    function: Callable[..., Any], dynamic: bool, tmp_path: Path, kernels: ReferenceBackend
) -> None:
    x, y = torch.randn(5, 16), torch.randn(5, 16)
    result = compiled(function, tmp_path / "tuning.db", dynamic=dynamic)(x, y)
    torch.testing.assert_close(result, function(x, y))
    stats = fuseplan.planner.stats()
    assert stats.groups_fused >= 1
    assert stats.fallbacks == {} or dynamic  # a sum over five rows is fused only where they are known to be five


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_lazily_negated_value_is_read_as_it_is(dynamic: bool, tmp_path: Path) -> None:
    x, y = torch.randn(5, 16), torch.randn(5, 16)
    torch.testing.assert_close(compiled(negated, tmp_path / "tuning.db", dynamic=dynamic)(x, y), negated(x, y))
    assert fuseplan.planner.stats().groups_fused >= 1


def test_a_lazily_negated_argument_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        read = (x * 2 + y).sin() + 1
        return read + x.add_(1).exp(), x

    run, y = compiled(function, tmp_path / "tuning.db"), torch.randn(5, 16)
    numbers = torch.randn(5, 16, dtype=torch.complex64)
    for negative in (False, True, False):
        given, expected = ((one.conj() if negative else one).imag for one in (numbers.clone(), numbers.clone()))
        assert given.is_neg() == negative
        torch.testing.assert_close(run(given, y), function(expected, y))
        torch.testing.assert_close(given, expected)
    assert fuseplan.planner.stats().groups_fused >= 2


@pytest.mark.parametrize("function", [gradient, pulled_back])
def test_derivatives_are_fused_where_gradients_are_on(
    function: Callable[..., Any], tmp_path: Path, kernels: ReferenceBackend
) -> None:
    x, y = torch.randn(5, 16), torch.randn(5, 16)
    with torch.enable_grad():
        torch.testing.assert_close(compiled(function, tmp_path / "tuning.db")(x, y), function(x, y))
    stats = fuseplan.planner.stats()
    assert stats.groups_fused >= 1 and stats.fallbacks == {}


def test_a_trace_that_fails_leaves_no_mode_behind() -> None:
    functorch = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    with pytest.raises(ZeroDivisionError), modes_restored():
        functorch._grad_increment_nesting()
        functorch._vmap_increment_nesting(3, "error")
        torch._C._set_grad_enabled(True)
        raise ZeroDivisionError
    assert functorch.get_dynamic_layer_stack_depth() == depth
    assert not torch.is_grad_enabled()


def test_a_graph_by_hand_reads_a_lazily_negated_input_as_it_is(tmp_path: Path) -> None:
    graph = SubGraph((OpNode("sin", ("x",), ("a",)), OpNode("neg", ("a",), ("out",))), ("x",), ("out",))
    x = torch.randn(5, 16, dtype=torch.complex64).conj().imag
    out = FusionScheduler(FusionConfig(min_nodes_for_fusion=2), tmp_path / "tuning.db").dispatch(graph, {"x": x})["out"]
    torch.testing.assert_close(out, -x.sin())
