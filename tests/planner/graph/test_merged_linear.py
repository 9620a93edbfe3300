"""The merged linear op against float64, wherever its weights lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.planner.graph.dataflow import OpNode, Ref
from fuseplan.planner.graph.execute import run_node
from fuseplan.planner.graph.merged_linear import MERGED, MergedLinear, as_one, linear_apart, side_by_side

SHAPES = [(7,), (1, 7), (5, 7), (2, 3, 7), (1, 1, 7), (0, 7), (2, 1, 3, 7)]
ROWS = (5, 1, 3)


def operands(rows: Sequence[int], width: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(width)
    return [torch.randn(count, *([width] if width else []), dtype=dtype) for count in rows]


def exact(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [x.double() @ one.double().t() for one in weights]
    if biases:
        parts = [part + one.double() for part, one in zip(parts, biases, strict=True)]
    return torch.cat(parts, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", ["none", "apart", "packed"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_what_the_linear_ops_are(
    shape: tuple[int, ...], bias: str, packed: bool, dtype: torch.dtype
) -> None:
    x, weights = torch.randn(shape, dtype=dtype), operands(ROWS, 7, dtype)
    biases = operands(ROWS, 0, dtype) if bias != "none" else []
    weights = side_by_side(weights) if packed else weights
    biases = side_by_side(biases) if bias == "packed" else biases
    assert (as_one(weights) is not None) == packed
    wanted = exact(x, weights, biases)
    eager = torch.cat([
        torch.nn.functional.linear(x, one, biases[at] if biases else None) for at, one in enumerate(weights)
    ], -1)
    allowed = (eager.double() - wanted).norm() * 1.5 + 1e-6
    for found in (
        MERGED(x, weights, biases), MergedLinear()(x, weights, biases), linear_apart(x, weights, biases)
    ):
        assert found.shape == (*shape[:-1], sum(ROWS)) and found.dtype == dtype and found.is_contiguous()
        assert (found.double() - wanted).norm() <= allowed


def test_what_is_read_may_lie_in_any_way() -> None:
    weights = operands(ROWS, 7)
    for x in (torch.randn(7, 5).t(), torch.randn(3, 7, 2).permute(2, 0, 1), torch.randn(5, 9)[:, 1:-1],
              torch.randn(1, 7).expand(4, 7)):
        for lying in (weights, side_by_side(weights)):
            found = MergedLinear()(x, lying, [])
            assert found.is_contiguous()
            torch.testing.assert_close(found.double(), exact(x, lying, []), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 5), st.permutations(range(4)))
def test_as_one_is_their_concatenation_or_nothing(rows: list[int], width: int, order: Sequence[int]) -> None:
    """Any part of a packing in any order: one tensor if and only if it says the same."""
    packed = side_by_side(operands(rows, width))
    chosen = [packed[at] for at in order if at < len(packed)]
    whole = as_one(chosen)
    follow = all(one.data_ptr() + one.nbytes == other.data_ptr() for one, other in pairwise(chosen))
    assert (whole is not None) == follow
    if whole is not None:
        assert whole.data_ptr() == chosen[0].data_ptr()
        assert torch.equal(whole, torch.cat(chosen))


@pytest.mark.parametrize("break_up", ["copied", "transposed", "another type", "overlapping", "another width"])
def test_what_does_not_follow_is_not_one(break_up: str) -> None:
    room = torch.randn(40)
    first, second = room[:12].view(3, 4), room[12:24].view(3, 4)
    other = {
        "copied": second.clone(), "transposed": room[12:28].view(4, 4).t(), "another type": second.view(torch.int32),
        "overlapping": room[8:20].view(3, 4), "another width": room[12:24].view(4, 3),
    }[break_up]
    assert as_one([first, second]) is not None
    assert as_one([first, other]) is None


def test_two_allocations_that_touch_are_two() -> None:
    room = torch.randn(24)
    first = torch.frombuffer(room.numpy(), dtype=torch.float32, count=12).view(3, 4)
    second = torch.frombuffer(room.numpy(), dtype=torch.float32, count=12, offset=48).view(3, 4)
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert as_one([first, second]) is None
    x, call = torch.randn(2, 4), MergedLinear()
    whole = room.view(6, 4)
    torch.testing.assert_close(call(x, list(whole.split(3)), []), x @ whole.t())
    # The same addresses, and none reaches beyond its own allocation any more.
    torch.testing.assert_close(call(x, [first, second], []), x @ whole.t())


def test_weights_that_move_are_found_again() -> None:
    x, call = torch.randn(2, 7), MergedLinear()
    for weights in (operands(ROWS, 7), side_by_side(operands(ROWS, 7)), side_by_side(operands((3, 5, 1), 7))):
        for _ in range(2):
            torch.testing.assert_close(call(x, weights, []).double(), exact(x, weights, []), rtol=1e-5, atol=1e-5)
    weights[1].mul_(3)
    torch.testing.assert_close(call(x, weights, []).double(), exact(x, weights, []), rtol=1e-5, atol=1e-5)


def test_moving_is_asked_for_once_and_keeps_nothing_alive() -> None:
    asked: list[int] = []

    def move(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> bool:
        asked.append(len(weights))
        if len(asked) == 1:
            return False
        for weight, part in zip(weights, side_by_side(weights), strict=True):
            weight.data = part
        return True

    x, call = torch.randn(2, 7), MergedLinear(move)
    refused, moved = operands(ROWS, 7), operands((2, 2), 7)
    for _ in range(3):
        call(x, refused, [])
        torch.testing.assert_close(call(x, moved, []).double(), exact(x, moved, []), rtol=1e-5, atol=1e-5)
    assert asked == [3, 2] and as_one(moved) is not None
    storage = moved[0].untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata)
    moved.clear()
    assert torch._C._storage_Use_Count(storage._cdata) == holders - 2


def test_the_op_runs_in_a_graph_by_its_name() -> None:
    """As graphs that come from a file do: two weights and a bias for each."""
    x, weights, biases = torch.randn(2, 7), operands((5, 2), 7), operands((5, 2), 0)
    attrs = {"weights": (Ref(1), Ref(2))}
    node = OpNode("fuseplan.merged_linear.default", ("x", "a", "b"), ("found",), {**attrs, "biases": ()})
    (found,) = run_node(node, [x, *weights])
    torch.testing.assert_close(found.double(), exact(x, weights, []), rtol=1e-5, atol=1e-5)
    node = OpNode("fuseplan.merged_linear.default", ("x", "a", "b", "c", "d"), ("found",), attrs)
    (found,) = run_node(node, [x, *weights, *biases])
    torch.testing.assert_close(found.double(), exact(x, weights, biases), rtol=1e-5, atol=1e-5)


def test_it_has_a_shape_without_data() -> None:
    meta = torch.randn(2, 3, 7, device="meta")
    assert MERGED(meta, [torch.empty(n, 7, device="meta") for n in ROWS], []).shape == (2, 3, sum(ROWS))
    with torch._subclasses.FakeTensorMode():
        made = MERGED(torch.empty(4, 7), [torch.empty(n, 7) for n in ROWS], [])
    assert made.shape == (4, sum(ROWS)) and made.stride() == (sum(ROWS), 1)
