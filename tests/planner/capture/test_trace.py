"""What is captured offline, without weights, is what torch.compile sees at run time, and it computes the model."""

from __future__ import annotations

import json
import re
import resource
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from model_families import FAMILY_CONFIGS, write_family
from model_samples import write_config
from torch import Tensor, fx
from tracing import ops, recording

from fuseplan.planner.capture import cache
from fuseplan.planner.capture.cache import cached_capture, capture_key
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.capture.trace import capture, record, trace_predispatch
from fuseplan.planner.errors import CaptureError, ConfigError
from fuseplan.planner.graph.dataflow import bind_graph
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.groups.regions import find_regions, region_parts, regions_to_json, split_common
from fuseplan.planner.models.build import build_model, cache_name
from fuseplan.planner.models.sources import ModelSource, find_source, generates
from fuseplan.planner.models.workload import Workload, decode, generate, prefill
from fuseplan.planner.rewrites import grouped_queries

pytestmark = pytest.mark.uncovered

DECODE, PREFILL = decode(3, 32), prefill(2, 9)


def at_run_time(source: ModelSource, workload: Workload) -> list[Traced]:
    """The graphs that torch.compile hands to a back end when the real model runs, checked against eager."""
    model = build_model(source, "cpu")
    args, kwargs = model.example(workload)
    eager_args, eager_kwargs = deepcopy((args, kwargs))
    traces: list[Traced] = []
    torch._dynamo.reset()
    with torch.no_grad():
        actual = torch.compile(model.module, backend=recording(traces))(*args, **kwargs)
        expected = model.module(*eager_args, **eager_kwargs)
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-5, atol=2e-5)
    if name := cache_name(kwargs):
        for layer, eager_layer in zip(kwargs[name].layers, eager_kwargs[name].layers, strict=True):
            for key, value in vars(eager_layer).items():
                if isinstance(value, torch.Tensor | int):
                    torch.testing.assert_close(getattr(layer, key), value, rtol=2e-5, atol=2e-5)
    return traces


@pytest.mark.parametrize(
    ("family", "workload", "layers"),
    [
        ("llama", DECODE, None),
        ("llama", PREFILL, 1),
        ("gemma3", DECODE, None),  # with a window and without
        ("gpt2", PREFILL, 1),
        ("llama", replace(PREFILL, given="masked"), 1),
        ("deepseek-v3", DECODE, None),  # keys and values of different widths; experts, in the second layer
        ("mamba", DECODE, None),  # a cache that is no keys and values
        ("whisper", PREFILL, 1),  # an encoder, too
    ],
)
def test_offline_capture_equals_run_time_and_computes_the_model(
    family: str, workload: Workload, layers: int | None, tmp_path: Path
) -> None:
    source = find_source(config=write_family(tmp_path, family), dtype="float32", layers=layers)
    running = [graph_to_json(trace.graph) for trace in at_run_time(source, workload)]
    assert [graph_to_json(graph) for graph in capture(source, workload, "cpu")] == running


def test_generation_is_captured_for_prompts_of_one_length_and_of_several(tmp_path: Path) -> None:
    source = find_source(config=write_family(tmp_path, "llama"), dtype="float32", layers=1)
    captured = {region.key for graph in capture(source, generate(3, 9), "cpu") for region in find_regions(graph)}
    for padding in (0, 3):
        ids = torch.full((3, 9), 5)
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        module: Any = build_model(source, "cpu").module
        traces: list[Traced] = []
        torch._dynamo.reset()
        module.forward = torch.compile(module.forward, backend=recording(traces))
        with torch.no_grad():
            module.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4, disable_compile=True)
        assert len(traces) == 3
        running = {region.key for trace in traces for region in find_regions(bind_graph(trace.graph))}
        assert running <= captured, f"padding {padding}"


