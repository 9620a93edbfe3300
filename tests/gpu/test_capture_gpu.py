"""On a GPU too, the graph captured on fake tensors is the one that torch.compile sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model_samples import write_config
from torch import fx

from fuseplan.planner.capture.cache import capture_to_disk, graphs_of_text
from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.trace import capture, trace_predispatch
from fuseplan.planner.graph.serialize import graph_to_json
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload, decode, prefill
from fuseplan.search.workers.worker import WorkerPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("workload", [decode(3, 64), prefill(2, 128)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
def test_offline_capture_equals_run_time(family: str, workload: Workload, tmp_path: Path) -> None:
    source = find_source(config=write_config(tmp_path, family))
    model = build_model(source, "cuda")
    args, kwargs = model.example(workload)
    running: list[dict[str, Any]] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        running.append(graph_to_json(normalise(trace_predispatch(module, example_inputs)).graph))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model.module, backend=backend)(*args, **kwargs)
    assert [graph_to_json(graph) for graph in capture(source, workload, "cuda")] == running


def reserved_after(job: Callable[..., None], *args: Any) -> int:
    job(*args)
    return torch.cuda.memory_reserved()


def test_a_process_that_captures_the_same_takes_no_memory_of_the_gpu(tmp_path: Path) -> None:
    """Contexts of a dozen processes take seconds to make, one after the other."""
    source, workload = find_source(config=write_config(tmp_path, "llama")), decode(3, 64)
    path = tmp_path / "capture.json"
    with WorkerPool(1, preload=["fuseplan.planner.capture.cache:warm_up"], threads=1) as pool:
        jobs = [(capture_to_disk, source, workload, "cuda", False, path)]
        ((_, outcome),) = pool.as_completed(reserved_after, jobs, 300.0)
    assert not outcome.failure, outcome.failure
    assert outcome.value == 0
    there = graphs_of_text(path.read_text(encoding="utf-8"))
    assert [graph_to_json(graph) for graph in there] == [
        graph_to_json(graph) for graph in capture(source, workload, "cuda")]
