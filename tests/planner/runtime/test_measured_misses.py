"""``on_miss="measure"``: what the cost model decides is run beside ATen and TorchInductor; nothing is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from fast_tunes import count_instead_of_timing

from fuseplan.planner import stats
from fuseplan.search import policy
from fuseplan.search.store.database import Database
from fuseplan.search.workers import jobs


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Much of it is ATen's (``var_mean``, ``asinh``), and some a kernel's."""
    y = torch.tanh(x) * 2 + 1
    variance, mean = torch.var_mean(y, 0)
    z = ((y - mean) / variance.sqrt()).clamp(-3, 3)
    low, high = z.asinh().aminmax(dim=0)
    return high - low, z


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * x + 1


def run(function: Any, db: Path, x: torch.Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    samples.known_machine(db)
    call = torch.compile(function, backend="fuseplan", options={"db": str(db), "on_miss": "measure"}, **options)
    with torch.no_grad():
        result = call(x)
    torch.testing.assert_close(result, function(x), rtol=1e-4, atol=1e-5)


def test_inductors_code_runs_what_the_plan_leaves_to_aten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_instead_of_timing(monkeypatch)
    run(statistics, tmp_path / "t.db", torch.randn(127, 33), dynamic=False)
    assert stats().from_model == 1 and stats().misses == 1 and not stats().fallbacks
    database = Database(tmp_path / "t.db")
    assert not database.everything() and len(database.misses()) == 1


def test_a_kernel_that_loses_to_aten_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_instead_of_timing(monkeypatch)
    x = torch.randn(3, 127)
    run(gated, tmp_path / "t.db", x, dynamic=False)
    assert stats().groups_fused == 1
    decisive = jobs.decisive

    def slow_plan(*args: Any, **more: Any) -> Any:
        found = decisive(*args, **more)
        slower = {name: 99.0 if name == "plan" else 1.0 for name in found.samples}
        return replace(found, samples={
            name: tuple(slower[name] * one for one in times) for name, times in found.samples.items()})

    monkeypatch.setattr(jobs, "decisive", slow_plan)
    run(gated, tmp_path / "t.db", x, dynamic=False)
    assert stats().groups_fused == 1 and stats().planned_unfused == 1


def test_after_its_seconds_the_cost_model_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_instead_of_timing(monkeypatch)
    monkeypatch.setattr(policy, "MEASURED_ON_MISS_S", -1.0)
    run(gated, tmp_path / "t.db", torch.randn(3, 127), dynamic=False)
    assert stats().from_model == 1


def test_dynamic_sizes_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_instead_of_timing(monkeypatch)
    run(gated, tmp_path / "t.db", torch.randn(5, 127), dynamic=True)
    assert not stats().fallbacks
