"""Sequences of kernels: wired as the model is, on operands that they share, releasing what is done with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graphs import Builder
from reference_backend import ReferenceBackend
from search_fakes import FakeSubject
from torch import Tensor

from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject
from fuseplan.search.timing.sequence import Part, SharedOperands, sequence
from fuseplan.search.timing.subject import Subject

TARGET = Target("cpu", "native", 2)


def inputs_of(subject: Subject) -> Sequence[Tensor]:
    return subject.make_inputs(0, "cpu")


def part(graph: Any, ops: Sequence[str], fused: bool = False) -> Part:
    subject = group_subject(graph, ops, "+".join(ops))
    backend = ReferenceBackend() if fused else None
    return Part(subject, backend, {"tile": 1} if fused else {}, subject.inputs, subject.outputs)


def branching() -> tuple[Any, list[str]]:
    """``a = exp(x) * w``, ``b = tanh(a)``, ``c = a + y``: what ``a`` is, both others read."""
    b = Builder(x=torch.randn(3, 127), w=torch.randn(127), y=torch.randn(3, 127))
    e = b("aten.exp.default", "x")
    a = b("aten.mul.Tensor", e, "w")
    t = b("aten.tanh.default", a)
    c = b("aten.add.Tensor", a, "y")
    return b.graph(t, c), [e, a, t, c]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("groups", [((0,), (1,), (2,), (3,)), ((2,), (0, 1), (3,)), ((3, 2, 1, 0),), ((2, 3), (0, 1))])
def test_any_division_computes_the_same(groups: tuple[tuple[int, ...], ...], fused: bool) -> None:
    graph, values = branching()
    ops = [node.name for node in graph]
    operands = SharedOperands(inputs_of)
    parts = [part(graph, [ops[at] for at in sorted(group)], fused) for group in groups]
    run = sequence(parts, operands, values[2:], TARGET)
    whole = group_subject(graph, ops, "all")
    names = dict(zip(_names(parts, values), operands.tensors, strict=True))
    expected = dict(zip(whole.outputs, whole.eager(*(names[name] for name in whole.inputs)), strict=True))
    found = run(*operands.tensors)
    made = [name for one in parts for name in one.makes if name in values[2:]]
    assert isinstance(found, tuple) and len(found) == 2
    for name, tensor in zip(made, found, strict=True):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)


def _names(parts: Sequence[Part], made: Sequence[str]) -> list[str]:
    """Names of what is read from outside, in the order in which it is first asked for."""
    return list(dict.fromkeys(name for one in parts for name in one.reads if name not in made))


def test_sides_share_their_operands() -> None:
    graph, values = branching()
    ops = [node.name for node in graph]
    operands = SharedOperands(inputs_of)
    one = sequence([part(graph, ops)], operands, values[2:], TARGET)
    count = len(operands.tensors)
    several = sequence([part(graph, [op]) for op in ops], operands, values[2:], TARGET)
    assert len(operands.tensors) == count == 3
    assert sorted(operands.hot) == [False, False, False]  # nothing in this graph made them
    for mine, theirs in zip(one(*operands.tensors), several(*operands.tensors), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_activations_are_told_from_weights() -> None:
    graph, _ = branching()
    ops = [node.name for node in graph]
    operands = SharedOperands(inputs_of)
    sequence([part(graph, ops[1:])], operands, (), TARGET)
    assert dict(zip(("v0_0", "w", "y"), operands.hot, strict=True)) == {"v0_0": True, "w": False, "y": False}


def test_every_part_keeps_its_own_indices() -> None:
    b = Builder(table=torch.randn(5, 8), ids=torch.tensor([0, 1, 2]))
    rows = b("aten.embedding.default", "table", b("aten.add.Tensor", "ids", "ids"))  # sampled ids add up to 14
    graph = b.graph(rows)
    ops = [node.name for node in graph]
    operands = SharedOperands(inputs_of)
    run = sequence([part(graph, [op]) for op in ops], operands, [rows], TARGET)
    assert [tensor.dtype for tensor in operands.tensors].count(torch.int64) == 2
    (found,) = run(*operands.tensors)
    assert found.shape == (3, 8)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sides_are_given_equal_numbers_that_are_within_every_table(order: tuple[int, int]) -> None:
    b = Builder(table=torch.randn(5, 8), place=torch.tensor([3]), keys=torch.arange(1000))
    row = b("aten.embedding.default", "table", "place")
    mask = b("aten.le.Tensor", "keys", "place")
    graph = b.graph(row, mask)
    parts = [part(graph, [node.name]) for node in graph]
    operands = SharedOperands(inputs_of)
    numbers = {}
    for at in order:
        (slot,) = (one for one, name in zip(operands.sources(parts[at], ()), parts[at].reads, strict=True)
                   if name == "place")
        numbers[at] = slot
    assert numbers[0] == numbers[1]
    assert operands.tensors[int(numbers[0])].tolist() == [4]  # the mask alone may have had any number


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_numbers_that_indices_are_computed_of_stay_as_small_as_was_found_to_work(order: tuple[int, int]) -> None:
    b = Builder(table=torch.randn(5, 8), ids=torch.tensor([0, 1, 2]))
    near = b("aten.embedding.default", "table", "ids")
    far = b("aten.embedding.default", "table", b("aten.add.Tensor", "ids", "ids"))
    graph = b.graph(near, far)
    first, *others = (node.name for node in graph)
    parts = [part(graph, [first]), part(graph, others)]
    operands = SharedOperands(inputs_of)
    run = sequence([parts[at] for at in order], operands, [near, far], TARGET)
    assert [tensor.dtype for tensor in operands.tensors].count(torch.int64) == 1
    assert all(result.shape == (3, 8) for result in run(*operands.tensors))


@dataclass(frozen=True)
class Watching:
    """A part that keeps weak references to what it made, and says what of the others' is alive when it is called."""

    seen: dict[str, list[str]]
    alive: dict[str, weakref.ref[Tensor]]

    def part(self, graph: Any, op: str) -> Part:
        subject = group_subject(graph, [op], op)
        return Part(_Watched(subject, self), reads=subject.inputs, makes=subject.outputs)


