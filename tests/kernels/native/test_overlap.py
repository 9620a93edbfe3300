"""The check in front of calls that write to arguments: it sends exactly those calls elsewhere that it has to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compilers import find_compiler
from torch import Tensor

from fuseplan.kernels.native import overlap
from fuseplan.kernels.native.overlap import Operand, guarded


@pytest.fixture(params=["extension", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(overlap, "load_guard", lambda: None)
    elif find_compiler() is None:
        pytest.skip("no C++ compiler")


def addresses(tensor: Tensor) -> set[int]:
    """Of all bytes from the first to the last element."""
    if not tensor.numel():
        return set()
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return set(range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))


def meet(written: list[Tensor], read: list[Tensor]) -> bool:
    tensors = [*written, *read]
    return any(
        addresses(one) & addresses(other)
        for at, one in enumerate(written) for number, other in enumerate(tensors) if number > at
    )


#: Shapes and strides: one element, a row, rows apart, columns, a view of every other row, none.
LAYOUTS = (((1,), (1,)), ((3,), (1,)), ((2, 3), (3, 1)), ((2, 3), (1, 5)), ((3, 2), (7, 2)), ((2, 0), (1, 1)))
DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_calls_go_where_byte_by_byte_comparison_says(seed: int, dynamic: bool) -> None:
    choose = random.Random(seed)
    pools = [torch.zeros(size, dtype=torch.uint8) for size in choose.sample([160, 256, 1024, 4096], 3)]
    count, writes = choose.randrange(2, 7), choose.randrange(1, 3)
    layouts = [(choose.choice(LAYOUTS), choose.choice(DTYPES)) for _ in range(count)]

    def somewhere(at: int) -> Tensor:
        """A tensor for a position: its layout, or with dynamic sizes any one, in any memory."""
        (shape, strides), dtype = layouts[at]
        if dynamic:
            shape, strides = choose.choice(LAYOUTS)
        memory = choose.choice(pools).view(dtype)
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        return memory.as_strided(shape, strides, choose.randrange(memory.numel() - max(reach, 0)))

    tensors = [somewhere(at) for at in range(count)]
    order = choose.sample(range(count), count)  # those that are written stand anywhere among the arguments
    operands = [Operand.of(at, tensors[at]) for at in order]
    if dynamic:
        operands = [one._replace(span_bytes=-1) for one in operands]
    went, expected = list[str](), list[str]()
    call = guarded(
        lambda *args: went.append("compiled"), lambda *args: went.append("unfused"), lambda: went.append("met"),
        operands[:writes], operands[writes:],
    )
    for _ in range(40):
        for at in choose.sample(range(count), choose.randrange(count)):  # the others stay where they are
            tensors[at] = somewhere(at)
        call(*tensors)
        held = [tensors[at] for at in order]
        expected += ["met", "unfused"] if meet(held[:writes], held[writes:]) else ["compiled"]
    assert went == expected


def test_every_way_two_tensors_can_lie() -> None:
    def goes(x: Tensor, y: Tensor) -> str:
        sides: tuple[Callable[..., str], ...] = (lambda x, y: "compiled", lambda x, y: "unfused")
        return str(guarded(*sides, lambda: None, [Operand.of(0, x)], [Operand.of(1, y)])(x, y))

    memory = torch.zeros(60)
    assert goes(memory[:20], memory[20:40]) == goes(memory[20:40], memory[:20]) == "compiled"  # they touch
    assert goes(memory[:21], memory[20:40]) == goes(memory[20:40], memory[:21]) == "unfused"
    assert goes(memory, memory[7:8]) == goes(memory[7:8], memory) == goes(memory, memory) == "unfused"
    assert goes(memory.view(6, 10)[:, :3], memory.view(6, 10)[:, 5:]) == "unfused"  # interleaved: ranges decide
    assert goes(memory, memory[3:3]) == goes(memory[3:3], memory) == "compiled"
    assert goes(memory.view(6, 10).t(), memory[59:]) == "unfused"
    twin = torch.from_numpy(memory.numpy())  # another storage of the same memory
    assert goes(memory[:4], twin[3:]) == "unfused" and goes(memory[:3], twin[3:]) == "compiled"


def test_results_and_errors_are_those_of_the_call() -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("its own")

    x, y = torch.zeros(4), torch.ones(4)
    operands = [Operand.of(1, x)], [Operand.of(2, y)]
    call = guarded(lambda *args: args, fails, lambda: None, *operands)
    assert call(7, x, y)[0] == 7
    with pytest.raises(ValueError, match="its own"):
        call(7, x, x)
    assert call(7, x, y)[0] == 7
