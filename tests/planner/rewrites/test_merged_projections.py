"""Linear ops that read one value become one op where nobody can tell, and stay as they are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import fresh_start
from torch import fx, nn

from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.subclasses import take_apart
from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.graph.merged_linear import MERGED
from fuseplan.planner.rewrites.merged_projections import MergedProjections, merge_projections

LINEAR = torch.ops.aten.linear.default
Forward = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


class Projections(nn.Module):
    """Linear layers ``a``, ``b``, ... of some widths, used as a function says."""

    def __init__(self, forward: Forward, widths: Sequence[int] = (5, 3, 3), bias: Any = False, k: int = 7) -> None:
        super().__init__()
        biases = bias if isinstance(bias, tuple) else (bias,) * len(widths)
        for name, width, has in zip("abcdef", widths, biases, strict=False):
            setattr(self, name, nn.Linear(k, width, bias=has))
        self.say = forward

    def forward(self, *args: torch.Tensor) -> Any:
        return self.say(self, *args)


def merged(model: nn.Module, *args: torch.Tensor, pack: Any = None, dynamic: bool = False) -> tuple[
    fx.GraphModule, MergedProjections
]:
    """The trace of a call after the rewriting, which is compared with eager mode: results, strides and writes."""
    traces: list[tuple[fx.GraphModule, MergedProjections]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Forward:
        trace = trace_predispatch(gm, example_inputs)
        traces.append((trace, merge_projections(trace, take_apart(gm, example_inputs).parameters, pack)))
        return trace.forward

    expected_args = [one.clone() for one in args]
    expected = model(*expected_args)
    found = torch.compile(model, backend=backend, dynamic=dynamic)(*args)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_stride=True)
    torch.testing.assert_close(list(args), expected_args, rtol=1e-5, atol=1e-6)
    (one,) = traces
    return one


def calls(trace: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(trace.graph.find_nodes(op="call_function", target=target))


def values_are_true(trace: fx.GraphModule, *args: Any) -> None:
    """Every fake value of a static trace has the shape and strides of what really runs."""
    class Checked(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, torch.Tensor) and node.op == "call_function":
                fake = node.meta["val"]
                assert result.shape == fake.shape, node
                same = [a == b for size, a, b in zip(result.shape, result.stride(), fake.stride(), strict=True)
                        if size != 1]
                assert all(same), node
            return result

    Checked(trace).run(*args)


def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of one head each, through a view, a transpose and attention."""
    batch, length, _ = x.shape
    q, k, v = (one(x).view(batch, length, 1, -1).transpose(1, 2) for one in (self.a, self.b, self.c))
    return F.scaled_dot_product_attention(q * 2, k, v).transpose(1, 2).reshape(batch, length, -1)


def gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.silu(self.a(x)) * self.b(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 1, 7), (3, 1, 7), (1, 9, 7)], ids=str)
@pytest.mark.parametrize(("forward", "widths"), [(attend, (4, 4, 4)), (gated, (9, 9))])
@pytest.mark.parametrize("dynamic", [False, True])
def test_siblings_are_one_op(
    forward: Forward, widths: tuple[int, ...], shape: tuple[int, ...], bias: bool, dynamic: bool
) -> None:
    trace, done = merged(Projections(forward, widths, bias), torch.randn(shape), dynamic=dynamic)
    assert done == MergedProjections(1, {})
    (call,) = calls(trace, MERGED)
    assert not calls(trace, LINEAR) and len(call.args[1]) == len(widths) and len(call.args[2]) == bias * len(widths)
    graph = normalise(trace).graph
    (op,) = [node for node in graph if node.op == "fuseplan.merged_linear.default"]
    assert len(op.inputs) == 1 + len(widths) * (1 + bias)
    assert graph.specs[op.outputs[0]].shape[-1] == sum(widths)


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 1, 7)], ids=str)
def test_layouts_of_the_trace_are_those_of_what_runs(shape: tuple[int, ...]) -> None:
    model, x = Projections(attend, (4, 4, 4)), torch.randn(shape)
    trace, _ = merged(model, x)
    order = [node.meta["val"].shape for node in trace.graph.find_nodes(op="placeholder")]
    pool = [x, model.a.weight, model.b.weight, model.c.weight]
    values_are_true(trace, *[pool.pop(next(at for at, one in enumerate(pool) if one.shape == size)) for size in order])


