"""The torch.compile back end on a GPU: a model in prefill and decode, dynamic lengths, CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_samples import write_config

import fuseplan.planner
from fuseplan.planner.build import build_model
from fuseplan.planner.models import find_source
from fuseplan.planner.patterns import PATTERNS, pattern
from fuseplan.planner.scheduler import FusionConfig, FusionScheduler
from fuseplan.planner.subject import random_tensor
from fuseplan.planner.workload import Workload, decode, prefill

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def compiled(module: Any, folder: Path) -> Any:
    return torch.compile(module, backend="fuseplan", options={"db": str(folder / "tuning.db")})


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("workload", [decode(2, 64), prefill(2, 37)])
def test_a_model_is_no_less_exact_than_eager(workload: Workload, tmp_path: Path) -> None:
    model = build_model(find_source(config=write_config(tmp_path, "llama"), dtype="bfloat16"), "cuda")
    fast = compiled(model.module, tmp_path)
    ids = model.example(workload)[1]["input_ids"]

    def logits(module: Any) -> torch.Tensor:
        args, kwargs = model.example(workload)  # a fresh cache
        result: torch.Tensor = module(*args, **{**kwargs, "input_ids": ids}).logits
        return result

    result, eager = logits(fast), logits(model.module)
    assert torch.isfinite(result).all()
    done = fuseplan.planner.stats()
    assert done.groups_fused >= 5 and done.fallbacks == {}
    if workload.regime == "prefill":
        exact = copy.deepcopy(model.module).double()(input_ids=ids, use_cache=False).logits
        assert error(result, exact) <= error(eager, exact) * 1.25
    else:
        assert error(result, eager.double()) < 0.05


def test_lengths_grow_without_another_compilation(tmp_path: Path) -> None:
    model = build_model(find_source(config=write_config(tmp_path, "llama"), dtype="bfloat16"), "cuda").module
    fast = compiled(model, tmp_path)
    for length in (16, 31, 64, 100):
        ids = torch.randint(0, 131, (2, length), device="cuda")
        result, eager = fast(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits
        assert error(result, eager.double()) < 0.05
    assert len(fuseplan.planner.stats().compiles) == 2 and fuseplan.planner.stats().fallbacks == {}


def test_a_compiled_model_can_be_captured_in_a_cuda_graph(tmp_path: Path) -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.silu(x) * y, -1)

    fast = compiled(chain, tmp_path)
    x, y = torch.randn(33, 127, device="cuda"), torch.randn(33, 127, device="cuda")
    fast(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fast(x, y)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(result, chain(x, y))
    assert fuseplan.planner.stats().groups_fused == 1


#: Kernels of a pattern that cannot be one: a library call cuts it, or one op by itself is left as it is.
KERNELS = {"moe_sigmoid": 2, "layer_norm": 0}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str, tmp_path: Path) -> None:
    graph, specs = pattern(name, PATTERNS[name].example)
    generator = torch.Generator("cuda").manual_seed(0)
    positive = ("scale", "temperature")
    inputs = {value: random_tensor(spec, generator, value in positive) for value, spec in specs.items()}
    scheduler = FusionScheduler(FusionConfig(), tmp_path / "tuning.db")
    result = scheduler.dispatch(graph, inputs)
    eager = FusionScheduler(FusionConfig(enable_fusion=False)).dispatch(graph, inputs)
    for value, expected in eager.items():
        assert result[value].dtype == expected.dtype
        # Which of two equal experts comes first is up to the library.
        if expected.dtype != torch.int64:
            distance = (result[value].double() - expected.double()).norm() / expected.double().norm()
            assert float(distance) < (5e-2 if expected.element_size() == 1 else 2e-2), value
    assert scheduler.stats.groups_fused == KERNELS.get(name, 1)
