"""A traced function, normalised and interpreted op by op, does exactly what eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from tracing import check, constants, only, ops, ordered, recording, runner

from fuseplan.kernels.ir.index import symbol
from fuseplan.planner.capture.normalise import Traced, normalise
from fuseplan.planner.errors import CaptureError
from fuseplan.planner.graph.dataflow import Ref
from fuseplan.planner.graph.execute import run_node
from fuseplan.planner.ops.table import kind_of, mutates


def f32(*shape: int) -> Tensor:
    return torch.randn(*shape)


def test_noops_leave_no_node() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.float().contiguous().detach().view(3, 5).expand(3, 5)[:, :]
        y = torch.nn.functional.dropout(y, 0.5, training=False)
        return y.to("cpu") + 1, y.reshape(3, 5).mul(2)

    graph = check(function, f32(3, 5)).graph
    assert ops(graph) == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert only(graph, "aten.add.Tensor").inputs == graph.inputs


@pytest.mark.parametrize("drop", ["dropout", "feature_alpha_dropout", "alpha_dropout"])
def test_dropout_in_place_is_nothing_outside_of_training(drop: str) -> None:
    def function(x: Tensor) -> Tensor:
        flat = (x * 2).view(15)
        return getattr(torch.nn.functional, drop)(flat, 0.5, training=False, inplace=True) + 1

    graph = check(function, f32(3, 5)).graph
    assert ops(graph) == ["aten.mul.Tensor", "aten.view.default", "aten.add.Tensor"]


def test_a_noop_on_a_transposed_tensor_is_a_copy() -> None:
    graph = check(lambda x: x.t().contiguous(), f32(3, 5)).graph
    assert ops(graph) == ["aten.t.default", "aten.contiguous.default"]
    assert graph.specs[graph.outputs[0]].strides == (3, 1)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.half(),
        lambda x: x.to(torch.float16),
        lambda x: x.to("cpu", torch.float16),
        lambda x: x.type_as(torch.ones((), dtype=torch.float16)),
        lambda x: x.to(torch.ones((), dtype=torch.float16)),
        lambda x: x.to(torch.float16, copy=True),
    ],
)
def test_every_way_to_cast_is_one_op(cast) -> None:  # type: ignore[no-untyped-def]
    graph = check(cast, f32(4, 3)).graph
    node = graph.op(graph.producer(graph.outputs[0]) or "")
    assert node.op == "aten.to.dtype"
    assert dict(node.attrs) == {"dtype": "float16"}
    assert node.inputs == graph.inputs


@pytest.mark.parametrize(
    "shape",
    [lambda x: x.reshape(-1, 6), lambda x: x.flatten(0, 1), lambda x: x.reshape_as(torch.empty(8, 6))],
)
def test_reshapes_are_one_op_with_explicit_sizes(shape) -> None:  # type: ignore[no-untyped-def]
    node = only(check(shape, f32(2, 4, 6)).graph, "aten.reshape.default")
    assert dict(node.attrs) == {"shape": (8, 6)}


@pytest.mark.parametrize(
    ("cut", "start", "end", "step"),
    [
        (lambda x: x[:, 2:], 2, 7, 1),
        (lambda x: x[:, -3:], 4, 7, 1),
        (lambda x: x[:, :-1], 0, 6, 1),
        (lambda x: x[:, 1:100:3], 1, 7, 3),
    ],
)
def test_slices_have_explicit_bounds(cut, start: int, end: int, step: int) -> None:  # type: ignore[no-untyped-def]
    node = only(check(cut, f32(3, 7)).graph, "aten.slice.Tensor")
    assert dict(node.attrs) == {"dim": 1, "start": start, "end": end, "step": step}


def test_arguments_are_bound_by_schema() -> None:
    def function(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return torch.add(x, 2.0, alpha=3), torch.cat([x, x, x], -1), x[:, i], torch.clamp(x, max=1.0)

    graph = check(function, f32(3, 5), torch.tensor([4, 0])).graph
    x, i = graph.inputs
    assert dict(only(graph, "aten.add.Tensor").attrs) == {"other": 2.0, "alpha": 3}
    cat = only(graph, "aten.cat.default")
    assert (cat.inputs, dict(cat.attrs)) == ((x, x, x), {"dim": -1})
    index = only(graph, "aten.index.Tensor")
    assert (index.inputs, dict(index.attrs)) == ((x, i), {"indices": (None, Ref(1))})
    assert dict(only(graph, "aten.clamp.default").attrs) == {"min": None, "max": 1.0}


def test_where_a_tensor_is_made_carries_no_device() -> None:
    graph = check(lambda x: x + torch.arange(5, dtype=torch.float32, device="cpu"), f32(3, 5)).graph
    assert dict(only(graph, "aten.arange.default").attrs) == {"end": 5, "dtype": "float32"}


def test_a_move_between_devices_names_its_target() -> None:
    traced = make_fx(lambda x: x.to("meta", torch.float16) * 2, pre_dispatch=True, tracing_mode="fake")(f32(3))
    trace = normalise(traced)
    move = only(trace.graph, "aten.to.device")
    assert move.attrs["device"] == "meta"
    assert run_node(move, [f32(3)])[0].device.type == "meta"


def elsewhere(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, str]:
    """Kinds of the compute and extern ops of a graph traced on fake tensors, by op."""
    graph = normalise(make_fx(function, pre_dispatch=True, tracing_mode="fake")(*inputs)).graph
    kinds = {node.op.split(".")[1]: kind_of(node, graph.specs) for node in graph}
    return {op: kind for op, kind in kinds.items() if kind != "view"}


def test_an_op_that_reads_a_tensor_of_another_device_is_no_part_of_a_kernel() -> None:
    x, n, m = (torch.empty(3, 5, device=device) for device in ("meta", "cpu", "meta"))
    n = n[0, 0]
    assert elsewhere(lambda x, n, m: (x + m).tanh() * n, x, n, m) == {
        "add": "compute", "tanh": "compute", "mul": "opaque",
    }
    assert elsewhere(lambda x, n, m: (n * x).tanh() - m, x, n, m) == {
        "mul": "opaque", "tanh": "compute", "sub": "compute",
    }
    assert elsewhere(lambda x, n, m: (n.exp().to("meta") + x).tanh(), x, n, m) == {
        "exp": "opaque", "to": "opaque", "add": "compute", "tanh": "compute",
    }


def test_a_number_made_on_another_device_can_be_made_in_the_kernel() -> None:
    def fill(x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.full((), 2.0, device="cpu"), x)

    assert set(elsewhere(fill, torch.empty(3, 5, device="meta")).values()) == {"compute"}


def test_results_of_one_op_are_flattened() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, _, third = x.split([1, 2, 3], dim=-1)
        return first * 2, third + 1, x.topk(2).indices

    graph = check(function, f32(4, 6)).graph
    split, topk = only(graph, "aten.split_with_sizes.default"), only(graph, "aten.topk.default")
    assert [graph.specs[value].shape for value in split.outputs] == [(4, 1), (4, 2), (4, 3)]
    assert only(graph, "aten.mul.Tensor").inputs == (split.outputs[0],)
    assert only(graph, "aten.add.Tensor").inputs == (split.outputs[2],)
    assert graph.outputs[2] == topk.outputs[1]
    assert graph.specs[topk.outputs[1]].dtype == "int64"


def test_a_split_into_one_part_is_a_noop() -> None:
    def function(x: Tensor) -> Tensor:
        (whole,) = x.split(4, -1)
        (once_more,) = whole.chunk(1, -1)
        return torch.exp(once_more)

    assert [op.op for op in check(function, f32(2, 4)).graph] == ["aten.exp.default"]


def test_unused_ops_vanish_but_effects_stay() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        torch.exp(x)
        y.add_(x)
        return x * 2

    trace = check(function, f32(4), f32(4))
    assert ops(trace.graph) == ["aten.add_.Tensor", "aten.mul.Tensor"]


def test_constants_are_inputs() -> None:
    trace = check(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), f32(4, 3))
    assert len(trace.placeholders) == 1
    (constant,) = constants(trace).values()
    assert torch.equal(constant, torch.tensor([1.0, 2.0, 3.0]))


def test_results_are_listed_in_order() -> None:
    def function(x: Tensor) -> tuple[Tensor, None, Tensor, int, Tensor]:
        return x.detach(), None, x + 1, 7, x

    trace = normalise(make_fx(function, pre_dispatch=True, tracing_mode="fake")(f32(3)))
    (x,) = trace.graph.inputs
    assert trace.graph.outputs == (x, only(trace.graph, "aten.add.Tensor").name, x)


# -- mutation ---------------------------------------------------------------------------------------------


def test_a_write_through_a_view_orders_reads_of_the_whole_storage() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        window = x[1:]
        before = x.sum()
        window.mul_(3)
        return before, x.sum()

    graph = check(function, f32(4, 5)).graph
    before, after = (node.name for node in graph if node.op == "aten.sum.default")
    write = only(graph, "aten.mul_.Tensor").name
    assert ordered(graph) == {(before, write), (write, after)}


def test_a_view_taken_before_a_write_sees_it() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        row = x[0]
        x.copy_(y)
        return row.exp()

    graph = check(function, f32(3, 5), f32(3, 5)).graph
    assert (only(graph, "aten.copy_.default").name, only(graph, "aten.exp.default").name) in ordered(graph)


def test_writes_keep_their_order_and_other_storages_are_free() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.add_(1)
        x.mul_(2)
        return x + y

    graph = check(function, f32(4), f32(4)).graph
    names = [node.name for node in graph if mutates(node)]
    assert (names[0], names[2]) in graph.graph.edges
    assert (names[0], names[1]) not in graph.graph.edges
    assert (names[1], names[2]) not in graph.graph.edges


def test_inputs_that_share_memory_are_ordered() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y.exp()

    base = f32(4, 3)
    graph = check(function, base, base[1:]).graph
    assert (only(graph, "aten.mul_.Tensor").name, only(graph, "aten.exp.default").name) in ordered(graph)


def test_indexed_writes_return_the_tensor_they_wrote() -> None:
    def function(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        cache.index_copy_(1, position, new)
        cache[:, position] += 1
        return cache.sum(0)

    trace = check(function, torch.zeros(2, 6, 3), torch.tensor([2, 4]), f32(2, 2, 3))
    assert {"aten.index_copy_.default", "aten.index_put_.default"} <= set(ops(trace.graph))


def test_random_ops_keep_their_order() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.rand_like(x) - torch.rand_like(x)

    traces: list[Traced] = []
    torch._dynamo.reset()
    x = f32(7)
    with torch.no_grad():
        torch.manual_seed(3)
        actual = torch.compile(function, backend=recording(traces))(x)
        torch.manual_seed(3)
        expected = function(x)
    torch.testing.assert_close(actual, expected)
    names = [node.name for node in traces[0].graph if node.op.startswith("aten.rand")]
    assert ordered(traces[0].graph) == {tuple(names)}


# -- dynamic sizes ----------------------------------------------------------------------------------------


def test_sizes_are_named_by_first_use_and_have_hints() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        rows, cols = x.shape
        return (x.view(rows * 2, -1) * rows + torch.arange(cols // 2)) @ y, cols + 1

    trace = check(function, f32(4, 6), f32(3, 5), dynamic=True)
    graph = trace.graph
    s0, s1 = symbol("s0"), symbol("s1")
    x = next(name for name in graph.inputs if graph.specs[name].shape == (s0, s1))
    assert graph.specs[x].strides == (s1, 1)
    assert graph.symbols["s0"] == 4
    assert graph.symbols["s1"] == 6
    assert only(graph, "aten.mul.Tensor").attrs["other"] == s0
    assert only(graph, "aten.view.default").attrs["size"][0] == 2 * s0


def test_a_size_divided_without_remainder_is_a_polynomial() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = (x @ x.T).view(-1)
        return flat.view(x.shape[0], -1).exp() * 2, torch.cat([flat, flat]).view(x.shape[0], -1).neg()

    graph = check(function, f32(4, 6), dynamic=True).graph
    s0 = symbol("s0")
    exponential, negated = (graph.specs[only(graph, f"aten.{name}.default").outputs[0]] for name in ("exp", "neg"))
    assert exponential.shape == (s0, s0) and exponential.strides == (s0, 1)
    assert negated.shape == (s0, 2 * s0) and negated.strides == (2 * s0, 1)


def test_a_dynamic_graph_runs_at_other_sizes() -> None:
    trace = check(lambda x: x.reshape(x.shape[0], 2, -1).softmax(-1) * x.shape[0], f32(4, 6), dynamic=True)
    x = f32(9, 14)
    sizes = {"s0": 9, "s1": 14}
    placeholders = trace.module.graph.find_nodes(op="placeholder")
    named = {node: sizes[name] for name, node in trace.scalars.items() if node.op == "placeholder"}
    arguments = [named.get(node, x) for node in placeholders]
    torch.testing.assert_close(runner(trace)(*arguments)[0], x.reshape(9, 2, -1).softmax(-1) * 9)


# -- what is kept whole or refused ------------------------------------------------------------------------


def test_control_flow_is_one_opaque_op() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x * 2,)) * 3

    trace = check(function, f32(3, 4))
    node = only(trace.graph, "higher_order.cond")
    assert len(node.inputs) == 2


def test_autocast_is_refused_by_name() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    with pytest.raises(Exception, match="autocast") as caught:
        check(function, f32(4, 4))
    assert "CaptureError" in str(caught.value) or isinstance(caught.value, CaptureError)


def test_disabled_autocast_is_no_op() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.exp()

    assert ops(check(function, f32(4, 4)).graph) == ["aten.exp.default"]


def test_a_sparse_tensor_is_refused() -> None:
    graph = fx.Graph()
    graph.placeholder("table").meta["val"] = torch.eye(3).to_sparse()
    graph.output(())
    with pytest.raises(CaptureError, match=r"table.*sparse_coo"):
        normalise(fx.GraphModule({}, graph))


def test_calls_that_are_no_aten_op_are_refused_by_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    graph.output(graph.call_function(torch.special.expit, (x,)))
    with pytest.raises(CaptureError, match="special_expit"):
        normalise(fx.GraphModule({}, graph))
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    with pytest.raises(CaptureError, match="layer is a call_module"):
        normalise(fx.GraphModule({"layer": torch.nn.Identity()}, graph))


def test_gradient_mode_switches_vanish() -> None:
    @torch.no_grad()
    def inner(x: Tensor) -> Tensor:
        return x.cos()

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return inner(x) + 1

    assert ops(check(function, f32(3)).graph) == ["aten.cos.default", "aten.add.Tensor"]