def test_generation_is_captured_until_a_sliding_window_is_full(tmp_path: Path) -> None:
    entries = FAMILY_CONFIGS["gemma3"] | {"sliding_window": 11, "layer_types": ["sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(entries | {"num_hidden_layers": 1}))
    source = find_source(config=tmp_path, dtype="float32")
    graphs = [{region.key for region in find_regions(graph)} for graph in capture(source, generate(1, 9), "cpu")]
    assert len(graphs) == 4 and not graphs[-1] <= set().union(*graphs[:-1])


def test_layers_of_a_llama_stay_whole(tmp_path: Path) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    graph = capture(source, DECODE, "cpu")[0]
    names = ops(graph)
    assert names.count("aten.linear.default") == 8
    assert names.count("aten.scaled_dot_product_attention.default") == 1
    assert names.count("aten.index_copy_.default") == 2
    assert {graph.specs[value].dtype for value in graph.outputs} == {"bfloat16"}
    writes = [node for node in graph if node.op == "aten.index_copy_.default"]
    attention = next(node for node in graph if "attention" in node.op)
    assert all(nx.has_path(graph.graph, node.name, attention.name) for node in writes)


def test_seventy_billion_parameters_need_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(find_source("llama-3.1-70b", layers=2), prefill(1, 2048), "cpu")[0]
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    weights_bytes = sum(graph.specs[name].nbytes() for name in graph.inputs)
    assert weights_bytes > 7e9
    assert grown_kib * 1024 < weights_bytes / 4


def test_cuda_can_be_captured_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the real device is captured")
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    monkeypatch.setattr(grouped_queries, "MEASURED", frozenset())
    assert ops(capture(source, DECODE, "cuda")[0]) == ops(capture(source, DECODE, "cpu")[0])


# -- the user's own module --------------------------------------------------------------------------------


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code = """
import io
import torch
from odd_models import Breaking, DataDependent, Tied

def tied(): return Tied(), (torch.randn(5, 6),)
def keyword(): return Tied(), {"x": torch.randn(5, 6), "extra": torch.randn(6)}
def single(): return Tied(), torch.randn(5, 6)
def cast(): return Tied().half().to("cpu"), (torch.randn(5, 6).half(),)
def loaded():
    file = io.BytesIO()
    torch.save(Tied().state_dict(), file)
    file.seek(0)
    model = Tied()
    model.load_state_dict(torch.load(file))
    return model, (torch.randn(5, 6),)
def asking():
    model = Tied()
    assert float(model.first.weight.abs().max()) < 10
    return model, (torch.randn(5, 6),)
def breaking(): return Breaking(), (torch.randn(5, 6),)
def data_dependent(): return DataDependent(), (torch.randn(5, 6),)
def narrow(): return Tied(), (torch.randn(5, 7),)
def wrong(): return Tied()
def failing(): raise RuntimeError("no such file: weights.bin")
def missing(): return {}["weights.pt"]
def listed(): return [Tied, torch.randn(5, 6), 3]
def silent(): torch.nn.functional.relu(torch.ones(3, dtype=torch.bool))
def chosen(): return Chosen(), torch.randn(5, 6)
class Chosen(torch.nn.Module):
    def forward(self, x):
        return x[x > 0] + 1
"""
    (tmp_path / "user_models.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "test_capture", sys.modules[__name__])
    monkeypatch.delitem(sys.modules, "user_models", raising=False)
    return "user_models"


@pytest.mark.parametrize("factory", ["tied", "keyword", "single", "cast", "loaded", "asking"])
def test_a_module_is_captured_as_it_runs(factories: str, factory: str) -> None:
    source = find_source(module=f"{factories}:{factory}")
    graph = capture(source, Workload("forward"), "cpu")[0]
    model = build_model(source, "cpu")
    args, kwargs = model.example(Workload("forward"))
    (trace,) = record(model.module, args, kwargs)
    assert graph_to_json(graph) == graph_to_json(trace.graph)
    weights = [name for name in graph.inputs if graph.specs[name].shape == (6, 6)]
    assert len(weights) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plain_tensor_of_a_module_is_on_the_device_of_the_others(factories: str, device: str) -> None:
    graph = capture(find_source(module=f"{factories}:tied"), Workload("forward"), device)[0]
    assert ops(graph)[-1] == "aten.add.Tensor"


def test_dtype_applies_to_a_module(factories: str) -> None:
    source = find_source(module=f"{factories}:tied", dtype="fp16")
    graph = capture(source, Workload("forward"), "cpu")[0]
    assert {graph.specs[name].dtype for name in graph.inputs if len(graph.specs[name].shape) == 2} == {"float16"}
    model = build_model(source, "cpu")
    assert {next(model.module.parameters()).dtype, model.inputs[0][0].dtype} == {torch.float16}


def test_graph_breaks_give_several_graphs(factories: str) -> None:
    captured = capture(find_source(module=f"{factories}:breaking"), Workload("forward"), "cpu")
    assert [ops(graph) for graph in captured] == [
        ["aten.sin.default", "aten.add.Tensor"],
        ["aten.cos.default", "aten.mul.Tensor"],
    ]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("wrong", r"must return .*; it returned Tied$"),
        ("listed", r"must return .*; it returned a list of 3: the class Tied, Tensor, int$"),
        ("failing", r"no such file: weights.bin \(line 25 of user_models.py\)"),
        ("missing", r"no such key: 'weights.pt' \(line 26 of user_models.py\)"),
        ("silent", r"relu \(line 28 of user_models.py\)"),
        ("absent", "absent"),
    ],
)
def test_a_bad_factory_is_named(factories: str, factory: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capture(find_source(module=f"{factories}:{factory}"), Workload("forward"), "cpu")


@pytest.mark.parametrize(("given", "meant"), [
    ("models.py:f", "did you mean models:f?"), ("./models.py:f", "did you mean models:f?"),
    ("models.py", "did you mean models:factory?"), ("../my lib/models.py:f", "models:f, in the folder ../my lib?"),
])
def test_a_factory_that_is_named_by_its_file_is_named_as_it_should_be(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(meant)):
        capture(find_source(module=given), Workload("forward"), "cpu")


def test_a_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_here.py").write_text("import torch\ndef f(): return torch.nn.Tanh(), (torch.ones(3),)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "found_here", raising=False)
    assert ops(capture(find_source(module="found_here:f"), Workload("forward"), "cpu")[0]) == ["aten.tanh.default"]


@pytest.mark.parametrize("name", ["no_such_package_here:f", "user_models"])
def test_a_bad_module_path_is_named(factories: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        capture(find_source(module=name), Workload("forward"), "cpu")


@pytest.mark.parametrize(("factory", "message"), [
    ("data_dependent", r"cannot be traced: it decides by a number in a tensor.* \(line \d+ of odd_models.py\)"),
    ("narrow", r"cannot be traced: .*same reduction dim.* \(line \d+ of odd_models.py\)"),
    ("chosen", r"cannot be traced: the size of what aten.nonzero.default makes .* \(line 32 of user_models.py\)"),
])
def test_a_model_that_cannot_be_traced_says_why(factories: str, factory: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(find_source(module=f"{factories}:{factory}"), Workload("forward"), "cpu")


@pytest.mark.parametrize("entries", [
    {"model_type": "convnext", "depths": [1, 1], "hidden_sizes": [8, 12], "num_stages": 2, "image_size": 32},
    {"model_type": "resnet", "depths": [1], "hidden_sizes": [16], "embedding_size": 8, "layer_type": "basic"},
    {"model_type": "swin", "image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    {"model_type": "pegasus", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99},
])
def test_constructors_that_look_at_numbers_and_configs_that_leave_things_out(
    entries: dict[str, Any], tmp_path: Path
) -> None:
    entries |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    source = find_source(config=tmp_path, dtype="float32")
    assert not generates(source)
    assert len(ops(capture(source, prefill(2, 5), "cpu")[0])) > 10


def test_nothing_to_trace_is_an_error() -> None:
    with pytest.raises(CaptureError, match="no tensor op"):
        record(lambda x: x, [torch.ones(2)], {})


def test_tracing_needs_a_back_end() -> None:
    with pytest.raises(CaptureError, match="back end"):
        trace_predispatch(fx.symbolic_trace(lambda x: x + 1), [torch.ones(2)])


def test_a_refused_graph_raises_its_own_error() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    with pytest.raises(CaptureError, match="autocast"):
        record(function, [torch.ones(2, 2)], {})


# -- the cache --------------------------------------------------------------------------------------------


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of captures, not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fuseplan" / "captures"


def test_a_capture_comes_back_from_disk(tmp_path: Path, captures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    fresh = cached_capture(source, PREFILL, "cpu")
    assert list(captures.iterdir())

    def forbidden(*args: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr(cache, "capture", forbidden)
    kept = cached_capture(source, PREFILL, "cpu")
    assert graph_to_json(kept[0]) == graph_to_json(fresh[0])
    assert [dict(node.attrs) for node in kept[0]] == [dict(node.attrs) for node in fresh[0]]


def test_a_capture_comes_back_with_its_regions(tmp_path: Path, captures: Path) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), layers=2)
    cached_capture(source, PREFILL, "cpu")
    kept, = cached_capture(source, PREFILL, "cpu")
    alike = graph_from_json(graph_to_json(kept))  # nothing is known of its regions
    assert find_regions(kept) == find_regions(alike)
    for region in find_regions(kept):
        assert region_parts(kept, region) == region_parts(alike, region)
        assert split_common(kept, region) == split_common(alike, region)
    assert len(regions_to_json(kept)) == len(find_regions(kept))  # pieces that were asked for are no regions


@pytest.mark.parametrize("damage", [
    "", "{", '{"graphs": [{"nodes": [1]}]}', '{"graphs": [], "regions": 3}', '{"graphs": 3}', "[]"])
def test_a_damaged_file_is_captured_again(
    tmp_path: Path, damage: str, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    captures.mkdir(parents=True)
    (captures / f"{capture_key(source, PREFILL, 'cpu')}.json").write_text(damage)
    calls: list[object] = []
    monkeypatch.setattr(cache, "capture", lambda *args: calls.append(args) or ())
    cached_capture(source, PREFILL, "cpu")
    assert len(calls) == 1


def test_an_unwritable_folder_is_no_error(tmp_path: Path, captures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    (tmp_path / "cache").write_text("not a folder")
    monkeypatch.setattr(cache, "capture", lambda *args: ())
    assert cached_capture(source, PREFILL, "cpu") == ()


def test_the_users_module_is_never_cached(factories: str, captures: Path) -> None:
    cached_capture(find_source(module=f"{factories}:tied"), Workload("forward"), "cpu")
    assert not captures.exists()


def test_the_key_tells_everything_apart_but_the_path(tmp_path: Path) -> None:
    path = write_config(tmp_path, "llama")
    base = capture_key(find_source(config=path), DECODE, "cpu")
    other = tmp_path / "elsewhere" / "config.json"
    other.parent.mkdir()
    other.write_text(path.read_text())
    assert capture_key(find_source(config=other), DECODE, "cpu") == base
    different = [
        capture_key(find_source(config=path, layers=1), DECODE, "cpu"),
        capture_key(find_source(config=path, dtype="float32"), DECODE, "cpu"),
        capture_key(find_source(config=path), PREFILL, "cpu"),
        capture_key(find_source(config=path), DECODE, "cuda"),
        capture_key(find_source(config=path), DECODE, "cpu", pack_weights=True),
        capture_key(find_source(config=write_config(tmp_path, "qwen3")), DECODE, "cpu"),
    ]
    assert len({base, *different}) == 7


def test_any_change_to_the_code_captures_anew(tmp_path: Path) -> None:
    hashed = cache._code_hash.__wrapped__
    (tmp_path / "one.py").write_text("first")
    seen = {hashed((tmp_path,))}
    (tmp_path / "one.py").write_text("second")
    seen.add(hashed((tmp_path,)))
    (tmp_path / "two.py").write_text("third")
    seen.add(hashed((tmp_path,)))
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "three.py").write_text("fourth")
    seen.add(hashed((tmp_path,)))
    assert len(seen) == 4
    ours = [Path(module.__file__ or "") for name, module in sys.modules.items()
            if name.startswith(("fuseplan.planner.", "fuseplan.kernels."))]
    folders = [folder.resolve() for folder in cache._CODE]
    assert ours and all(any(path.resolve().is_relative_to(folder) for folder in folders) for path in ours)
