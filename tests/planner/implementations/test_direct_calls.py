"""ATen calls through PyTorch's own bindings: the same operator with the same arguments, or left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from fake_traces import Function, traced
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplan.planner.implementations.direct_calls import Direct, bind_calls, fill_namespace, find_binding

aten = torch.ops.aten
def bound(module: fx.GraphModule) -> fx.GraphModule:
    """The same module with its calls bound, as the executor does it."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {"traced": node.name}
    bind_calls(graph, module.graph)
    result = fx.GraphModule(module, graph)
    fill_namespace(result.forward.__globals__)
    return result


class Seen(TorchDispatchMode):
    """The operators that reach the dispatcher below the composite ones, with their plain arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(torch.Tensor, lambda one: tuple(one.shape), (args, kwargs or {}))
        self.calls.append((func, plain))
        return func(*args, **(kwargs or {}))


#: A shape of random numbers, or a tensor.
Operand = tuple[int, ...] | torch.Tensor


def tensors(*operands: Operand) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [one.clone() if isinstance(one, torch.Tensor) else torch.randn(one) for one in operands]


INDEX = torch.tensor([2, 0])
MASK = torch.tensor([[True, False, True, False]] * 3)

#: name -> (function, shapes): every operator in it has a binding.
BOUND: dict[str, tuple[Function, list[Operand]]] = {
    "views": (
        lambda x: (x.view(4, 3), x.t(), x[:, None].expand(3, 2, 4), x.permute(1, 0), x.reshape(-1), x[..., None], x[1]),
        [(3, 4)],
    ),
    "parts": (lambda x: (*x.split(2, 1), *x.chunk(2, -1), *x.unbind(0), *x.split([1, 3], 1)), [(3, 4)]),
    "linear": (lambda x, w, b: (F.linear(x, w), F.linear(x, w, b), x @ w.t()), [(2, 3, 4), (5, 4), (5,)]),
    "products": (
        lambda x, y, b: (x.bmm(y), torch.baddbmm(b, x, y, beta=0.5, alpha=2), torch.addmm(b[0], x[0], y[0])),
        [(2, 3, 4), (2, 4, 5), (2, 3, 5)],
    ),
    "attention": (
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m, scale=0.3), [(1, 4, 3, 8), (1, 4, 5, 8), (3, 5)]
    ),
    "grouped attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True),
        [(1, 4, 3, 8), (1, 2, 3, 8)],
    ),
    "scalars": (lambda x: (x + 1, x * 2.0, 1 - x, x.pow(2), x**0.5, 2.0 / x, x > 0, x.clamp(min=0.1)), [(3, 4)]),
    "keywords": (
        lambda x, y: (torch.add(x, y, alpha=2), x.sum(-1, keepdim=True, dtype=torch.float64), x.var(-1, correction=0)),
        [(3, 4), (3, 4)],
    ),
    "reductions": (
        lambda x: (x.mean(-1), x.amax(1, True), x.argmax(-1), *x.max(-1), *x.topk(2), *x.sort(-1), x.softmax(-1)),
        [(3, 4)],
    ),
    "in place": (
        lambda x, y, i: (x.add_(1), x.mul_(y), x.index_copy_(0, i, y[:2]), x.copy_(y), x[0].fill_(2.0), y.zero_()),
        [(3, 4), (3, 4), INDEX],
    ),
    "masks": (
        lambda x, y, m: (x.masked_fill(m, -1.0), torch.where(m, x, y), x.masked_fill_(m, 2)), [(3, 4), (3, 4), MASK]
    ),
    "norms": (
        lambda x, w: (F.layer_norm(x, (4,), w), F.rms_norm(x, (4,), w, 1e-6), F.group_norm(x[None], 3)),
        [(3, 4), (4,)],
    ),
    "activations": (lambda x: (F.gelu(x, approximate="tanh"), F.silu(x), F.relu(x), x.tanh(), x.sigmoid()), [(3, 4)]),
    "tables": (lambda x, i: (F.embedding(i, x), x.index_select(0, i), x.gather(0, i[:, None])), [(3, 4), INDEX]),
    "lists": (lambda x, y: (torch.cat([x, y], -1), torch.stack([x, y])), [(3, 4), (3, 4)]),
    "convolution": (lambda x, w: F.conv2d(x, w, None, stride=2, padding=1), [(1, 3, 8, 8), (4, 3, 3, 3)]),
    "casts": (lambda x: (x.double(), x.to(torch.int32), x.float()), [(3, 4)]),
}
#: What is called as it was: no binding of that name, or nothing that could be tried out.
LEFT: dict[str, tuple[Function, list[Operand]]] = {
    "slice": (lambda x: x[1:], [(3, 4)]),
    "advanced": (lambda x, i: x[i], [(3, 4), INDEX]),
    "factory": (lambda x: torch.full((3, 4), 2.0), [(3, 4)]),
    "device": (lambda x: torch.zeros_like(x, device="cpu"), [(3, 4)]),
    "random": (lambda x: torch.bernoulli(torch.full_like(x, 1.0)), [(3, 4)]),
    "out": (lambda x, y, z: torch.add(x, y, out=z), [(3, 4), (3, 4), (3, 4)]),
    "data": (lambda x: x.nonzero(), [(3, 4)]),
}


def operators(module: fx.GraphModule) -> set[str]:
    return {
        str(node.target) for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.all_input_nodes
    }


@pytest.mark.parametrize("name", [*BOUND, *LEFT])
def test_results_writes_and_aliases_are_the_same(name: str) -> None:
    function, shapes = {**BOUND, **LEFT}[name]
    mine, theirs = tensors(*shapes), tensors(*shapes)
    module = traced(function, *mine)
    direct = bound(module)
    with torch.no_grad():
        with Seen() as expected_calls:
            expected = pytree.tree_leaves(module(*theirs))
        with Seen() as calls:
            result = pytree.tree_leaves(direct(*mine))
    assert calls.calls == expected_calls.calls
    for one, other in zip((*result, *mine), (*expected, *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == other.stride() and one._version == other._version
        assert (one._base is None) == (other._base is None)
    for values, own in ((result, mine), (expected, theirs)):
        values += own
    same = [[one is other for other in values] for values in (result, expected) for one in values]
    assert same[: len(same) // 2] == same[len(same) // 2 :]


@pytest.mark.parametrize("name", BOUND)
def test_these_operators_have_bindings(name: str) -> None:
    function, shapes = BOUND[name]
    # A slice is spelled in Python only, by an object; `getitem` with tensors is another operator.
    assert operators(bound(traced(function, *tensors(*shapes)))) <= {"aten.slice.Tensor", "aten.index.Tensor"}


@pytest.mark.parametrize("name", ["slice", "advanced", "device", "out", "data"])
def test_these_are_left_alone(name: str) -> None:
    function, shapes = LEFT[name]
    module = traced(function, *tensors(*shapes))
    assert operators(bound(module)) == operators(module) != set()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_random_numbers_are_drawn_as_before() -> None:
    q = meta(1, 2, 3, 4)
    assert find_binding(aten.scaled_dot_product_attention.default, (q, q, q), {}) is not None
    assert find_binding(aten.scaled_dot_product_attention.default, (q, q, q, None, 0.5), {}) is None
    assert find_binding(aten.bernoulli.default, (q,), {}) is None
    state = torch.get_rng_state()
    find_binding(aten.rand_like.default, (q,), {})
    assert torch.equal(state, torch.get_rng_state())


def test_a_binding_that_picks_another_overload_is_not_taken() -> None:
    # `Tensor.to` has no layout, and with a dtype it is another overload; no Python spelling gives this one.
    assert find_binding(aten.to.dtype_layout, (meta(3),), {"dtype": torch.float64, "layout": torch.strided}) is None
    assert find_binding(aten.to.dtype, (meta(3), torch.float64), {}) is not None
    # `Tensor.add` with a number is `add.Tensor`, as in eager.
    assert find_binding(aten.add.Scalar, (meta(3), 1), {}) is None
    assert find_binding(aten.add.Tensor, (meta(3), 1), {}) is not None
    assert find_binding(aten.contiguous.default, (meta(3),), {}) is None


def test_the_kind_of_each_argument_counts() -> None:
    whole, number = find_binding(aten.mul.Tensor, (meta(3), 2), {}), find_binding(aten.mul.Tensor, (meta(3), 2.0), {})
    assert whole is number is not None  # one function, two entries
    assert find_binding(aten.sum.dim_IntList, (meta(3, 4), [1]), {}) is not None
    assert find_binding(aten.sum.dim_IntList, (meta(3, 4), [1], True), {"dtype": torch.int32}) is not None


def test_a_binding_is_found_where_the_dispatcher_leaves_traces_out() -> None:
    """As within a ``__torch_dispatch__``. Answers are kept, and no other test asks for a matrix of int16."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.PreDispatch, True)
        found = find_binding(torch.ops.aten.t.default, [torch.empty(3, 4, dtype=torch.int16, device="meta")], {})
    assert found is not None and found.__name__ == "t"


def test_a_function_has_one_name_in_generated_code() -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 3).view(3, 4).view(2, 6).t()

    module = bound(traced(many, *tensors((3, 4))))
    names = {name for name in module.forward.__globals__ if name.startswith("fuseplan_")}
    assert names == {"fuseplan_view", "fuseplan_t"}
    assert not any(isinstance(value, Direct) for value in module.forward.__globals__.values())
    assert module.code.count("fuseplan_view(") == 3 and "torch.ops" not in module.code


def test_dynamic_sizes_stay_arguments() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] * 2, -1).transpose(0, 1) * 2

    module = bound(traced(rows, *tensors((3, 4)), symbolic=True))
    for count in (3, 5, 1):
        (x,) = tensors((count, 4))
        assert torch.equal(module(x), rows(x))
    assert "fuseplan_view" in module.code


def test_a_module_can_be_copied_before_it_is_filled() -> None:
    module = traced(lambda x: x.view(4, 3) + 1, *tensors((3, 4)))
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        node.meta["traced"] = node.name
    bind_calls(graph, module.graph)
    x = tensors((3, 4))[0]
    assert torch.equal(copy.deepcopy(fx.GraphModule(module, graph))(x), x.view(4, 3) + 1)
