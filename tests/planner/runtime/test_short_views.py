"""Chains of views as one call: against the graph as it was, with writes, aliases and results that are views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_functions import compiled
from fake_traces import traced
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_place_backend import InPlaceBackend
from reference_backend import ReferenceBackend
from torch import fx

from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.implementations.direct_calls import Direct, bind_calls, fill_namespace
from fuseplan.planner.runtime.buffer_donation import Memory
from fuseplan.planner.runtime.short_views import shorten_views

Tensors = tuple[torch.Tensor, ...]


def shortened(module: fx.GraphModule) -> fx.GraphModule:
    """The same module with short views and bound calls, as the executor makes it."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {"traced": node.name}
    whole = normalise(module)
    shorten_views(graph, whole, Memory(graph, whole), ())
    graph.lint()
    bind_calls(graph, module.graph)
    result = fx.GraphModule(module, graph)
    fill_namespace(result.forward.__globals__)
    return result


def names(module: fx.GraphModule) -> list[str]:
    """Calls of a module, in order."""
    return [
        node.target.__name__ if isinstance(node.target, Direct) else str(node.target)
        for node in module.graph.nodes if node.op == "call_function"
    ]


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and offset (``clone`` keeps those of dense tensors only)."""
    storage = tensor.untyped_storage().clone()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def strides(tensor: torch.Tensor) -> list[int]:
    """Of dimensions in which there is more than one element: others are arbitrary."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


def check_same(module: fx.GraphModule, inputs: list[torch.Tensor]) -> fx.GraphModule:
    """Results, what they are views of, and what writing through them changes."""
    better = shortened(module)
    with torch.no_grad():
        mine, theirs = [twin(one) for one in inputs], [twin(one) for one in inputs]
        result, expected = better(*mine), module(*theirs)
        for _ in range(2):
            own, its = [*result, *mine], [*expected, *theirs]
            for one, other in zip(own, its, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
                assert strides(one) == strides(other) and one.storage_offset() == other.storage_offset()
                assert one._version == other._version and one.dtype == other.dtype
            for values in (own, its):
                bases = [[base is one._base for base in values] + [one._base is None] for one in values]
                shared = [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in values] for a in values]
                values[:] = [bases, shared]  # type: ignore[list-item]
            assert own == its
            for one, other in zip(result, expected, strict=True):
                if 0 not in one.stride():
                    one.mul_(3), other.mul_(3)
    return better


# -- any program of views ---------------------------------------------------------------------------------


def part(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.chunk(2, number % x.dim())[-1]


def merged(x: torch.Tensor, number: int) -> torch.Tensor:
    dim = number % (x.dim() - 1)
    return x.flatten(dim, dim + 1)


def halves(x: torch.Tensor, number: int) -> torch.Tensor:
    dim = number % x.dim()
    return x.unflatten(dim, (2, x.shape[dim] // 2))


#: name -> (value, a number) -> a new value; one that cannot be applied is skipped.
STEPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "flat": lambda x, n: x.reshape(-1),
    "rows": lambda x, n: x.view(x.shape[0], -1),
    "reshape": lambda x, n: x.reshape(2, -1, 3),
    "same": lambda x, n: x.reshape(x.shape),
    "merged": merged,
    "halves": halves,
    "transpose": lambda x, n: x.transpose(n % x.dim(), -1),
    "swap": lambda x, n: x.transpose(0, 1),
    "permute": lambda x, n: x.permute(*range(1, x.dim()), 0),
    "unsqueeze": lambda x, n: x.unsqueeze(n % (x.dim() + 1)),
    "squeeze": lambda x, n: x.squeeze(),
    "expand": lambda x, n: x.unsqueeze(0).expand(2, *x.shape),
    "slice": lambda x, n: x[1:],
    "steps": lambda x, n: x[..., ::2],
    "select": lambda x, n: x.select(n % x.dim(), -1),
    "part": part,
    "alias": lambda x, n: torch.ops.aten.alias.default(x),
    "contiguous": lambda x, n: x.contiguous(),
    "float": lambda x, n: x.float(),
    "bits": lambda x, n: x.view(torch.int32).view(torch.float32),
    "diagonal": lambda x, n: x.diagonal(),
    # What computes, and what writes.
    "double": lambda x, n: x * 2,
    "sum": lambda x, n: x.sum(0, keepdim=True),
    "product": lambda x, n: F.linear(x, torch.ones_like(x.reshape(-1, x.shape[-1])[:2])),
    "add_": lambda x, n: x.add_(1),
    "row": lambda x, n: x[0].mul_(2),
    "dropout": lambda x, n: torch.ops.aten.dropout.default(x, 0.5, False),
}
Step = tuple[str, int, int]
STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 3))


