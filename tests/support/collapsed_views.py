"""Collapsed chains of views beside the trace they come from."""

from __future__ import annotations

import torch
from torch import fx

from fuseplan.planner.implementations.direct_calls import Direct, bind_calls, fill_namespace
from fuseplan.planner.implementations.view_chains import collapse_views


def collapsed(module: fx.GraphModule) -> fx.GraphModule:
    """The same module with its chains collapsed and its calls bound, as the executor does it."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {"traced": node.name}
    collapse_views(graph, module.graph)
    graph.lint()
    bind_calls(graph, module.graph)
    result = fx.GraphModule(module, graph)
    fill_namespace(result.forward.__globals__)
    return result


def names(module: fx.GraphModule) -> list[str]:
    """Calls of a collapsed module, in order."""
    return [
        node.target.__name__ if isinstance(node.target, Direct) else str(node.target)
        for node in module.graph.nodes if node.op == "call_function"
    ]


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and offset (``clone`` keeps those of dense tensors only)."""
    storage = tensor.untyped_storage().clone()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def check_same(module: fx.GraphModule, inputs: list[torch.Tensor]) -> fx.GraphModule:
    """Results, what they are views of, and what writing through them changes."""
    better = collapsed(module)
    with torch.no_grad():
        mine, theirs = [twin(one) for one in inputs], [twin(one) for one in inputs]
        result, expected = better(*mine), module(*theirs)
        for _ in range(2):
            own, its = [*result, *mine], [*expected, *theirs]
            for one, other in zip(own, its, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
                assert one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
                assert one._version == other._version and one.dtype == other.dtype
            for values in (own, its):
                bases = [[base is one._base for base in values] + [one._base is None] for one in values]
                shared = [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in values] for a in values]
                values[:] = [bases, shared]  # type: ignore[list-item]
            assert own == its
            for one, other in zip(result, expected, strict=True):
                if 0 not in one.stride():
                    one.mul_(3), other.mul_(3)
    return better
