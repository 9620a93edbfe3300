"""A slice of the matrix of model families (all of it: ``check_models.py``), its kernels interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_checks as checks
import pytest
from reference_backend import ReferenceBackend, use


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use(monkeypatch, ReferenceBackend())
    return {"db": str(tmp_path / "tuning.db")}


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bf16"), ("whisper", "fp32"), ("transformer-encoder", "bf16")])
def test_models_are_fused_and_no_less_exact_than_eager(family: str, dtype: str, options: dict[str, Any]) -> None:
    row = checks.check_forward(family, dtype, dynamic=False, device="cpu", options=options)
    assert row.problems == []
    assert row.coverage is not None and row.coverage.fused > 0


@pytest.mark.parametrize("prompt", [checks.Prompt(3, "static")], ids=lambda prompt: prompt.label)
def test_generation_gives_the_tokens_of_eager(prompt: checks.Prompt, options: dict[str, Any]) -> None:
    row = checks.check_generate("llama", "fp32", prompt, "cpu", options)
    assert row.problems == []
    assert row.coverage is not None and row.coverage.fused > 0