def applied(steps: list[Step], inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Step]]:
    """All values, and the steps that can be applied."""
    values, done = list(inputs), []
    for step in steps:
        name, which, number = step
        try:
            values.append(STEPS[name](values[-1 - which % min(len(values), 4)], number))
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
            continue
        done.append(step)
    return values, done


def program(steps: list[Step], results: int) -> Callable[..., Tensors]:
    def run(*inputs: torch.Tensor) -> Tensors:
        values, _ = applied(steps, list(inputs))
        # Every value is read at the end; the last ones are handed out as they are, too.
        return (*(torch.cos(one) for one in values[len(inputs) :]), *(values[-results:] if results else ()))

    return run


@settings(max_examples=100)
@given(st.lists(STEP, min_size=1, max_size=10), st.integers(0, 2))
@example([("swap", 0, 0), ("reshape", 0, 0), ("add_", 2, 0)], 0)
@example([("double", 0, 0), ("swap", 0, 0), ("flat", 0, 0), ("halves", 0, 0)], 1)
@example([("expand", 0, 0), ("flat", 0, 0), ("add_", 0, 0), ("slice", 0, 0)], 2)
@example([("same", 1, 0), ("expand", 0, 0), ("swap", 0, 0)], 0)
@example([("diagonal", 0, 0), ("select", 0, 0), ("sum", 0, 0)], 0)
def test_any_program_of_views(steps: list[Step], results: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 4), torch.randn(6, 1, 4).transpose(0, 2), torch.randn(4, 12)[1:, ::2]]
    with torch.no_grad():
        _, steps = applied(steps, [twin(one) for one in inputs])
    check_same(traced(program(steps, results), *inputs), inputs)


# -- what becomes of a chain ------------------------------------------------------------------------------


def test_a_chain_from_an_input_is_one_call() -> None:
    def heads(x: torch.Tensor) -> Tensors:
        return (torch.cos(x.view(2, 3, 2, 4).transpose(1, 2)[:, 1:]),)

    inputs = [torch.randn(2, 3, 8)]
    better = check_same(traced(heads, *inputs), inputs)
    assert names(better) == ["reinterpret", "cos"]
    (call,) = [node for node in better.graph.nodes if node.name.startswith("reinterpret")]
    assert call.args[1:] == ((2, 1, 3, 4), (24, 4, 8, 1), 4)


