"""What ``check_exactness.py`` says of contestants that are known to be right or wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from check_exactness import dispatch_problems, judged_tokens
from decoder_layers import Cache
from layer_errors import Call, Errors, LayerRow, copied, layer_rows, run_layer

from fuseplan.planner.dispatch_stats import Stats

ALLOWED = 1.1


def judged(ours: Call, cell: tuple[int, int] = (2, 1), dtype: torch.dtype = torch.bfloat16) -> list[LayerRow]:
    with torch.no_grad():
        rows = list(layer_rows(ours, "tiny", cell, 2, 3, "cpu", dtype))
    for row in rows:
        row.judge(ALLOWED)
    return rows


@pytest.mark.parametrize("cell", [(1, 1), (2, 1), (2, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eager_is_as_exact_as_eager(cell: tuple[int, int], dtype: torch.dtype) -> None:
    rows = judged(run_layer, cell, dtype)
    assert [row.problems for row in rows] == [[], []]
    assert {one.ratio for row in rows for one in row.errors.values()} == {1.0}
    assert all(0 < one.eager < 4 * torch.finfo(dtype).eps for row in rows for one in row.errors.values())
    assert [set(row.errors) for row in rows] == [{"output", "keys", "values"} if cell[1] == 1 else {"output"}] * 2


def rounded_once(
    layer: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor, cache: Cache
) -> torch.Tensor:
    """In float32, with the result and what is written rounded at the end."""
    wide = copied(cache, torch.float32)
    found = run_layer(layer.float(), x.float(), cos.float(), sin.float(), at, wide).to(x.dtype)
    layer.to(x.dtype)
    for own, made in zip(cache, wide, strict=True):
        own.copy_(made)
    return found


def test_fewer_roundings_are_right() -> None:
    rows = judged(rounded_once)
    assert [row.problems for row in rows] == [[], []]
    assert all(row.errors["output"].ratio < 1 for row in rows)


def larger(layer: Any, *args: Any) -> torch.Tensor:
    return run_layer(layer, *args) * 1.01


def no_number(layer: Any, *args: Any) -> torch.Tensor:
    found = run_layer(layer, *args)
    found[0, 0, 0] = math.nan
    return found


def other_type(layer: Any, *args: Any) -> torch.Tensor:
    return run_layer(layer, *args).float()


def wrong_values(layer: Any, *args: Any) -> torch.Tensor:
    found = run_layer(layer, *args)
    args[-1][1].mul_(1.01)
    return found


def next_key(layer: Any, *args: Any) -> torch.Tensor:
    found = run_layer(layer, *args)
    args[-1][0][:, :, int(args[3]) + 1] = 0
    return found


def overwritten_input(layer: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    found = run_layer(layer, x, *args)
    x.copy_(found)
    return found


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (larger, "output: "),
        (no_number, "output: nan times"),
        (other_type, "torch.float32 (2, 1, 64), eager's is torch.bfloat16"),
        (wrong_values, "values: "),
        (next_key, "other keys of the cache are overwritten"),
        (overwritten_input, "its input is overwritten"),
    ],
)
def test_what_is_wrong_is_said_of_every_layer(ours: Call, said: str) -> None:
    assert all(any(said in problem for problem in row.problems) for row in judged(ours))


def test_an_error_where_eager_has_none_is_wrong() -> None:
    assert Errors(0.0, 0.0, 1.0).ratio == 1.0 and Errors(0.0, 1e-9, 1.0).ratio == math.inf


def test_the_first_token_that_differs_is_said_with_its_gap() -> None:
    expected = torch.tensor([[4, 5, 6], [7, 8, 9]])
    gap = torch.tensor([[0.5, 0.4, 0.3], [0.2, 1e-6, 0.1]])
    same = judged_tokens("", expected.clone(), expected, gap)
    assert not same.problems and same.distinct == 6 and same.smallest_gap == pytest.approx(1e-6)
    row = judged_tokens("", torch.tensor([[4, 5, 1], [7, 3, 9]]), expected, gap)
    assert row.tokens == "another from token 2 on"
    assert row.problems == [
        "token 2 of sequence 2 is 3, eager's 8; eager's two best are 1.0e-06 standard deviations of the logits apart"
    ]


def test_a_run_without_anything_of_ours_is_wrong() -> None:
    assert dispatch_problems(Stats()) == ["nothing of ours ran"]
    assert dispatch_problems(Stats(from_tuned=1, fallbacks={"no compiler": 2})) == ["2 x no compiler"]
    assert dispatch_problems(Stats(library_calls=1)) == []
