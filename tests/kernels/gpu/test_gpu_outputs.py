"""Outputs of direct launches: their layouts, and inputs whose place they take."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from fake_driver import Machine, aligned, needs_compiler, pretend_cuda

from fuseplan.kernels.gpu.launch import Geometry
from fuseplan.kernels.ir.backend import OutputLayout


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


@needs_compiler
@pytest.mark.parametrize("count", [1, 2])
def test_fused_allocates_what_the_layout_says(count: int) -> None:
    machine = Machine(addresses=1 + count, sizes=1)
    kernel = machine.kernel(tuple((n, 0) for n in range(1 + count)), 1 + count)
    asked: list[tuple[int, ...]] = []

    def layout(sizes: tuple[int, ...]) -> tuple[OutputLayout, ...]:
        asked.append(sizes)
        return tuple(((sizes[0], 3), (1, sizes[0] + n), torch.bfloat16) for n in range(count))

    call, x = kernel.fused(1, layout), aligned(4)
    for n in (4, 4, 9, 4):
        made = call(x, n)
        made = (made,) if count == 1 else made
        assert isinstance(made, tuple) and len(made) == count
        assert [(tuple(t.shape), t.stride(), t.dtype) for t in made] == list(layout((n,)))
    direct = [one[5] for one in machine.direct]
    assert not machine.slow and [values[1 + count] for values in direct] == [4, 4, 9, 4]
    assert direct[-1][: 1 + count] == tuple(t.data_ptr() for t in (x, *made))


@needs_compiler
@pytest.mark.parametrize("reuse", [{0: 1}, {1: 0}, {2: 2, 0: 0}, {0: 0, 1: 2, 2: 1}], ids=str)
def test_fused_returns_the_inputs_whose_place_outputs_take(reuse: dict[int, int]) -> None:
    machine = Machine(addresses=6, sizes=1)
    kernel = machine.kernel(tuple((n, 0) for n in range(6)), 6)
    rest = [number for number in range(3) if number not in reuse]
    call = kernel.fused(3, lambda sizes: tuple(((*sizes, 1 + n), (1, 1), torch.int16) for n in rest), reuse)
    inputs = [aligned(4), aligned(8), aligned(12)]
    held = [sys.getrefcount(one) for one in inputs]
    for _ in range(3):
        made = call(*inputs, 5)
        assert all(made[number] is inputs[place] for number, place in reuse.items())
        assert [tuple(made[number].shape) for number in rest] == [(5, 1 + number) for number in rest]
        passed = tuple(one.data_ptr() for one in (*inputs, *made))
        assert machine.direct[-1][5][:6] == passed
        del made
    assert len(machine.direct) == 3
    assert [sys.getrefcount(one) for one in inputs] == held
    machine.error = 1
    with pytest.raises(RuntimeError):
        call(*inputs, 5)
    assert [sys.getrefcount(one) for one in inputs] == held


@needs_compiler
def test_places_that_are_none_are_errors() -> None:
    launcher = Machine(addresses=2).launcher()
    for reuse in ({0: 1}, {0: -2}):
        with pytest.raises(ValueError, match="an output takes the place of an input that the kernel does not have"):
            launcher.bind((1, 1, 0), [(0, 0), (1, 0)], print, print, reuse)


@needs_compiler
def test_fused_with_a_new_alignment_keeps_its_outputs() -> None:
    machine = Machine(addresses=2)
    call = machine.kernel(((0, 0), (1, 0)), 2).fused(1, lambda _: (((4,), (1,), torch.float32),))
    even, odd = aligned(8), aligned(8, shift=1)
    results = [call(x) for x in (even, odd, odd)]
    passed = [(x.data_ptr(), result.data_ptr()) for x, result in zip((even, odd, odd), results, strict=True)]
    assert [one[5][:2] for one in machine.direct] == passed


@needs_compiler
def test_empty_outputs_are_made_and_nothing_is_launched() -> None:
    machine = Machine(addresses=2)
    kernel = machine.kernel(((0, 0), (1, 0)), 2, lambda _: Geometry(0, False))
    call = kernel.fused(1, lambda _: (((0, 4), (4, 1), torch.float32),))
    for _ in range(3):
        assert call(torch.zeros(0, 4)).shape == (0, 4)
    assert machine.slow == machine.direct == []


@needs_compiler
def test_mistakes_are_errors_and_lose_no_memory() -> None:
    def allocate(shape: Any, strides: Any, dtype: Any) -> torch.Tensor:
        if fail:
            raise MemoryError("out of memory")
        return torch.empty_strided(shape, strides, dtype=dtype)

    fail = False
    machine = Machine(addresses=3)
    kernel = machine.kernel(((0, 0), (1, 0), (2, 0)), 3, allocate=allocate)
    one: OutputLayout = ((4,), (1,), torch.float32)
    call, x = kernel.fused(1, lambda _: (one, one)), aligned(4)
    call(x)
    held = sys.getrefcount(x)
    for _ in range(50):
        fail = True
        with pytest.raises(MemoryError, match="out of memory"):
            call(x)
        fail, machine.error = False, 1
        with pytest.raises(RuntimeError, match="CUDA error 1"):
            call(x)
        machine.error = 0
        with pytest.raises(TypeError, match="takes 1 tensors and 0 sizes, got 2 arguments"):
            call(x, x)
        with pytest.raises((TypeError, AttributeError)):
            call("a string")
    assert sys.getrefcount(x) == held
