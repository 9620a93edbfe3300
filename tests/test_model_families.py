"""A slice of the matrix of model families (all of it: ``check_models.py``), its kernels interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_checks as checks
import model_families as families
import pytest
from reference_backend import ReferenceBackend, use

from fuseplan.planner.capture import capture
from fuseplan.planner.models import find_source, workloads_for
from fuseplan.planner.session import open_session


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use(monkeypatch, ReferenceBackend())
    return {"db": str(tmp_path / "tuning.db")}


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bf16"), ("whisper", "fp32"), ("transformer-encoder", "bf16")])
def test_models_are_fused_and_no_less_exact_than_eager(family: str, dtype: str, options: dict[str, Any]) -> None:
    row = checks.check_forward(family, dtype, dynamic=False, device="cpu", options=options)
    assert row.problems == []
    assert all(one.fused > 0 for one in row.graphs)


@pytest.mark.parametrize("prompt", [checks.Prompt(3, "static")], ids=lambda prompt: prompt.label)
def test_generation_gives_the_tokens_of_eager(prompt: checks.Prompt, options: dict[str, Any]) -> None:
    row = checks.check_generate("llama", "fp32", prompt, "cpu", options)
    assert row.problems == []
    assert all(one.fused > 0 for one in row.graphs)


@pytest.mark.parametrize("family", ["llama", "t5", "clip"])
def test_calls_that_follow_from_tuned_sizes_are_hits(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = find_source(config=families.write_family(tmp_path, family), dtype="float32")
    decode = "1" if families.task_of(family) == "causal" else None
    session = open_session("cpu", options["db"])
    for workload in workloads_for(source, "cpu", decode, checks.KV_LEN, f"1x{checks.PROMPT}", calls=True):
        for graph in capture(source, workload, "cpu").graphs:
            for plan in session.planner().plan_graph(graph).unique():
                session.database.put_plan(plan.record)
    session.database.close()
    rows = checks.check_hits(family, "fp32", "cpu", (1,), options)
    assert {row.check: row.problems for row in rows if row.problems} == {}
    assert len(rows) == (5 if decode else 2)
