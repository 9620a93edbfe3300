"""A Llama whose sizes are tuned for, called in other ways: with masks, positions, embeddings, or another epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fast_tunes import look_at_few_groups
from near_misses import WAYS, Llamas, compiled
from reference_backend import ReferenceBackend, use

from fuseplan.planner import reset_stats, stats
from fuseplan.planner.capture.trace import capture
from fuseplan.planner.models.sources import source_of, workloads_for
from fuseplan.planner.tuning.session import open_session

pytestmark = pytest.mark.uncovered

ENTRIES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}
KV_LEN, PROMPT = 12, 6


@pytest.mark.parametrize("kv_len", [KV_LEN, 0], ids=["decode", "prefill"])
def test_a_tuned_model_has_plans_for_every_way_to_call_it(
    kv_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In combinations, too, that no call of the tune has. Plans are the cost model's, stored as a tune stores them."""
    use(monkeypatch, ReferenceBackend())
    look_at_few_groups(monkeypatch)
    db = str(tmp_path / "tuning.db")
    source, session = source_of(ENTRIES, "tiny", "bfloat16"), open_session("cpu", db)
    sizes = ("1", kv_len, None) if kv_len else (None, None, str(PROMPT))
    for workload in workloads_for(source, "cpu", *sizes, calls=True):
        for graph in capture(source, workload, "cpu") if workload.regime != "generate" else ():
            planner = session.planner()
            regions, _ = planner.look_up_regions(graph, workload.derived)
            for plan in planner.plan_graph(graph, regions=regions).unique():
                session.database.put_plan(plan.record)
    session.database.close()
    with torch.no_grad():
        llamas = Llamas(ENTRIES, "cpu")
        for way in (*WAYS, "mask+embeddings"):
            torch._dynamo.reset()
            reset_stats()
            model, given, rewind = llamas.call(way, kv_len, PROMPT)
            found = compiled(model, given, rewind, db)().float()
            rewind()
            expected = model(**given).logits.float()
            assert (stats().misses, stats().from_model, dict(stats().fallbacks)) == (0, 0, {}), way
            assert float((found - expected).norm() / expected.norm()) < 2e-2, way
