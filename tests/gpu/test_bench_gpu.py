"""The bench on a GPU: groups, whole models and patterns, launched from Python, in a CUDA graph, and cold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import group_bench
import launch_costs
import pytest
import report_samples as samples
from compile_ahead import compile_ahead
from curves import curve_of

from fuseplan.costmodel.device import DeviceSpec, Latency, Peak
from fuseplan.costmodel.identity import DeviceIdentity, current_identity
from fuseplan.planner.bench import model as bench_model
from fuseplan.planner.bench.patterns import COPY, PatternBench
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import decode
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.patterns.table import pattern_graph
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS
from fuseplan.planner.peers.peers import FLASHINFER, LIGER, peer_names
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.store.database import Database

pytestmark = pytest.mark.gpu


def gpu_spec(identity: DeviceIdentity) -> DeviceSpec:
    """A device on which one kernel of ours costs less than one ATen op: with a CPU's rates no plan would fuse any."""
    return replace(
        samples.SPEC,
        identity=identity,
        bandwidth=curve_of([(2.0**14, 100.0), (2.0**22, 3000.0), (2.0**30, 4000.0)]),
        launch={**samples.SPEC.launch, "graph": Latency(1.0, 0.5, "empty kernel")},
        peaks={"fp32": Peak(4e13, 5e13), "sfu": Peak(4e12, 5e12)},
    )


@pytest.fixture
def session(tmp_path: Path) -> Session:
    path = tmp_path / "tuning.db"
    spec = gpu_spec(current_identity("cuda"))
    with Database(path) as database:
        database.put_device(spec.identity.key(), json.loads(spec.to_json()))
    return open_session("cuda", path)


def test_group_in_both_modes(session: Session) -> None:
    graph = pattern_graph("add_rms_norm", "3x4097", "bfloat16")
    plan = session.planner().plan_graph(graph)
    for group in group_bench.fused_groups(session, [("3x4097", graph, plan)]):
        rows = group_bench.bench_group(session, group, (EAGER, INDUCTOR), ("eager", "graph"), 0.0)
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
    rows = bench_model.bench_model(session, model, decode(2, 64), (EAGER,), ("eager", "graph"), 0.0)
    assert [(row.contestant, row.mode) for row in rows] == [
        (EAGER, "eager"), (OURS, "eager"), (EAGER, "graph"), (OURS, "graph"),
    ]
    for row in rows:
        assert row.median_us is not None, row
        assert row.error is not None and row.error < 1e-2


@pytest.mark.parametrize(
    "name, shape",
    [
        ("swiglu", "3x4096"), ("geglu_tanh", "3x4096"), ("add_rms_norm", "3x4096"), ("rms_norm", "3x4096"),
        ("layer_norm", "3x4096"), ("rope", "1x8x5x128"), ("sampling_softmax", "3x4096"),
    ],
)
def test_every_peer_of_a_pattern_is_right_in_every_mode(session: Session, name: str, shape: str) -> None:
    modes = ("eager", "graph", "cold")
    peers = peer_names(None, "cuda", without=(MAX_AUTOTUNE,))
    rows = PatternBench(session, peers, modes, 0.0).rows(cell(name, shape, "bfloat16"))
    assert {(row.contestant, row.mode) for row in rows} == {(who, mode) for who in (OURS, *peers) for mode in modes}
    for row in rows:
        # A library may lack the op or not be installed; whoever answers is right.
        others = (LIGER, FLASHINFER, "ninetoothed default")
        absent = row.contestant in others and row.median_us is None
        said = f"{row.contestant}, {row.mode}: {row.note or 'no note'}; {row}"
        assert absent or row.median_us is not None, said
        assert not row.note.startswith("another result"), said
        assert absent or (row.error is not None and row.error < 2e-2), said


def test_large_cells_are_held_against_a_copy(session: Session) -> None:
    rows = PatternBench(session, (EAGER,), ("cold",), 0.0).rows(cell("swiglu", "4096x14336", "bfloat16"))
    times = {row.contestant: row.median_us for row in rows}
    assert times.keys() == {OURS, EAGER, COPY}
    assert times[COPY] is not None and times[COPY] > 0


def test_inductor_is_compiled_beforehand(session: Session) -> None:
    one = cell("swiglu", "5x96", "bfloat16")
    with compile_ahead("cuda", (INDUCTOR, MAX_AUTOTUNE), 2) as compile_cells:
        assert compile_cells([one]) == []
    rows = PatternBench(session, (MAX_AUTOTUNE,), ("graph",), 0.0).rows(one)
    assert {row.contestant: row.median_us is not None for row in rows} == {OURS: True, MAX_AUTOTUNE: True}


def test_launches_are_timed(session: Session) -> None:
    rows = launch_costs.bench_launch(session, [cell("add_rms_norm", "1x4096", "bfloat16")], 0.0)
    found = {(row.what, row.outputs): row for row in rows}
    assert (launch_costs.TRITON, "given") in found
    for row in rows:
        assert row.host_us is not None, row
