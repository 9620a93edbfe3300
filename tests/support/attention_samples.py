"""Tracing a function with its attention rewritten, and attention as on a GPU where PyTorch uses cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.rewrites import attention, attention_call, grouped_queries, trace_edit
from fuseplan.planner.rewrites.attention import AttentionRewrites, rewrite_attention
from fuseplan.planner.rewrites.attention_call import ATTENTION

Function = Callable[..., Any]


def imitate_cuda(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[dict[str, Any]], str]) -> None:
    """As on a GPU where PyTorch computes each attention call with the backend that ``chosen`` names."""
    monkeypatch.setattr(trace_edit, "trace_device", lambda _: "cuda")
    for module in (grouped_queries, attention_call, attention):
        monkeypatch.setattr(module, "chosen_backend", chosen)


@dataclass(frozen=True)
class Rewritten:
    """A trace after its attention was rewritten, what was done, and what it returned."""

    module: fx.GraphModule
    done: AttentionRewrites
    result: Any


def rewritten(function: Function, *args: Any, dynamic: bool = False, **options: Any) -> Rewritten:
    """Trace a function, rewrite its attention, run it, and compare it with the function itself."""
    traces: list[fx.GraphModule] = []
    done: list[AttentionRewrites] = []

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Function:
        trace = trace_predispatch(graph, example_inputs, grouped_queries=False, attention_masks=False)
        before: AttentionRewrites = trace.meta["attention"]  # copies of operands are always left out
        assert replace(before, uncopied_operands=0) == AttentionRewrites()
        traces.append(trace)
        after = rewrite_attention(trace, **options)
        done.append(replace(after, uncopied_operands=before.uncopied_operands + after.uncopied_operands))
        return trace.forward

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
        torch.testing.assert_close(result, function(*args))
    (trace,), (found,) = traces, done
    return Rewritten(trace, found, result)


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def attention_of(module: fx.GraphModule) -> list[dict[str, Any]]:
    return [trace_edit.arguments_of(node) for node in module.graph.find_nodes(op="call_function", target=ATTENTION)]
