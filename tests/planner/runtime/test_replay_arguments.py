"""Where arguments are copied to and how results come out: every layout, alias and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuseplan.planner.runtime.replay_arguments import NotRecordable, Results, Roles, StaticInputs


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element behind a multiple of 16 bytes."""
    room = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    at = next(n for n in range(8) if room[n:].data_ptr() % 16 == tensor.element_size())
    return room[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(5, 3).t(),
    "sliced": lambda: torch.randn(3, 10)[:, 1::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "windows": lambda: torch.randn(7).unfold(0, 5, 1),
    "scalar": lambda: torch.randn(()),
    "one": lambda: torch.randn(1, 1, 1),
    "empty": lambda: torch.randn(0, 5),
    "odd": lambda: odd(torch.randn(3, 5)),
    "odd bf16": lambda: odd(torch.randn(127).bfloat16()),
    "bool": lambda: torch.rand(3, 5) > 0.5,
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "int64": lambda: torch.randint(0, 9, (4097,)),
    "float8": lambda: torch.randn(7).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_copied_arguments_keep_layout_and_alignment(name: str) -> None:
    first, second, other = LAYOUTS[name](), LAYOUTS[name](), torch.ones(2)
    statics = StaticInputs((first, 3, other), Roles(copied=(0,), kept=(2,), sizes=(1,)))
    static, number, kept = statics.replace((first, 3, other))
    assert number == 3 and kept is other
    assert static.shape == first.shape and static.stride() == first.stride() and static.dtype == first.dtype
    if first.numel():
        assert static.data_ptr() % 16 == first.data_ptr() % 16
        assert static.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    for given_one in (first, second):
        statics.fill((given_one, 3, other))
        assert torch.equal(static.to(torch.complex128), given_one.to(torch.complex128))


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_copied_with_their_layout(name: str) -> None:
    output = LAYOUTS[name]()
    results = Results((output,), ())
    (copy,) = results.make(())
    assert copy.shape == output.shape and copy.stride() == output.stride() and copy.dtype == output.dtype
    assert torch.equal(copy.to(torch.complex128), output.to(torch.complex128))
    if output.numel():
        assert copy.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()


def test_several_copied_arguments_of_mixed_dtypes() -> None:
    made = [LAYOUTS[name]() for name in LAYOUTS]
    roles = Roles(copied=tuple(range(len(made))))
    statics = StaticInputs(made, roles)
    again = [LAYOUTS[name]() for name in LAYOUTS]
    statics.fill(again)
    for static, tensor in zip(statics.replace(made), again, strict=True):
        assert torch.equal(static.to(torch.complex64), tensor.to(torch.complex64))


def test_results_that_lie_in_arguments_lie_in_the_callers_arguments() -> None:
    recorded, given_one = torch.randn(4, 6), torch.randn(5, 6)[1:]  # the caller's lies elsewhere in its storage
    outputs = (recorded, recorded[1:, 2:], recorded.t(), recorded.flatten()[3:4], None, 7)
    whole, part, turned, element, nothing, number = Results(outputs, (recorded,)).make((given_one,))
    assert whole is given_one and nothing is None and number == 7
    for mine, theirs in ((part, given_one[1:, 2:]), (turned, given_one.t()), (element, given_one.flatten()[3:4])):
        assert mine.data_ptr() == theirs.data_ptr() and torch.equal(mine, theirs)


def test_results_of_one_storage_share_one_copy() -> None:
    base = torch.randn(40)
    outputs = (base[4:24].view(4, 5), base[10:30:3], base[4:24].view(4, 5))
    results = Results(outputs, ())
    first, second, third = results.make(())
    base.zero_()
    first[1, 1] = 100.0  # element 10 of the storage
    assert second[0] == 100.0 and third[1, 1] == 100.0
    assert [one.stride() for one in (first, second, third)] == [(5, 1), (3,), (5, 1)]
    assert results.make(())[0].tolist() == torch.zeros(4, 5).tolist()


def test_what_the_module_holds_is_returned_itself() -> None:
    held = torch.randn(3)
    assert Results((held,), (), (held,)).make(())[0] is held


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (torch.zeros(3), "the graph returns a Tensor, not a tuple"),
        ((object(),), "the graph returns a object"),
        (([torch.zeros(3)],), "the graph returns a list"),
    ],
)
def test_strange_results_are_not_recorded(outputs: Any, reason: str) -> None:
    with pytest.raises(NotRecordable, match=reason):
        Results(outputs, ())


def test_memory_read_as_another_dtype_is_not_recorded() -> None:
    x = torch.zeros(4)
    with pytest.raises(NotRecordable, match="reads an argument"):
        Results((x.view(torch.int32),), (x,))
    with pytest.raises(NotRecordable, match="the same memory as different dtypes"):
        Results((x, x.view(torch.int32)), ())


def test_a_view_of_one_of_two_arguments_in_one_allocation_is_of_that_one_in_every_call() -> None:
    keys, values = torch.arange(24.0).view(2, 3, 4).unbind()
    results = Results((values[:, 1:3], keys[2]), (keys, values))
    others = torch.full((3, 4), -1.0), torch.arange(12.0).view(3, 4)
    found, row = results.make(others)
    assert torch.equal(found, others[1][:, 1:3]) and found.data_ptr() == others[1][:, 1:3].data_ptr()
    assert torch.equal(row, others[0][2])
