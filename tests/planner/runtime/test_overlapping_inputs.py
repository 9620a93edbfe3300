"""Inputs that overlap in a later call only, one of them written: the call does what eager does, and is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from fake_recorder import FakeRecorder
from reference_backend import ReferenceBackend, use
from torch import Tensor, nn

import fuseplan.planner
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.runtime import cuda_graphs
from fuseplan.planner.runtime.scheduler import FusionScheduler, SubGraph

Function = Callable[..., Any]
#: Two arguments, each a view of one base of 96 floats.
Views = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReferenceBackend]:
    """Interpreted kernels in place of compiled ones."""
    made = ReferenceBackend()
    use(monkeypatch, made)
    for _ in fresh_start():
        yield made


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


def writes_by(write: Callable[[Tensor, Tensor], Any]) -> Function:
    """A function whose reads of ``y`` stand on both sides of a write to ``x``."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        before = y * 1.5
        made = write(x, y)
        return torch.relu(before + 0.25) * y, made

    return function


def one_token(x: Tensor, y: Tensor) -> None:
    x[:, 2] = y[:, 0] * 2


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda x, y: x.mul_(2),
    "copy_": lambda x, y: x.copy_(y + 1),
    "add_ and returned": lambda x, y: x.add_(y.sin()),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([2, 0]), y[:2].cos()),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([1]),), y[:1] * 3),
    "scatter_": lambda x, y: x.scatter_(0, torch.zeros(1, 8, dtype=torch.int64), y[:1] * 3),
    "one token": one_token,
    "relu_ of a view": lambda x, y: x[1:].relu_(),
    "zero_": lambda x, y: x.zero_(),
}
LIES: dict[str, Callable[[Tensor], Views]] = {
    "overlapping slices": lambda base: (base[:32].view(4, 8), base[17:49].view(4, 8)),
    "the other way round": lambda base: (base[17:49].view(4, 8), base[:32].view(4, 8)),
    "two views of one tensor": lambda base: (base[:32].view(4, 8), base[:32].view(4, 8)),
    "one element": lambda base: (base[:32].view(4, 8), base[31:63].view(4, 8)),
    "another storage": lambda base: (base[:32].view(4, 8), torch.from_numpy(base.numpy())[8:40].view(4, 8)),
}


def base() -> Tensor:
    return torch.linspace(-2, 2, 96)