class _Watched:
    def __init__(self, subject: TunableGroup, watching: Watching) -> None:
        self._subject, self._watching = subject, watching

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject, name)

    def eager(self, *inputs: Tensor) -> list[Tensor]:
        gc.collect()
        alive = self._watching.alive
        self._watching.seen[self._subject.key] = sorted(name for name, one in alive.items() if one() is not None)
        made = self._subject.eager(*inputs)
        alive.update({name: weakref.ref(one) for name, one in zip(self._subject.outputs, made, strict=True)})
        return made


@pytest.mark.usefixtures("quick_collections")
def test_values_are_released_after_their_last_use_but_for_those_kept() -> None:
    b = Builder(x=torch.randn(4))
    values = [b("aten.exp.default", "x")]
    for op in ("aten.neg.default", "aten.tanh.default", "aten.cos.default"):
        values.append(b(op, values[-1]))
    graph = b.graph(values[1], values[3])
    ops = [node.name for node in graph]
    watching = Watching({}, {})
    run = sequence([watching.part(graph, op) for op in ops], operands := SharedOperands(inputs_of), [values[1]], TARGET)
    assert [tensor.shape for tensor in run(*operands.tensors)] == [(4,)]
    # While an op runs its operand lives; so does what is kept.
    assert [watching.seen[op] for op in ops] == [[], values[:1], values[1:2], values[1:3]]


def test_parts_without_names_share_nothing() -> None:
    first, second = Part(FakeSubject()), Part(FakeSubject(key="other"))
    run = sequence([first, second], operands := SharedOperands(inputs_of), (), TARGET)
    assert len(operands.tensors) == 6
    assert run(*operands.tensors) == ()


