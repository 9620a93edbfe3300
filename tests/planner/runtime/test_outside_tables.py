"""An index outside its table through ``torch.compile``: the error, and the memory afterwards, are eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from in_place_backend import InPlaceBackend
from outside_on_gpu import full_cache
from reference_backend import ReferenceBackend, use

import fuseplan.planner
from fuseplan.kernels.ir.backend import Backend

#: Sizes of tables, and of what is looked up or written.
ROWS, WIDTH, COUNT = 7, 5, 3
_Function: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


def _table(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 9, shape or (ROWS, WIDTH), generator=generator)
    return numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return ~x if x.dtype == torch.bool else x * 2


def _columns(i: torch.Tensor) -> torch.Tensor:
    """Indices of each element."""
    return i[:, None].expand(COUNT, WIDTH)


def _written(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.index_copy_(0, i, _doubled(x[:COUNT].clone() if x.is_floating_point() else torch.ones_like(x[:COUNT])))


def _cache_and_result(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a static cache that holds both."""
    new = torch.ones(2, COUNT, WIDTH, dtype=x.dtype)
    keys, values = x.view(1, ROWS, WIDTH), torch.zeros(2, ROWS, WIDTH, dtype=x.dtype)
    values.index_copy_(1, i, _doubled(new))
    keys.index_copy_(1, i, _doubled(new[:1]))
    return values, _doubled(new)


