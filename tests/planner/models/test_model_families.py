"""A slice of the matrix of model families (all of it: ``check_models.py``), its kernels interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_checks as checks
import model_families as families
import pytest
import torch
from reference_backend import ReferenceBackend, use

from fuseplan.planner.capture.trace import capture
from fuseplan.planner.models.sources import find_source, workloads_for
from fuseplan.planner.tuning.session import open_session

pytestmark = pytest.mark.no_cover


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use(monkeypatch, ReferenceBackend())
    return {"db": str(tmp_path / "tuning.db")}


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bf16"), ("whisper", "fp32"), ("transformer-encoder", "bf16")])
def test_models_are_fused_and_no_less_exact_than_eager(family: str, dtype: str, options: dict[str, Any]) -> None:
    row = checks.check_forward(family, dtype, dynamic=False, device="cpu", options=options)
    assert row.problems == []
    assert all(one.fused > 0 for one in row.graphs)


@pytest.mark.parametrize("family", families.FAMILY_CONFIGS)
def test_every_family_can_be_captured_from_its_config(family: str, tmp_path: Path) -> None:
    source = find_source(config=families.write_family(tmp_path, family), dtype="bfloat16")
    decode = "1" if families.task_of(family) == "causal" else None
    workload = workloads_for(source, "cpu", decode, checks.KV_LEN, "3x9")[0]
    assert workload.regime == ("decode" if decode else "prefill")
    assert max(len(list(graph)) for graph in capture(source, workload, "cpu")) > 20


#: Families whose calls are tuned for, and the sequences of a call: of several, some are padded.
_TUNED = [("llama", 3), ("gemma3", 1), ("t5", 1)]


@pytest.mark.parametrize(("family", "batch"), _TUNED)
def test_calls_and_generation_that_follow_from_tuned_sizes_are_exact_hits(
    family: str, batch: int, options: dict[str, Any], tmp_path: Path
) -> None:
    source = find_source(config=families.write_family(tmp_path, family), dtype="float32")
    decode = str(batch) if families.task_of(family) == "causal" else None
    session = open_session("cpu", options["db"])
    for workload in workloads_for(source, "cpu", decode, checks.KV_LEN, f"{batch}x{checks.PROMPT}", calls=True):
        for graph in capture(source, workload, "cpu"):
            for plan in session.planner().plan_graph(graph).unique():
                session.database.put_plan(plan.record)
    session.database.close()
    rows = checks.check_hits(family, "fp32", "cpu", (batch,), options)
    assert {row.check: row.problems for row in rows if row.problems} == {}
    assert len(rows) == (5 if decode else 2)
    assert all(one.fused > 0 for row in rows for one in row.graphs)


@pytest.mark.parametrize("prompt", checks.PROMPTS[1:3], ids=lambda prompt: prompt.label)
def test_only_tokens_as_good_as_eagers_are_excused(prompt: checks.Prompt) -> None:
    model = families.build("gemma2", dtype=torch.bfloat16)
    with torch.no_grad():
        tokens = checks.generate(model, "gemma2", prompt, "cpu")
        assert checks.unexcused(model, "gemma2", prompt, "cpu", tokens) == ""
        worst = checks.led(model, "gemma2", prompt, "cpu", tokens)[2].nan_to_num(neginf=torch.inf).argmin(1)
        tokens[:, checks.PROMPT + 2] = worst
        assert "token 2 of sequence" in checks.unexcused(model, "gemma2", prompt, "cpu", tokens)
