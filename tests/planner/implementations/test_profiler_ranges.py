"""Ranges of profilers around the groups of a compiled graph, and none without a profiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import Block, compiled, fresh_start, llama, swiglu
from reference_backend import ReferenceBackend, use

import fuseplan.planner
from fuseplan.planner.dispatch_stats import Tally


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


def ranges(profile: torch.profiler.profile) -> dict[str, int]:
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("fuseplan::")}


def test_a_profile_names_the_groups_of_each_call(tmp_path: Path, kernels: ReferenceBackend) -> None:
    block = Block()
    fast, x = compiled(block, tmp_path / "t.db"), torch.randn(3, 33)
    expected = block(x, x)
    fast(x, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = [fast(x, x) for _ in range(2)]
    for result in results:
        torch.testing.assert_close(result, expected)
    found = ranges(profile)
    assert len(found) == fuseplan.planner.stats().groups_fused and set(found.values()) == {2}
    assert any("silu" in name for name in found)


def test_a_profile_says_where_in_the_model_a_group_is(tmp_path: Path, kernels: ReferenceBackend) -> None:
    model = llama(num_hidden_layers=3)
    fast, ids = compiled(model, tmp_path / "t.db"), torch.ones(1, 5, dtype=torch.long)
    fast(input_ids=ids, use_cache=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fast(input_ids=ids, use_cache=False)
    found = ranges(profile)
    (swiglu_name,) = [name for name in found if name.startswith("fuseplan::silu+mul")]
    assert swiglu_name.endswith("(model.layers.*.mlp: act_fn -> (itself)  x3)") and found[swiglu_name] == 3


def test_a_first_call_in_a_profile_is_guarded_as_ever(tmp_path: Path, kernels: ReferenceBackend) -> None:
    x = torch.randn(3, 8)
    fast = compiled(swiglu, tmp_path / "t.db")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            torch.testing.assert_close(fast(x, x), swiglu(x, x))
    assert ranges(profile) == {"fuseplan::silu+mul": 3}


def test_without_a_profiler_no_range_is_made(
    tmp_path: Path, kernels: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def counted(name: str, make: Any = torch._C._profiler._RecordFunctionFast) -> Any:
        if name.startswith("fuseplan"):  # Dynamo makes ranges, too
            made.append(name)
        return make(name)

    monkeypatch.setattr(torch._C._profiler, "_RecordFunctionFast", counted)
    x = torch.randn(3, 8)
    fast = compiled(swiglu, tmp_path / "t.db")
    for _ in range(3):
        fast(x, x)
    assert made == []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        fast(x, x)
    fast(x, x)
    assert made == ["fuseplan::silu+mul"]


def test_a_kernel_that_fails_in_a_profile_is_replaced_for_good(
    tmp_path: Path, kernels: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuseplan.planner.implementations.first_call.check_layouts", lambda *given: 1 / 0)
    given: list[str] = []
    monkeypatch.setattr(Tally, "fall_back", lambda self, reason, *where: given.append(reason))
    x = torch.randn(3, 8)
    fast = compiled(swiglu, tmp_path / "t.db")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        fast(x, x)
    torch.testing.assert_close(fast(x, x), swiglu(x, x))
    assert len(given) == 1 and "first call failed" in given[0]
