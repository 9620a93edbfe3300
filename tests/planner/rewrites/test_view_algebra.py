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

from fuseplan.kernels.ir.index import Coord, Index, Mod
from fuseplan.planner.rewrites.view_algebra import coordinates, origins, source_position

_aten = torch.ops.aten


def number(index: Index, place: tuple[int, ...]) -> int:
    """The number that an index stands for at a place."""
    total = int(index.const)
    for atom, coefficient in index.terms:
        if isinstance(atom, Coord):
            total += place[atom.axis] * coefficient
        else:
            whole = divmod(number(atom.base, place), atom.divisor)
            total += whole[isinstance(atom, Mod)] * coefficient
    return total


def numbers(where: tuple[Index, ...], shape: tuple[int, ...], source: torch.Tensor) -> torch.Tensor:
    """The source's element at each place."""
    found = torch.zeros(shape, dtype=torch.int64)
    for place in itertools.product(*map(range, shape)):
        found[place] = source[tuple(number(index, place) for index in where)]
    return found


def followed(function: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> tuple[Index, ...] | None:
    """Where each element of a function's result is in its operand."""
    trace = make_fx(function, tracing_mode="fake", pre_dispatch=True)(source)
    calls = [node for node in trace.graph.nodes if node.op == "call_function"]
    shape = calls[-1].meta["val"].shape if calls else source.shape
    where: tuple[Index, ...] | None = coordinates(shape)
    for node in reversed(calls):
        where = source_position(node, where) if where is not None else None
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
        start = draw(st.integers(0, shape[dim] - size))
        return kind, lambda x: x[(slice(None),) * dim + (slice(start, start + size),)]
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
    assert where is not None
    assert torch.equal(numbers(where, tuple(moved.shape), source), moved)


def test_what_attention_sees_of_gathered_pages_is_never_refused() -> None:
    pages = torch.arange(2 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6)  # batch, blocks, heads, rows, width

    def shared(x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 1, 3, 4).contiguous().view(2, 4, 15, 6)
        return x[:, :, None].expand(2, 4, 3, 15, 6).reshape(2, 12, 15, 6)

    where = followed(shared, pages)
    assert where is not None and torch.equal(numbers(where, (2, 12, 15, 6), pages), shared(pages))
    batch, head, row, column = coordinates((2, 12, 15, 6))
    assert where == (batch, row // 5, head // 3, row % 5, column)


@pytest.mark.parametrize("function", [
    lambda x: x * 1, lambda x: x.flip(0), lambda x: torch.as_strided(x, (2, 2), (1, 1)),
    lambda x: x.view(torch.int32), lambda x: x.repeat(2, 1), lambda x: torch.cat([x, x]), lambda x: x.to(torch.float32),
    lambda x: x.add_(1), lambda x: x.index_select(0, torch.tensor([1, 0])),
])
def test_what_may_do_more_than_move_elements_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert followed(function, torch.arange(12).reshape(3, 4)) is None


def test_the_calls_that_a_node_is_made_of() -> None:
    def run(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[at].transpose(0, 1).unsqueeze(0), (x + 1).transpose(0, 1)

    trace = make_fx(run, tracing_mode="fake", pre_dispatch=True)(torch.randn(3, 4), torch.tensor([1, 0]))
    found, other = trace.graph.output_node().args[0]
    moved = list(origins(found))
    assert [one.target for one, _ in moved] == [_aten.unsqueeze.default, _aten.transpose.int, _aten.index.Tensor]
    assert moved[-1][1] == (Index.coord(2, 2), Index.coord(1, 4))
    assert [one.target for one, _ in origins(other)] == [_aten.transpose.int, _aten.add.Tensor]
