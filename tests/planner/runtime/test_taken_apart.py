"""Graphs of tensor subclasses that are made of plain tensors: fused as the ops that their classes call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start, relative_error, store_plans
from fake_recorder import FakeRecorder
from reference_backend import ReferenceBackend, use
from tensor_subclasses import Block, Int4Weight, Int8Linear, Int8Weight, blocks, parts_of
from torch import Tensor, fx, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fuseplan.planner
from fuseplan.planner.capture.subclasses import take_apart
from fuseplan.planner.capture.trace import capture
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations import inductor
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.runtime import cuda_graphs


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(monkeypatch, ReferenceBackend())
    yield from fresh_start()


def fused(function: Any, db: Path, *args: Any, **options: Any) -> tuple[Any, fuseplan.planner.DispatchStats]:
    """What the second call gives, and the counts."""
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    fast = compiled(function, db, **options)
    fast(*args)
    return fast(*args), fuseplan.planner.stats()


# -- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, dynamic", [(Int8Weight, False), (Int8Linear, False), (Int4Weight, False), (Int8Weight, True)])
def test_quantised_layers_are_fused_as_their_ops_on_plain_tensors(
    kind: type[Int8Weight], dynamic: bool, tmp_path: Path
) -> None:
    (model, plain, exact), x = blocks(kind), torch.randn(5, 24)
    _, wanted = fused(plain, tmp_path / "tuning.db", x, dynamic=dynamic)
    found, stats = fused(model, tmp_path / "tuning.db", x, dynamic=dynamic)
    assert stats.groups_fused == wanted.groups_fused > 2 and stats.misses == wanted.misses
    assert not stats.fallbacks and type(found) is Tensor
    assert relative_error(found, exact(x.double())) < 1e-5


@pytest.mark.parametrize("kind", [Int8Weight, Int8Linear, Int4Weight])
def test_plans_of_the_plain_ops_are_found(kind: type[Int8Weight], tmp_path: Path) -> None:
    model, plain, _ = blocks(kind)
    x = torch.randn(5, 24)
    store_plans(plain, (x,), tmp_path / "tuning.db", ({},))
    _, stats = fused(model, tmp_path / "tuning.db", x)
    assert stats.misses == 0 < stats.from_database


def test_a_module_is_captured_as_it_is_dispatched(tmp_path: Path) -> None:
    found, plain = (
        {region.key for graph in capture(find_source(module=f"tensor_subclasses:{name}"), Workload("forward"), "cpu")
         for region in find_regions(graph)} for name in ("quantised", "in_plain_ops")
    )
    assert found == plain != set()


def test_a_weight_that_knows_something_else_is_not_taken_for_the_same(tmp_path: Path) -> None:
    q, scale = torch.randint(-9, 9, (6, 8), dtype=torch.int8), torch.rand(6, 1)
    layer, x = nn.Linear(8, 6, bias=False), torch.randn(3, 8)
    fast = compiled(nn.Sequential(layer, nn.SiLU(), nn.Tanh()), tmp_path / "tuning.db")
    for weight in (Int8Weight(q, scale), Int8Weight(q, scale, 0.5), Int8Linear(q, scale), Int8Weight(q, scale * 2)):
        layer.weight = nn.Parameter(weight, requires_grad=False)
        wide = q.double() * weight.scale.double() + weight.plus
        torch.testing.assert_close(fast(x).double(), torch.tanh(F.silu(x.double() @ wide.t())), atol=1e-5, rtol=1e-5)
    assert not fuseplan.planner.stats().fallbacks


def test_replays_use_the_tensors_inside_of_parameters_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorder = FakeRecorder()
    monkeypatch.setattr(cuda_graphs, "find_recorder", lambda _: recorder)
    model, _, exact = blocks(Int8Weight)
    fast = compiled(model, tmp_path / "tuning.db", cuda_graphs=True)
    for _ in range(4):
        x = torch.randn(5, 24)
        assert relative_error(fast(x), exact(x.double())) < 1e-5
    assert recorder.recorded == 1 and recorder.replayed == 3
    (seen,) = recorder.seen
    inside = {one.data_ptr() for block in model for weight in (block.up, block.down) for one in parts_of(weight)}  # type: ignore[union-attr]
    assert inside < {one.data_ptr() for one in seen} and {type(one) for one in seen} <= {Tensor, nn.Parameter}


def test_torchinductor_runs_a_graph_that_was_taken_apart() -> None:
    model, _, exact = blocks(Int4Weight)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        apart = take_apart(gm, example_inputs)
        return apart.whole(inductor.compile_graph(apart.module, apart.inputs))

    x = torch.randn(5, 24)
    assert relative_error(torch.compile(model, backend=backend)(x), exact(x.double())) < 1e-5


# -- arguments and results --------------------------------------------------------------------------------


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted) and found.stride() == wanted.stride()
    for one, other in [(found.a, wanted.a), (found.b, wanted.b)] if isinstance(found, TwoTensor) else [(found, wanted)]:
        torch.testing.assert_close(one, other)


def two(rows: int = 3) -> tuple[TwoTensor, Tensor]:
    return TwoTensor(torch.randn(rows, 8), torch.randn(rows, 8)), torch.randn(rows, 8)


def gated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return F.silu(x * y).t() * 2, y.sigmoid() * y, x


def given_back(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.mul_(2), F.silu(x) * x, x[1:], y.add_(1).tanh()


def made_inside(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    both = TwoTensor(y, y * 2)
    return F.silu(both) * 2 + x, both.b


@pytest.mark.parametrize("function", [gated, given_back, made_inside])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_are_subclasses_and_arguments_as_in_eager(
    function: Callable[..., tuple[Tensor, ...]], dynamic: bool, tmp_path: Path
) -> None:
    fast = compiled(function, tmp_path / "tuning.db", dynamic=dynamic)
    for rows in (3, 3, 5):
        args = two(rows)
        twins = [one.clone() for one in args]
        found, wanted = fast(*args), function(*twins)
        for one, other in zip((*found, *args), (*wanted, *twins), strict=True):
            same(one, other)
        assert [one is args[0] for one in found] == [one is twins[0] for one in wanted]
    stats = fuseplan.planner.stats()
    assert stats.groups_fused > 0 and not stats.fallbacks


def test_memory_that_a_plain_argument_shares_with_one_inside_is_seen(tmp_path: Path) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        return F.silu(y) * 2 + x.sum() * 0, x * 1

    fast, (x, y) = compiled(function, tmp_path / "tuning.db"), two()
    fast(x, y)
    assert not fuseplan.planner.stats().fallbacks and fuseplan.planner.stats().groups_fused > 0
    x, (twin, _) = TwoTensor(y.clone(), y), two()
    twin.a, twin.b, twin_y = x.a.clone(), (other := y.clone()), other[:]
    for one, wanted in zip(fast(x, y[:]), function(twin, twin_y), strict=True):
        same(one, wanted)
    assert torch.equal(y, other) and sum(fuseplan.planner.stats().fallbacks.values()) == 1


# -- what stays as it is ----------------------------------------------------------------------------------


class Renamed(TwoTensor):
    """Is made again as the class that it is derived from."""


class Swapping(TwoTensor):
    """Puts other tensors into itself where others are written to."""

    @staticmethod
    def __tensor_unflatten__(inside: Any, context: Any, size: Any, stride: Any) -> Any:
        return Swapping(inside["a"], inside["b"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.add_.Tensor:
            args[0].a, args[0].b = args[0].a + args[1], args[0].b + args[1]
            return args[0]
        return super().__torch_dispatch__(function, types, args, kwargs)


class Asking(Int8Weight):
    """Decides by a number in it."""

    def wide(self) -> Tensor:
        return super().wide() if bool(self.scale.amax() > 0) else self.scale


class Spelled(TwoTensor):
    """Keeps its size as text, as quanto's do."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], str(list(self.size()))

    @staticmethod
    def __tensor_unflatten__(inside: Any, context: Any, size: Any, stride: Any) -> Any:
        assert all(one.isdigit() for one in context.strip("[]").split(", ")), context
        return Spelled(inside["a"], inside["b"])


