"""Address maps against the view ops of torch, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_oracle import value_of

from fuseplan.kernels.ir.index import Index, symbol
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.ops.positions import reshape_position
from fuseplan.planner.ops.table import is_address_map, op_of


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).split(".")[1], tuple(tensor.stride()))


def coordinates(shape: tuple[int, ...]) -> tuple[Index, ...]:
    return tuple(Index.coord(axis, extent) for axis, extent in enumerate(shape))


def check_map(node: OpNode, source: torch.Tensor, results: list[torch.Tensor]) -> None:
    """Reading ``source`` where the map says must give the elements of each result."""
    specs = {"x": spec_of(source), **{name: spec_of(r) for name, r in zip(node.outputs, results, strict=True)}}
    for name, result in zip(node.outputs, results, strict=True):
        position = op_of(node.op).view(node, name, coordinates(tuple(result.shape)), specs)
        for point in itertools.product(*(range(extent) for extent in result.shape)):
            at = tuple(value_of(index, point) for index in position)
            assert source[at] == result[point], (node.op, point, at)


CASES: list[tuple[str, dict[str, Any], Callable[[torch.Tensor], Any]]] = [
    ("aten.view.default", {"size": (6, 20)}, lambda x: x.view(6, 20)),
    ("aten.view.default", {"size": (2, 3, 2, 10)}, lambda x: x.view(2, 3, 2, 10)),
    ("aten.reshape.default", {"shape": (5, 24)}, lambda x: x.reshape(5, 24)),
    ("aten.permute.default", {"dims": (2, 0, 1)}, lambda x: x.permute(2, 0, 1)),
    ("aten.transpose.int", {"dim0": -1, "dim1": 0}, lambda x: x.transpose(-1, 0)),
    ("aten.mT.default", {}, lambda x: x.mT),
    ("aten.unsqueeze.default", {"dim": 1}, lambda x: x.unsqueeze(1)),
    ("aten.unsqueeze.default", {"dim": -1}, lambda x: x.unsqueeze(-1).clone()),
    ("aten.slice.Tensor", {"dim": 2, "start": 2, "end": 2**63 - 1}, lambda x: x[:, :, 2:]),
    ("aten.slice.Tensor", {"dim": -1, "start": -3, "end": -1}, lambda x: x[..., -3:-1]),
    ("aten.slice.Tensor", {"dim": 1, "start": 0, "end": 4, "step": 2}, lambda x: x[:, 0:4:2]),
    ("aten.narrow.default", {"dim": 1, "start": 1, "length": 2}, lambda x: x.narrow(1, 1, 2)),
    ("aten.select.int", {"dim": 1, "index": -1}, lambda x: x.select(1, -1)),
    ("aten.split.Tensor", {"split_size": 2, "dim": 1}, lambda x: x.split(2, 1)),
    ("aten.split_with_sizes.default", {"split_sizes": (1, 4), "dim": 2}, lambda x: x.split((1, 4), 2)),
    ("aten.chunk.default", {"chunks": 2, "dim": -1}, lambda x: x.chunk(2, -1)),
    ("aten.unbind.int", {"dim": 1}, lambda x: x.unbind(1)),
    ("aten.alias.default", {}, lambda x: x),
]


@pytest.mark.parametrize(("op", "attrs", "run"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)])
def test_view_map(op: str, attrs: dict[str, Any], run: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(120).view(6, 4, 5)
    result = run(x)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    check_map(OpNode(op, ("x",), tuple(f"y{n}" for n in range(len(results))), attrs), x, results)


@pytest.mark.parametrize(("shape", "target"), [((3, 1, 4), (3, 5, 4)), ((4,), (2, 3, 4)), ((1,), (7,))])
def test_expand(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    check_map(OpNode("aten.expand.default", ("x",), ("y",), {"size": target}), x, [x.expand(target)])


@pytest.mark.parametrize("dim", [None, 0, (0, 2), 1])
def test_squeeze(dim: Any) -> None:
    x = torch.arange(12).view(1, 4, 1, 3)
    attrs = {} if dim is None else {"dim": dim}
    check_map(OpNode("aten.squeeze.dims", ("x",), ("y",), attrs), x, [x.squeeze() if dim is None else x.squeeze(dim)])


@st.composite
def factorised(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same number of elements, ones included."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        shape = [1]
        for prime in draw(st.permutations(primes)):
            if draw(st.booleans()):
                shape.append(prime)
            else:
                shape[-1] *= prime
        return tuple(shape)

    return grouped(), grouped()


@settings(max_examples=60, deadline=None)
@given(factorised())
def test_reshape_position_is_torch_reshape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source_shape, target_shape = shapes
    source = torch.arange(torch.Size(source_shape).numel()).view(source_shape)
    target = source.reshape(target_shape)
    position = reshape_position(coordinates(target_shape), target_shape, source_shape)
    for point in itertools.product(*(range(extent) for extent in target_shape)):
        assert source[tuple(value_of(index, point) for index in position)] == target[point]


def test_reshape_with_a_dynamic_dimension_needs_no_division() -> None:
    s = symbol("s0")
    joined = (Index.coord(0, 2), Index.coord(1, s), Index.coord(2, 32), Index.coord(3, 64))
    position = reshape_position(joined, (2, s, 32, 64), (2, s, 2048))
    assert position == (joined[0], joined[1], joined[2] * 64 + joined[3])


def test_a_reshape_that_copies_is_not_an_address_map() -> None:
    x = torch.empty(4, 6)
    node = OpNode("aten.reshape.default", ("x",), ("y",), {"shape": (24,)})
    assert is_address_map(node, {"x": spec_of(x), "y": spec_of(x.reshape(24))})
    assert not is_address_map(node, {"x": spec_of(x.t()), "y": spec_of(x.t().reshape(24))})
    rows = x[:, :3]  # a strided view whose rows cannot be joined
    assert not is_address_map(node, {"x": spec_of(rows), "y": spec_of(rows.reshape(12))})
