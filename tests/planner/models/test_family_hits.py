"""Calls of models whose sizes are tuned for find their plans, with kernels interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_checks as checks
import model_families as families
import pytest
from fast_tunes import look_at_few_groups
from reference_backend import ReferenceBackend, use

from fuseplan.planner.capture.trace import capture
from fuseplan.planner.models.sources import find_source, workloads_for
from fuseplan.planner.tuning.session import open_session

pytestmark = pytest.mark.uncovered


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use(monkeypatch, ReferenceBackend())
    return {"db": str(tmp_path / "tuning.db")}


#: Families whose calls are tuned for, the sequences of a call (of several, some are padded), and the caches that are
#: generated with: Gemma3's growing cache is Llama's, and its static one has windows. Llama has one layer here. The
#: other families have two, and look up the ops between layers.
_TUNED = [("llama", 3, (None, "static")), ("gemma3", 1, ("static",)), ("t5", 1, ())]


@pytest.mark.parametrize(("family", "batch", "caches"), _TUNED)
def test_calls_and_generation_that_follow_from_tuned_sizes_are_exact_hits(
    family: str, batch: int, caches: tuple[str | None, ...], options: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if family != "t5":  # one has all of them
        look_at_few_groups(monkeypatch)
    if family == "llama":
        monkeypatch.setitem(families.FAMILY_CONFIGS, family, families.FAMILY_CONFIGS[family] | {"num_hidden_layers": 1})
    source = find_source(config=families.write_family(tmp_path, family), dtype="float32")
    decode = str(batch) if families.task_of(family) == "causal" else None
    session = open_session("cpu", options["db"])
    for workload in workloads_for(source, "cpu", decode, checks.KV_LEN, f"{batch}x{checks.PROMPT}", calls=True):
        unused = workload.regime == "generate" and ("static" if workload.kv_len else None) not in caches
        for graph in () if unused else capture(source, workload, "cpu"):
            planner = session.planner()
            regions, _ = planner.look_up_regions(graph, workload.derived)
            for plan in planner.plan_graph(graph, regions=regions).unique():
                session.database.put_plan(plan.record)
    session.database.close()
    rows = checks.check_hits(family, "fp32", "cpu", (batch,), options, caches)
    assert {row.check: row.problems for row in rows if row.problems} == {}
    assert len(rows) == {"llama": 5, "gemma3": 4, "t5": 2}[family]
    assert all(one.fused > 0 for row in rows for one in row.graphs)
