"""What the dispatch tests compile: a function, a block, a small Llama; and plans stored as a tune would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fuseplan.planner
from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.graph.dataflow import bind_graph
from fuseplan.planner.groups.regions import find_regions, parts_to_plan
from fuseplan.planner.runtime import logs
from fuseplan.planner.tuning.session import open_session


def fresh_start() -> Iterator[None]:
    """The body of a fixture: nothing compiled or logged yet, seeded, no gradients."""
    torch._dynamo.reset()
    logs.SAID.clear()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compiled(function: Any, db: Path, **options: Any) -> Any:
    dynamic = options.pop("dynamic", None)
    return torch.compile(function, backend="fuseplan", dynamic=dynamic, options={"db": str(db), **options})


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


class Block(nn.Module):
    """Add, RMSNorm, projection, SwiGLU: the groups of a decoder layer without the attention."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.gate = nn.Linear(width, 65, bias=False)
        self.up = nn.Linear(width, 65, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = residual + x
        normal = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return swiglu(self.gate(normal), self.up(normal)), hidden


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def store_plans(function: Any, inputs: tuple[torch.Tensor, ...], db: Path, sizes: tuple[dict[str, int], ...]) -> None:
    """Plan ``function`` by the model at several sizes and store the plans, those of parts too, as a tune would."""
    def keeping(gm: Any, example_inputs: Any) -> Any:
        graph = normalise(trace_predispatch(gm, example_inputs)).graph
        session = open_session("cpu", db)
        for bound in sizes:
            planner, static = session.planner(), bind_graph(graph, bound)
            parts = [part for region in find_regions(static) for part in parts_to_plan(static, region, ())]
            for plan in (*planner.plan_graph(static).unique(), *planner.plan_graph(static, regions=parts).unique()):
                session.database.put_plan(plan.record)
        session.database.close()
        return gm.forward

    torch.compile(function, backend=keeping, dynamic=bool(sizes[0]))(*inputs)
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
