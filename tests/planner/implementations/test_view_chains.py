"""Chains of views as one call: against the graph as it was, with writes, aliases and results that are views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collapsed_views import check_same, collapsed, names, twin
from compiled_functions import compiled
from dispatch_samples import compiled as compile_for_dispatch
from dispatch_samples import llama
from fake_traces import traced
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_place_backend import InPlaceBackend
from reference_backend import ReferenceBackend, use
from static_caches import cache_argument
from torch import fx
from torch.utils._pytree import tree_map

from fuseplan.kernels.ir.index import symbol
from fuseplan.kernels.ir.ir import Buffer
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.implementations import aten, view_chains
from fuseplan.planner.implementations.view_chains import collapse_views, is_op
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites import grouped_queries
from fuseplan.planner.runtime import executor

pytestmark = pytest.mark.uncovered

Tensors = tuple[torch.Tensor, ...]


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


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=10), st.integers(0, 2))
@example([("swap", 0, 0), ("reshape", 0, 0), ("add_", 2, 0)], 0)
@example([("double", 0, 0), ("swap", 0, 0), ("flat", 0, 0), ("halves", 0, 0)], 1)
@example([("expand", 0, 0), ("flat", 0, 0), ("add_", 0, 0), ("slice", 0, 0)], 2)
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
    assert names(check_same(traced(run, *inputs), inputs))[:3] == ["linear", "view", "transpose"]  # it is returned

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
    assert names(better) == ["reinterpret", "index_copy_", "reinterpret", "cos"]


def test_what_is_written_through_stays_a_view() -> None:
    def run(x: torch.Tensor) -> Tensors:
        x.view(4, 3).t().copy_(torch.ones(3, 4))
        return (torch.cos(x.view(2, 6)),)

    inputs = [torch.randn(3, 4)]
    assert {"view", "t", "copy_", "reinterpret"} <= set(names(check_same(traced(run, *inputs), inputs)))


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


def test_dynamic_sizes_are_left_alone() -> None:
    def run(x: torch.Tensor) -> Tensors:
        return (torch.cos(x.view(x.shape[0], 2, -1).transpose(1, 2)),)

    better = collapsed(traced(run, torch.randn(3, 4), symbolic=True))
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
        better = collapsed(traced(run, *inputs))
    assert "reinterpret" in names(better)
    with made_in():
        inputs = [one.clone() for one in inputs]
    with mode():
        for one, other in zip(better(*inputs), run(*inputs), strict=True):
            assert torch.equal(one, other) and one.is_inference() == other.is_inference()


@pytest.mark.parametrize("offset", [0, 1])
def test_without_the_private_function_strides_are_given_in_public(
    monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    monkeypatch.setattr(view_chains, "_REINTERPRET", None)

    def run(x: torch.Tensor) -> Tensors:
        return (torch.cos(x.view(2, 3, 4).transpose(1, 2)[offset:]),)

    inputs = [torch.randn(3, 12)[1:]]  # an offset of its own
    calls = names(check_same(traced(run, *inputs), inputs))
    assert calls == (["as_strided", "cos"] if not offset else ["as_strided", "aten.slice.Tensor", "cos"])


# -- fused groups -----------------------------------------------------------------------------------------


def chained(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Two groups with views between them and a matmul."""
    normal = torch.softmax(x * 2 + 1, -1)
    heads = F.linear(normal.view(3, 2, 4).transpose(0, 1), w)
    return (torch.tanh(heads * 3).transpose(0, 1), heads.sum())


@pytest.mark.parametrize("kernels", [ReferenceBackend(), InPlaceBackend(), ReferenceBackend(fails_in_call=True)])
def test_views_of_what_kernels_make(kernels: Any) -> None:
    torch.manual_seed(0)
    inputs, tally = [torch.randn(3, 8), torch.randn(4, 4)], Tally()
    call = compiled(chained, inputs, kernels, tally)
    assert any("reinterpret" in name for name in call.__globals__)  # type: ignore[attr-defined]
    with torch.no_grad():
        for _ in range(3):
            for one, other in zip(call(*inputs), chained(*inputs), strict=True):
                torch.testing.assert_close(one, other)
                assert one.stride() == other.stride()


def test_ops_in_place_of_a_kernel_lay_results_out_like_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views after a group were worked out for what its kernel allocates."""
    generated = aten._generated

    def elsewhere(*args: Any) -> Any:
        plain = generated(*args)
        return lambda *given: tree_map(lambda one: one.mT.contiguous().mT, plain(*given))

    inputs, tally = [torch.randn(3, 8), torch.randn(4, 4)], Tally()
    call = compiled(chained, inputs, ReferenceBackend(fails_in_call=True), tally)
    with torch.no_grad():
        expected = chained(*inputs)
        monkeypatch.setattr(aten, "_generated", elsewhere)
        for _ in range(2):
            torch.testing.assert_close(call(*inputs)[0], expected[0])
    assert tally.snapshot().fallbacks


def test_a_kernel_with_dynamic_sizes_has_no_certain_layout() -> None:
    node = fx.Graph().placeholder("x")
    rows = symbol("rows")
    assert view_chains._allocated(node, Buffer("y", "float32", (rows, 4), (4, 1), True)) is None
    assert view_chains._allocated(node, Buffer("y", "float32", (3, 4), (4, 1), True)) is not None


@pytest.mark.parametrize("batch", [1, 2])
def test_a_decode_step_keeps_no_chain_of_views(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import StaticCache

    views: list[str] = []

    def keeping(graph: fx.Graph, *rest: Any) -> None:
        collapse_views(graph, *rest)
        views.extend(str(node.target) for node in graph.nodes if is_op(node) and op_of(str(node.target)).view)

    monkeypatch.setattr(executor, "collapse_views", keeping)
    monkeypatch.setattr(grouped_queries, "MEASURED", frozenset())
    use(monkeypatch, ReferenceBackend())
    model = llama()
    cache = StaticCache(config=model.config, max_cache_len=16)
    cache.early_initialization(batch, 2, 12, torch.float32, torch.device("cpu"))
    torch._dynamo.reset()
    with torch.no_grad():
        compile_for_dispatch(model, tmp_path / "tuning.db")(
            torch.ones(batch, 1, dtype=torch.int64), **cache_argument(model, cache), use_cache=True
        )
    torch._dynamo.reset()
    # What is left are the copies of keys and values for the heads of each group, and three views of attention's result.
    assert Counter(views) == {"aten.reshape.default": 4, "aten.transpose.int": 1}