@pytest.mark.usefixtures("quick_collections")
def test_parts_keep_the_order_of_the_model_where_they_can() -> None:
    """Two chains, one after the other: side by side, both chains' intermediates would live at once."""
    b = Builder(x=torch.randn(4), y=torch.randn(4))
    ends = []
    for start in ("x", "y"):
        value = start
        for op in ("aten.exp.default", "aten.tanh.default", "aten.neg.default"):
            value = b(op, value)
        ends.append(value)
    graph = b.graph(*ends)
    ops = [node.name for node in graph]
    watching = Watching({}, {})
    parts = [watching.part(graph, op) for op in ops]
    shuffled = [parts[1], parts[0], *parts[2:]]  # the first two only run the other way round
    for given in (parts, shuffled):
        watching.seen.clear()
        sequence(given, operands := SharedOperands(inputs_of), ends, TARGET)(*operands.tensors)
        assert list(watching.seen) == ops


def test_truth_values_are_handed_on_and_integers_only_wait() -> None:
    b = Builder(x=torch.randn(5), y=torch.randn(5), ids=torch.arange(5))
    mask = b("aten.gt.Tensor", "x", "y")
    first = b("aten.where.self", mask, "x", "y")
    second = b("aten.where.self", mask, "y", "x")
    count = b("aten.add.Tensor", "ids", "ids")
    third = b("aten.mul.Tensor", count, "x")
    graph = b.graph(first, second, third)
    parts = {op: part(graph, [op]) for op in (node.name for node in graph)}
    operands = SharedOperands(inputs_of)
    backwards = [parts[name] for name in reversed(list(parts))]
    found = dict(zip((third, second, first), sequence(backwards, operands, [first, second, third], TARGET)(
        *operands.tensors), strict=True))
    assert sum(tensor.dtype == torch.bool for tensor in operands.tensors) == 0
    assert sum(tensor.dtype == torch.int64 for tensor in operands.tensors) == 2  # of its maker, and of its reader
    x, y = (tensor for tensor in operands.tensors if tensor.is_floating_point())
    assert torch.equal(found[first] + found[second], x + y)


def test_what_indices_are_computed_of_is_handed_to_nobody() -> None:
    b = Builder(x=torch.zeros(5), table=torch.randn(2, 3))
    far = b("aten.mul.Tensor", "x", other=1000.0)
    index = b("aten.to.dtype", b("aten.abs.default", far), dtype="int64")
    graph = b.graph(b("aten.embedding.default", "table", index))
    first, *others = (node.name for node in graph)
    operands = SharedOperands(inputs_of)
    run = sequence([part(graph, [first]), part(graph, others)], operands, [graph.outputs[0]], TARGET)
    (found,) = run(*operands.tensors)
    assert torch.isfinite(found).all()


def test_a_value_that_nothing_makes_cannot_be_kept() -> None:
    graph, _ = branching()
    with pytest.raises(ValueError, match="no part of the sequence makes nonsense"):
        sequence([part(graph, [node.name for node in graph])], SharedOperands(inputs_of), ["nonsense"], TARGET)


def test_parts_of_the_past_lend_nobody_their_operands() -> None:
    operands = SharedOperands(inputs_of)
    for rows in range(1, 30):
        subject = FakeSubject(rows=rows)
        (slot, *_) = operands.sources(Part(subject), ())
        assert isinstance(slot, int)
        assert operands.tensors[slot].shape[0] == rows
    assert len(operands.tensors) == 3 * 29


def test_parts_that_wait_for_each_other_are_refused() -> None:
    graph, _ = branching()
    ops = [node.name for node in graph]
    one, other = part(graph, [ops[0]]), part(graph, [ops[1]])
    looped = Part(one.subject, reads=other.makes, makes=one.makes)
    with pytest.raises(ValueError, match="wait for each other"):
        sequence([looped, other], SharedOperands(inputs_of), (), TARGET)


def test_operands_that_came_later_do_no_harm() -> None:
    graph, values = branching()
    ops = [node.name for node in graph]
    operands = SharedOperands(inputs_of)
    early = sequence([part(graph, ops[:1])], operands, values[:1], TARGET)
    sequence([part(graph, ops)], operands, values[2:], TARGET)
    (found,) = early(*operands.tensors)
    torch.testing.assert_close(found, operands.tensors[0].exp())
