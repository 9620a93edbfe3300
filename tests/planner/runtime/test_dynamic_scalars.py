"""Numbers that change from call to call in fused groups: sizes as operands, numbers computed from sizes, floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from reference_backend import ReferenceBackend, use

import fuseplan.planner


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    """Interpreted kernels in place of compiled ones."""
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (x / x.shape[-1] ** 0.5).relu() * 2


def counted(x: torch.Tensor) -> torch.Tensor:
    return (x * x.shape[0] + x.shape[1]).relu() - 1


def halves(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([F.silu(high) * 2, low.sigmoid() + 1], -1)


def clipped(x: torch.Tensor) -> torch.Tensor:
    return (x[: max(1, x.shape[0] - 3)].exp() + 1) * 2


def strided(x: torch.Tensor) -> torch.Tensor:
    return x[:, ::2].tanh() * 3 + x.shape[1] // 3


def averaged(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) * (x.shape[-1] / (x.shape[-1] - 1)) ** 0.5


def compared(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(x.shape[1]) % 2 < x.shape[0] / 10, x * 2, -x)


def enlarged(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x[None, None], scale_factor=1.5, mode="bicubic") * 2 + 1


def rounded(x: torch.Tensor) -> torch.Tensor:
    kept = x[:, : int(x.shape[1] * 0.75)].sigmoid() * round(x.shape[1] / 127, 2)
    return kept * math.ceil(x.shape[0] / 30) + math.floor(x.shape[1] * 0.01)


FUNCTIONS = [scaled, counted, halves, clipped, strided, averaged, compared, enlarged, rounded]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_graph_serves_every_size(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, db: Path, kernels: ReferenceBackend
) -> None:
    fast = compiled(function, db, dynamic=True)
    for shape in ((5, 7), (8, 127), (33, 6)):
        x = torch.randn(shape).to(dtype)
        result, expected = fast(x), function(x)
        # A bfloat16 keeps 8 bits, and eager rounds to them after every op.
        exact = dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-5 if exact else 0.02, atol=1e-5 if exact else 0.05)
        assert result.stride() == expected.stride()
    stats = fuseplan.planner.stats()
    assert stats.fallbacks == {} and stats.groups_fused >= 1


def test_what_is_cut_into_windows_is_fused(db: Path, kernels: ReferenceBackend) -> None:
    """With half of that size there is no window, and ``s0 // (s0 // 4)`` has no value."""

    def windowed(x: torch.Tensor) -> torch.Tensor:
        tall, wide = x.shape
        windows = x.view(tall // 4, 4, wide // 4, 4).transpose(1, 2)
        return windows.reshape(-1, 16).softmax(-1) * 2 + 1

    fast = compiled(windowed, db, dynamic=True)
    for shape in ((8, 12), (16, 8), (12, 20)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), windowed(x))
    stats = fuseplan.planner.stats()
    assert stats.fallbacks == {} and stats.groups_fused >= 1


@pytest.mark.parametrize("function", [
    lambda x: x.chunk(2, -1)[1] / (x.abs() + 0.5), lambda x: x[..., : x.shape[-1] // 2] - x.square(),
])
def test_a_size_that_has_to_be_one_is_broadcast(
    function: Callable[[torch.Tensor], torch.Tensor], db: Path, kernels: ReferenceBackend
) -> None:
    """What broadcasting asks of a size stands in no shape: ``s1 // 2`` is 1 for the sizes that the graph holds for."""
    fast = compiled(function, db, dynamic=True)
    for shape in ((5, 3), (33, 3), (4, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), function(x))
    assert fuseplan.planner.stats().groups_fused >= 1


def test_a_reshape_that_is_a_view_for_numbers_alone_splits_no_group(db: Path, kernels: ReferenceBackend) -> None:
    """The strides of ``tiles`` are ``Max(1, ...)`` of its sizes, which no proof knows to be the sizes themselves."""
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        tiles = F.pad(x, (0, 0, 0, (8 - length % 8) % 8)).reshape(batch, -1, 8, width) * 2
        mixed = tiles + tiles.transpose(2, 3).sum(-1).unsqueeze(2)
        return torch.sigmoid(mixed.contiguous().reshape(batch, -1, width)) * w

    fast = compiled(function, db, dynamic=True)
    for length in (13, 16, 9):
        x, w = torch.randn(2, length, 12), torch.randn(12)
        result, expected = fast(x, w), function(x, w)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()
    stats = fuseplan.planner.stats()
    assert stats.fallbacks == {} and stats.groups_fused >= 1


def test_what_only_a_number_allows_is_left_to_eager(db: Path, kernels: ReferenceBackend) -> None:
    """The plan, made for 5 rows, writes their sum out; for any number of rows no kernel can."""
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sum(0) * 2).sin() + x

    fast = compiled(function, db, dynamic=True)
    for rows in (5, 33):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(fast(x), function(x))


def test_batch_and_sequence_change_together(db: Path, kernels: ReferenceBackend) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1, x.shape[-1]) * x.shape[1] ** -0.5).softmax(-1).reshape(x.shape) + x.shape[0]

    fast = compiled(block, db)
    x = torch.randn(3, 5, 6)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    for one in (x, torch.randn(2, 127, 6), torch.randn(1, 5, 6), torch.randn(3, 1, 6), torch.randn(0, 5, 6)):
        torch.testing.assert_close(fast(one), block(one))
    assert fuseplan.planner.stats().groups_fused >= 1
    assert not [reason for reason in fuseplan.planner.stats().fallbacks if "empty" not in reason]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_a_float_argument_that_changes_is_an_argument_of_the_kernel(
    dtype: torch.dtype, db: Path, kernels: ReferenceBackend
) -> None:
    def blended(x: torch.Tensor, share: float) -> torch.Tensor:
        return (x * share + x * ((1 - share) * 0.5)).clamp(-2, 2) > share

    def lowered(x: torch.Tensor, by: float) -> torch.Tensor:
        return (x - by) * (2 * by)

    x = torch.randn(5, 7).mul(3).to(dtype)
    for function in (blended, lowered):
        fast = compiled(function, db, dynamic=True)
        for share in (0.5, 0.3, -1.7, 1e5, 0.0):
            torch.testing.assert_close(fast(x, share), function(x, share))
    stats = fuseplan.planner.stats()
    assert stats.fallbacks == {} and stats.groups_fused >= 2


def test_float64_takes_no_rounded_number(db: Path, kernels: ReferenceBackend) -> None:
    fast = compiled(lambda x, by: (x - by).relu() * 2, db, dynamic=True)
    x = torch.randn(5, 7, dtype=torch.float64)
    for by in (0.1, 0.3):
        torch.testing.assert_close(fast(x, by), (x - by).relu() * 2, rtol=1e-15, atol=0.0)


def test_the_ops_of_a_failing_kernel_get_the_same_numbers(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ReferenceBackend(fails_in_call=True))
    fast: Any = compiled(lambda x, by: (x * by - x.shape[-1] ** 0.5).relu() * 2, db, dynamic=True)
    for by, size in ((0.1, 7), (0.3, 5)):
        x = torch.randn(5, size)
        torch.testing.assert_close(fast(x, by), (x * by - size**0.5).relu() * 2)