def test_writing_results_into_a_cache_reads_them_where_they_lie() -> None:
    def step(self: Any, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        q, k = self.a(x).view(2, 1, 1, 4).transpose(1, 2), self.b(x).view(2, 1, 1, 4).transpose(1, 2)
        cache.index_copy_(2, torch.tensor([3]), k)
        return q @ cache.transpose(2, 3)

    trace, done = merged(Projections(step, (4, 4)), torch.randn(2, 1, 7), torch.randn(2, 1, 6, 4))
    assert done.merged == 1 and len(calls(trace, MERGED)) == 1


def test_only_alike_ops_are_one() -> None:
    """By whether they have a bias; those left alone stay."""
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sum() + self.b(x).sum() * self.c(x).sum() - self.d(x).sum() / self.e(x).sum()

    trace, done = merged(Projections(forward, (5, 3, 2, 4, 1), (True, False, True, False, True)), torch.randn(3, 7))
    assert done == MergedProjections(2, {})
    assert sorted(len(call.args[1]) for call in calls(trace, MERGED)) == [2, 3]
    assert not calls(trace, LINEAR)


def test_what_reads_another_value_stays() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sum() + self.b(x + 1).sum()

    trace, done = merged(Projections(forward), torch.randn(3, 7))
    assert done == MergedProjections() and len(calls(trace, LINEAR)) == 2


def test_work_between_keeps_them_apart() -> None:
    """Cross-attention in every layer reads one encoder's output: those are not one op for all layers."""
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first = F.scaled_dot_product_attention(self.a(x), self.b(x), self.b.weight.sum() * self.a(x).detach().exp())
        return first + F.scaled_dot_product_attention(first, self.c(x), self.d(x))

    trace, done = merged(Projections(forward, (7, 7, 7, 7)), torch.randn(1, 3, 7))
    assert [len(call.args[1]) for call in calls(trace, MERGED)] == [2] and done.merged == 1


REFUSALS: dict[str, tuple[Forward, str]] = {
    "returned": (lambda self, x: (self.a(x), self.b(x).sum()), "returned"),
    "a view is returned": (lambda self, x: (self.a(x).view(-1, 1, 1, 5), self.b(x).sum()), "returned"),
    "written to": (lambda self, x: self.a(x).mul_(2).sum() + self.b(x).sum(), "written to"),
    "a part is written to": (lambda self, x: _zeroed(self.a(x)).sum() + self.b(x).sum(), "written to"),
    "merged by a view": (lambda self, x: self.a(x).view(-1).sum() + self.b(x).view(-1).exp().sum(), "viewed"),
    "read by address": (lambda self, x: self.a(x).as_strided((3,), (1,)).sum() + self.b(x).sum(), "viewed"),
    "between": (lambda self, x: self.a(x).sum() + (x[0].add_(1), self.b(x).sum())[1], "written to between"),
    "one weight twice": (lambda self, x: self.a(x).sum() - F.linear(x, self.a.weight).exp().sum(), "several places"),
    "no parameter": (lambda self, x: self.a(x).sum() + F.linear(x, self.b.weight * 2).sum(), "no parameter"),
    "another layout": (lambda self, x: self.a(x).sum() + F.linear(x, self.c.weight).sum(), "row by row"),
}


def _zeroed(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., :2].zero_()
    return tensor


@pytest.mark.parametrize(("case", "rows"), [
    (case, rows) for case in REFUSALS for rows in (1, 3) if (case, rows) != ("merged by a view", 1)
])
def test_what_could_be_told_is_refused(case: str, rows: int) -> None:
    """Of one row, too: there slices of a wider result look contiguous."""
    forward, reason = REFUSALS[case]
    model = Projections(forward)
    model.c.weight = nn.Parameter(torch.randn(7, 3).t())
    trace, done = merged(model, torch.randn(1, rows, 7))
    assert done.merged == 0 and sum(done.refused.values()) == (2 if case == "one weight twice" else 1)
    assert reason in next(iter(done.refused))
    assert not calls(trace, MERGED)
    assert len(calls(trace, torch.ops.aten.slice.Tensor)) == (case == "a part is written to")  # the model's own


def test_a_refused_packing_leaves_the_trace_as_it_was() -> None:
    given: list[tuple[list[int], list[int]]] = []

    def pack(weights: Sequence[int], biases: Sequence[int]) -> str | None:
        given.append((list(weights), list(biases)))
        return "not these"

    model, x = Projections(attend, (4, 4, 4), bias=True), torch.randn(2, 5, 7)
    plain, _ = merged_without(model, x)
    torch._dynamo.reset()
    trace, done = merged(model, x, pack=pack)
    assert done == MergedProjections(0, {"not these": 1})
    assert str(trace.graph) == str(plain.graph)
    for node, before in zip(trace.graph.nodes, plain.graph.nodes, strict=True):
        if isinstance(node.meta.get("val"), torch.Tensor):
            assert node.meta["val"].stride() == before.meta["val"].stride()
    placeholders = list(trace.graph.find_nodes(op="placeholder"))
    ((weights, biases),) = given
    linear = [node.args for node in calls(trace, LINEAR)]
    assert [placeholders[at] for at in weights] == [args[1] for args in linear]
    assert [placeholders[at] for at in biases] == [args[2] for args in linear]


def merged_without(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, None]:
    traces: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Forward:
        traces.append(trace_predispatch(gm, example_inputs))
        return gm.forward

    torch.compile(model, backend=backend, dynamic=False)(x)
    return traces[0], None