LOOKUPS: dict[str, _Function] = {
    "embedding": lambda x, i: _doubled(F.embedding(i, x)),
    "index_select": lambda x, i: _doubled(x.index_select(0, i)),
    "index_select, last": lambda x, i: _doubled(x.t().index_select(1, i)),
    "gather": lambda x, i: _doubled(x.gather(0, _columns(i))),
    "gather, last": lambda x, i: _doubled(x.t().gather(-1, _columns(i).t())),
    "x[i]": lambda x, i: _doubled(x[i]),
    "x[:, i]": lambda x, i: _doubled(x.t()[:, i]),
    "x[i, j]": lambda x, i: _doubled(x[i, i - i]),
    "one number": lambda x, i: _doubled(x[:, 0][i]),
    "computed": lambda x, i: _doubled(x[(i - 4) + 4]),
    "under where": lambda x, i: torch.where(i[:, None] < ROWS, x[i], x[:COUNT] if x.dtype != torch.bool else ~x[i]),
    "in a cat": lambda x, i: torch.cat([x[i], _doubled(x)]),
    "columns in a cat": lambda x, i: torch.cat([x[i], _doubled(x)[:COUNT]], 1),
    "a slice": lambda x, i: _doubled(x[i][:, 1:4]),
    "of a view": lambda x, i: _doubled(x.view(ROWS, 1, WIDTH).transpose(0, 1)[:, i]),
}
WRITES: dict[str, _Function] = {
    "index_copy_": _written,
    "index_copy_, last": lambda x, i: x.t().index_copy_(1, i, _doubled(torch.ones_like(x.t()[:, :COUNT]))),
    "a static cache": _cache_and_result,
    "index_put_": lambda x, i: _doubled(x.index_put_((i,), torch.ones_like(x[:COUNT]))),
    "x[i] = y": lambda x, i: x.__setitem__(i, _doubled(torch.ones_like(x[:COUNT]))),
    "scatter": lambda x, i: _doubled(x.scatter(0, _columns(i), torch.ones_like(x))),
    "scatter_": lambda x, i: _doubled(x.scatter_(0, _columns(i), torch.ones_like(x))),
    "computed": lambda x, i: x.index_copy_(0, (i + 4) // 1 - 4, _doubled(torch.ones_like(x[:COUNT]))),
    "looked up and written": lambda x, i: x.index_copy_(0, torch.arange(COUNT), _doubled(torch.ones_like(x)[i])),
}
#: How a good call is made bad: a place among the indices, and the number there.
BAD = ((0, ROWS), (COUNT - 1, -1), (1, 2**40), (2, -ROWS - 1), (0, -(2**63)))


def _outcome(function: Any, x: torch.Tensor, i: torch.Tensor) -> tuple[Any, ...]:
    """What a call gives or raises, and the table afterwards."""
    table = x.clone()
    try:
        found = function(table, i)
    except Exception as error:
        return type(error), str(error), table
    return found, "", table


def _same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert isinstance(theirs[0], type) == isinstance(ours[0], type), (ours, theirs)
    if isinstance(theirs[0], type):
        assert ours[:2] == theirs[:2]
    else:
        torch.testing.assert_close(ours[0], theirs[0])
    assert torch.equal(ours[2], theirs[2])


def _compare(function: _Function, x: torch.Tensor, db: Path, first: bool = False, **options: Any) -> int:
    """Compare good and bad calls, a bad one first if that is wanted; how many calls eager refused."""
    good = torch.tensor([4, 0, 6])
    calls = [good, *(good.clone().index_fill_(0, torch.tensor(place), number) for place, number in BAD), good]
    run, refused = compiled(function, db, **options), 0
    for i in calls[1 if first else 0 :]:
        theirs = _outcome(function, x, i)
        _same(_outcome(run, x, i), theirs)
        refused += isinstance(theirs[0], type)
    return refused


def _in_turn(names: Iterable[str], *dtypes: torch.dtype) -> list[Any]:
    """Each name in float32 and in another type, which the next name does not have."""
    pairs = [(name, dtype) for at, name in enumerate(names) for dtype in (torch.float32, dtypes[at % len(dtypes)])]
    return [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, dtype in pairs]


@pytest.mark.parametrize(("name", "dtype"), _in_turn(LOOKUPS, torch.bfloat16, torch.int64, torch.uint8, torch.bool))
def test_lookups_fail_as_eager_does(name: str, dtype: torch.dtype, db: Path) -> None:
    assert _compare(LOOKUPS[name], _table(dtype), db) >= 4  # where -1 counts from the end
    stats = fuseplan.planner.stats()
    assert stats.from_model == 1 and not stats.fallbacks, stats


@pytest.mark.parametrize(("name", "dtype"), _in_turn(WRITES, torch.bfloat16, torch.int64, torch.bool))
def test_writes_fail_as_eager_does(name: str, dtype: torch.dtype, db: Path) -> None:
    assert _compare(WRITES[name], _table(dtype), db) >= 4
    assert not fuseplan.planner.stats().fallbacks


@pytest.mark.parametrize("backend", [ReferenceBackend, InPlaceBackend])
@pytest.mark.parametrize("name", ["embedding", "gather", "x[i]", "computed"])
def test_a_bad_call_may_come_first_on_any_back_end(
    name: str, backend: type[Backend], db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, backend())
    assert _compare(LOOKUPS[name], _table(torch.float32), db, first=True) >= 4
    assert not fuseplan.planner.stats().fallbacks


@pytest.mark.parametrize("function", [LOOKUPS["gather"], LOOKUPS["embedding"], LOOKUPS["x[i]"], WRITES["index_copy_"]])
def test_dynamic_sizes(function: _Function, db: Path) -> None:
    run = compiled(function, db, dynamic=True)
    for rows in (7, 9, 8, 127):
        x = torch.arange(float(rows * WIDTH)).view(rows, WIDTH)
        for number in (rows - 1, rows, -1, 2**40):
            i = torch.tensor([1, number, 0])
            _same(_outcome(run, x, i), _outcome(function, x, i))
    assert fuseplan.planner.stats().from_model >= 1


def _looked_up_first(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    rows = x.clone()[i]
    x.view(-1)[:WIDTH * COUNT].view(COUNT, WIDTH).copy_(torch.ones(COUNT, WIDTH) * 3)
    return rows.sin() + 1


def _written_first(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    other = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
    x.index_copy_(0, torch.tensor([0, 1, 2]), torch.ones(COUNT, WIDTH) * 3)
    return other[i].sin() + 1


def _between(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    other = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
    rows = F.embedding(i, other)
    x.index_copy_(0, torch.tensor([0, 1, 2]), torch.ones(COUNT, WIDTH) * 3)
    return torch.softmax(rows.sin() + 1, -1)


@pytest.mark.parametrize("function", [_looked_up_first, _written_first, _between])
def test_what_is_written_before_a_lookup_fails_is_what_eager_writes(function: _Function, db: Path) -> None:
    assert _compare(function, _table(torch.float32), db) >= 4


@pytest.mark.slow
def test_decoding_past_a_static_cache_fails_as_eager_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager, fused = (full_cache(how, str(tmp_path), "cpu") for how in ("eager", "fused"))
    assert eager == fused and eager.endswith("after 3 tokens")
    assert fuseplan.planner.stats().from_model and not fuseplan.planner.stats().fallbacks


@pytest.mark.parametrize("count", [1, 3, 127])
def test_the_last_lanes_of_a_row_are_no_indices(count: int, db: Path) -> None:
    """A computed index of a lane that does not exist must not fail."""
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i - 2] + 1.0

    run, x = compiled(function, db), torch.randn(5)
    i = torch.arange(count) % 5 + 2
    for number in (2, 6, 7, 1):
        i[-1] = number
        _same(_outcome(run, x, i), _outcome(function, x, i))


def test_one_part_of_a_cat_looks_up(db: Path) -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.cat([_doubled(x), x[i - 3], _doubled(x)])  # elsewhere there is no index, and none is computed

    run, x = compiled(function, db), torch.randn(ROWS, WIDTH)
    for i in (torch.tensor([9, 3]), torch.tensor([3, 3 + ROWS]), torch.tensor([-5, 3])):
        _same(_outcome(run, x, i), _outcome(function, x, i))
    assert not fuseplan.planner.stats().fallbacks
