"""Groups that write to a cache, through ``torch.compile``: what is in the cache afterwards, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import compiled, fresh_start
from in_place_backend import InPlaceBackend
from reference_backend import ReferenceBackend, use
from torch import nn

import fuseplan.planner

Calls = list[tuple[torch.Tensor, ...]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


class Attention(nn.Module):
    """Keys are turned and written to a cache, values as they are; what is read is the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Buffer(torch.randn(2, 3, 17, 8))
        self.values = nn.Buffer(torch.randn(2, 3, 17, 8))

    def forward(self, k: torch.Tensor, v: torch.Tensor, turn: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        low, high = k.chunk(2, -1)
        k = torch.cat([-high, low], -1) * turn
        keys, values = self.keys.index_copy_(2, at, k), self.values.index_copy_(2, at, v)
        return torch.matmul(torch.matmul(k, keys.transpose(-1, -2)), values)


def _call(positions: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, positions, 3, 8, generator=generator).transpose(1, 2) for _ in range(2))
    at = torch.randperm(17, generator=generator)[:positions]
    return k, v, torch.randn(positions, 8, generator=generator), at


def _same_as_eager(make: Callable[[], nn.Module], db: Path, calls: Calls, **options: Any) -> None:
    """Compare results and all buffers after each of some calls."""
    torch.manual_seed(1)
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    run = compiled(ours, db, **options)
    for call in calls:
        torch.testing.assert_close(run(*call), theirs(*call))
        for (name, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", [None, ReferenceBackend, InPlaceBackend], ids=["cpp", "interpreted", "in-place"])
@pytest.mark.parametrize("positions", [1, 3])
def test_caches_hold_what_eager_writes(
    positions: int, backend: type[ReferenceBackend] | None, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend is not None:
        use(monkeypatch, backend())
    _same_as_eager(Attention, db, [_call(positions, seed) for seed in range(3)])
    stats = fuseplan.planner.stats()
    assert stats.from_model == 1 and not stats.fallbacks, stats


def test_a_dynamic_number_of_positions(db: Path) -> None:
    _same_as_eager(Attention, db, [_call(positions, 7 + positions) for positions in (3, 5, 4, 17)], dynamic=True)
    assert fuseplan.planner.stats().from_model >= 1


def test_a_kernel_that_fails_leaves_the_cache_to_atens_ops(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ReferenceBackend(fails_in_call=True))
    _same_as_eager(Attention, db, [_call(2, seed) for seed in range(3)])
    assert sum(fuseplan.planner.stats().fallbacks.values()) == 1


class Unread(nn.Module):
    """What is written is read in the next call only, before it is written again."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Buffer(torch.randn(3, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (self.state * 0.5 + x).sigmoid()
        self.state.copy_(mixed * x)
        return mixed - x


class Windows(nn.Module):
    """Two parts of one cache are written, and the whole is read between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = nn.Buffer(torch.randn(2, 4, 6))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache[0].index_copy_(0, at, x.exp())
        middle = self.cache.sum(-1)
        self.cache[1].index_copy_(0, at, x.sigmoid() * 2)
        return middle + self.cache.amax(-1)


def test_state_that_is_read_before_it_is_written(db: Path) -> None:
    _same_as_eager(Unread, db, [(torch.randn(3, 9),) for _ in range(3)])


def test_reads_between_two_writes_see_the_first_alone(db: Path) -> None:
    _same_as_eager(Windows, db, [(torch.randn(2, 6), torch.tensor(at)) for at in ([0, 3], [2, 1])])


def test_results_over_a_cache_are_never_donated(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written cache, all of which a later kernel reads last, must not become that kernel's result."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = nn.Buffer(torch.randn(4, 6))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            written = self.cache.index_copy_(0, at, x.exp())
            return torch.softmax(written * 2, -1) + 1

    backend = InPlaceBackend()
    use(monkeypatch, backend)
    _same_as_eager(Doubled, db, [(torch.randn(2, 6), torch.tensor(at)) for at in ([0, 3], [2, 1], [1, 0])])
    assert not backend.taken


def test_a_tuned_plan_writes_and_is_found_again(db: Path) -> None:
    _same_as_eager(Attention, db, [_call(1, seed) for seed in range(2)], on_miss="tune")
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    _same_as_eager(Attention, db, [_call(1, seed) for seed in range(2, 4)])
    assert fuseplan.planner.stats().misses == 0
