"""The torch.compile back end on a GPU: a model in prefill and decode, dynamic lengths, CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import fresh_start
from model_samples import write_config

import fuseplan.planner
from fuseplan.planner.capture.subgraph import trace_subgraph
from fuseplan.planner.implementations.tunable_group import reference_results
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload, decode, prefill
from fuseplan.planner.patterns.listing import LISTING
from fuseplan.planner.patterns.table import PATTERNS, pattern
from fuseplan.planner.peers.contestant import make_inputs
from fuseplan.planner.runtime.scheduler import FusionConfig, FusionScheduler
from fuseplan.search.timing.verify import errors, rounding

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


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


#: Kernels of a pattern that cannot be one: a library call (topk) cuts it, or one op by itself is left as it is.
KERNELS = {"moe_sigmoid": 2, "layer_norm": 0}


def complaint(result: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
    """What is wrong with a result beyond what is wrong with eager's and the rounding of its type; empty when nothing.

    Quantised integers may differ from float64's by one step, and no more of them than eager's, but for ties.
    """
    if result.dtype != eager.dtype or result.shape != eager.shape:
        return f"is {result.dtype} {tuple(result.shape)}"
    (norm, worst), (eager_norm, eager_worst) = errors(result, exact), errors(eager, exact)
    if not result.is_floating_point():
        step = int((result.long() - exact.long()).abs().max())
        fine = step <= 1 and norm <= eager_norm + 1e-3
        return "" if fine else f"{norm:.2%} of the elements differ by up to {step}, of eager's {eager_norm:.2%}"
    if not norm <= eager_norm + max(rounding(result.dtype) / 8, 1e-6):
        return f"normwise error {norm:.2e}, eager has {eager_norm:.2e}"
    excess = (result.double() - exact.double()).abs() - eager_worst - rounding(result.dtype) * exact.double().abs()
    return f"largest error {worst:.2e}, eager has {eager_worst:.2e}" if float(excess.max()) > 1e-30 else ""


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str, tmp_path: Path) -> None:
    graph, specs = pattern(name, LISTING[name].example)
    traced = trace_subgraph(graph, specs, "cuda")
    tensors = make_inputs(traced, specs, "cuda")
    inputs = dict(zip(specs, tensors, strict=True))
    scheduler = FusionScheduler(FusionConfig(), tmp_path / "tuning.db")
    result = scheduler.dispatch(graph, inputs)
    eager = FusionScheduler(FusionConfig(enable_fusion=False)).dispatch(graph, inputs)
    exact = reference_results(tuple(traced.graph), traced.graph.inputs, traced.graph.outputs, tensors, "cuda")
    for value, reference in zip(graph.output_names, exact, strict=True):
        # Which of two equal experts comes first is up to the library; their weights tell whether they are equal.
        if eager[value].dtype != torch.int64:
            assert complaint(result[value], eager[value], reference) == "", value
    assert scheduler.stats.groups_fused == KERNELS.get(name, 1) and scheduler.stats.fallbacks == {}