def added(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.add_(1)
    return (F.silu(y) * 2,)


def doubled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return F.silu(y) * 2, x * 2


def multiplied(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(F.linear(x, y)) * 2,)


def made(kind: type[TwoTensor]) -> tuple[Tensor, Tensor]:
    x, y = two()
    return kind(x.a, x.b), y


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]], bool]] = {
    "other tensors inside": (added, lambda: made(Swapping), False),
    "another class": (doubled, lambda: made(Renamed), False),
    "a function transform": (lambda x, y: (torch.vmap(lambda one: one * 2)(x), F.silu(y) * 2), two, False),
    "a size as text": (doubled, lambda: made(Spelled), True),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_taken_apart_runs_unfused_and_is_counted(kind: str, tmp_path: Path) -> None:
    function, make, dynamic = REFUSED[kind]
    args = make()
    twins = [type(one)(one.a.clone(), one.b.clone()) if isinstance(one, TwoTensor) else one.clone() for one in args]
    found, wanted = compiled(function, tmp_path / "tuning.db", dynamic=dynamic)(*args), function(*twins)
    for one, other in zip((*found, *args), (*wanted, *twins), strict=True):
        torch.testing.assert_close(getattr(one, "a", one), getattr(other, "a", other))
    assert fuseplan.planner.stats().fallbacks


def test_a_class_that_decides_by_a_number_in_it_is_fused_in_several_graphs(tmp_path: Path) -> None:
    def run() -> None:
        args = torch.randn(3, 8), Asking.of(torch.randn(6, 8))
        same(compiled(multiplied, tmp_path / "tuning.db")(*args)[0], multiplied(*args)[0])

    with torch._C._PreserveDispatchKeyGuard():
        run()
        stats = fuseplan.planner.stats()
        assert stats.groups_fused > 1 and not stats.fallbacks
        gc.collect()  # when its frames go, PyTorch's dispatcher is left as they had it


def test_a_graph_is_traced_where_the_dispatcher_leaves_traces_out(tmp_path: Path) -> None:
    """As within a ``__torch_dispatch__``, and for good once Dynamo has met a decision by data in a subclass."""
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (F.silu(x) * torch.arange(x.shape[1], dtype=x.dtype),)

    class Within(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return fast(*args)[0] if op is torch.ops.aten.exp.default else op(*args, **(kwargs or {}))

    fast, x = compiled(function, tmp_path / "tuning.db"), torch.randn(3, 127)
    with Within():
        found = x.exp()
    same(found, function(x)[0])
    assert fuseplan.planner.stats().groups_fused == 1 and not fuseplan.planner.stats().fallbacks


def test_gradients_of_a_subclass_are_seen(tmp_path: Path) -> None:
    block = Block(F.linear, nn.Parameter(Int8Weight.of(torch.randn(40, 24))), nn.Parameter(torch.randn(24, 40)))
    with torch.enable_grad():
        compiled(block, tmp_path / "tuning.db")(torch.randn(5, 24))
    ((reason, _),) = fuseplan.planner.stats().fallbacks.items()
    assert "gradients are enabled" in reason
