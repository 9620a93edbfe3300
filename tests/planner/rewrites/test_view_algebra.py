"""Where elements come from, against tensors of numbers that are really moved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.planner.rewrites.view_algebra import ElementMap, moved_from, walked

_aten = torch.ops.aten


def numbers(where: ElementMap) -> torch.Tensor:
    """The number of the source's element at each place."""
    found = torch.zeros(where.shape, dtype=torch.int64)
    for place in itertools.product(*map(range, where.shape)):
        total = 0
        for at, digits in zip(place, where.dims, strict=True):
            for size, stride in reversed(digits):
                at, rest = divmod(at, size)
                total += rest * stride
        found[place] = total
    return found


def followed(function: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> ElementMap | None:
    trace = make_fx(function, tracing_mode="fake", pre_dispatch=True)(source)
    where: ElementMap | None = ElementMap.of(tuple(source.shape))
    for node in trace.graph.nodes:
        if node.op == "call_function":
            where = where.through(node) if where is not None else None
    return where


def moves(shape: tuple[int, ...], draw: Callable[[Any], Any]) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """One way to move the elements of a tensor, drawn by hypothesis."""
    kind = draw(st.sampled_from(["permute", "merge", "split", "expand", "repeat", "clone", "narrow", "squeeze"]))
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "permute":
        order = draw(st.permutations(range(len(shape))))
        return kind, lambda x: x.permute(order)
    if kind == "merge":
        return kind, lambda x: x.flatten(dim, min(dim + 1, x.dim() - 1))
    if kind == "split":
        parts = [size for size in range(1, shape[dim] + 1) if shape[dim] % size == 0]
        inner = draw(st.sampled_from(parts))
        return kind, lambda x: x.unflatten(dim, (-1, inner))
    if kind == "expand":
        times = draw(st.integers(1, 3))
        return kind, lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], times, *x.shape[dim:])
    if kind == "repeat":
        times = draw(st.integers(1, 3))
        return kind, lambda x: x.repeat_interleave(times, dim)
    if kind == "narrow":
        size = draw(st.integers(1, shape[dim]))
        return kind, lambda x: x[(slice(None),) * dim + (slice(0, size),)]
    return kind, {"clone": lambda x: x.clone(), "squeeze": lambda x: x.squeeze(dim)}[kind]


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_a_chain_of_moves_says_where_each_element_is_from(shape: list[int], data: st.DataObject) -> None:
    source = torch.arange(math.prod(shape)).reshape(shape)
    chain = []
    moved = source
    for _ in range(data.draw(st.integers(1, 4))):
        if not 0 < moved.dim() < 6 or moved.numel() > 300:
            break
        _, step = moves(tuple(moved.shape), data.draw)
        chain.append(step)
        moved = step(moved)

    def run(x: torch.Tensor) -> torch.Tensor:
        for step in chain:
            x = step(x)
        return x

    where = followed(run, source)
    if where is not None:
        assert where.shape == tuple(moved.shape)
        assert torch.equal(numbers(where), moved)
        assert torch.equal(numbers(where.plain()), moved)


@given(digits=st.lists(st.integers(1, 4), min_size=1, max_size=3), size=st.integers(1, 8), stride=st.integers(0, 8))
def test_steps_through_digits_are_counted_or_refused(digits: list[int], size: int, stride: int) -> None:
    if (size - 1) * stride >= math.prod(digits):
        return
    source = ElementMap(tuple(((extent, 10**number),) for number, extent in enumerate(digits)))
    flat = numbers(source).flatten()
    found = walked([digit for dim in source.dims for digit in dim], size, stride)
    if found is not None:
        assert numbers(ElementMap((found,))).tolist() == [int(flat[at * stride]) for at in range(size)]


def test_what_attention_sees_of_gathered_pages_is_never_refused() -> None:
    pages = torch.arange(2 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6)  # batch, blocks, heads, rows, width

    def shared(x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 1, 3, 4).contiguous().view(2, 4, 15, 6)
        return x[:, :, None].expand(2, 4, 3, 15, 6).reshape(2, 12, 15, 6)

    where = followed(shared, pages)
    assert where is not None and torch.equal(numbers(where), shared(pages))
    assert where.plain().dims == (((2, 360),), ((4, 30), (3, 0)), ((3, 120), (5, 6)), ((6, 1),))


@pytest.mark.parametrize("function", [
    lambda x: x * 1, lambda x: x.flip(0), lambda x: x[1:], lambda x: torch.as_strided(x, (2, 2), (1, 1)),
    lambda x: x.view(torch.int32), lambda x: x.repeat(2, 1), lambda x: torch.cat([x, x]), lambda x: x.to(torch.float32),
    lambda x: x.add_(1), lambda x: x.index_select(0, torch.tensor([1, 0])),
])
def test_what_may_do_more_than_move_elements_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert followed(function, torch.arange(12).reshape(3, 4)) is None


def test_the_calls_from_an_op_on() -> None:
    def run(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[at].transpose(0, 1).unsqueeze(0), (x + 1).transpose(0, 1)

    trace = make_fx(run, tracing_mode="fake", pre_dispatch=True)(torch.randn(3, 4), torch.tensor([1, 0]))
    found, other = trace.graph.output_node().args[0]
    path = moved_from(found, lambda node: node.target is _aten.index.Tensor)
    assert path is not None
    assert [one.target for one in path] == [_aten.index.Tensor, _aten.transpose.int, _aten.unsqueeze.default]
    assert moved_from(other, lambda node: node.target is _aten.index.Tensor) is None
