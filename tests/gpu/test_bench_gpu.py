"""The bench on a GPU: groups and whole models, launched from Python and replayed from a CUDA graph."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
import torch

from fuseplan.costmodel.device import Latency, current_identity
from fuseplan.planner import bench_groups, bench_model
from fuseplan.planner.bench import EAGER, INDUCTOR, OURS
from fuseplan.planner.build import build_model
from fuseplan.planner.models import find_source
from fuseplan.planner.patterns import pattern_graph
from fuseplan.planner.session import Session, open_session
from fuseplan.planner.workload import decode
from fuseplan.search.database import Database

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    path = tmp_path / "tuning.db"
    identity = current_identity("cuda")
    launch = {**samples.SPEC.launch, "graph": Latency(1.0, 0.5, "empty kernel")}
    with Database(path) as database:
        spec = replace(samples.SPEC, identity=identity, launch=launch)
        database.put_device(identity.key(), json.loads(spec.to_json()))
    return open_session("cuda", path)


def test_group_in_both_modes(session: Session) -> None:
    graph = pattern_graph("add_rms_norm", "3x4097", "bfloat16")
    plan = session.planner().plan_graph(graph)
    for group in bench_groups.fused_groups(session, [("3x4097", graph, plan)]):
        rows = list(bench_groups.bench_group(session, group, (EAGER, INDUCTOR), ("eager", "graph"), 0.0))
        assert len(rows) == 6
        for row in rows:
            assert row.median_us is not None, row
            assert row.error is not None and row.error < 1e-2


def test_decode_in_both_modes(session: Session, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 256, "dtype": "bfloat16",
    }
    path = tmp_path / "toy" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    model = build_model(find_source(config=path, device_type="cuda"), "cuda")
    rows = list(bench_model.bench_model(session, model, decode(2, 64), (EAGER,), ("eager", "graph"), 0.0))
    assert [(row.contestant, row.mode) for row in rows] == [
        (EAGER, "eager"), (OURS, "eager"), (EAGER, "graph"), (OURS, "graph"),
    ]
    for row in rows:
        assert row.median_us is not None, row
        assert row.error is not None and row.error < 1e-2