def same_as_eager(function: Function, fast: Function, lie: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """Results, and the memory of the arguments, after one call."""
    own, given = base(), base()
    torch.testing.assert_close(fast(*lie(given)), function(*lie(own)))
    torch.testing.assert_close(given, own)


def apart(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of the same layout in memory of their own."""
    return x[:32].view(4, 8).clone(), x[32:64].view(4, 8).clone()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_call_whose_inputs_overlap_is_as_in_eager(write: str, dynamic: bool, db: Path) -> None:
    function = writes_by(WRITES[write])
    fast = compiled(function, db, dynamic=dynamic)
    for number, lie in enumerate(LIES.values()):
        same_as_eager(function, fast, apart)
        assert sum(fuseplan.planner.stats().fallbacks.values()) == number
        same_as_eager(function, fast, lie)
        assert sum(fuseplan.planner.stats().fallbacks.values()) == number + 1  # counted
    assert fuseplan.planner.stats().groups_fused


def test_a_graph_that_was_compiled_for_inputs_that_overlap_is_fused_for_others(db: Path) -> None:
    function = writes_by(WRITES["mul_"])
    fast = compiled(function, db)
    same_as_eager(function, fast, LIES["overlapping slices"])
    compiled_once = fuseplan.planner.stats()
    assert sum(compiled_once.fallbacks.values()) == 1 and compiled_once.groups_fused
    same_as_eager(function, fast, apart)
    assert fuseplan.planner.stats() == compiled_once  # no graph is compiled again, and no call fell back


def test_it_is_said_once_and_counted_every_time(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    function = writes_by(WRITES["mul_"])
    fast = compiled(function, db)
    with caplog.at_level(logging.WARNING, "fuseplan"):
        same_as_eager(function, fast, apart)
        caplog.clear()
        for _ in range(3):
            same_as_eager(function, fast, LIES["overlapping slices"])
    (record,) = caplog.records
    ((reason, count),) = fuseplan.planner.stats().fallbacks.items()
    assert "share memory" in record.getMessage() and "share memory" in reason and count == 3


@pytest.mark.parametrize(
    "layout",
    [
        lambda base, at: base[at : at + 32].view(4, 8).t(),
        lambda base, at: base[at : at + 64].view(4, 16)[:, ::2],
        lambda base, at: base.view(12, 8)[at // 8 : at // 8 + 4],
        lambda base, at: base[at : at + 3],
        lambda base, at: base[at : at + 1],
    ],
    ids=["transposed", "every other column", "rows", "three", "one"],
)
def test_layouts_that_overlap(layout: Callable[[Tensor, int], Tensor], db: Path) -> None:
    function = writes_by(WRITES["mul_"])
    fast = compiled(function, db)
    for begins in ((0, 64), (0, 0), (32, 32), (8, 8)):
        def lie(x: Tensor, begins: tuple[int, int] = begins) -> Views:
            other = x.clone() if begins == (0, 64) else x  # the graph is compiled for two allocations
            return layout(x, begins[0]), layout(other, begins[1] % 33)

        same_as_eager(function, fast, lie)
    assert sum(fuseplan.planner.stats().fallbacks.values()) == 3


def test_halves_of_one_allocation_that_touch_are_fused(db: Path, kernels: ReferenceBackend) -> None:
    function = writes_by(WRITES["mul_"])
    fast = compiled(function, db)
    same_as_eager(function, fast, apart)
    called = len(kernels.calls)
    same_as_eager(function, fast, lambda x: (x[:32].view(4, 8), x[32:64].view(4, 8)))
    assert not fuseplan.planner.stats().fallbacks and len(kernels.calls) > called


@pytest.mark.parametrize("write", ["mul_", "one token", "index_copy_"])
def test_a_graph_compiled_for_parts_of_one_allocation_is_fused(write: str, db: Path, kernels: ReferenceBackend) -> None:
    """As a cache whose keys and values are halves of one tensor."""
    function = writes_by(WRITES[write])
    fast = compiled(function, db)
    for lie in (
        lambda x: (x[:32].view(4, 8), x[32:64].view(4, 8)),
        lambda x: (x[40:72].view(4, 8), x[:32].view(4, 8)),
        apart,
    ):
        called = len(kernels.calls)
        same_as_eager(function, fast, lie)
        assert len(kernels.calls) > called and not fuseplan.planner.stats().fallbacks
    same_as_eager(function, fast, LIES["overlapping slices"])
    assert sum(fuseplan.planner.stats().fallbacks.values()) == 1


def test_inputs_that_are_only_read_may_overlap(db: Path, kernels: ReferenceBackend) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x * 1.5 + 0.25) * y

    fast = compiled(function, db)
    for lie in (apart, *LIES.values()):
        called = len(kernels.calls)
        same_as_eager(function, fast, lie)
        assert len(kernels.calls) > called
    assert not fuseplan.planner.stats().fallbacks


def test_the_same_tensor_twice(db: Path) -> None:
    function = writes_by(WRITES["mul_"])
    fast = compiled(function, db)
    same_as_eager(function, fast, apart)
    own, given = apart(base())[0], apart(base())[0]
    torch.testing.assert_close(fast(given, given), function(own, own))
    torch.testing.assert_close(given, own)


def test_two_written_inputs_that_overlap(db: Path) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        total = (x + y).sin()
        x.mul_(2)
        y.add_(1)
        return total * x

    fast = compiled(function, db)
    for lie in (apart, *LIES.values()):
        same_as_eager(function, fast, lie)
    assert sum(fuseplan.planner.stats().fallbacks.values()) == len(LIES)


class Cached(nn.Module):
    """A module with a cache that it writes, and a parameter and an argument that may be put into its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
        self.cache = nn.Buffer(torch.zeros(4, 8))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        before = F.silu(x * self.weight)
        self.cache.index_copy_(0, at, before)
        return F.silu(x + 1) * self.weight + self.cache.sum(0)


@pytest.mark.parametrize("role", ["argument", "parameter", "buffer"])
@pytest.mark.parametrize("replays", [False, True])
def test_parameters_and_buffers_that_come_to_overlap(
    role: str, replays: bool, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "find_recorder", lambda _: FakeRecorder())
    modules = Cached(), Cached()
    fast = compiled(modules[1], db, cuda_graphs=replays)

    def step(call: Function, module: Cached, x: Tensor) -> tuple[Tensor, ...]:
        return call(x, torch.tensor([2])).clone(), module.cache.clone(), module.weight.detach().clone(), x.clone()

    def both(given: Callable[[Cached], Tensor]) -> None:
        expected = step(modules[0], modules[0], given(modules[0]))
        torch.testing.assert_close(step(fast, modules[1], given(modules[1])), expected)

    for number in range(4):  # with CUDA graphs: recorded, and replayed
        both(lambda module, number=number: torch.full((1, 8), float(number)))
    assert not fuseplan.planner.stats().fallbacks
    for module in modules:
        if role == "parameter":
            module.weight.data = module.cache.view(-1)[12:20]
        elif role == "buffer":
            memory = base()[:40]
            module.weight.data, module.cache.data = memory[:8], memory[4:36].view(4, 8)
    for _ in range(3):
        both(lambda module: module.cache[2:3] if role == "argument" else torch.ones(1, 8))
    assert sum(fuseplan.planner.stats().fallbacks.values()) == 3


def test_hand_built_graphs_are_checked_too(db: Path) -> None:
    graph = SubGraph(
        (OpNode("mul", ("y",), ("before",), {"other": 1.5}),
         OpNode("aten.mul_.Scalar", ("x",), ("made",), {"other": 2.0}),
         OpNode("relu", ("before",), ("after",)), OpNode("mul", ("after", "y"), ("out",))),
        ("x", "y"), ("out",),
    )
    scheduler = FusionScheduler(database=db)

    def fast(x: Tensor, y: Tensor) -> Tensor:
        return scheduler.dispatch(graph, {"x": x, "y": y})["out"]

    def function(x: Tensor, y: Tensor) -> Tensor:
        before = y * 1.5
        x.mul_(2)
        return torch.relu(before) * y

    for lie in (LIES["overlapping slices"], apart, *LIES.values()):
        same_as_eager(function, fast, lie)
    assert scheduler.stats.groups_fused and sum(scheduler.stats.fallbacks.values()) == len(LIES) + 1
