"""A few of PyTorch's samples of its operators, of ``check_operators.py``, and what that found before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import compiled, fresh_start
from in_place_backend import InPlaceBackend
from operator_samples import Case, cases, differences, judge
from reference_backend import use

from fuseplan.planner.dispatch_stats import stats

pytestmark = pytest.mark.uncovered  # many cases of code that other tests cover

#: Every so many samples: each operator of PyTorch has some, in six dtypes.
SOME = [*cases("", range(2))[::101], *cases("nan_to_num,einsum,linalg.vector_norm", range(1))]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(monkeypatch, InPlaceBackend())
    yield from fresh_start()


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It has no plans, and gets none: only misses are noted there."""
    return str(tmp_path_factory.mktemp("operators") / "tuning.db")


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_sample_of_an_operator_does_what_eager_does(case: Case, db: str) -> None:
    assert not judge(case, db)["complaints"]


@pytest.mark.parametrize("case", [
    *cases("group_norm,masked.normalize", range(1)), *cases("", range(1))[7::151],
], ids=lambda case: case.name)
def test_a_sample_with_dynamic_sizes_does_what_eager_does(case: Case, db: str) -> None:
    assert not judge(case, db, dynamic=True)["complaints"]


def test_the_samples_are_fused(db: str) -> None:
    outcomes = [judge(case, db) for case in cases("sigmoid", range(1)) if not case.in_place]
    assert len(outcomes) > 5 and all(one["fused"] and not one["left"] for one in outcomes)


@pytest.mark.parametrize("fault", ["number", "dtype", "strides", "no error"])
def test_what_is_not_as_in_eager_mode_is_noticed(fault: str, tmp_path: Path) -> None:
    (case,) = cases("cumsum", range(1), {"float32": torch.float32})[:1]
    given = ((torch.randn(3, 5), 1), {})
    one = torch.randn(3, 5).cumsum(1)
    mine: Any = {
        "number": one * (1 + 1e-4), "dtype": one.double(), "strides": one.t().contiguous().t(), "no error": one,
    }[fault]
    expected: Any = RuntimeError("no") if fault == "no error" else one
    assert any(differences(expected, mine, case, given)) and not any(differences(one, one.clone(), case, given))


def test_a_list_among_the_results_of_an_op_is_taken_apart(tmp_path: Path) -> None:
    def histogram(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        counts, edges = torch.histogramdd(x * 2, (2, 3), range=[-3.0, 3.0, -3.0, 3.0])
        return counts + 1, edges[1] * 2

    x = torch.randn(7, 2)
    call = compiled(histogram, tmp_path / "tuning.db")
    for one, expected in zip(call(x), histogram(x), strict=True):
        torch.testing.assert_close(one, expected)
    assert stats().regions and not stats().fallbacks


@pytest.mark.parametrize("reduce", [
    lambda x: x.sum(0, keepdim=True), lambda x: x.sum(-1), lambda x: x.mean(0), lambda x: x.amax(0),
    lambda x: x.softmax(0), lambda x: x.log_softmax(-1), lambda x: x.argmax(0), lambda x: x.max(0)[0],
    lambda x: x.var(0, correction=0), lambda x: x.logsumexp(0), lambda x: x.cumsum(0),
])
def test_the_one_dimension_of_a_scalar_is_reduced(reduce: Any, tmp_path: Path) -> None:
    x = torch.tensor(3.0)
    torch.testing.assert_close(compiled(lambda x: reduce(x) * 2, tmp_path / "tuning.db")(x), reduce(x) * 2)
    assert not stats().fallbacks
