"""Ops know their modules, however the model was captured; what is planned does not depend on how modules are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tracing import recording

from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.capture.trace import record
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.groups.places import paths_of, place_of, region_paths
from fuseplan.planner.groups.regions import find_regions, unique_regions
from fuseplan.planner.module_paths import group_place
from fuseplan.planner.tuning.session import open_session

IDS = torch.arange(7)[None]


def at_run_time(function: Callable[..., Any], *args: Any, **options: Any) -> Traced:
    """What torch.compile gives a back end."""
    traces: list[Traced] = []
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=recording(traces), **options)(*args)
    (trace,) = traces
    return trace


def modules_of(graph: DataflowGraph, op: str) -> list[tuple[str, ...]]:
    return [graph.paths[node.name] for node in graph if node.op.startswith(f"aten.{op}.")]


def test_ops_have_the_paths_of_named_modules() -> None:
    model = llama()
    (trace,) = record(model, (IDS,), {})
    known = dict(model.named_modules())
    assert {path for paths in trace.graph.paths.values() for path in paths} <= known.keys()
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert modules_of(trace.graph, "linear") == [(name,) for name in linears]
    assert modules_of(trace.graph, "scaled_dot_product_attention") == [("model.layers.0.self_attn",)]


def test_paths_are_the_same_however_the_model_is_captured() -> None:
    model = llama()
    offline = record(model, (IDS,), {})[0].graph.paths

    def step(ids: Tensor) -> Any:
        return model(ids)

    for function in (model, model.forward, step, lambda ids: model(input_ids=ids)):
        assert at_run_time(function, IDS).graph.paths == offline


def test_ops_outside_of_modules_are_at_the_top() -> None:
    norm = nn.LayerNorm(8)
    graph = record(lambda x: norm(x.sin()).cos(), (torch.ones(2, 8),), {})[0].graph
    assert modules_of(graph, "sin") == modules_of(graph, "cos") == [("",)]
    (found,) = {path for paths in graph.paths.values() for path in paths} - {"norm"}
    assert found == ""


class _Checkpointed(nn.Module):
    """Parts that are traced by themselves: a checkpoint's body and a functorch level."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
        self.each = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, x, use_reentrant=False)
        return torch.vmap(self.each)(hidden).tanh()


def test_checkpoints_and_functorch_levels_keep_their_modules() -> None:
    graph = record(_Checkpointed().eval(), (torch.ones(3, 4),), {})[0].graph
    assert modules_of(graph, "silu") == [("body.1",)]
    assert modules_of(graph, "tanh") == [("",)]
    assert {path for paths in graph.paths.values() for path in paths} == {"", "body.0", "body.1", "each"}


def test_an_op_made_of_several_is_of_all_their_modules() -> None:
    graph = record(llama(), (IDS,), {}, pack_weights=True)[0].graph
    merged = [graph.paths[node.name] for node in graph if "merged" in node.op]
    assert merged == [
        tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
    ]


def test_paths_come_back_from_json_and_older_files_have_none() -> None:
    graph = record(llama(), (IDS,), {})[0].graph
    data = json.loads(json.dumps(graph_to_json(graph)))
    assert graph_from_json(data).paths == graph.paths
    del data["paths"]
    older = graph_from_json(data)
    assert (older.paths, place_of(older, [next(iter(older)).name])) == ({}, "")
    assert [region.key for region in find_regions(older)] == [region.key for region in find_regions(graph)]


class _One(nn.Module):
    def __init__(self, norm: str, linear: str) -> None:
        super().__init__()
        self.names = norm, linear
        self.add_module(norm, nn.LayerNorm(16))
        self.add_module(linear, nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        norm, linear = (getattr(self, name) for name in self.names)
        return torch.nn.functional.silu(linear(norm(x))) * x


class _Flat(nn.Module):
    """The computation of ``_One`` without modules."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.layer_norm(x, (16,), self.a, self.b)
        return torch.nn.functional.silu(torch.nn.functional.linear(hidden, self.c, self.d)) * x

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d = (nn.Parameter(torch.ones(16)) for _ in range(3))
        self.c = nn.Parameter(torch.ones(16, 16))


def test_keys_and_plans_do_not_depend_on_how_modules_are_named(tmp_path: Path) -> None:
    session = open_session("cpu", tmp_path / "tuning.db")
    plans, places = [], []
    for module in (_One("norm", "proj"), _One("ln", "fc"), _Flat()):
        for wrapped in (module, nn.Sequential(module)):
            graph = record(wrapped.eval(), (torch.ones(2, 16),), {})[0].graph
            planned = session.planner().plan_graph(graph).regions
            plain = [replace(one.record, evidence=session_free(one.record.evidence)) for one in planned]
            plans.append(([one.region.key for one in planned], plain))
            places.append(place_of(graph, [node.name for node in graph]))
    session.database.close()
    assert all(plan == plans[0] for plan in plans)
    assert len(set(places)) == len(places)


def session_free(evidence: Any) -> Any:
    """Evidence without the time at which it was made."""
    return replace(evidence, created="", elapsed_s=0.0)


def test_equal_layers_are_one_region_wherever_they_are() -> None:
    layers = nn.ModuleDict({name: _One("norm", "proj") for name in ("first", "second")})
    graph = record(lambda x: layers["second"](torch.rrelu(layers["first"](x))), (torch.ones(2, 16),), {})[0].graph
    found = unique_regions(find_regions(graph)).values()
    assert max(len(occurrences) for occurrences in found) == 2
    whole = {
        text for occurrences in found
        for text in group_place(region_paths(graph, occurrences), range(99)).split("; ")
    }
    roots = {text.split(".")[-2 if ":" not in text else 0].split(":")[0] for text in whole if text}
    assert roots <= {"first", "second"}


def test_views_say_where_a_group_is_only_where_it_has_nothing_else() -> None:
    graph = record(llama(), (IDS,), {})[0].graph
    views = [node.name for node in graph if node.op in ("aten.transpose.int", "aten.view.default")]
    (q_proj, *_) = [node.name for node in graph if graph.paths[node.name] == ("model.layers.0.self_attn.q_proj",)]
    assert paths_of(graph, [*views, q_proj]) == ("model.layers.0.self_attn.q_proj",)
    assert paths_of(graph, views) == ("model.layers.0.self_attn",)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_layers_of_a_model_are_one_place(layers: int) -> None:
    model = llama()
    model.model.layers = nn.ModuleList([model.model.layers[0], *(llama().model.layers[0] for _ in range(layers - 1))])
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = layers
    graph = record(model, (IDS,), {})[0].graph
    texts = set()
    for occurrences in unique_regions(find_regions(graph)).values():
        places = region_paths(graph, occurrences)
        texts |= {group_place(places, [at]) for at in range(len(occurrences[0].ops))}
    down = "model.layers.0.mlp.down_proj" if layers == 1 else "model.layers.*.mlp.down_proj  x2"
    assert down in texts
