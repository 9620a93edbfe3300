"""The config of every model family can be captured, also of those that no other test runs."""

from __future__ import annotations

from pathlib import Path

import family_checks as checks
import model_families as families
import pytest

from fuseplan.planner.capture.trace import capture
from fuseplan.planner.models.sources import find_source, workloads_for

pytestmark = pytest.mark.uncovered

#: ``tests/planner/capture/test_trace.py`` captures these, and runs them.
FAMILIES_RUN = {"llama", "gemma3", "gpt2", "deepseek-v3", "mamba", "whisper"}
#: Captured with both layers: they are not alike, or Hugging Face cannot leave one out.
WHOLE = {"gemma2", "gpt-oss", "mamba2"}


@pytest.mark.parametrize("family", sorted(families.FAMILY_CONFIGS.keys() - FAMILIES_RUN))
def test_every_other_family_can_be_captured_from_its_config(family: str, tmp_path: Path) -> None:
    layers = None if family in WHOLE else 1
    source = find_source(config=families.write_family(tmp_path, family), dtype="bfloat16", layers=layers)
    decode = "1" if families.task_of(family) == "causal" else None
    workload = workloads_for(source, "cpu", decode, checks.KV_LEN, "3x9")[0]
    assert workload.regime == ("decode" if decode else "prefill")
    assert max(len(list(graph)) for graph in capture(source, workload, "cpu")) > 20
