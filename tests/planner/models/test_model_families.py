"""A slice of the matrix of model families (all of it: ``check_models.py``), its kernels interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_checks as checks
import model_families as families
import pytest
import torch
from reference_backend import ReferenceBackend, use

pytestmark = pytest.mark.uncovered


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use(monkeypatch, ReferenceBackend())
    return {"db": str(tmp_path / "tuning.db")}


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bf16"), ("whisper", "fp32"), ("transformer-encoder", "bf16")])
def test_models_are_fused_and_no_less_exact_than_eager(family: str, dtype: str, options: dict[str, Any]) -> None:
    row = checks.check_forward(family, dtype, dynamic=False, device="cpu", options=options)
    assert row.problems == []
    assert all(one.fused > 0 for one in row.graphs)


@pytest.mark.parametrize("prompt", checks.PROMPTS[1:3], ids=lambda prompt: prompt.label)
def test_only_tokens_as_good_as_eagers_are_excused(prompt: checks.Prompt) -> None:
    model = families.build("gemma2", dtype=torch.bfloat16)
    with torch.no_grad():
        tokens = checks.generate(model, "gemma2", prompt, "cpu")
        assert checks.unexcused(model, "gemma2", prompt, "cpu", tokens) == ""
        worst = checks.led(model, "gemma2", prompt, "cpu", tokens)[2].nan_to_num(neginf=torch.inf).argmin(1)
        tokens[:, checks.PROMPT + 2] = worst
        assert "token 2 of sequence" in checks.unexcused(model, "gemma2", prompt, "cpu", tokens)