def test_a_product_is_reinterpreted_and_a_reshape_that_copies_stays() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        heads = F.linear(x, w).view(2, 3, 2, 2).transpose(1, 2)
        return (torch.cos(heads), heads.unsqueeze(2).expand(2, 2, 3, 3, 2).reshape(2, 6, 3, 2))

    inputs = [torch.randn(2, 3, 8), torch.randn(4, 8)]
    assert names(check_same(traced(run, *inputs), inputs))[:3] == [
        "linear", "view", "transpose"]  # what is returned may be a view of it, by the schema of reshape

    def returned(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        heads = F.linear(x, w).view(2, 3, 2, 2).transpose(1, 2)
        return (torch.cos(heads), heads)

    assert names(check_same(traced(returned, *inputs), inputs)) == ["linear", "view", "transpose", "cos"]

    def read(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        heads = F.linear(x, w).view(2, 3, 2, 2).transpose(1, 2)
        return (torch.cos(heads.unsqueeze(2).expand(2, 2, 3, 3, 2).reshape(2, 6, 3, 2)),)

    assert names(check_same(traced(read, *inputs), inputs)) == ["linear", "reinterpret", "reshape", "cos"]


def test_views_of_what_attention_returns_stay() -> None:
    """Its strides may be others than those of its fake tensor."""
    def attend(q: torch.Tensor) -> Tensors:
        return (torch.cos(F.scaled_dot_product_attention(q, q, q).transpose(1, 2)[:, 1:].reshape(1, -1, 8)),)

    inputs = [torch.randn(1, 2, 3, 4)]
    assert names(check_same(traced(attend, *inputs), inputs)) == [
        "scaled_dot_product_attention", "transpose", "aten.slice.Tensor", "reshape", "cos"
    ]  # fmt: skip


def test_equal_views_are_shared_and_no_ops_vanish() -> None:
    def run(x: torch.Tensor) -> Tensors:
        one, other = x[:, None].expand(2, 3, 4), x.unsqueeze(1).expand(2, 3, 4)
        return (torch.cos(one), torch.sin(other), torch.tanh(torch.ops.aten.alias.default(x).contiguous().float()))

    inputs = [torch.randn(2, 4)]
    assert names(check_same(traced(run, *inputs), inputs)) == ["reinterpret", "cos", "sin", "tanh"]


def test_a_cache_is_written_itself_and_read_through_one_view() -> None:
    def step(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> Tensors:
        full = cache.index_copy_(2, at, new.view(1, 1, 2, 4).transpose(1, 2))
        return (torch.cos(full[:, :, None].expand(1, 2, 3, 5, 4)),)

    inputs = [torch.randn(1, 2, 5, 4), torch.randn(1, 1, 8), torch.tensor([3])]
    better = check_same(traced(step, *inputs), inputs)
    assert names(better) == ["reinterpret", "index_copy_", "unsqueeze", "expand", "cos"]


def test_what_is_written_through_stays_a_view() -> None:
    def run(x: torch.Tensor) -> Tensors:
        x.view(4, 3).t().copy_(torch.ones(3, 4))
        return (torch.cos(x.view(2, 6)),)

    inputs = [torch.randn(3, 4)]
    assert names(check_same(traced(run, *inputs), inputs)) == ["view", "t", "aten.ones.default", "copy_", "view", "cos"]


def test_a_layout_that_changes_under_way_leaves_all_views() -> None:
    def run(x: torch.Tensor) -> Tensors:
        made = x.clone()
        view = made.view(4, 3)
        made.t_()
        return (torch.cos(view), torch.cos(made[1:]))

    inputs = [torch.randn(3, 4)]
    assert "reinterpret" not in names(check_same(traced(run, *inputs), inputs))


def test_a_write_does_not_read_the_tensor_itself_in_place_of_a_view() -> None:
    """ATen refuses that even without elements, where it lets the view pass."""
    def write(x: torch.Tensor) -> Tensors:
        return (x.index_copy_(0, torch.arange(1), x[:1]),)

    inputs = [torch.zeros(1, 0, 2)]
    check_same(traced(write, *inputs), inputs)


def test_parts_of_one_allocation_may_be_apart_in_a_later_call() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return (torch.cos(x.t()), torch.sin(y.t()))

    better = shortened(traced(run, *torch.randn(2, 3, 4)))
    for inputs in (torch.randn(2, 3, 4), [torch.randn(3, 4), torch.randn(3, 4)]):
        for one, other in zip(better(*inputs), run(*inputs), strict=True):
            assert torch.equal(one, other)


def test_a_dropout_that_drops_nothing_is_its_operand() -> None:
    """Its fake tensor says that it is new memory with strides of its own."""
    def run(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        part = F.linear(x, w).t()
        return (torch.cos(F.dropout(part, 0.5, training=False)), torch.sin(part))

    inputs = [torch.randn(3, 4), torch.randn(5, 4)]
    assert names(check_same(traced(run, *inputs), inputs)) == ["linear", "reinterpret", "cos", "sin"]


def test_dynamic_sizes_are_left_alone() -> None:
    def run(x: torch.Tensor) -> Tensors:
        return (torch.cos(x.view(x.shape[0], 2, -1).transpose(1, 2)),)

    better = shortened(traced(run, torch.randn(3, 4), symbolic=True))
    assert "reinterpret" not in names(better)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(better(x)[0], run(x)[0])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
def test_inference_mode(mode: Any, made_in: Any) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        heads = F.linear(x, w).view(3, 2, 2).transpose(0, 1)
        return (torch.cos(heads), x.view(2, 12)[1])

    inputs = [torch.randn(3, 8), torch.nn.Parameter(torch.randn(4, 8))]
    with torch.no_grad():
        better = shortened(traced(run, *inputs))
    assert "reinterpret" in names(better)
    with made_in():
        inputs = [one.clone() for one in inputs]
    with mode():
        for one, other in zip(better(*inputs), run(*inputs), strict=True):
            assert torch.equal(one, other) and one.is_inference() == other.is_inference()


# -- fused groups -----------------------------------------------------------------------------------------


def test_what_a_kernel_makes_is_reinterpreted() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return (torch.tanh(F.linear(torch.softmax(x * 2 + 1, -1).view(3, 2, 4).transpose(0, 1), w) * 3),)

    inputs = [torch.randn(3, 8), torch.randn(4, 4)]
    call = compiled(run, inputs, ReferenceBackend(), Tally())
    assert any("reinterpret" in name for name in call.__globals__)  # type: ignore[attr-defined]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(call(*inputs), run(*inputs))


@settings(max_examples=60)
@given(st.lists(STEP, min_size=2, max_size=10), st.sampled_from([ReferenceBackend(), InPlaceBackend()]))
@example([("product", 0, 0), ("add_", 0, 0), ("add_", 0, 0), ("product", 0, 0)], ReferenceBackend())
def test_any_program_of_views_around_kernels(steps: list[Step], kernels: InPlaceBackend) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 4), torch.randn(4, 6)]
    with torch.no_grad():
        _, steps = applied(steps, [twin(one) for one in inputs])

        def run(*given: torch.Tensor) -> Tensors:  # nothing else is read, so ops that write may be fused
            return (torch.cos(applied(steps, list(given))[0][-1]),)

        call = compiled(run, inputs, kernels, Tally())
        for _ in range(3):
            mine, theirs = [twin(one) for one in inputs], [twin(one) for one in inputs]
            for one, other in zip((*call(*mine), *mine), (*run(*theirs), *theirs), strict=True):
                torch.testing.assert_close(one, other)


def written_over(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Tensors:
    """As with ``ReLU(inplace=True)``: the kernel's result is new memory, though its fake tensor is the matmul's."""
    y = F.linear(x, w)
    y += 1
    F.relu_(y)
    return (F.linear(y, u),)


def written_between(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> Tensors:
    z = torch.tanh(F.linear(x, w).add_(1))
    z.mul_(2).add_(3)
    return (F.linear(z.view(2, -1, 16)[1:], u),)


@pytest.mark.parametrize("run", [written_over, written_between])
@pytest.mark.parametrize("kernels", [ReferenceBackend(), InPlaceBackend()])
def test_what_a_kernel_makes_of_an_op_that_writes_is_not_its_operand(
    run: Callable[..., Tensors], kernels: InPlaceBackend
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(8, 16), torch.randn(16, 16), torch.randn(5, 16)]
    call = compiled(run, inputs, kernels, Tally())
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(*inputs), run(*inputs))
