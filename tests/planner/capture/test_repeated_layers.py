"""Three traced layers as a whole model, beside a trace of all its layers: equal but for names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_samples import CONFIGS

from fuseplan.planner.capture import cache, repeated_layers
from fuseplan.planner.capture.cache import cached_capture
from fuseplan.planner.capture.repeated_layers import FEWEST, TRACED, traced_source, with_layers
from fuseplan.planner.capture.trace import capture
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.models.sources import ModelSource, find_source
from fuseplan.planner.models.workload import Workload, decode, generate, prefill


def source_of(tmp_path: Path, family: str, layers: int, **more: Any) -> ModelSource:
    entries = {**CONFIGS[family], **more}
    entries["n_layer" if "n_layer" in entries else "num_hidden_layers"] = layers
    (tmp_path / "config.json").write_text(json.dumps(entries))
    return find_source(config=tmp_path / "config.json")


def differences(one: DataflowGraph, other: DataflowGraph) -> list[str]:
    """Where two graphs differ in more than names and the order of graph inputs; ops are compared in order."""
    found, names = list[str](), dict[str, str]()
    if len(one) != len(other):
        return [f"{len(one)} and {len(other)} ops"]
    for mine, theirs in zip(one, other, strict=True):
        if (mine.op, dict(mine.attrs)) != (theirs.op, dict(theirs.attrs)):
            found.append(f"{mine.name} and {theirs.name}: ops")
        if one.paths.get(mine.name) != other.paths.get(theirs.name):
            found.append(f"{mine.name} and {theirs.name}: paths")
        for value, its in zip((*mine.inputs, *mine.outputs), (*theirs.inputs, *theirs.outputs), strict=True):
            if names.setdefault(value, its) != its or one.specs[value] != other.specs[its]:
                found.append(f"{mine.name}: value {value} is not {its}")
    if len(set(names.values())) != len(names):
        found.append("two values of one are one of the other")
    for what in ("inputs", "outputs", "rounds"):
        ours, theirs_too = (list(getattr(graph, what)) for graph in (one, other))
        if len(ours) != len(theirs_too) or {names.get(value) for value in ours} - {None} != {
                value for value in theirs_too if value in set(names.values())}:
            found.append(what)
    if {(names[a], names[b]) for a, b in one.orders()} != set(other.orders()):
        found.append("orders")
    return found


@pytest.mark.parametrize(("family", "workload", "packed"), [
    ("llama", generate(1, 8), False), ("qwen3", decode(2, 16), True), ("mixtral", prefill(1, 8), False),
    ("gpt2", decode(2, 16), False), ("bert", prefill(2, 8), False),
], ids=["llama", "qwen3-packed", "mixtral", "gpt2", "bert"])
def test_repeated_layers_are_those_of_the_whole_model(
    tmp_path: Path, family: str, workload: Workload, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two layers that are made: what goes from the one to the other is nobody's but theirs."""
    traced = list[DataflowGraph]()

    def noted(*asked: Any) -> list[DataflowGraph]:
        graphs = capture(*asked)
        traced.extend(graphs)
        return graphs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(repeated_layers, "FEWEST", TRACED + 2)
    monkeypatch.setattr(cache, "capture", noted)
    source = source_of(tmp_path, family, TRACED + 2)
    short = traced_source(source)
    assert short is not None and short[1] == TRACED + 2
    whole = capture(source, workload, "cpu", packed)
    made = cached_capture(source, workload, "cpu", packed)
    assert [differences(one, other) for one, other in zip(whole, made, strict=True)] == [[]] * len(whole)
    for one, other in zip(whole, made, strict=True):
        assert [region.key for region in find_regions(one)] == [region.key for region in find_regions(other)]
    assert 0 < sum(map(len, traced)) < sum(map(len, whole))


@pytest.mark.parametrize(("family", "more"), [
    ("gemma3", {"layer_types": ["sliding_attention"] * (FEWEST - 1) + ["full_attention"]}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
], ids=["kinds of layers", "scaled by their place"])
def test_of_layers_that_are_not_alike_all_are_traced(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    source = source_of(tmp_path, family, FEWEST, **more)
    if family == "gpt2":  # the code reads the config and its place: no attribute says so
        short = traced_source(source)
        assert short is None or with_layers(capture(short[0], prefill(1, 8), "cpu")[0], FEWEST) is None
    else:
        assert traced_source(source) is None


def test_a_graph_whose_last_two_layers_differ_shows_no_repetition(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    (graph,) = capture(source_of(tmp_path, "gemma3", 3, layer_types=kinds), prefill(1, 32), "cpu")
    assert with_layers(graph, 8) is None


def test_few_layers_are_all_traced(tmp_path: Path) -> None:
    assert traced_source(source_of(tmp_path, "llama", FEWEST - 1)) is None
